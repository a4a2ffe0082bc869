"""Estimates of a figure that changes over weeks: a quantile of its newest dated measurements.

A minimum, a maximum or a mean over all that was ever measured keeps one outlier, or the line of
last month, for as long as the process lives. Dates are arguments: nothing here reads a clock.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

DAY_S = 86_400.0
"""Older measurements do not count: a line differs between the hours of a day, not the days."""
ROBUST = 3
"""From so many measurements on a single one does not decide alone."""


class Dated(NamedTuple):
    """One measurement: its value and the time at which it ended, in seconds of one clock."""

    value: float
    at_s: float


class Recent:
    """The newest measurements of one figure, of the last day; may be read from other threads.

    Attributes:
        newest: in the order of their dates, whatever their age.
    """

    def __init__(self, kept: int, least: int = 0) -> None:
        """Has no measurement.

        Args:
            kept: at most so many count.
            least: so many count whatever their age, where nothing newer was measured.
        """
        self.newest: tuple[Dated, ...] = ()
        self._kept, self._least = kept, least

    def add(self, value: float, at_s: float) -> None:
        """Adds a measurement; dates never go back."""
        self.newest = (*self.newest, Dated(value, at_s))[-self._kept :]

    def of_late(self, now_s: float, since_s: float = -inf) -> list[float]:
        """The values that count now, the lowest first; only those since a moment."""
        newest, since_s = self.newest, max(since_s, now_s - DAY_S)
        new = [each for each in newest if each.at_s >= since_s]
        few = newest[-self._least :] if self._least else ()
        return sorted(each.value for each in (few if len(few) > len(new) else new))

    def low(self, now_s: float) -> float | None:
        """The lower quartile; the lowest of fewer than `ROBUST`; None of none."""
        values = self.of_late(now_s)
        return values[_quarter(len(values))] if values else None

    def high(self, now_s: float, since_s: float = -inf) -> float | None:
        """The upper quartile since a moment; the highest of fewer than `ROBUST`; None of none."""
        values = self.of_late(now_s, since_s)
        return values[-1 - _quarter(len(values))] if values else None


def _quarter(count: int) -> int:
    """How many of so many sorted values are passed over at one end."""
    return max(count // 4, 1 if count >= ROBUST else 0)
