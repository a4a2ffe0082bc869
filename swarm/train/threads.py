"""How many CPU threads a peer computes with: from measured steps, and when to measure again. Pure.

Threads of one peer take cores from its neighbours on the same machine, so that more of them must be
clearly worth it, and where one thread already has to share its core, a peer takes one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

GAIN = 0.9
"""More threads are taken if a step takes at most this share of the time with fewer."""
GAIN_TO_STAY = 0.95
"""Threads that a peer has already are kept for less: the choice shall not swing with noise."""
BUSY_SHARE = 0.8
"""A thread that gets less of a core than this shares it with others."""
PASSES = 5
"""Each number of threads is measured at most so often, in turn."""
LEAST_BUDGET_S = 3.0
BUDGET_OF_ROUND = 0.05
"""Measuring takes at most this share of a round's local steps, or `LEAST_BUDGET_S`."""
SLOWER = 1.5
"""Steps that take this many times as long, or as short, as at the choice are measured again."""
WINDOW = 8
"""Steps whose median is compared."""
REST_S = 180.0
"""Between two measurements."""


@dataclass(frozen=True)
class Trial:
    """One measured computation.

    Attributes:
        threads: that it ran with.
        seconds: that passed.
        cpu_s: that the calling thread had a core for.
    """

    threads: int
    seconds: float
    cpu_s: float


@dataclass(frozen=True)
class Choice:
    """A number of threads, and why."""

    threads: int
    reason: str


def candidates(cores: int) -> tuple[int, ...]:
    """The numbers of threads that are tried on so many cores: 1, 2, 4 ... and all of them."""
    powers = [2**k for k in range(cores.bit_length()) if 2**k < cores]
    return (*powers, cores)


def budget_s(steps: int, step_s: float) -> float:
    """How long measuring may take where a round has so many steps of this length."""
    return max(LEAST_BUDGET_S, BUDGET_OF_ROUND * steps * step_s)


def choose(trials: Sequence[Trial], current: int | None = None) -> Choice:
    """The number of threads to compute with.

    Args:
        trials: at least one, of whatever numbers of threads; medians count.
        current: the number that is in use since an earlier choice.
    """
    median_s = {
        threads: statistics.median(t.seconds for t in trials if t.threads == threads)
        for threads in sorted({trial.threads for trial in trials})
    }
    shown = ", ".join(f"{threads}: {s * 1e3:.1f} ms" for threads, s in median_s.items())
    if crowded := _crowded(trials):
        return Choice(1, f"{crowded}; {shown}")
    best = min(median_s)
    for threads, seconds in median_s.items():
        gain = GAIN_TO_STAY if threads == current else GAIN
        if seconds < gain * median_s[best]:
            best = threads
    return Choice(best, f"the fewest that are about as fast as any; {shown}")


def choose_unmeasured(short: Trial, otherwise: int) -> Choice:
    """The number of threads where there was only time for a short computation with one."""
    if crowded := _crowded([short]):
        return Choice(1, crowded)
    return Choice(otherwise, "a step takes too long to be measured")


def _crowded(trials: Sequence[Trial]) -> str | None:
    """Says so if one thread did not get a core for itself, in the middle."""
    shares = [trial.cpu_s / trial.seconds for trial in trials if trial.threads == 1]
    if not shares or statistics.median(shares) >= BUSY_SHARE:
        return None
    share = statistics.median(shares)
    return f"one thread gets only {share:.0%} of a core, others use the rest"


@dataclass
class StepWatch:
    """Notices when steps have become slower, or faster, than they were at the last choice.

    Attributes:
        measured_s: when the last choice was made.
    """

    measured_s: float
    _first: list[float] = field(default_factory=list)
    _last: list[float] = field(default_factory=list)

    def saw(self, seconds_per_token: float, now_s: float) -> str | None:
        """Takes a step in.

        Returns:
            Why the threads should be measured again, or None.
        """
        if len(self._first) < WINDOW:
            self._first.append(seconds_per_token)
            return None
        self._last = [*self._last[1 - WINDOW :], seconds_per_token]
        if len(self._last) < WINDOW or now_s - self.measured_s < REST_S:
            return None
        ratio = statistics.median(self._last) / statistics.median(self._first)
        if 1 / SLOWER < ratio < SLOWER:
            return None
        return f"steps take {ratio:.2f} times as long as at the last choice"
