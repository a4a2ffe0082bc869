"""Which stretch of the run's text each peer reads next: agreed, so that nothing is read twice.

A *sample* is one window of the common text. The samples of a run are numbered from 0 on; the
number alone says which window it is (`swarm.data.streams`), and in which lap through the text. A
manifest carries a *book*: `cursor` (no sample from here on was dealt yet), `holes` (samples before
it that were dealt and not counted, and are dealt to nobody now) and `dealt` (what each member reads
next). Whatever a round did not count of its deals becomes a hole, and holes are dealt first. So at
any time, of the samples before the cursor: counted + holes + dealt = cursor, and none is in two.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from swarm.protocol.manifest import PeerId, Stretch

Stretches = tuple[Stretch, ...]


@dataclass(frozen=True)
class Book:
    """What of the text is dealt and what is open; see the module's text."""

    cursor: int = 0
    holes: Stretches = ()
    """Ascending, disjoint, neither empty nor adjacent."""
    dealt: Mapping[PeerId, Stretches] = field(default_factory=dict)
    """To each member, in the order in which it reads them."""


def num_samples(stretches: Iterable[Stretch]) -> int:
    """How many samples these stretches hold."""
    return sum(stop - start for start, stop in stretches)


def next_book(book: Book, counted: Mapping[PeerId, int], quotas: Mapping[PeerId, int]) -> Book:
    """The book after a round.

    Args:
        book: the parent's.
        counted: of each contributor, how many samples from the front of its deal entered the round.
        quotas: of each member of the new manifest, how many samples it is to get.
    """
    rest = [*book.holes]
    for peer, stretches in book.dealt.items():
        rest += split(stretches, counted.get(peer, 0))[1]
    cursor, holes = _settled(book.cursor, rest)
    dealt: dict[PeerId, Stretches] = {}
    for peer in sorted(quotas):
        taken, holes = split(holes, quotas[peer])
        fresh = quotas[peer] - num_samples(taken)
        if fresh:
            taken, cursor = _joined([*taken, (cursor, cursor + fresh)]), cursor + fresh
        dealt[peer] = taken
    return Book(cursor, holes, dealt)


def book_without(book: Book, lost: Iterable[PeerId]) -> Book:
    """The book of a reform: what was dealt to lost peers is open, the others read on."""
    gone = set(lost)
    rest = [*book.holes, *(each for peer in gone for each in book.dealt.get(peer, ()))]
    kept = {peer: stretches for peer, stretches in book.dealt.items() if peer not in gone}
    return Book(book.cursor, _joined(rest), kept)


def split(stretches: Iterable[Stretch], count: int) -> tuple[Stretches, Stretches]:
    """The first `count` samples of these stretches, or all if they are fewer, and the rest."""
    first: list[Stretch] = []
    rest: list[Stretch] = []
    for start, stop in stretches:
        middle = min(stop, start + count)
        count -= middle - start
        if start < middle:
            first.append((start, middle))
        if middle < stop:
            rest.append((middle, stop))
    return tuple(first), tuple(rest)


def _settled(cursor: int, rest: Iterable[Stretch]) -> tuple[int, Stretches]:
    """Cursor and holes; a hole that ends at the cursor moves the cursor back instead."""
    holes = _joined(rest)
    if holes and holes[-1][1] == cursor:
        return holes[-1][0], holes[:-1]
    return cursor, holes


def _joined(stretches: Iterable[Stretch]) -> Stretches:
    """Ascending, with neighbours made one."""
    joined: list[Stretch] = []
    for start, stop in sorted(stretches):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
