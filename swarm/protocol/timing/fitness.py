"""Whether a link and a machine can keep up with a run's rounds. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

SHORTEST_ROUND_S = 10.0
"""Shorter rounds are for experiments, and count as this long: a link that carries their bytes in
this time is enough."""
HOPELESS = 3.0
"""A link this many times too slow is hopeless: other peers wait for votes three times as long as
their own transfers take (deadlines.py)."""


class Fitness(Enum):
    """What a link's speed means for its peer and for the others."""

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
        text: the verdict in words.
    """

    fitness: Fitness
    needed_mbit: float
    text: str


def training_s(local_tokens: int, tokens_per_s: Iterable[float]) -> float | None:
    """Seconds that the local steps of a round take the median peer; None: no rate is known.

    Args:
        local_tokens: tokens of one peer in one round.
        tokens_per_s: pace of each peer. 0 if the peer has not trained yet.
    """
    rates = sorted(rate for rate in tokens_per_s if rate > 0)
    return max(local_tokens / rates[len(rates) // 2], SHORTEST_ROUND_S) if rates else None


def link_verdict(
    bytes_per_round: float, round_s: float | None, down_mbit: float | None, up_mbit: float | None
) -> LinkVerdict:
    """Whether a link carries the bytes that a peer sends in each round, and as many received.

    Args:
        bytes_per_round: bytes sent; about as many are received.
        round_s: seconds of local steps in a round.
        down_mbit: rate measured towards this peer; None if it was not.
        up_mbit: rate measured away from this peer; None if it was not.
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


HOME_MBIT = 60.0
"""Uplinks up to this rate are home lines, which become slow when their routers queue and drop
packets."""
CAP_SHARE = 0.88
"""A cap is this share of an uplink's measured rate, because a measured rate may be some percent too
high, and headers add 3 to 4 % (`scripts/benchmarks/bench_link.py`, `bench_utilisation.py`)."""
SEEN_SHARE = 0.75
"""No cap is lower than this share of the rate that a link has carried lately."""


def cap_for(up_mbit: float, sent_mbit: float | None = None) -> float:
    """The cap that suits a slow uplink, in Mbit/s.

    A home router queues a quarter of a second of packets, and drops further packets.

    Args:
        up_mbit: rate of the uplink, as others have shown.
        sent_mbit: the rate that this peer itself saw lately; others may report less, even on
            purpose.
    """
    return max(CAP_SHARE * up_mbit, SEEN_SHARE * (sent_mbit or 0.0), 1.0)


def cap_advice(up_mbit: float) -> str | None:
    """Advice in words to cap an uplink; None for an uplink that needs no cap."""
    if up_mbit > HOME_MBIT:
        return None
    cap = f"--max-upload {cap_for(up_mbit):.3g}mbit"
    return f"with {cap} a router drops little on such a link; without, much of it may be wasted"


ALWAYS_LATE = 3
"""A peer that trained is warned after this many rounds in a row without its shared tensors."""


def lateness(
    missed: int,
    tokens: int,
    local_tokens: int,
    tokens_per_s: float,
    round_s: float,
    *,
    up_mbit: float | None = None,
) -> str | None:
    """The warning for a peer whose machine or link is too slow for the rounds; None if none is due.

    The warning comes after `ALWAYS_LATE` rounds, then less and less often.

    Args:
        missed: rounds in a row that did not count this peer's shared tensors.
        tokens: tokens of the local steps that this peer did in the last of these rounds.
        local_tokens: tokens of all local steps of a round.
        tokens_per_s: rate of this peer.
        round_s: seconds of the last round at the others.
        up_mbit: this peer's uplink; None: not known.
    """
    is_power = missed >= ALWAYS_LATE and (missed // ALWAYS_LATE).bit_count() == 1
    if not is_power or missed % ALWAYS_LATE or tokens_per_s <= 0:
        return None
    needed_s = local_tokens / tokens_per_s
    if needed_s < round_s / 2:
        line = f"an uplink of {up_mbit:.3g} Mbit/s" if up_mbit else "an uplink not measured yet"
        return (
            f"{missed} rounds in a row went on without this peer, though its local steps take only "
            f"{needed_s:.3g} s of {round_s:.3g}: it has {line}, and a peer whose link costs the "
            "others more than its work is worth is left out. A link as fast as theirs would help, "
            "or a run with longer rounds or coarser codings (swarm-plan --link)"
        )
    return (
        f"{missed} rounds in a row went on without this peer: a round's local steps take it "
        f"{needed_s:.3g} s, and the others were done after {round_s:.3g} s. Its experts advance by "
        f"{tokens / local_tokens:.0%} of a round each time, but its shared steps are lost. A "
        f"machine {needed_s / round_s:.2g} times as fast would help, or fewer experts to train "
        f"(--capacity), or for all peers {round_s / needed_s:.0%} of the local steps' tokens"
    )
