"""Which samples a peer reads next, and how much its work weighs in means (claimed work). Pure.

The peers agree on which peer reads which samples, so that none is read twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from swarm.protocol.values.manifest import Manifest, PeerId, Stretch

Work = Mapping[PeerId, int]
"""Tokens of each contributor."""
Trusted = Mapping[PeerId, int]
"""Weight of each member whose work an anchor lets count like that of several members."""
MOST = (3, 2)
"""A source weighs at most this fraction times the lower median of the contributors' tokens."""
LARGEST_SHARE = 3
"""Of three or more sources, none has more than 1 / `LARGEST_SHARE` of the weight."""
NOBODY: Trusted = {}


def weights(
    work: Work, peers: Iterable[PeerId], trusted: Trusted = NOBODY
) -> tuple[int, ...] | None:
    """Weights of the sources of a unit, in the order given; None if all are equal.

    A source weighs its tokens, but at most 1.5 times the lower median of the contributors' tokens.
    Of three or more sources, none has more than a third of the weight. For a member that is vouched
    for with weight w, the first limit is w times as high, and the second does not hold. A late
    offer has experts, but no tokens. So it weighs as much as the lightest other source; if all
    offers are late, all weigh the same.

    Args:
        work: tokens of each contributor; a source without tokens here made a late offer.
        peers: the sources.
        trusted: trusted members by the manifest before the round.
    """
    sources, most = list(peers), limited(work, trusted)
    tokens = [most.get(peer, 0) for peer in sources]
    least = min((count for count in tokens if count), default=1)
    weighed = [count or least for count in tokens]
    if len(sources) >= LARGEST_SHARE:
        weighed = _level(weighed, [peer in trusted for peer in sources])
    return tuple(weighed) if len(set(weighed)) > 1 else None


def trained(work: Work, trusted: Trusted = NOBODY) -> int:
    """Tokens by which a round advances the run and its schedule (claimed work).

    No contributor counts for more than its limit in a mean, nor for more than the second largest.
    So a member that claims too much advances the schedule no further than another member has
    worked.
    """
    each = _each(work, trusted)
    second = sorted(each.values())[-2:][0] if each else 0
    most = limited(work, trusted)
    return sum(min(most[peer], second * trusted.get(peer, 1)) for peer in each)


def limited(work: Work, trusted: Trusted = NOBODY) -> dict[PeerId, int]:
    """Tokens of each contributor that has any, cut to 1.5 times the lower median."""
    each = _each(work, trusted)
    if not each:
        return {}
    usual = sorted(each.values())[(len(each) - 1) // 2]
    times, over = MOST
    return {
        peer: min(work[peer], max(1, times * usual * trusted.get(peer, 1) // over)) for peer in each
    }


def _each(work: Work, trusted: Trusted) -> dict[PeerId, int]:
    """Each contributor's tokens, divided by its weight as a trusted member."""
    return {peer: max(1, tokens // trusted.get(peer, 1)) for peer, tokens in work.items() if tokens}


def _level(weighed: Sequence[int], is_free: Sequence[bool]) -> list[int]:
    """The weights of three or more sources, cut to a third of the sum, except free weights.

    If one weight is cut, it becomes half of the sum of all others. If two weights are cut, each
    becomes the sum of all others.
    """
    total = sum(weighed)
    bound = sorted((n for n, free in zip(weighed, is_free, strict=True) if not free), reverse=True)
    first, second = [*bound, 0, 0][:2]
    if LARGEST_SHARE * first <= total:
        return list(weighed)
    most = (total - first) // 2
    if second > most:
        most = total - first - second
    return [n if free else min(n, most) for n, free in zip(weighed, is_free, strict=True)]


Stretches = tuple[Stretch, ...]
Counts = Mapping[PeerId, int]
"""Samples of each peer."""
MAX_SAMPLES = 2**62
"""Samples are numbered below this."""
MAX_HOLES = 2**16
"""Most holes of a book; more are refused. In random histories with dozens of leaving members, N
members had at most 3 N holes."""


@dataclass(frozen=True)
class Book:
    """The dealt samples of the text, and the holes (open samples) before the cursor."""

    cursor: int = 0
    holes: Stretches = ()
    """Open samples before the cursor: ascending, disjoint stretches, not empty, not adjacent."""
    dealt: Mapping[PeerId, Stretches] = field(default_factory=dict)
    """The stretches of each member, in reading order."""


def book_of(manifest: Manifest) -> Book:
    """The book that a manifest carries."""
    return Book(manifest.cursor, manifest.holes, manifest.dealt)


def num_samples(stretches: Iterable[Stretch]) -> int:
    """How many samples these stretches hold."""
    return sum(stop - start for start, stop in stretches)


def next_book(book: Book, counted: Counts, quotas: Counts, *, keeps_rest: bool = False) -> Book:
    """The book after a round.

    Args:
        book: the parent's book.
        counted: for each contributor, how many samples from the front of its deal entered the
            round.
        quotas: for each member of the new manifest, how many samples it is to have.
        keeps_rest: whether uncounted samples stay with their member, before newly dealt samples.
            Where rounds overlap, the member may have read these samples by now (overlapped deals).
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
    """The book of a reform: members keep their deals, so that their work stays valid.

    Samples that were dealt to others become open.

    Args:
        book: the parent's book.
        quotas: for each member of the reform, how many samples it gets if it has none yet.
    """
    kept = {peer: stretches for peer, stretches in book.dealt.items() if peer in quotas}
    lost = (each for peer in book.dealt.keys() - kept.keys() for each in book.dealt[peer])
    cursor, holes = _settled(book.cursor, [*book.holes, *lost])
    new = {peer: quota for peer, quota in quotas.items() if peer not in kept}
    return _deal(Book(cursor, holes, kept), new)


def book_problem(book: Book) -> str | None:
    """Why this is no valid book, whatever the parent's book is; None if it is valid.

    Every sample before the cursor is in at most one stretch, and none at or after the cursor is.
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

    The holes come first, then the samples from the cursor on.
    """
    cursor, dealt = book.cursor, dict(book.dealt)
    holes = [*reversed(book.holes)]  # so that the first one is popped first
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
    """Both sequences one after the other; adjacent stretches become one."""
    if first and then and first[-1][1] == then[0][0]:
        return (*first[:-1], (first[-1][0], then[0][1]), *then[1:])
    return (*first, *then)


def _settled(cursor: int, rest: Iterable[Stretch]) -> tuple[int, Stretches]:
    """Cursor and holes. A hole that ends at the cursor is removed by moving the cursor back."""
    holes = _joined(rest)
    if holes and holes[-1][1] == cursor:
        return holes[-1][0], holes[:-1]
    return cursor, holes


def _joined(stretches: Iterable[Stretch]) -> Stretches:
    """The stretches in ascending order, with adjacent ones joined."""
    joined: list[Stretch] = []
    for start, stop in sorted(stretches):
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
