"""How fast this peer receives: what the protocol's timers are adapted from.

How long rounds take is no part of it. A time-out that is derived from rounds which a time-out has
ended feeds on itself; the word of peers about their own steps does not [C3]. Waiting is no part of
it either: for a source, a disk or a line that was cut. One outage would lengthen every time-out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf

from swarm.experts import expert_of_unit
from swarm.protocol.deadlines import ASSUMED_RATE_BYTES_PER_S, Measured
from swarm.protocol.estimates import Recent
from swarm.protocol.manifest import Unit

KEPT = 16
"""Fetches that count at most, of the last day."""
KEPT_LEAST = 3
"""Fetches that count whatever their age: rounds may take longer than a day."""
STALL_S = 3.0
"""Of a gap between arrivals no more than this is transfer time: the rest was waiting. A portion of
256 KiB takes less on any line of 0.7 Mbit/s."""


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
    _rates: Recent = field(default_factory=lambda: Recent(KEPT, KEPT_LEAST))

    def fetched(self, num_bytes: int, flowing_s: float, at_s: float) -> None:
        """A whole fetch ended; short ones say nothing about the rate of a link.

        Args:
            num_bytes: that came.
            flowing_s: seconds in which they came, see `STALL_S`.
            at_s: when it ended.
        """
        if num_bytes >= 2**20 and flowing_s > 0:
            self._rates.add(num_bytes / flowing_s, at_s)

    def measured(self, due: Mapping[Unit, int], now_s: float) -> Measured:
        """What the timers are computed from.

        Args:
            due: units that the next manifest may renew, and the bytes that move of each; all that
                a peer lacks of it is among them.
            now_s: by the clock of `fetched`.
        """
        shared = [unit for unit in due if expert_of_unit(unit) is None]
        made = {u: size for u, size in self.unit_bytes.items() if due.get(u, size) < size}
        return Measured(
            reduce_bytes=sum(due[unit] for unit in shared),
            proposal_bytes=sum(due.values()),
            model_bytes=sum(self.unit_bytes.values()),
            rate_bytes_per_s=self.rate_bytes_per_s(now_s),
            reduced_bytes=sum(made.get(unit, 0) for unit in shared),
            proposed_bytes=sum(made.values()),
        )

    def rate_bytes_per_s(self, now_s: float) -> float:
        """At which this peer receives: the lower quartile of late, or a lower cap; 0: not known."""
        rate, cap = self._rates.low(now_s) or 0.0, self.cap_bytes_per_s
        if not rate:
            cap = min(cap, self.cap_of_others_bytes_per_s)
        return cap if cap < (rate or ASSUMED_RATE_BYTES_PER_S) else rate


class Arrivals:
    """Bytes that arrive, and the time in which they do.

    Attributes:
        num_bytes: so far.
        flowing_s: seconds in which they arrived; of each gap `STALL_S` at most.
    """

    def __init__(self) -> None:
        """Nothing has arrived."""
        self.num_bytes, self.flowing_s = 0, 0.0
        self._last_s: float | None = None

    def begin(self, now_s: float) -> None:
        """Bytes are expected from now on; the time before is none of theirs."""
        self._last_s = now_s

    def arrived(self, num_bytes: int, now_s: float) -> None:
        """Counts bytes that came until now."""
        if self._last_s is not None:
            self.flowing_s += min(max(0.0, now_s - self._last_s), STALL_S)
        self.num_bytes, self._last_s = self.num_bytes + num_bytes, now_s
