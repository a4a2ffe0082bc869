"""How fast this peer receives: what the protocol's timers are adapted from.

How long rounds take is no part of it. A time-out that is derived from rounds which a time-out has
ended feeds on itself; the word of peers about their own steps does not [C3].
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from swarm.experts import expert_of_unit
from swarm.protocol.deadlines import ASSUMED_RATE_BYTES_PER_S, Measured
from swarm.protocol.manifest import Unit

KEPT = 16
"""Fetches that count as recent."""


@dataclass
class Pace:
    """Sizes, and the receiving rate of recent fetches.

    Attributes:
        unit_bytes: size of every unit.
        cap_bytes_per_s: of what this peer receives, as a person has set it.
        cap_of_others_bytes_per_s: what others are taken to send at most, until something was
            received: as much as this peer, since nobody tells them its cap or it theirs.
    """

    unit_bytes: Mapping[Unit, int]
    cap_bytes_per_s: float = inf
    cap_of_others_bytes_per_s: float = inf
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    def fetched(self, num_bytes: int, seconds: float) -> None:
        """A whole fetch ended; short ones say nothing about the rate of a link."""
        if num_bytes >= 2**20 and seconds > 0:
            self._rates.append(num_bytes / seconds)

    def measured(self, due: Mapping[Unit, int]) -> Measured:
        """What the timers are computed from; the slowest recent rate counts, or a lower cap.

        Args:
            due: units that the next manifest may renew, and the bytes that move of each; all that
                a peer lacks of it is among them.
        """
        shared = [unit for unit in due if expert_of_unit(unit) is None]
        made = {u: size for u, size in self.unit_bytes.items() if due.get(u, size) < size}
        return Measured(
            reduce_bytes=sum(due[unit] for unit in shared),
            proposal_bytes=sum(due.values()),
            model_bytes=sum(self.unit_bytes.values()),
            rate_bytes_per_s=self.rate_bytes_per_s,
            reduced_bytes=sum(made.get(unit, 0) for unit in shared),
            proposed_bytes=sum(made.values()),
        )

    @property
    def rate_bytes_per_s(self) -> float:
        """At which this peer receives: the slowest of late, or a lower cap; 0: none is known."""
        rate, cap = min(self._rates, default=0.0), self.cap_bytes_per_s
        if not rate:
            cap = min(cap, self.cap_of_others_bytes_per_s)
        return cap if cap < (rate or ASSUMED_RATE_BYTES_PER_S) else rate
