"""The rounds of bench_internet.py: drawn lines, bytes of each peer, and seconds. Pure.

A round is a chain of stages, each as long as the slowest line that it needs: offers to the
convener, offers to the reducers, values to the reducers, the body of the manifest to all, means to
all. The functions of peers decide which peer averages which unit, which units are due, and which
peers the round waits for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from random import Random
from statistics import median

from swarm.protocol.messages.messages import Offer, OfferedUnit
from swarm.protocol.rounds import Rules
from swarm.protocol.rounds.policies.roster_deadline import Absent, OpenRoster, Word, why_close
from swarm.protocol.rounds.policies.rosters import assign_reducers
from swarm.protocol.rounds.policies.slow_links import relays_among, relays_of_body
from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.values.digests import digest_of
from swarm.protocol.values.manifest import Manifest, PeerId

ROUND = "a round figure of ours"
OOKLA_US = "Ookla, USA, fixed lines, end of 2022 (potsandpansbyccg.com, Final 2022 Statistics)"
OOKLA_2023 = "a tenth of Speedtest's users, USA, May 2023 (Ookla, as forums.rwusers.com quotes it)"
FCC_2015 = "the FCC's benchmark for broadband from 2015 to March 2024"
FIOS = "Verizon Fios 940/880 by Verizon's own tests, October 2019"


@dataclass(frozen=True)
class Quantile:
    """The share of the lines with this rate or less.

    Attributes:
        share: 0 to 1.
        mbit: the rate.
        source: source of the figure.
    """

    share: float
    mbit: float
    source: str


UP = (
    Quantile(0.0, 3.0, f"{FCC_2015}: that nobody has less is {ROUND}"),
    Quantile(
        0.1, 10.7, f"Cox, the slowest of six providers' medians, {OOKLA_US}; a tenth: {ROUND}"
    ),
    Quantile(0.5, 22.6, f"median, {OOKLA_US}"),
    Quantile(0.9, 142.8, f"AT&T, the fastest of these six; a tenth: {ROUND}"),
    Quantile(1.0, 880.0, FIOS),
)
"""Quantiles of uplinks. Between them log(Mbit/s) is interpolated linearly."""
DOWN = (
    Quantile(0.0, 25.0, f"{FCC_2015}: that nobody has less is {ROUND}"),
    Quantile(0.1, 30.49, f"the slowest {OOKLA_2023}"),
    Quantile(0.5, 193.7, f"median, {OOKLA_US}"),
    Quantile(0.9, 698.62, f"the fastest {OOKLA_2023}"),
    Quantile(1.0, 940.0, FIOS),
)
"""Quantiles of downlinks, likewise. A line has the same rank in both, because fast lines are
fiber."""
RTT_S = 0.118
"""14 ms to a server nearby (median, as OOKLA_US) of both lines, and 90 ms from New York to London
(Verizon's service level), as in swarm/emulation/links.py."""
EXCHANGES = 20
"""Sequential messages and requests of a round: 4 until an offer is at the convener, 5 until the
offers are at the reducers, 2 for values, 1 REDUCED, 3 for PROPOSE and body, 2 for means, 1 ACCEPT,
2 for COMMIT and its certificate."""


@dataclass(frozen=True)
class Line:
    """Mbit/s of a peer."""

    up: float
    down: float


@dataclass(frozen=True)
class Constants:
    """Costs of a round other than its transfers, measured elsewhere.

    Attributes:
        offer_bytes, body_bytes, evidence_bytes: bytes of one offer, of a manifest, of its evidence.
        cpu_s: seconds of the convener's decisions, one after the other.
        control_s: seconds of polls, greetings and votes.
        compute_s: seconds of the local steps of a round.
        exchange_s: seconds of making an offer, and of adopting the result.
        link_share: share of a line's rate that transfers reach.
        overlap: whether steps continue during a round.
    """

    offer_bytes: int
    body_bytes: int
    evidence_bytes: int
    cpu_s: float
    control_s: float
    compute_s: float
    exchange_s: tuple[float, float]
    link_share: float
    overlap: bool


@dataclass(frozen=True)
class Moved:
    """Bytes of the data phase, of each peer.

    A peer sends `values` to reducers, receives `averaged` as a reducer, and sends `means` to all.
    It sends `experts`, its own, to all. With relays, `passed` are the bytes of experts that it
    sends.
    """

    values: dict[PeerId, float]
    averaged: dict[PeerId, float]
    means: dict[PeerId, float]
    experts: dict[PeerId, float]
    passed: dict[PeerId, float]
    received: dict[PeerId, float]
    num_reducers: int
    own: dict[PeerId, float]
    """Bytes of one copy of each mean and expert that the peer is the origin of."""


Stages = Mapping[str, tuple[float, str]]
"""Seconds of each stage, and its bottleneck."""


@dataclass(frozen=True)
class Outcome:
    """A round with one of the peers as its convener. Times are seconds.

    Attributes:
        stages: seconds by name. Their sum is the round without its local steps.
        relayed: the stages if relays pass on experts and manifests (blob relays).
        flow_s: least seconds of the data if any peer could pass on any data.
        bottleneck, bottleneck_relayed: the bottleneck of the longest stage.
    """

    stages: Mapping[str, float]
    relayed: Mapping[str, float]
    flow_s: float
    bottleneck: str
    bottleneck_relayed: str


def _seconds(stages: Stages) -> dict[str, float]:
    return {name: seconds for name, (seconds, _) in stages.items()}


def _longest(stages: Stages) -> str:
    return max(stages.values())[1]


def rate_at(quantiles: Sequence[Quantile], share: float) -> float:
    """Mbit/s that this share of the lines does not exceed."""
    above = min(bisect_right([q.share for q in quantiles], share), len(quantiles) - 1)
    low, high = quantiles[above - 1], quantiles[above]
    part = (share - low.share) / (high.share - low.share)
    return exp(log(low.mbit) + part * (log(high.mbit) - log(low.mbit)))


def draw_lines(peers: Sequence[PeerId], seed: int, least_up: float = 0.0) -> dict[PeerId, Line]:
    """A line for each peer, from the lines with uplinks of at least `least_up` Mbit/s."""
    random = Random(f"lines {seed}")
    first = next((n / 1000 for n in range(1000) if rate_at(UP, n / 1000) >= least_up), 0.999)
    ranks = [first + random.random() * (1 - first) for _ in peers]
    pairs = ((rate_at(UP, rank), rate_at(DOWN, rank)) for rank in ranks)
    return {peer: Line(min(pair), pair[1]) for peer, pair in zip(peers, pairs, strict=True)}


def offers_of(tip: Manifest, rules: Rules) -> dict[PeerId, Offer]:
    """The offers of all members after a tip, with meaningless digests."""
    sizes = rules.offered_bytes
    return {
        peer: Offer(
            tip.digest,
            1,
            1,
            {
                unit: OfferedUnit(tip.digest, sizes[unit], tip.entries[unit].digest)
                for unit in rules.schedule.due_of(peer, tip)
            },
        )
        for peer in sorted(tip.members)
    }


def uplinks_of(lines: Mapping[PeerId, Line]) -> dict[PeerId, int]:
    """Uplinks in whole Mbit/s, as in READY messages."""
    return {peer: max(1, round(line.up)) for peer, line in lines.items()}


def moved(offers: Mapping[PeerId, Offer], lines: Mapping[PeerId, Line], rules: Rules) -> Moved:
    """The bytes that each peer sends and receives. Uplinks count as measured."""
    num_others, sizes, uplinks = len(offers) - 1, rules.moved_bytes, uplinks_of(lines)
    reducers = assign_reducers(offers, uplinks, sizes, rules.averaged_deltas)
    relays = relays_among(reducers.values(), uplinks)
    zero = dict.fromkeys(offers, 0.0)
    result = Moved(dict(zero), dict(zero), dict(zero), dict(zero), dict(zero), dict(zero),
                   len(set(reducers.values())), dict(zero))  # fmt: skip
    offered = [(peer, unit) for peer, offer in offers.items() for unit in offer.units]
    for peer, unit in offered:
        reducer, num_bytes = reducers.get(unit), sizes[unit]
        if reducer is None:
            result.own[peer] += num_bytes
            result.experts[peer] += num_bytes * num_others
            between = relays.of(digest_of(unit.encode()), peer)
            result.passed[peer] += num_bytes * (len(between) or num_others)
            for relay in between:
                result.passed[relay] += num_bytes * (num_others / len(between) - 1)
        elif reducer != peer:
            result.values[peer] += rules.offered_bytes[unit]
            result.averaged[reducer] += rules.offered_bytes[unit]
    for unit, reducer in reducers.items():
        result.own[reducer] += sizes[unit]
        result.means[reducer] += sizes[unit] * num_others
    all_bytes = sum(result.own.values())
    for peer in offers:
        result.received[peer] = all_bytes - result.own[peer]
    return result


@dataclass(frozen=True)
class Round:
    """One drawing of lines, and their traffic."""

    lines: Mapping[PeerId, Line]
    moved: Moved
    constants: Constants

    def up_s(self, peer: PeerId, num_bytes: float) -> float:
        """Seconds in which a peer sends a number of bytes."""
        return num_bytes * 8e-6 / (self.lines[peer].up * self.constants.link_share)

    def down_s(self, peer: PeerId, num_bytes: float) -> float:
        """Seconds in which a peer receives a number of bytes."""
        return num_bytes * 8e-6 / (self.lines[peer].down * self.constants.link_share)

    def data(self) -> Stages:
        """The stages that do not depend on the convener: seconds and bottlenecks."""
        lines, it, offer = self.lines, self.moved, self.constants.offer_bytes
        num_peers, asked = len(lines), offer * it.num_reducers
        lists = max(
            max((self.up_s(p, asked), "an uplink, with its offer") for p in lines),
            max((self.down_s(p, offer * num_peers), "a downlink, with all offers")
                for p in lines if it.means[p]),
        )  # fmt: skip
        values = max(
            max((self.up_s(p, it.values[p]), "an uplink, with values") for p in lines),
            max((self.down_s(p, it.averaged[p]), "a reducer's downlink") for p in lines),
        )
        received = sorted(self.down_s(p, it.received[p]) for p in lines)
        means = max(
            max((self.up_s(p, it.means[p]), "a reducer's uplink") for p in lines),
            (received[num_peers // 2], "the median downlink"),
        )
        data: dict[str, tuple[float, str]] = {"lists": lists, "values": values, "means": means}
        for name, experts in (("experts", it.experts), ("passed", it.passed)):
            longest_s = max(self.up_s(p, it.values[p] + it.means[p] + experts[p]) for p in lines)
            rest_s = max(0.0, longest_s - values[0] - means[0])
            data[name] = (rest_s, "an uplink, with experts")
        return data

    def flow_s(self) -> float:
        """Least seconds of values, means and experts if all peers pass on their data."""
        it, lines = self.moved, self.lines
        total = sum(it.values.values()) + sum(it.received.values())
        rate = sum(line.up for line in lines.values()) * self.constants.link_share
        received = sorted(self.down_s(p, it.received[p]) for p in lines)
        return max(
            total * 8e-6 / rate,
            received[len(lines) // 2],
            max(self.up_s(p, it.values[p] + it.own[p]) for p in lines),
        )

    def outcome(self, convener: PeerId, data: Stages, flow_s: float) -> Outcome:
        """The round that a peer convenes."""
        it, lines = self.constants, self.lines
        num_others = len(lines) - 1
        body, offer = it.body_bytes + it.evidence_bytes, it.offer_bytes
        stages = dict(data) | {
            "offers": max(
                (self.down_s(convener, offer * num_others), "the convener's downlink"),
                max((self.up_s(peer, offer), "an uplink, with its offer") for peer in lines),
            ),
            "body": (self.up_s(convener, body * num_others), "the convener's uplink"),
            "rest": (it.control_s + RTT_S * EXCHANGES + it.cpu_s + sum(it.exchange_s),
                     "the convener's processor, control and round trips"),
        }  # fmt: skip
        passed_s, why = stages.pop("passed")
        relayed = stages | {
            "experts": (passed_s, why),
            "body": (self.relayed_body_s(convener, body), "the uplinks of a manifest's relays"),
        }
        return Outcome(
            _seconds(stages), _seconds(relayed), flow_s, _longest(stages), _longest(relayed)
        )

    def relayed_body_s(self, convener: PeerId, num_bytes: int) -> float:
        """Seconds until all peers have a body that relays and then all idle peers pass on."""
        num_others = len(self.lines) - 1
        relays = [p for p in relays_of_body(uplinks_of(self.lines)) if p != convener]
        if not relays:
            return self.up_s(convener, num_bytes * num_others)
        others = num_others / len(relays) - 1
        first_s = max(self.up_s(convener, num_bytes * len(relays)),
                      max(self.down_s(relay, num_bytes) for relay in relays))  # fmt: skip
        then_s = max(self.up_s(relay, num_bytes * others) for relay in relays)
        return first_s + then_s


def counted(round_: Round, stages: Mapping[str, float]) -> tuple[int, float]:
    """Peers whose steps a round counts, and the seconds that the median peer waits for them.

    The conveners' rule for closing rosters decides. A peer begins its steps when it has the
    previous round's result. Its delay after the median peer follows from its slower downlink.
    """
    it, lines = round_.constants, round_.lines
    fetched = sorted(round_.down_s(peer, round_.moved.received[peer]) for peer in lines)
    usual_s, quorum = median(fetched), len(lines) // 2 + 1
    ready = [max(0.0, each - usual_s) for each in fetched]
    spare_s = max(0.0, it.compute_s - sum(stages.values())) if it.overlap else 0.0
    num = max(quorum, bisect_right(ready, ready[quorum - 1]))
    while num < len(lines):
        now = ready[num - 1]
        absent = tuple(
            Absent(str(place), 0.0, ready[place] - now, it.compute_s - (ready[place] - now),
                   Word(it.compute_s, now - ready[place]), fetched_s=fetched[place])
            for place in range(num, len(lines))
        )  # fmt: skip
        roster = OpenRoster(now, now - ready[quorum - 1], num, len(lines), True, it.compute_s,
                            absent, spare_s=spare_s)  # fmt: skip
        if why_close(roster, Timers()):
            break
        num += 1
    return num, ready[num - 1]


def utilisation(stages: Mapping[str, float], constants: Constants, waited_s: float) -> float:
    """Share of time that the median peer computes, given its wait for later peers."""
    round_s = sum(stages.values()) + waited_s
    waits_s = max(0.0, round_s - constants.compute_s) if constants.overlap else round_s
    return constants.compute_s / (constants.compute_s + waits_s)
