"""Link conditions, and what an emulated network can do; how packets pass is computed here.

The link of a peer lies between it and the middle of the network, as an access line does: what two
peers see of each other is the line up of one, the line down of the other, and the delay of both.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

MOST_QUEUED_S = 0.25
"""A line queues so much before it drops packets: what home routers do."""


@dataclass(frozen=True)
class Bursts:
    """Losses in bursts: the chain of Gilbert and Elliott, as netem's `loss gemodel p r 1-h 1-k`.

    Before each packet the line may change its state, and a packet is lost by the state before that.

    Attributes:
        p_pct: good lines that turn bad, percent of packets.
        r_pct: bad lines that turn good; bad stretches are 100 / r_pct packets long in the mean.
        lost_bad_pct: of the packets on a bad line, netem's 1-h.
        lost_good_pct: of those on a good one, netem's 1-k.
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
        bursts: packets lost in bursts, in its place.
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
    """Delay between two peers: half of what a round trip takes, to which each has a half."""
    return (source.rtt_ms + target.rtt_ms) / 4000


class Links(Protocol):
    """An emulated network whose links can be cut; peers are named by their number."""

    def place(self, peer: int) -> tuple[list[str], list[str]]:
        """What a peer's command begins with, and its arguments that say where it listens."""

    def cut(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Loses everything from the first to the second of each pair."""

    def mend(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Ends cuts of these pairs; a partition stays."""

    def partition(self, groups: Sequence[Sequence[int]]) -> None:
        """Loses everything between different groups; whoever is in none reaches nobody."""

    def heal(self) -> None:
        """Ends all cuts and partitions."""

    def close(self) -> None:
        """Takes the network down."""


@dataclass
class Cuts:
    """Who does not reach whom."""

    pairs: set[tuple[int, int]] = field(default_factory=set)
    group_of: dict[int, int] | None = None
    """None without a partition."""

    def loses(self, source: int, target: int) -> bool:
        """Whether nothing gets from one peer to another."""
        if (source, target) in self.pairs:
            return True
        if self.group_of is None:
            return False
        group = self.group_of.get(source)
        return group is None or group != self.group_of.get(target)

    def partition(self, groups: Sequence[Sequence[int]]) -> None:
        """From now on only peers of one group reach each other."""
        self.group_of = {peer: i for i, group in enumerate(groups) for peer in group}

    def heal(self) -> None:
        """Everybody reaches everybody."""
        self.pairs, self.group_of = set(), None


@dataclass
class Line:
    """One direction of a link: bytes leave one after another at its rate."""

    mbit: float
    free_at_s: float = 0.0

    def leaves_at(self, now_s: float, num_bytes: int) -> float | None:
        """When the last byte of a packet is through; None if the queue is full."""
        begin_s = max(now_s, self.free_at_s)
        if begin_s - now_s > MOST_QUEUED_S:
            return None
        self.free_at_s = begin_s + num_bytes * 8 / (self.mbit * 1e6)
        return self.free_at_s


class Losses:
    """Which packets of one peer are lost on their way."""

    def __init__(self, link: Link, draw: random.Random) -> None:
        """The line is good; `draw` gives all randomness."""
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


class Shaper:
    """When packets between peers arrive, if they do; knows nothing of sockets or clocks."""

    def __init__(self, link: Link | Sequence[Link], seed: int = 0) -> None:
        """Nothing is on its way yet; peers have several links in turn, `seed` is of losses."""
        self._links = (link,) if isinstance(link, Link) else tuple(link)
        self.cuts = Cuts()
        self._draw = random.Random(seed)
        self._losses: dict[int, Losses] = {}
        self._up: dict[int, Line] = {}
        self._down: dict[int, Line] = {}

    def link_of(self, peer: int) -> Link:
        """The link of a peer."""
        return self._links[peer % len(self._links)]

    def arrives_at(
        self, now_s: float, source: int, target: int, num_bytes: int
    ) -> tuple[float | None, str]:
        """When a packet arrives, None if it is lost; and why.

        Args:
            now_s: it is sent at this moment; calls come in the order of their moments.
            source: the peer that sends it.
            target: the peer that it is for.
            num_bytes: of the packet.
        """
        if self.cuts.loses(source, target):
            return None, "cut"
        losses = self._losses.get(source)
        if losses is None:
            losses = self._losses[source] = Losses(self.link_of(source), self._draw)
        if losses.next_is_lost():
            return None, "lost"
        up = self._up.setdefault(source, Line(self.link_of(source).up_mbit))
        down = self._down.setdefault(target, Line(self.link_of(target).down_mbit))
        passed_s = up.leaves_at(now_s, num_bytes)
        if passed_s is None:
            return None, "queue up is full"
        at_s = down.leaves_at(passed_s, num_bytes)
        if at_s is None:
            return None, "queue down is full"
        return at_s + one_way_s(self.link_of(source), self.link_of(target)), "delivered"
