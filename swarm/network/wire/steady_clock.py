"""The DHT's clock: steady, follows the wall clock's small corrections, and ignores its jumps.

Records expire by wall time, and hivemind reads the wall clock each time. After a jump of minutes, a
peer would treat all records of others as expired, or others would treat its records so. A machine's
own count of time is no substitute: it drifts by up to 100 ppm (36 s a week at 60 ppm), and peers'
clocks may differ by at most 3 s. So this clock runs slightly faster or slower until it has the
right time. That is the wall clock's time while the wall clock moves only in small steps, and
otherwise the time of the other members.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from hivemind.dht import node, protocol, routing
from hivemind.utils import timed_storage

logger = logging.getLogger(__name__)

LIMIT_S = float(timed_storage.MAX_DHT_TIME_DISCREPANCY_SECONDS)
"""Limit of the difference between the clocks of two peers."""
JUMP_S = 2.0
"""A wall clock that moved by this much between two looks has jumped; smaller steps correct
drift."""
NEAR_S = 1.0
"""Clocks that differ by less count as the same."""
SLEW = 500e-6
"""Seconds per second by which this clock moves to its goal; more than any drift."""
FAST_SLEW = 0.1
"""In place of `SLEW` after a jump of the wall clock to a time that another member has."""
HIVEMIND = (timed_storage, protocol, routing, node)
"""hivemind's modules that read the time; each has the function as `get_dht_time`."""

_lock = threading.Lock()


