"""How fast this run is, as this peer sees it: what the protocol's timers are adapted from."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from swarm.experts import expert_of_unit
from swarm.protocol.deadlines import Measured
from swarm.protocol.events import Event, Offered, Received
from swarm.protocol.manifest import Unit
from swarm.protocol.messages import Ready

KEPT = 16
"""Rounds and offers that count as recent."""


def brings_offer(event: Event) -> bool:
    """Whether a peer, this one too, has finished its local steps in time."""
    offer = event.offer if isinstance(event, Offered) else None
    if isinstance(event, Received) and isinstance(event.message, Ready):
        offer = event.message.offer
    return offer is not None and not offer.is_late


@dataclass
class Pace:
    """Recent durations, in seconds of a monotonic clock, and the receiving rate.

    Attributes:
        unit_bytes: size of every unit.
    """

    unit_bytes: Mapping[Unit, int]
    applied_s: float | None = None
    _ready_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _round_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    def offered(self, now: float) -> None:
        """An offer, this peer's or another's, is ready."""
        if self.applied_s is not None:
            self._ready_s.append(now - self.applied_s)

    def applied(self, now: float) -> None:
        """A new tip was applied."""
        if self.applied_s is not None:
            self._round_s.append(now - self.applied_s)
        self.applied_s = now

    def fetched(self, num_bytes: int, seconds: float) -> None:
        """A whole fetch ended; short ones say nothing about the rate of a link."""
        if num_bytes >= 2**20 and seconds > 0:
            self._rates.append(num_bytes / seconds)

    def measured(self) -> Measured:
        """What the timers are computed from; the slowest recent rate counts."""
        sizes = self.unit_bytes.items()
        shared = sum(size for unit, size in sizes if expert_of_unit(unit) is None)
        total = sum(size for _, size in sizes)
        return Measured(
            reduce_bytes=shared,
            proposal_bytes=total,
            rate_bytes_per_s=min(self._rates, default=0.0),
            ready_s=tuple(self._ready_s),
            round_s=tuple(self._round_s),
        )
