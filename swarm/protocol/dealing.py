"""Which stretch of the run's text each peer reads next: agreed, so that nothing is read twice.

A *sample* is one window of the common text. The samples of a run are numbered from 0 on; the
number alone says which window it is (`swarm.data.streams`), and in which lap through the text. A
manifest carries a *book*: `cursor` (no sample from here on was dealt yet), `holes` (samples before
it that were dealt and not counted, and are dealt to nobody now) and `dealt` (what each member reads
next). Whatever a round did not count of its deals becomes a hole, and holes are dealt first. Where
rounds overlap, a member may have read on: what was not counted stays its own, and it is dealt two
rounds ahead. So at any time, of the samples before the cursor: counted + holes + dealt = cursor,
and none is in two. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from swarm.protocol.manifest import Manifest, PeerId, Stretch

Stretches = tuple[Stretch, ...]
Counts = Mapping[PeerId, int]
"""Samples of each peer."""
MAX_SAMPLES = 2**62
"""Samples are numbered below this."""
MAX_HOLES = 2**16
"""More are refused. Random histories in which members are lost by the dozen have at most 3 N."""


@dataclass(frozen=True)
class Book:
    """What of the text is dealt and what is open; see the module's text."""

    cursor: int = 0
    holes: Stretches = ()
    """Ascending, disjoint, neither empty nor adjacent."""
    dealt: Mapping[PeerId, Stretches] = field(default_factory=dict)
    """To each member, in the order in which it reads them."""


def book_of(manifest: Manifest) -> Book:
    """The book that a manifest carries."""
    return Book(manifest.cursor, manifest.holes, manifest.dealt)


def num_samples(stretches: Iterable[Stretch]) -> int:
    """How many samples these stretches hold."""
    return sum(stop - start for start, stop in stretches)


def next_book(book: Book, counted: Counts, quotas: Counts, *, keeps_rest: bool = False) -> Book:
    """The book after a round.

    Args:
        book: the parent's.
        counted: of each contributor, how many samples from the front of its deal entered the round.
        quotas: of each member of the new manifest, how many samples it is to have.
        keeps_rest: whether what was not counted stays with a member, before what it is dealt anew:
            where rounds overlap, it may have read that by now [T5].
    """
    open_, kept = [*book.holes], dict[PeerId, Stretches]()
    for peer, stretches in book.dealt.items():
        rest = split(stretches, counted.get(peer, 0))[1]
        if keeps_rest and peer in quotas:
            kept[peer] = rest
        else:
            open_ += rest
    cursor, holes = _settled(book.cursor, open_)
    return _deal(Book(cursor, holes, kept), quotas)


def reformed_book(book: Book, quotas: Counts) -> Book:
    """The book of a reform: its members read on what they were dealt, so their work stays good.

    What was dealt to the others is open.

    Args:
        book: the parent's.
        quotas: of each member of the reform, how many samples it gets if it has none.
    """
    kept = {peer: stretches for peer, stretches in book.dealt.items() if peer in quotas}
    lost = (each for peer in book.dealt.keys() - kept.keys() for each in book.dealt[peer])
    cursor, holes = _settled(book.cursor, [*book.holes, *lost])
    new = {peer: quota for peer, quota in quotas.items() if peer not in kept}
    return _deal(Book(cursor, holes, kept), new)


def book_problem(book: Book) -> str | None:
    """Why this is no book, whatever was before it; None if it is one.

    Every sample before the cursor is in at most one stretch, and none is at or after it.
    """
    if not 0 <= book.cursor < MAX_SAMPLES:
        return f"the cursor is {book.cursor}"
    if len(book.holes) > MAX_HOLES:
        return f"it has {len(book.holes)} holes, more than {MAX_HOLES}"
    if list(book.holes) != list(_joined(book.holes)):
        return "its holes are not in order, or touch each other"
    before = 0
    for start, stop in sorted([*book.holes, *(s for own in book.dealt.values() for s in own)]):
        if not before <= start < stop <= book.cursor:
            return f"samples {start} to {stop} are listed twice, or not before {book.cursor}"
        before = stop
    return None


def _deal(book: Book, quotas: Counts) -> Book:
    """Fills these peers' deals up to their quotas, in peer-id order.

    First come the holes, then what follows the cursor.
    """
    cursor, dealt = book.cursor, dict(book.dealt)
    holes = [*reversed(book.holes)]  # the first one last, since each is looked at once only
    for peer in sorted(quotas):
        taken: list[Stretch] = []
        own = dealt.get(peer, ())
        left = max(0, quotas[peer] - num_samples(own))
        while left and holes:
            start, stop = holes.pop()
            middle = min(stop, start + left)
            taken.append((start, middle))
            left -= middle - start
            if middle < stop:
                holes.append((middle, stop))
        if left:
            taken.append((cursor, cursor + left))
            cursor += left
        dealt[peer] = _in_turn(own, _joined(taken))
    return Book(cursor, tuple(reversed(holes)), dict(sorted(dealt.items())))


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


def _in_turn(first: Stretches, then: Stretches) -> Stretches:
    """One after the other; where they touch, one stretch is made of two."""
    if first and then and first[-1][1] == then[0][0]:
        return (*first[:-1], (first[-1][0], then[0][1]), *then[1:])
    return (*first, *then)


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
