"""What is known of other peers, in dictionaries that do not grow: their keys cost nothing."""

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
    """What is known of a peer, which then counts as the one that was used last.

    Beyond `most` peers those are let go that were used longest ago.

    Args:
        known: the dictionary; in the order of use.
        peer: whose.
        new: makes what is known of a peer at first.
        most: how many peers are kept, not counting those in use.
        is_in_use: whether a peer must not be let go.
    """
    found = known.pop(peer, None) or new()
    known[peer] = found
    while len(known) > most:
        oldest = next((other for other, each in known.items() if not is_in_use(each)), None)
        if oldest is None:
            break
        del known[oldest]
    return found
