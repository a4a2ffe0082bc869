"""How the tokens of some steps were spread over the experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.train.engine import StepStats


@dataclass(frozen=True)
class RoutingStats:
    """Figures over some local steps of one peer.

    Attributes:
        max_load: tokens of the busiest expert of a layer by their mean over the experts, in the
            layer where that is largest: 1 when routing is even, E / K when it has collapsed.
        idle_experts: (layer, expert) pairs that got no token at all.
        dropped: share of the choices of experts that exceeded a capacity.
        similarity: mean CKA of experts that got the same tokens, in the last step that measured
            it; None if none did.
        shares: of each expert its permille of all choices, over the layers; rounded, but 0 only
            where it got none.
        pairs: two experts and their CKA, the most alike first, of the same step as `similarity`.
    """

    max_load: float
    idle_experts: int
    dropped: float
    similarity: float | None
    shares: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int, float], ...] = ()


def routing_stats(steps: Sequence[StepStats]) -> RoutingStats:
    """Sums up at least one step."""
    layers = [
        [sum(counts) for counts in zip(*of_layer, strict=True)]
        for of_layer in zip(*(stats.expert_tokens for stats in steps), strict=True)
    ]
    choices = sum(sum(layer) for layer in layers)
    measured = [stats for stats in steps if stats.similarity is not None]
    return RoutingStats(
        max_load=max(max(layer) * len(layer) / sum(layer) for layer in layers),
        idle_experts=sum(layer.count(0) for layer in layers),
        dropped=sum(stats.dropped for stats in steps) / choices,
        similarity=measured[-1].similarity if measured else None,
        shares=tuple(
            max(round(1000 * sum(tokens) / choices), 1) if any(tokens) else 0
            for tokens in zip(*layers, strict=True)
        ),
        pairs=measured[-1].pairs if measured else (),
    )
