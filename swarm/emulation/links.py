"""Link conditions, and the faults of an emulated network. Computes when packets arrive.

The link of a peer lies between the peer and the middle of the network, like an access line. Two
peers are connected by the sender's line up, the receiver's line down, and the delay of both links.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

MOST_QUEUED_S = 0.25
"""Seconds of packets that a line queues before it drops further packets, as home routers do."""


@dataclass(frozen=True)
class Bursts:
    """Losses in bursts: the chain of Gilbert and Elliott, as netem's `loss gemodel p r 1-h 1-k`.

    Before each packet the line may change its state. The state before the change decides whether
    the packet is lost.

    Attributes:
        p_pct: chance at each packet that a good line turns bad, percent.
        r_pct: chance at each packet that a bad line turns good, percent. Bad stretches have 100 /
            r_pct packets on average.
        lost_bad_pct: share of packets lost on a bad line, netem's 1-h.
        lost_good_pct: share of packets lost on a good line, netem's 1-k.
    """

    p_pct: float
    r_pct: float
    lost_bad_pct: float = 100.0
    lost_good_pct: float = 0.0

    @property
    def loss_pct(self) -> float:
        """Packets lost in the long run, percent."""
        bad = self.p_pct / (self.p_pct + self.r_pct)
        return bad * self.lost_bad_pct + (1 - bad) * self.lost_good_pct


@dataclass(frozen=True)
class Link:
    """The access line of a peer.

    Attributes:
        up_mbit, down_mbit: rates in Mbit/s from and to the peer.
        rtt_ms: round-trip time between two peers that both have this link.
        loss_pct: packets lost at random each way between two such peers, percent.
        bursts: losses in bursts, in place of `loss_pct`.
    """

    up_mbit: float
    down_mbit: float
    rtt_ms: float
    loss_pct: float = 0.0
    bursts: Bursts | None = None

    @property
    def mean_loss_pct(self) -> float:
        """Packets lost in the long run, percent."""
        return self.bursts.loss_pct if self.bursts else self.loss_pct


def one_way_s(source: Link, target: Link) -> float:
    """Delay between two peers: half of the mean of their links' round trips."""
    return (source.rtt_ms + target.rtt_ms) / 4000


