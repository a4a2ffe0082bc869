"""Puts whole documents into sequences, so that few of them are cut.

Source: best-fit-decreasing of H. Ding et al., arXiv 2404.10830, in groups of documents. There the
pieces of a long document are packed like others; here they stay in sequences that follow each
other, the last of which is filled up.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator

import numpy as np

from swarm.data.tokenizer import Tokens

GROUP_TOKENS = 2**22
"""Documents are moved within so many tokens, which are in memory at once."""


def packed(
    documents: Iterable[Tokens], length: int, end_of_text: int, group_tokens: int = GROUP_TOKENS
) -> Iterator[Tokens]:
    """The tokens of documents group by group, each a multiple of `length`.

    A document begins with the end-of-text token before it. What is left of a sequence is filled
    with more of these: one that follows another is padding.

    Args:
        documents: each closed by `end_of_text`, of at least one other token.
        length: tokens of a sequence.
        end_of_text: this token's id.
        group_tokens: a group ends with the document that reaches this size.
    """
    group: list[Tokens] = []
    size = 0
    for document in documents:
        group.append(np.roll(document, 1))
        size += len(document)
        if size >= group_tokens:
            yield _in_bins(group, length, end_of_text)
            group, size = [], 0
    if group:
        yield _in_bins(group, length, end_of_text)


def _in_bins(group: list[Tokens], length: int, end_of_text: int) -> Tokens:
    bins: list[list[Tokens]] = []
    room: list[tuple[int, int]] = []
    """Free places and bin, ascending."""
    for document in sorted(group, key=len, reverse=True):
        place = bisect.bisect_left(room, (len(document), 0))
        if place < len(room):
            free, index = room.pop(place)
        else:
            free, index = -(-len(document) // length) * length, len(bins)
            bins.append([])
        bins[index].append(document)
        if free > len(document):
            bisect.insort(room, (free - len(document), index))
    for free, index in room:
        bins[index].append(np.full(free, end_of_text, group[0].dtype))
    return np.concatenate([part for parts in bins for part in parts])
