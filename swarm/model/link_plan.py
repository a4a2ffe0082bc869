"""Predicts a run's speed on a link: seconds of a round, share of time spent computing. Pure.

N peers, R owners per expert. A *cycle* is H local steps of a peer and has P rounds. With one round
per cycle, H is `round.local_steps`. The prices are differences of toy runs of 247 thousand
parameters, not promises for a large model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import get_args

from swarm.codings import BLOCK, elements_bytes
from swarm.config import Coding, RunConfig
from swarm.config.amounts import LinkRates
from swarm.model.cost import exact_elements, parameters
from swarm.model.cost import private_bytes as private_bytes_with

CODING_BYTES: dict[str, float] = {"fp32": 4.0} | {
    coding: elements_bytes(BLOCK, coding) / BLOCK for coding in get_args(Coding) if coding != "none"
}
"""Bytes of an element: fp32 and bf16 for values, the others for codings of differences."""
EXACT_BYTES = 4
"""Bytes of an element of norms and routers, which travel in fp32."""
SEGMENT_BITS = 1460 * 8


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of the formulas.

    Attributes:
        link_share: share of a link's rate that transfers reach.
        control_s: seconds of a round apart from its transfers: greeting, rosters, votes.
        offer_ns: core time to offer an element of a shared tensor, and of an expert that the peer
            trains (scripts/benchmarks/bench_stall.py, codings b2 and b1). Values take less.
        adopt_ns: core time to adopt an element of a shared tensor, of an own expert, and of an
            expert that another peer trains.
        cores: number of cores that share this work.
        disk_bytes_per_s: rate at which a peer makes its private state durable: once a cycle with a
            coding, before each offer without a coding.
        is_beside: whether offers and private states are made while the next step computes, if
            rounds overlap. Otherwise steps wait for offers and private states
            (`Engine.before_update`).
    """

    link_share: float = 0.85
    control_s: float = 4.0
    offer_ns: tuple[float, float] = (5.0, 9.0)
    adopt_ns: tuple[float, float, float] = (2.0, 0.1, 0.4)
    cores: float = 8
    disk_bytes_per_s: float = 2e9
    is_beside: bool = True


ASSUMED = Assumptions()
TRANSFERS_ALONE = Assumptions(1.0, 0.0, (0.0, 0.0), (0.0, 0.0, 0.0), 1, math.inf)
"""Assumptions for measured rates: transfers alone take time."""


@dataclass(frozen=True)
class Price:
    """The held-out loss of a setting, compared with exact SPES with the same cycle.

    Attributes:
        loss_pct: percent. Negative is better.
        seeds: number of paired runs, with a noise of about 0.6 points each.
        source: the toy runs.
    """

    loss_pct: float
    seeds: int
    source: str


@dataclass(frozen=True)
class Setting:
    """Settings of a run's exchange.

    Attributes:
        shared: type or coding of the shared tensors, a key of `CODING_BYTES`.
        experts: type or coding of the experts, a key of `CODING_BYTES`.
        rounds: P, rounds of a cycle. Each round moves its slice of the due values, so all rounds
            move the same number of bytes.
        shared_every: rounds between two exchanges of a shared tensor.
        experts_every: rounds between two exchanges of an expert.
        owners: R.
        overlap: whether rounds overlap the next local steps.
        price: None if unknown.
    """

    shared: str
    experts: str
    rounds: int = 1
    shared_every: int = 1
    experts_every: int = 1
    owners: int = 1
    overlap: bool = False
    price: Price | None = field(default=None, compare=False)


@dataclass(frozen=True)
class LinkPlan:
    """The speed of a setting on a link.

    Attributes:
        cycle_bytes: bytes that a peer sends in a cycle, and also receives.
        transfer_s: seconds for these bytes.
        round_s: seconds from the beginning of a round to that of the next, including local steps.
        delay_share: the part of a cycle after which local steps see the result of a round.
        utilisation: share of time spent computing.
        link_busy: share of time in which the slower direction carries bytes.
    """

    cycle_bytes: float
    transfer_s: float
    round_s: float
    delay_share: float
    utilisation: float
    link_busy: float


