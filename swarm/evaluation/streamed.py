"""An exported model that is read layer by layer, so that it needs not fit into memory.

Shapes: B windows, T tokens that a window predicts, N = B * T, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from swarm.config import RunConfig
from swarm.data.held_out import HeldOut
from swarm.experts import all_shapes, exported
from swarm.model.attention import rotary_tables
from swarm.model.pretrained import open_checkpoint
from swarm.model.transformer import Transformer

BATCH_TOKENS = 2048
"""Of windows that go through a layer together."""
LOGITS_BYTES = 2**26
"""Of the logits that are in memory together, roughly."""


class StreamedModel:
    """The model in an export, computed in fp32 on the CPU.

    Memory: one layer, the embedding and the output head in fp32, 4 bytes a parameter, and of
    `nats_per_token` the hidden states, 4 D bytes a token of the text. The files are mapped, so what
    the system caches of them it can drop.
    """

    def __init__(self, folder: Path, run: RunConfig) -> None:
        """Opens an export.

        Args:
            folder: as for `open_checkpoint`.
            run: whose model it is.

        Raises:
            CorruptState: a file is missing or damaged.
            ConfigError: it is of another model.
        """
        self._config, self._weights = run.model, open_checkpoint(folder, run)
        one_layer = run.model.model_copy(update={"num_hidden_layers": 1})
        self._one = Transformer(one_layer, frozen="fp32")
        # What is of training alone is in no export, and nothing here uses it.
        named = [name for name in all_shapes(one_layer) if exported(name)]
        self._of_layer = [name for name in named if name.startswith(_FIRST)]
        ends = [name for name in named if not name.startswith(_FIRST)]
        self._one.write({name: self._weights[name] for name in ends})

    @torch.inference_mode()
    def nats_per_token(self, held_out: HeldOut) -> float:
        """The mean cross-entropy over all scored predictions; reads the model once."""
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
        """The likeliest next tokens, one after the other; reads the model once for each of them.

        Args:
            tokens: what comes before, at least one.
            count: how many at most.
            end_of_text: after which there are no more; it is left out.
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
        """The normalised last residual stream [B, T, D] of each batch of token ids [B, T]."""
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
