"""What each value weighs in the mean of a unit [W1]. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from swarm.protocol.manifest import PeerId


def weights(work: Mapping[PeerId, int], peers: Iterable[PeerId]) -> tuple[int, ...] | None:
    """Weights of the sources of a unit, in the order given; None if all are equal.

    A source weighs its tokens. A late offer [O2] brings an expert and says nothing of its tokens,
    so it weighs as the least of the others, or all weigh the same if all are late.

    Args:
        work: tokens of each contributor; others, and those of 0 tokens, are late.
        peers: the sources.
    """
    tokens = [work.get(peer, 0) for peer in peers]
    least = min((count for count in tokens if count), default=1)
    weighed = tuple(count or least for count in tokens)
    return weighed if len(set(weighed)) > 1 else None
