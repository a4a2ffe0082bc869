"""Texts that repeat the same few tokens over and over, on which training diverges."""

from __future__ import annotations

import numpy as np

from swarm.data.tokenizer import Tokens

MAX_PERIOD = 13
TIMES = 32


def is_repetitive(tokens: Tokens) -> bool:
    """Whether 1 to 13 tokens stand 32 times in a row somewhere.

    Source: SPES (arXiv 2602.11543) and OLMo 2 (arXiv 2501.00656; `instance_filter` of its code),
    with the same numbers: a training sequence with such a stretch carries no loss there, and here
    with `data.mask_repetition`; `swarm-data tokenize --drop-repetition` leaves documents out.
    """
    return any(_repeats(tokens, period) for period in range(1, MAX_PERIOD + 1))


def _repeats(tokens: Tokens, period: int) -> bool:
    needed = (TIMES - 1) * period
    if len(tokens) < needed + period:
        return False
    differs = np.flatnonzero(tokens[period:] != tokens[:-period])
    edges = np.concatenate([[-1], differs, [len(tokens) - period]])
    return bool((np.diff(edges) - 1 >= needed).any())
