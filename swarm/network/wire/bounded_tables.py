"""Bounded LRU dictionaries keyed by peer id; they must not grow, since ids are free to create."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Known = TypeVar("Known")


def recalled(
    known: dict[str, Known],
    peer: str,
    new: Callable[[], Known],
    most: int,
    *,
    is_in_use: Callable[[Known], bool] = lambda _: False,
) -> Known:
    """The value of a peer, which then counts as the most recently used.

    Beyond `most` peers, the least recently used are dropped.

    Args:
        known: the dictionary, in the order of use.
        peer: key of the value.
        new: makes the first value of a peer.
        most: most peers, not counting those in use.
        is_in_use: whether a peer must not be dropped.
    """
    found = known.pop(peer, None) or new()
    known[peer] = found
    while len(known) > most:
        oldest = next((other for other, each in known.items() if not is_in_use(each)), None)
        if oldest is None:
            break
        del known[oldest]
    return found
