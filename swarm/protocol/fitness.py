"""Whether a link can carry a run: bytes of a round against the time that a round takes. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

SHORTEST_ROUND_S = 10.0
"""Rounds shorter than this are for trying things out: any link that carries them in it will do."""
HOPELESS = 3.0
"""The others wait for votes three times as long as their own transfers take (deadlines.py)."""


class Fitness(Enum):
    """What a link means for its peer and for the others."""

    UNKNOWN = "unknown"  # nothing was measured, or nobody trains yet
    ENOUGH = "enough"  # a round's bytes take no longer than its local steps
    SLOW = "slow"  # rounds take longer, and this peer will be left out of some
    HOPELESS = "hopeless"  # it would be one round late for ever


@dataclass(frozen=True)
class LinkVerdict:
    """Whether a link suffices, with the numbers.

    Attributes:
        fitness: the verdict.
        needed_mbit: rate at which a round's bytes take as long as its local steps.
        text: all of it for people.
    """

    fitness: Fitness
    needed_mbit: float
    text: str


def training_s(
    local_tokens: int, tokens_per_s: Iterable[float], shortest_s: float = SHORTEST_ROUND_S
) -> float | None:
    """Seconds that the local steps of a round take the median peer; None if nobody knows.

    Args:
        local_tokens: of one peer in one round.
        tokens_per_s: of each peer; 0 where it has not trained yet.
        shortest_s: of what counts as a round.
    """
    rates = sorted(rate for rate in tokens_per_s if rate > 0)
    return max(local_tokens / rates[len(rates) // 2], shortest_s) if rates else None


def link_verdict(
    bytes_per_round: float, round_s: float | None, down_mbit: float | None, up_mbit: float | None
) -> LinkVerdict:
    """Whether a link carries what a peer sends, and as much that it receives, in each round.

    Args:
        bytes_per_round: bytes sent; about as many are received.
        round_s: seconds of local steps in a round.
        down_mbit: rate measured towards this peer; None if it was not.
        up_mbit: the same away from it.
    """
    rates = {"down": down_mbit, "up": up_mbit}
    measured = {name: rate for name, rate in rates.items() if rate is not None}
    if round_s is None or not measured:
        return LinkVerdict(Fitness.UNKNOWN, 0.0, "the link or the length of a round is unknown")
    needed_mbit = bytes_per_round * 8 / 1e6 / round_s
    name, slowest_mbit = min(measured.items(), key=lambda item: item[1])
    transfer_s = bytes_per_round * 8 / 1e6 / max(slowest_mbit, 1e-6)
    text = (
        f"{slowest_mbit:.3g} Mbit/s {name}; a round moves {bytes_per_round / 1e6:.3g} MB each way "
        f"and trains for {round_s:.3g} s, so {needed_mbit:.3g} Mbit/s are needed; "
        f"here it takes {transfer_s:.3g} s"
    )
    if transfer_s <= round_s:
        return LinkVerdict(Fitness.ENOUGH, needed_mbit, text)
    slow = transfer_s <= HOPELESS * round_s
    return LinkVerdict(Fitness.SLOW if slow else Fitness.HOPELESS, needed_mbit, text)
