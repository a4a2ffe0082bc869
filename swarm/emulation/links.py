"""Named link conditions, and what an emulated network must be able to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Link:
    """What lies between a peer and the middle of the network, each way.

    Attributes:
        up_mbit, down_mbit: rates in Mbit/s from and to the peer.
        rtt_ms: round-trip time that this end adds; two peers have the mean of both.
        loss_pct: packets lost each way, percent.
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
"""By the name that `--link` takes."""


class Links(Protocol):
    """An emulated network whose links can be cut; peers are named by their number."""

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
