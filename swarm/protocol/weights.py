"""What work counts for: the weight of a value in a mean, and the run's tokens [W1, W2]. Pure.

Nobody can check how many tokens another member has trained on. So what one member says of that
moves no mean, and no schedule, by much more than what the others say.

A member that an anchor has vouched for with weight w counts as w members: its tokens are compared
with w times those of the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from swarm.protocol.manifest import PeerId

Work = Mapping[PeerId, int]
"""Tokens of each contributor."""
Trusted = Mapping[PeerId, int]
"""Weight of each member that an anchor trusts with more than one's work."""
MOST = (3, 2)
"""A source weighs at most so many times the lower median of the contributors' tokens."""
LARGEST_SHARE = 3
"""Of three or more sources none has more than one part in so many."""
NOBODY: Trusted = {}


def weights(
    work: Work, peers: Iterable[PeerId], trusted: Trusted = NOBODY
) -> tuple[int, ...] | None:
    """Weights of the sources of a unit, in the order given; None if all are equal.

    A source weighs its tokens, but at most 1.5 times the lower median of the contributors' tokens.
    Of three or more sources none has more than a third of the weight. Who is vouched for with
    weight w has w times the first limit, and not the second.

    A late offer [O2] brings an expert and says nothing of its tokens, so it weighs as the least of
    the others, or all weigh the same if all are late.

    Args:
        work: tokens of each contributor; others, and those of 0 tokens, are late.
        peers: the sources.
        trusted: by the manifest before the round.
    """
    sources, most = list(peers), limited(work, trusted)
    tokens = [most.get(peer, 0) for peer in sources]
    least = min((count for count in tokens if count), default=1)
    weighed = [count or least for count in tokens]
    if len(sources) >= LARGEST_SHARE:
        weighed = _level(weighed, [peer in trusted for peer in sources])
    return tuple(weighed) if len(set(weighed)) > 1 else None


def trained(work: Work, trusted: Trusted = NOBODY) -> int:
    """Tokens by which a round moves the run and its schedule [W2].

    Nobody counts more than the limit of a mean, nor more than another contributor does. So one
    member alone that says too much moves the schedule no further than another has worked.
    """
    each = _each(work, trusted)
    second = sorted(each.values())[-2:][0] if each else 0
    most = limited(work, trusted)
    return sum(min(most[peer], second * trusted.get(peer, 1)) for peer in each)


def limited(work: Work, trusted: Trusted = NOBODY) -> dict[PeerId, int]:
    """Tokens of each contributor that did any, at most 1.5 times the lower median."""
    each = _each(work, trusted)
    if not each:
        return {}
    usual = sorted(each.values())[(len(each) - 1) // 2]
    times, over = MOST
    return {
        peer: min(work[peer], max(1, times * usual * trusted.get(peer, 1) // over)) for peer in each
    }


def _each(work: Work, trusted: Trusted) -> dict[PeerId, int]:
    """What the work of every contributor is for each of the members that it counts as."""
    return {peer: max(1, tokens // trusted.get(peer, 1)) for peer, tokens in work.items() if tokens}


def _level(weighed: Sequence[int], is_free: Sequence[bool]) -> list[int]:
    """The weights of three or more sources; those above a third are cut down, but for free ones.

    Once one is cut down, it is half of the others; once two are, each is all of the others.
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
