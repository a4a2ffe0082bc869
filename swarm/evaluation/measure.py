"""What a run's own measure says of an exported model: held-out loss, and a sample of its text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from swarm.config import RunConfig
from swarm.data.held_out import HeldOut, held_out_windows, split_documents
from swarm.data.tokenizer import Tokenizer, Tokens
from swarm.errors import TokenizerError
from swarm.evaluation.harness import TASK
from swarm.evaluation.scores import Measured
from swarm.evaluation.streamed import StreamedModel

PROMPT_TOKENS = 32
SAMPLE_TOKENS = 48
"""Each of them reads the model once."""


@dataclass(frozen=True)
class HeldOutTokens:
    """The held-out text of a run as its manifest 0 has it.

    Attributes:
        tokens: of all documents, each closed by `end_of_text`.
        end_of_text: this token's id.
        num_bytes: of the text in UTF-8.
    """

    tokens: Tokens
    end_of_text: int
    num_bytes: int


@dataclass(frozen=True)
class Evaluation:
    """What was measured of one export.

    Attributes:
        nats_per_token: mean cross-entropy of the held-out text.
        bits_per_byte: the same in a unit that does not depend on the tokenizer.
        documents: of the held-out text.
        prompt: the beginning of its first document; "" where the tokenizer cannot be run here.
        sample: how the model goes on, always with the likeliest token.
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
        folder: of the export.
        run: whose model it is.
        text: the run's held-out text.
        tokenizer: the run's, for the sample alone.

    Raises:
        CorruptState, ConfigError: it is no export of the run.
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
    # A sample is for people: without the package of tokenizers there is none.
    known = [np.array([t for t in row if t < tokenizer.num_ids], dtype=np.uint32) for row in rows]
    try:
        prompt, sample = tokenizer.decoded(known)
    except TokenizerError:
        return "", ""
    return prompt.decode(errors="replace"), sample.decode(errors="replace")
