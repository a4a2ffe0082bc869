"""Measures an exported model by its run's held-out loss, and lets the model continue a text.

The model is read layer by layer, so it need not fit into memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from swarm.config import RunConfig
from swarm.data.held_out import HeldOut, held_out_windows, split_documents
from swarm.data.tokenizer import Tokenizer, Tokens
from swarm.errors import TokenizerError
from swarm.evaluation.scores import Measured
from swarm.evaluation.tasks import TASK
from swarm.experts import all_shapes, exported
from swarm.model.attention import rotary_tables
from swarm.model.pretrained import open_checkpoint
from swarm.model.transformer import Transformer

BATCH_TOKENS = 2048
"""Tokens of the windows that are computed together in a layer."""
LOGITS_BYTES = 2**26
"""Approximate bytes of the logits that are in memory together."""


class StreamedModel:
    """The model in an export, computed in fp32 on the CPU.

    Memory: one layer, the embedding and the output head in fp32, 4 bytes a parameter.
    `nats_per_token` also holds the hidden states, 4 D bytes a token of the text. The files are
    mapped, so the system can drop their cached pages.
    """

    def __init__(self, folder: Path, run: RunConfig) -> None:
        """Opens an export.

        Args:
            folder: see `open_checkpoint`.
            run: the run of the model.

        Raises:
            CorruptState: a file is missing or damaged.
            ConfigError: the export is of another model.
        """
        self._config, self._weights = run.model, open_checkpoint(folder, run)
        one_layer = run.model.model_copy(update={"num_hidden_layers": 1})
        self._one = Transformer(one_layer, frozen="fp32")
        # Tensors that only training uses are in no export.
        named = [name for name in all_shapes(one_layer) if exported(name)]
        self._of_layer = [name for name in named if name.startswith(_FIRST)]
        ends = [name for name in named if not name.startswith(_FIRST)]
        self._one.write({name: self._weights[name] for name in ends})

    @torch.inference_mode()
    def nats_per_token(self, held_out: HeldOut) -> float:
        """The mean cross-entropy over all scored predictions. Reads the model once."""
        windows = [
            (tokens, scored)
            for tokens_BT1, scored_BT in held_out.windows
            for tokens, scored in zip(
                tokens_BT1.split(_rows(scored_BT)), scored_BT.split(_rows(scored_BT)), strict=True
            )
        ]
        total = 0.0
        hidden = self._hidden([tokens[:, :-1] for tokens, _ in windows])
        for hidden_BTD, (tokens_BT1, scored_BT) in zip(hidden, windows, strict=True):
            labels_N = tokens_BT1[:, 1:][scored_BT]
            chunk = max(LOGITS_BYTES // (4 * self._config.vocab_size), 1)
            for some_ND, labels in zip(
                hidden_BTD[scored_BT].split(chunk), labels_N.split(chunk), strict=True
            ):
                lost_N = F.cross_entropy(self._logits(some_ND), labels, reduction="none")
                total += float(lost_N.double().sum())
        return total / held_out.num_tokens

    @torch.inference_mode()
    def continued(self, tokens: Sequence[int], *, count: int, end_of_text: int) -> list[int]:
        """The most likely next tokens, one after the other. Reads the model once for each token.

        Args:
            tokens: the preceding tokens, at least one.
            count: most tokens to add.
            end_of_text: id of the token that ends the text. It is left out.
        """
        found = list(tokens)
        for _ in range(count):
            (hidden_BTD,) = self._hidden([torch.tensor([found])])
            token = int(self._logits(hidden_BTD[0, -1]).argmax())
            if token == end_of_text:
                break
            found.append(token)
        return found[len(tokens) :]

    def _hidden(self, batches: Sequence[Tensor]) -> Iterator[Tensor]:
        """The normalized last residual stream [B, T, D] of each batch of token ids [B, T]."""
        decoder, device = self._one.model, torch.device("cpu")
        states = [decoder.embed_tokens(ids_BT) for ids_BT in batches]
        tables = {
            size: rotary_tables(size, decoder.dim_per_head, decoder.rope_theta, device)
            for size in {ids_BT.shape[1] for ids_BT in batches}
        }
        for layer in range(self._config.num_hidden_layers):
            named = {name: self._weights[self._named(name, layer)] for name in self._of_layer}
            self._one.write(named)
            del named
            for index, x_BTD in enumerate(states):
                states[index], _ = decoder.layers[0](x_BTD, tables[x_BTD.shape[1]])
        return (decoder.norm(x_BTD) for x_BTD in states)

    def _logits(self, hidden_ND: Tensor) -> Tensor:
        tied = self._config.tie_word_embeddings
        head_VD = self._one.model.embed_tokens.weight if tied else self._one.lm_head.weight
        return F.linear(hidden_ND, head_VD)

    def _named(self, name: str, layer: int) -> str:
        return f"model.layers.{layer}.{name.removeprefix(_FIRST)}"


_FIRST = "model.layers.0."


def _rows(scored_BT: Tensor) -> int:
    return max(BATCH_TOKENS // scored_BT.shape[1], 1)


PROMPT_TOKENS = 32
SAMPLE_TOKENS = 48
"""Number of sample tokens. For each token the model is read once."""


@dataclass(frozen=True)
class HeldOutTokens:
    """The held-out text of a run, from its manifest 0.

    Attributes:
        tokens: tokens of all documents, each closed by `end_of_text`.
        end_of_text: id of the end-of-text token.
        num_bytes: bytes of the text in UTF-8.
    """

    tokens: Tokens
    end_of_text: int
    num_bytes: int


@dataclass(frozen=True)
class Evaluation:
    """The measurements of one export.

    Attributes:
        nats_per_token: mean cross-entropy of the held-out text.
        bits_per_byte: the same loss in a unit that does not depend on the tokenizer.
        documents: number of documents of the held-out text.
        prompt: the beginning of the first of these documents. "" if the tokenizer cannot be run
            here.
        sample: the model's continuation of the prompt, always with the likeliest token.
    """

    nats_per_token: float
    bits_per_byte: float
    documents: int
    prompt: str
    sample: str

    def measured(self) -> list[Measured]:
        """The figures as scores."""
        return [
            Measured(TASK, "bits_per_byte", self.bits_per_byte, self.documents),
            Measured(TASK, "nats_per_token", self.nats_per_token, self.documents),
        ]


def evaluate(folder: Path, run: RunConfig, text: HeldOutTokens, tokenizer: Tokenizer) -> Evaluation:
    """Measures an export from its files, layer by layer; see `StreamedModel` for the memory.

    Args:
        folder: folder of the export.
        run: the run of the model.
        text: the run's held-out text.
        tokenizer: the run's tokenizer, used only for the sample.

    Raises:
        CorruptState, ConfigError: the folder is no export of the run.
        DataError: the held-out text has no token.
    """
    length = run.data.sequence_length
    documents = list(split_documents(text.tokens, text.end_of_text))
    held_out: HeldOut = held_out_windows(text.tokens, text.end_of_text, length, text.num_bytes)
    model = StreamedModel(folder, run)
    nats = model.nats_per_token(held_out)
    room = min(PROMPT_TOKENS, length // 2)
    prompt = documents[0][:room].tolist()
    sample = model.continued(
        [text.end_of_text, *prompt],
        count=min(SAMPLE_TOKENS, length - len(prompt)),
        end_of_text=text.end_of_text,
    )
    said = _spelled(tokenizer, [prompt, sample])
    return Evaluation(nats, held_out.bits_per_byte(nats), len(documents), *said)


def _spelled(tokenizer: Tokenizer, rows: Sequence[Sequence[int]]) -> tuple[str, str]:
    # A sample is only for people, so without the package tokenizers there is none.
    known = [np.array([t for t in row if t < tokenizer.num_ids], dtype=np.uint32) for row in rows]
    try:
        prompt, sample = tokenizer.decoded(known)
    except TokenizerError:
        return "", ""
    return prompt.decode(errors="replace"), sample.decode(errors="replace")