@dataclass(frozen=True)
class _Offset:
    """This clock minus the machine's count of time; changes evenly from one value to another."""

    begin_s: float
    value_s: float
    goal_s: float
    slew: float = SLEW

    def at(self, passed_s: float) -> float:
        """The offset after `passed_s`. It never falls so fast that the clock goes back."""
        most_s = self.slew * max(passed_s - self.begin_s, 0.0)
        return self.value_s + min(max(self.goal_s - self.value_s, -most_s), most_s)


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison with other members.

    Attributes:
        ahead_s: how far the others' clocks are ahead of this clock, as the new goal. None keeps the
            goal.
        by_wall: whether the new goal is the time of this machine's wall clock.
    """

    ahead_s: float | None
    by_wall: bool = False


def compared(told: Sequence[float], wall_ahead_s: float, *, has_jumped: bool) -> Comparison:
    """The correction that follows from the other members' times; pure.

    If any member has this clock's time, this clock does not change. Otherwise, after a jump of the
    wall clock, this clock follows the wall clock if any member has the wall clock's time. Otherwise
    it follows the others' time if they agree. In a run of two peers, each clock moves half the way,
    because otherwise the two would exchange their times.

    Args:
        told: seconds by which the clock of each member that answered is ahead of this one.
        wall_ahead_s: seconds by which this machine's wall clock is ahead of this clock.
        has_jumped: whether this clock has not followed the wall clock since a jump.
    """
    if not told or min(map(abs, told)) <= NEAR_S:
        return Comparison(None)
    if has_jumped and min(abs(ahead_s - wall_ahead_s) for ahead_s in told) <= NEAR_S:
        return Comparison(wall_ahead_s, by_wall=True)
    middle_s = median(told)
    if len(told) == 1:
        return Comparison(middle_s / 2)
    are_agreed = all(abs(ahead_s - middle_s) <= NEAR_S for ahead_s in told)
    return Comparison(middle_s if are_agreed else None)


class SteadyClock:
    """Seconds since 1970. Ignores jumps of the wall clock, but counts suspended time."""

    def __init__(
        self,
        passed: Callable[[], float] | None = None,
        wall: Callable[[], float] | None = None,
    ) -> None:
        """Starts with the wall clock's time.

        Args:
            passed: the machine's count of time, in seconds; monotonic.
            wall: seconds since 1970, which may jump.
        """
        self._passed = passed or (lambda: passed_s())
        self._wall = wall or (lambda: time.time())
        self._guard = threading.Lock()
        begin_s = self._passed()
        self._seen_s = self._wall() - begin_s
        self._jumped_s = self._drifted_s = self._said_s = 0.0
        self._begin_s = begin_s
        self._offset = _Offset(begin_s, self._seen_s, self._seen_s)

    def __call__(self) -> float:
        """The time now."""
        passed = self._passed()
        return passed + self._offset.at(passed)

    def look(self) -> float:
        """How far the wall clock is ahead of this clock; must be called every few seconds.

        Small steps of the wall clock, which correct this machine's count of time, are followed. A
        jump is logged with its size, and not followed.
        """
        with self._guard:
            begin_s, wall_s, passed = self._passed(), self._wall(), self._passed()
            if passed - begin_s > NEAR_S:  # this thread was delayed between the reads
                return self._seen_s - self._offset.at(passed)
            wall_s -= passed
            step_s, self._seen_s = wall_s - self._seen_s, wall_s
            if abs(step_s) > JUMP_S:
                self._jumped_s += step_s
                logger.warning(
                    "this machine's wall clock jumped by %+.1f s; records follow it only once "
                    "another member has its time",
                    step_s,
                )
            elif step_s:
                self._drifted_s += step_s
                self._aim(self._offset.goal_s + step_s, passed, self._offset.slew)
                self._say_drift(passed)
            return wall_s - self._offset.at(passed)

    def compare(self, told: Sequence[float]) -> Comparison:
        """Follows the times of other members; see `compared`. Logs a change of the goal.

        Args:
            told: seconds by which the clock of each that answered is ahead of this one.
        """
        with self._guard:
            passed = self._passed()
            offset_s = self._offset.at(passed)
            wall_ahead_s = self._seen_s - offset_s
            found = compared(told, wall_ahead_s, has_jumped=abs(self._jumped_s) > NEAR_S)
            if found.ahead_s is None:
                return found
            goal_s = offset_s + found.ahead_s
            is_news = abs(goal_s - self._offset.goal_s) > NEAR_S / 2
            self._jumped_s = self._seen_s - goal_s
            self._aim(goal_s, passed, FAST_SLEW if found.by_wall else SLEW)
        if not is_news:
            return found
        if found.by_wall:
            logger.warning(
                "other members have the time that this machine's wall clock jumped to: records "
                "move by %+.1f s",
                found.ahead_s,
            )
        else:
            logger.log(
                logging.WARNING if abs(median(told)) > LIMIT_S else logging.INFO,
                "the clock of records is %.1f s %s those of the other members (%d): it moves by "
                "%+.1f s; this machine's wall clock is %+.1f s from there (timedatectl set-ntp "
                "true sets it right)",
                abs(median(told)),
                "behind" if found.ahead_s > 0 else "ahead of",
                len(told),
                found.ahead_s,
                self._jumped_s,
            )
        return found

    def _aim(self, goal_s: float, passed: float, slew: float) -> None:
        value_s = self._offset.at(passed)
        slew = slew if abs(goal_s - value_s) > NEAR_S else SLEW
        self._offset = _Offset(passed, value_s, goal_s, slew)

    def _say_drift(self, passed: float) -> None:
        if abs(self._drifted_s - self._said_s) < JUMP_S:
            return
        self._said_s = self._drifted_s
        hours = (passed - self._begin_s) / 3600
        logger.info(
            "this machine's count of time drifted by %+.1f s in %.1f h (%+.0f ppm) from its wall "
            "clock, which records follow slowly",
            -self._drifted_s,
            hours,
            -self._drifted_s / (passed - self._begin_s) * 1e6,
        )


def passed_s() -> float:
    """Seconds since the machine was started, including suspended time."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_clock: SteadyClock | None = None


def dht_clock() -> SteadyClock:
    """The clock of this process, which hivemind's DHT uses from the first call on."""
    global _clock
    with _lock:
        if _clock is None:
            _clock = SteadyClock()
            for module in HIVEMIND:
                module.get_dht_time = _clock
    return _clock
