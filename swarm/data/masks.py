"""Masks of a batch for attention and loss, and detection of repetitive texts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from swarm.config import RunConfig
from swarm.data.tokenizer import Tokens

MAX_PERIOD = 13
TIMES = 32


def is_repetitive(tokens: Tokens) -> bool:
    """Whether a sequence of 1 to 13 tokens occurs 32 times in a row.

    Source: SPES (arXiv 2602.11543) and OLMo 2 (arXiv 2501.00656; `instance_filter` of its code),
    with the same numbers. There, a training sequence with such a repetition has no loss. Here,
    `data.mask_repetition` does the same, and `swarm-data tokenize --drop-repetition` leaves
    documents out.
    """
    return any(_repeats(tokens, period) for period in range(1, MAX_PERIOD + 1))


def _repeats(tokens: Tokens, period: int) -> bool:
    needed = (TIMES - 1) * period
    if len(tokens) < needed + period:
        return False
    differs = np.flatnonzero(tokens[period:] != tokens[:-period])
    edges = np.concatenate([[-1], differs, [len(tokens) - period]])
    return bool((np.diff(edges) - 1 >= needed).any())


@dataclass(frozen=True)
class Masks:
    """Masks of one batch.

    Attributes:
        starts_BT: bool, the first tokens of documents. Attention stays within documents. None: a
            token attends to its whole sequence.
        scored_BT: bool, predictions in the loss. None: all.
    """

    starts_BT: Tensor | None = None
    scored_BT: Tensor | None = None


def masks_of(tokens_BT1: Tensor, run: RunConfig, end_of_text: int | None) -> Masks | None:
    """The masks of a batch, by the run's `data.attention` and `data.mask_repetition`.

    The batch is on the CPU. Attention within documents needs the id that closes a document.
    """
    if run.data.attention == "window" and not run.data.mask_repetition:
        return None
    starts_BT, scored_BT = None, torch.ones_like(tokens_BT1[:, 1:], dtype=torch.bool)
    if run.data.attention == "document":
        assert end_of_text is not None, "the run's tokenizer has an end-of-text id"
        starts_BT = tokens_BT1[:, :-1] == end_of_text
        scored_BT &= ~starts_BT | (tokens_BT1[:, 1:] != end_of_text)
    if run.data.mask_repetition:
        for row_T1, scored_T in zip(tokens_BT1, scored_BT, strict=True):
            # Padding is repetitive, but is no text.
            text = torch.cat([row_T1[:1], row_T1[1:][scored_T]])
            scored_T &= not is_repetitive(text.numpy())
    return Masks(starts_BT, None if scored_BT.all() else scored_BT)
