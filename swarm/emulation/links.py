"""Named link conditions, and what an emulated network can do; how packets pass is computed here.

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
class Link:
    """The access line of a peer.

    Attributes:
        up_mbit, down_mbit: rates in Mbit/s from and to the peer.
        rtt_ms: round-trip time between two peers that both have this link.
        loss_pct: packets lost each way between two such peers, percent.
    """

    up_mbit: float
    down_mbit: float
    rtt_ms: float
    loss_pct: float = 0.0


LINKS = {
    "lan": Link(1000, 1000, 1),
    "datacentre": Link(1000, 1000, 10),
    "home-100": Link(40, 100, 30),
    "home-20": Link(20, 20, 50),
    "lossy": Link(20, 20, 100, loss_pct=1.0),
}
"""By the name that `--link` takes: round figures, not measurements of any provider."""


class Links(Protocol):
    """An emulated network whose links can be cut; peers are named by their number."""

    def place(self, peer: int) -> tuple[list[str], list[str]]:
        """What a peer's command begins with, and its arguments that say where it listens."""
        ...

    def cut(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Loses everything from the first to the second of each pair."""
        ...

    def mend(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Ends cuts of these pairs; a partition stays."""
        ...

    def partition(self, groups: Sequence[Sequence[int]]) -> None:
        """Loses everything between different groups; whoever is in none reaches nobody."""
        ...

    def heal(self) -> None:
        """Ends all cuts and partitions."""
        ...

    def close(self) -> None:
        """Takes the network down."""
        ...


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


class Shaper:
    """When packets between peers arrive, if they do; knows nothing of sockets or clocks."""

    def __init__(self, link: Link, seed: int = 0) -> None:
        self.link, self.cuts = link, Cuts()
        self._draw = random.Random(seed)
        self._up: dict[int, Line] = {}
        self._down: dict[int, Line] = {}

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
        if self.link.loss_pct and self._draw.random() * 100 < self.link.loss_pct:
            return None, "lost"
        up = self._up.setdefault(source, Line(self.link.up_mbit))
        down = self._down.setdefault(target, Line(self.link.down_mbit))
        passed_s = up.leaves_at(now_s, num_bytes)
        if passed_s is None:
            return None, "queue up is full"
        at_s = down.leaves_at(passed_s, num_bytes)
        if at_s is None:
            return None, "queue down is full"
        return at_s + self.link.rtt_ms / 2000, "delivered"
