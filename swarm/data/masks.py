"""What of a batch is not attended to, or not in the loss: pure functions of its tokens.

A document is stored with the end-of-text token behind it. As a label that token belongs to the
document that it closes; as an input it begins the next one, as it does in evaluation and in
generation. So with `data.attention = "document"` each token is predicted from its own document
alone, the first one from the end-of-text token, and no prediction has to be left out of the loss
but padding: end-of-text tokens that follow another one.

Legend: B sequences, T tokens that a sequence predicts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.config import RunConfig
from swarm.data.repetition import is_repetitive


@dataclass(frozen=True)
class Masks:
    """Of one batch.

    Attributes:
        starts_BT: bool, inputs with which a document begins, within which attention stays; None:
            it sees the whole sequence.
        scored_BT: bool, predictions that are in the loss; None: all.
    """

    starts_BT: Tensor | None = None
    scored_BT: Tensor | None = None


def masks_of(tokens_BT1: Tensor, run: RunConfig, end_of_text: int | None) -> Masks | None:
    """The masks of a batch, as the run's `data.attention` and `data.mask_repetition` want them.

    The batch is on the CPU; attention within documents needs the id that closes one.
    """
    if run.data.attention == "window" and not run.data.mask_repetition:
        return None
    starts_BT, scored_BT = None, torch.ones_like(tokens_BT1[:, 1:], dtype=torch.bool)
    if run.data.attention == "document":
        assert end_of_text is not None, "the run's tokenizer says how documents end"
        starts_BT = tokens_BT1[:, :-1] == end_of_text
        scored_BT &= ~starts_BT | (tokens_BT1[:, 1:] != end_of_text)
    if run.data.mask_repetition:
        for row_T1, scored_T in zip(tokens_BT1, scored_BT, strict=True):
            # Padding repeats itself, and is no text.
            text = torch.cat([row_T1[:1], row_T1[1:][scored_T]])
            scored_T &= not is_repetitive(text.numpy())
    return Masks(starts_BT, None if scored_BT.all() else scored_BT)