def cycle_bytes(run: RunConfig, setting: Setting, num_peers: int) -> float:
    """Blob bytes that a peer sends (and receives) in a cycle; see `bytes_sent_per_peer_per_round`.

    P (2 (S s + 4 L) (N-1) / p_s + X x (N+R-2) / p_x) / N: S, L and X count the elements of shared
    tensors, of norms and routers, and of experts. An element of S has s bytes, and an element of X
    has x. p_s and p_x are the rounds between two exchanges of a shared tensor and of an expert.
    """
    counted = parameters(run.model)
    exact = exact_elements(run.model)
    owners = min(setting.owners, num_peers)
    to_and_from = 2 * (num_peers - 1)
    shared = (counted.shared - exact) * CODING_BYTES[setting.shared] + exact * EXACT_BYTES
    experts = counted.experts * CODING_BYTES[setting.experts] / setting.experts_every
    sent = to_and_from * shared / setting.shared_every
    sent += max(num_peers + owners - 2, 0) * experts
    return setting.rounds * sent / num_peers


def private_bytes(run: RunConfig, setting: Setting, num_peers: int) -> float:
    """Bytes of a peer's masters and moments, which are saved once a cycle or a round [P6]."""
    owners = min(setting.owners, num_peers)
    return private_bytes_with(run, run.model.num_experts * owners / num_peers)


def exchange_s(
    run: RunConfig, setting: Setting, num_peers: int, assumed: Assumptions = ASSUMED
) -> tuple[float, float]:
    """Seconds in which a peer makes its offer, and seconds in which it adopts the result."""
    counted, owners = parameters(run.model), min(setting.owners, num_peers)
    own = counted.experts * owners / num_peers / setting.experts_every
    others = counted.experts / setting.experts_every - own
    shared, each = counted.shared / setting.shared_every, 1e-9 / assumed.cores
    offer = assumed.offer_ns[0] * shared + assumed.offer_ns[1] * own
    adopt = assumed.adopt_ns[0] * shared + assumed.adopt_ns[1] * own + assumed.adopt_ns[2] * others
    return each * offer, each * adopt


def stall_s(
    run: RunConfig,
    setting: Setting,
    num_peers: int,
    *,
    compute_s: float,
    assumed: Assumptions = ASSUMED,
) -> float:
    """Seconds of a cycle in which a peer neither computes steps nor waits for others."""
    offer_s, adopt_s = exchange_s(run, setting, num_peers, assumed)
    private_s = private_bytes(run, setting, num_peers) / assumed.disk_bytes_per_s
    saves = 1 if {setting.shared, setting.experts} - {"fp32", "bf16"} else setting.rounds
    rounds = [offer_s + private_s] * saves + [offer_s] * (setting.rounds - saves)
    free_s = 0.0
    if setting.overlap and assumed.is_beside:
        free_s = compute_s / cycle_steps(run)
    return setting.rounds * adopt_s + sum(max(0.0, each - free_s) for each in rounds)


def carried_mbit(link: LinkRates, num_peers: int, *, is_bbr: bool = False) -> tuple[float, float]:
    """The rates that a link reaches up and down, in Mbit/s. Loss lowers them, except with bbr.

    With reno or cubic, the connection to each other peer carries at most 1.22 segments / (round
    trip sqrt(p)) (Mathis et al., CCR 27(3), 1997; cubic is as slow at these windows, RFC 9438,
    4.3).
    """
    if not link.loss_pct or is_bbr:
        return link.up_mbit, link.down_mbit
    share = link.loss_pct / 100
    each = 1.22 * SEGMENT_BITS / (max(link.rtt_ms, 1.0) / 1e3 * math.sqrt(share)) / 1e6
    most = each * max(num_peers - 1, 1)
    return min(link.up_mbit, most), min(link.down_mbit, most)


def plan_link(
    run: RunConfig,
    setting: Setting,
    rates: tuple[float, float],
    *,
    compute_s: float,
    num_peers: int,
    assumed: Assumptions = ASSUMED,
) -> LinkPlan:
    """Predicts the speed of a setting. A peer sends and receives equal numbers of bytes at once.

    Args:
        run: only its model matters.
        setting: setting of the exchange.
        rates: rates up and down, Mbit/s; see `carried_mbit`.
        compute_s: seconds of the local steps of a cycle.
        num_peers: N.
        assumed: further assumptions.
    """
    num_bytes = cycle_bytes(run, setting, num_peers)
    transfer_s = num_bytes * 8 / (min(rates) * 1e6 * assumed.link_share)
    exchange_s = transfer_s / setting.rounds + assumed.control_s
    stalls_s = stall_s(run, setting, num_peers, compute_s=compute_s, assumed=assumed)
    waits_s = exchange_s
    if setting.overlap:  # one round in flight, which may last as long as the steps that it overlaps
        waits_s = max(0.0, exchange_s - compute_s / setting.rounds)
    cycle_s = compute_s + setting.rounds * waits_s + stalls_s
    return LinkPlan(
        cycle_bytes=num_bytes,
        transfer_s=transfer_s,
        round_s=cycle_s / setting.rounds,
        delay_share=min(exchange_s / compute_s, 1 / setting.rounds) if setting.overlap else 0.0,
        utilisation=compute_s / cycle_s,
        link_busy=transfer_s / cycle_s,
    )


