"""The rate at which this peer receives; the protocol's timers depend on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from swarm.experts import expert_of_unit
from swarm.protocol.timing.deadlines import ASSUMED_RATE_BYTES_PER_S, Measured
from swarm.protocol.values.manifest import Unit

DAY_S = 86_400.0
"""Older measurements do not count: the rate of a link varies over a day, not between days."""
ROBUST = 3
"""With this many measurements or more, quartiles are used, so that no single one decides."""


class Dated(NamedTuple):
    """One measurement: its value and the time at which it ended, in seconds of one clock."""

    value: float
    at_s: float


class Recent:
    """The newest measurements of one figure from the last day; other threads may read them.

    Attributes:
        newest: measurements in the order of their dates, whatever their age.
    """

    def __init__(self, kept: int, least: int = 0) -> None:
        """Starts without measurements.

        Args:
            kept: the most measurements that count.
            least: number of measurements that count at any age, if there are no newer ones.
        """
        self.newest: tuple[Dated, ...] = ()
        self._kept, self._least = kept, least

    def add(self, value: float, at_s: float) -> None:
        """Adds a measurement; dates never go back."""
        self.newest = (*self.newest, Dated(value, at_s))[-self._kept :]

    def of_late(self, now_s: float, since_s: float = -inf) -> list[float]:
        """The values since `since_s` that count now, the lowest first."""
        newest, since_s = self.newest, max(since_s, now_s - DAY_S)
        new = [each for each in newest if each.at_s >= since_s]
        few = newest[-self._least :] if self._least else ()
        return sorted(each.value for each in (few if len(few) > len(new) else new))

    def low(self, now_s: float) -> float | None:
        """The lower quartile; the lowest of fewer than `ROBUST`; None if there are none."""
        values = self.of_late(now_s)
        return values[_quarter(len(values))] if values else None

    def high(self, now_s: float, since_s: float = -inf) -> float | None:
        """The upper quartile since `since_s`; the highest of fewer than `ROBUST`; None if none."""
        values = self.of_late(now_s, since_s)
        return values[-1 - _quarter(len(values))] if values else None


def _quarter(count: int) -> int:
    """How many of `count` sorted values are skipped at one end."""
    return max(count // 4, 1 if count >= ROBUST else 0)


KEPT = 16
"""Most fetches that count, of the last day."""
KEPT_LEAST = 3
"""How many fetches count at any age, since rounds may take longer than a day."""
STALL_S = 3.0
"""At most this much of a gap between arrivals counts as transfer time; the rest counts as waiting.
On a link of 0.7 Mbit/s a portion of 256 KiB takes this long."""


@dataclass
class Pace:
    """Sizes, and the receiving rate of recent fetches.

    Attributes:
        unit_bytes: size of every unit.
        cap_bytes_per_s: cap on what this peer receives, as a person has set it.
        cap_of_others_bytes_per_s: assumed cap on the sending rate of others, until bytes were
            received: this peer's own cap, because peers do not know each other's caps.
    """

    unit_bytes: Mapping[Unit, int]
    cap_bytes_per_s: float = inf
    cap_of_others_bytes_per_s: float = inf
    _rates: Recent = field(default_factory=lambda: Recent(KEPT, KEPT_LEAST))

    def fetched(self, num_bytes: int, flowing_s: float, at_s: float) -> None:
        """Counts a fetch that ended; short fetches do not show a link's rate, and are ignored.

        Args:
            num_bytes: bytes that came.
            flowing_s: seconds in which the bytes came, see `STALL_S`.
            at_s: time when the fetch ended.
        """
        if num_bytes >= 2**20 and flowing_s > 0:
            self._rates.add(num_bytes / flowing_s, at_s)

    def measured(self, due: Mapping[Unit, int], now_s: float) -> Measured:
        """The figures from which the timers are computed.

        Args:
            due: units that the next manifest may renew, with the bytes to transfer for each. A peer
                with the present manifest has all other units.
            now_s: the time by the clock of `fetched`.
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
        """Receiving rate: the lower quartile of recent fetches, or a lower cap; 0: not known."""
        rate, cap = self._rates.low(now_s) or 0.0, self.cap_bytes_per_s
        if not rate:
            cap = min(cap, self.cap_of_others_bytes_per_s)
        return cap if cap < (rate or ASSUMED_RATE_BYTES_PER_S) else rate


class Arrivals:
    """Bytes that arrive, and the time in which they arrive.

    Attributes:
        num_bytes: bytes so far.
        flowing_s: seconds in which they arrived; at most `STALL_S` of each gap.
    """

    def __init__(self) -> None:
        """Starts without arrivals."""
        self.num_bytes, self.flowing_s = 0, 0.0
        self._last_s: float | None = None

    def begin(self, now_s: float) -> None:
        """Expects bytes from now on; the time before does not count."""
        self._last_s = now_s

    def arrived(self, num_bytes: int, now_s: float) -> None:
        """Counts bytes that came until now."""
        if self._last_s is not None:
            self.flowing_s += min(max(0.0, now_s - self._last_s), STALL_S)
        self.num_bytes, self._last_s = self.num_bytes + num_bytes, now_s