class Links(Protocol):
    """An emulated network whose links can be cut. Peers are named by their number."""

    def place(self, peer: int) -> tuple[list[str], list[str]]:
        """The beginning of a peer's command, and the arguments that say where it listens."""

    def cut(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Loses everything from the first to the second of each pair."""

    def mend(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Ends cuts of these pairs. A partition stays."""

    def partition(self, groups: Sequence[Sequence[int]]) -> None:
        """Loses everything between different groups. A peer in no group reaches nobody."""

    def heal(self) -> None:
        """Ends all cuts and partitions."""

    def close(self) -> None:
        """Takes the network down."""


@dataclass
class Cuts:
    """The pairs of peers that do not reach each other."""

    pairs: set[tuple[int, int]] = field(default_factory=set)
    group_of: dict[int, int] | None = None
    """None without a partition."""

    def loses(self, source: int, target: int) -> bool:
        """Whether no packet gets from one peer to another."""
        if (source, target) in self.pairs:
            return True
        if self.group_of is None:
            return False
        group = self.group_of.get(source)
        return group is None or group != self.group_of.get(target)

    def partition(self, groups: Sequence[Sequence[int]]) -> None:
        """From now on, only peers of the same group reach each other."""
        self.group_of = {peer: i for i, group in enumerate(groups) for peer in group}

    def heal(self) -> None:
        """All peers reach each other."""
        self.pairs, self.group_of = set(), None


@dataclass
class Line:
    """One direction of a link: bytes leave one after another at the link's rate."""

    mbit: float
    free_at_s: float = 0.0

    def is_full(self, now_s: float) -> bool:
        """Whether the queue takes no further packet."""
        return self.free_at_s - now_s > MOST_QUEUED_S

    def leaves_at(self, now_s: float, num_bytes: int) -> float | None:
        """When the last byte of a packet is through. None if the queue is full."""
        if self.is_full(now_s):
            return None
        self.free_at_s = max(now_s, self.free_at_s) + num_bytes * 8 / (self.mbit * 1e6)
        return self.free_at_s


class Losses:
    """Which packets of one peer are lost on their way."""

    def __init__(self, link: Link, draw: random.Random) -> None:
        """Begins with a good line. `draw` gives all randomness."""
        self._link, self._draw = link, draw
        self._is_bad = False

    def next_is_lost(self) -> bool:
        """Decides for the next packet."""
        bursts = self._link.bursts
        if bursts is None:
            return self._happens(self._link.loss_pct)
        was_bad = self._is_bad
        if self._happens(bursts.r_pct if was_bad else bursts.p_pct):
            self._is_bad = not was_bad
        return self._happens(bursts.lost_bad_pct if was_bad else bursts.lost_good_pct)

    def _happens(self, percent: float) -> bool:
        return percent > 0 and self._draw.random() * 100 < percent


@dataclass
class Access:
    """The two lines of a peer's link, and the losses before them."""

    link: Link
    losses: Losses
    up: Line
    down: Line


class Shaper:
    """Packets on their way between peers, without sockets or clocks.

    A packet takes the receiver's line only when it has left the sender's line: while it queues at
    the sender, other peers' packets pass. Moments are in seconds, and never earlier than in the
    last call.

    Attributes:
        cuts: which peers do not reach which others.
        packets: number of packets by their fate.
    """

    def __init__(self, link: Link | Sequence[Link], seed: int = 0) -> None:
        """Starts without packets. Peers get the links in turn. `seed` decides losses."""
        self._links = (link,) if isinstance(link, Link) else tuple(link)
        self.cuts = Cuts()
        self.packets: dict[str, int] = {}
        self._draw = random.Random(seed)
        self._accesses: dict[int, Access] = {}
        self._on_way: list[tuple[float, int, Access | None, int, bytes]] = []
        """Heap of packets: when it leaves a line, its number, the sender's line up (None: it is on
        the receiver's line, after the delay), its receiver, its content."""
        self._num_sent = 0

    def link_of(self, peer: int) -> Link:
        """The link of a peer."""
        return self._links[peer % len(self._links)]

    def access_of(self, peer: int) -> Access:
        """A peer's lines, which all its traffic shares."""
        access = self._accesses.get(peer)
        if access is None:
            link = self.link_of(peer)
            lines = Line(link.up_mbit), Line(link.down_mbit)
            access = self._accesses[peer] = Access(link, Losses(link, self._draw), *lines)
        return access

    @property
    def next_s(self) -> float | None:
        """When `arrived` has work again. None: nothing is on its way."""
        return self._on_way[0][0] if self._on_way else None

    def send(self, now_s: float, source: int, target: int, packet: bytes) -> None:
        """Sends a packet, unless it is lost or the queue before the line up is full."""
        access = self.access_of(source)
        if self.cuts.loses(source, target):
            self._count("cut")
        elif access.losses.next_is_lost():
            self._count("lost")
        elif (left_s := access.up.leaves_at(now_s, len(packet))) is None:
            self._count("queue up is full")
        else:
            self._num_sent += 1
            heapq.heappush(self._on_way, (left_s, self._num_sent, access, target, packet))

    def arrived(self, now_s: float) -> list[tuple[int, bytes]]:
        """Receivers and contents of the packets that have arrived by now, in this order."""
        on_way, found = self._on_way, []
        while on_way and on_way[0][0] <= now_s:
            left_s, number, sender, target, packet = on_way[0]
            if sender is None:
                heapq.heappop(on_way)
                found.append((target, packet))
                self._count("delivered")
                continue
            receiver = self.access_of(target)
            through_s = receiver.down.leaves_at(left_s, len(packet))
            if through_s is None:
                heapq.heappop(on_way)
                self._count("queue down is full")
                continue
            at_s = through_s + one_way_s(sender.link, receiver.link)
            heapq.heapreplace(on_way, (at_s, number, None, target, packet))
        return found

    def _count(self, what: str) -> None:
        self.packets[what] = self.packets.get(what, 0) + 1


ROUND = "a round figure of ours, no measurement"
FCC_2024 = "the FCC's benchmark for broadband since 14 March 2024 (Section 706 Report)"
FCC_2015 = "the FCC's benchmark for broadband from 2015 to March 2024"
FIOS = (
    "Verizon Fios 940/880 by Verizon's own tests, October 2019 (verizon.com, Network Performance)"
)
SPEEDTEST_2020 = "world's mean, Speedtest Global Index, September 2020"
OOKLA_5G = "world's median over 5G, third quarter of 2021 (Ookla, State of 5G, 20 December 2021)"
FIXED_MS = "10 ms to a server, fixed lines (world's median, Speedtest, November 2022)"
MOBILE_MS = "28 ms to a server, mobile (world's median, Speedtest, November 2022)"
DSL_MS = "37 ms to a server over DSL (FCC, Measuring Broadband America 2016, Verizon)"
US_MS = "45 ms across the USA (Verizon's service level for its backbone)"
ATLANTIC_MS = "90 ms from New York to London (Verizon's service level for its backbone)"
PATCHBAY = "preset of iroh's n0-computer/patchbay 2920b8c, lab.rs"
PATCHBAY_RATES = "iroh's n0-computer/patchbay 2920b8c, docs/reference/patterns.md"
STARLINK_MS = "50 ms to anchors in Europe (median, UCLouvain; APNIC blog, 28 November 2022)"
HANDOVERS = (
    "1 % in all as the preset of patchbay; half of the packets (Kassem et al., IMC 2022: up to "
    "50 % at handovers) for 0.3 s of each 15 s (arXiv 2310.09242: links are chosen every 15 s), at "
    "833 packets a second; the 0.3 s follow from the 1 %"
)
IN_FLIGHT = (
    "within what was measured in aeroplanes (Rula et al., WWW 2018, as F. Michel's QUIC-FEC, IFIP "
    "Networking 2019, has it): p 1 to 8 %, r 8 to 50 %, 90 to 100 % lost in the bad state"
)
FEW_BURSTS = (
    "0.1 % in all as home-100-20-loss, in bursts of 3 packets: r = 33 %, of the middle of what "
    "in-flight cites; only we say that it fits a line on the ground"
)


@dataclass(frozen=True)
class Profile:
    """A named link.

    Attributes:
        link: figures of the link.
        rates: source of the rates.
        rtt: source of the round trip.
        loss: source of the losses. "" for a link without losses.
    """

    link: Link
    rates: str
    rtt: str
    loss: str = ""


def _round(link: Link) -> Profile:
    return Profile(link, ROUND, ROUND, ROUND if link.loss_pct else "")


PROFILES = {
    "lan": _round(Link(1000, 1000, 1)),
    "datacentre": _round(Link(1000, 1000, 10)),
    "home-100": _round(Link(40, 100, 30)),
    "home-20": _round(Link(20, 20, 50)),
    "lossy": _round(Link(20, 20, 100, loss_pct=1.0)),
    "fibre": Profile(Link(945, 944, 65), FIOS, f"{FIXED_MS}, twice; {US_MS}"),
    "home-100-20": Profile(
        Link(20, 100, 100), FCC_2024, f"{ATLANTIC_MS}, and 10 ms for both lines: {ROUND}"
    ),
    "home-100-20-loss": Profile(
        Link(20, 100, 100, loss_pct=0.1), FCC_2024, f"as home-100-20: {ATLANTIC_MS}", ROUND
    ),
    "home-100-20-bursty": Profile(
        Link(20, 100, 100, bursts=Bursts(p_pct=0.0333, r_pct=33.3)),
        FCC_2024, f"as home-100-20: {ATLANTIC_MS}", FEW_BURSTS,
    ),
    "home-25-3": Profile(Link(3, 25, 120), FCC_2015, f"{DSL_MS}, twice; {US_MS}"),
    "home-world": Profile(
        Link(45.74, 85.73, 110), SPEEDTEST_2020, f"{FIXED_MS}, twice; {ATLANTIC_MS}"
    ),
    "mobile": Profile(Link(11.22, 35.96, 100), SPEEDTEST_2020, f"{MOBILE_MS}, twice; {US_MS}"),
    "5g": Profile(Link(21.08, 166.13, 100), OOKLA_5G, f"{MOBILE_MS}, twice; {US_MS}"),
    "wifi-bad": Profile(
        Link(20, 20, 80, loss_pct=2.0), f"{PATCHBAY}, WifiBad", f"{PATCHBAY}, WifiBad",
        f"{PATCHBAY}, WifiBad",
    ),
    "satellite": Profile(
        Link(10, 100, 100, bursts=Bursts(p_pct=0.0082, r_pct=0.4, lost_bad_pct=50.0)),
        f"{PATCHBAY_RATES}: satellite around 100/10 Mbit/s", f"{STARLINK_MS}, twice", HANDOVERS,
    ),
    "in-flight": Profile(
        Link(10, 10, 200, bursts=Bursts(p_pct=1.0, r_pct=50.0, lost_bad_pct=90.0)),
        f"{IN_FLIGHT}; 0.3 to 10 Mbit/s", f"{IN_FLIGHT}; 100 to 400 ms one way", IN_FLIGHT,
    ),
}  # fmt: skip
"""All links by name. Six links lose packets, at random or in bursts."""
LINKS = {name: profile.link for name, profile in PROFILES.items()}
"""Links by the name that `--link` takes."""