def needed_mbit(
    run: RunConfig, setting: Setting, *, compute_s: float, num_peers: int, wanted: float
) -> float:
    """Rate of both directions at which transfers alone leave the wanted share for computing."""
    spare_s = compute_s if setting.overlap else compute_s * (1 / wanted - 1)
    return cycle_bytes(run, setting, num_peers) * 8 / 1e6 / spare_s


# ---------------------------------------------------------------- settings to choose from


def setting_of(run: RunConfig) -> Setting:
    """The exchange settings of a run's configuration.

    With slices, a cycle consists of the rounds in which each unit is exchanged once.
    """
    wire, due = run.wire, run.round
    return Setting(
        shared=wire.shared if wire.shared_coding == "none" else wire.shared_coding,
        experts=wire.experts if wire.experts_coding == "none" else wire.experts_coding,
        rounds=max(due.experts_every, due.shared_every) if due.stagger else 1,
        shared_every=due.shared_every,
        experts_every=due.experts_every,
        owners=run.ownership.owners_per_expert,
        overlap=due.overlap == "round",
    )


def with_rounds(setting: Setting, rounds: int) -> Setting:
    """A setting of the table with another number of rounds per cycle.

    The number of times that a unit is due in a cycle does not change.
    """
    times = rounds / setting.rounds
    return Setting(
        setting.shared, setting.experts, rounds,
        round(setting.shared_every * times) if setting.shared_every > 1 else 1,
        round(setting.experts_every * times) if setting.experts_every > 1 else 1,
        setting.owners, setting.overlap, setting.price,
    )  # fmt: skip


_BLOCKING = "blocking rounds, H = 10, 400 steps"
_CYCLE = "overlapped, 4 rounds a cycle, H = 20, 800 steps"
# By scripts/benchmarks/reproduce_wire_quality.py.
_MEASURED = "overlapped, 5 rounds a cycle, H = 20, 400 steps"
SETTINGS = (
    Setting("fp32", "fp32", price=Price(0.0, 3, "exact SPES")),
    Setting("fp32", "bf16"),
    Setting("bf16", "bf16"),
    Setting("b2", "b2", price=Price(-0.3, 3, _BLOCKING)),
    Setting("b2", "b1", price=Price(-1.3, 2, _BLOCKING)),
    Setting("b1", "b1", price=Price(-0.3, 3, _BLOCKING)),
    Setting("b2", "b2", overlap=True),
    Setting("b2", "b2", 4, 4, 4, overlap=True, price=Price(-1.9, 2, _CYCLE)),
    Setting("b1", "b1", 4, 1, 4, overlap=True, price=Price(-4.6, 2, _CYCLE)),
    Setting("b2", "b2", 4, 1, 4, overlap=True, price=Price(-4.6, 2, _CYCLE)),
    Setting("b2", "b1", 4, 1, 4, overlap=True, price=Price(-3.9, 8, _MEASURED)),
    Setting("b2", "b1", 4, 1, 4, owners=2, overlap=True, price=Price(-6.1, 2, _CYCLE)),
    Setting("b2", "b2", 4, 1, 8, owners=2, overlap=True, price=Price(-6.4, 2, _CYCLE)),
)
"""Settings that were measured, with their prices in held-out loss."""
ROUNDS = (5, 4, 2)
"""Rounds per cycle, the best first. The first number that divides the local steps is used."""


def cycle_steps(run: RunConfig) -> int:
    """H, the local steps of a cycle after the last of the run's phases."""
    return run.round.local_steps * setting_of(run).rounds


def settings_for(run: RunConfig) -> tuple[Setting, ...]:
    """The settings of the table with rounds that divide this run's cycle."""
    steps, num_peers = cycle_steps(run), run.run.peers
    rounds = next((n for n in ROUNDS if steps % n == 0), None)
    return tuple(
        with_rounds(setting, rounds) if setting.rounds > 1 and rounds else setting
        for setting in SETTINGS
        if (setting.rounds == 1 or rounds) and setting.owners <= num_peers
    )
