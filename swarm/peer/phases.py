"""What each phase of a peer's work took: seconds, and the most memory that the process held."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from swarm.train.allocations import return_free_memory

logger = logging.getLogger(__name__)

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_FORGET_PEAK = "5"
"""What resets the peak of resident memory, see proc(5)."""
STARTING = "starting"


@dataclass(frozen=True)
class PhaseFigures:
    """One phase, or several of the same name together.

    Attributes:
        seconds: how long.
        peak_rss_bytes: resident memory of the whole process at its peak, of all threads; 0 where
            the system does not say.
    """

    seconds: float
    peak_rss_bytes: int


class PhaseMeter:
    """Follows one thread through its phases; a phase within another pauses the outer one."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        peak: Callable[[], int] | None = None,
        between: Callable[[], None] = return_free_memory,
    ) -> None:
        """Begins with the phase `STARTING`.

        Args:
            clock: monotonic seconds.
            peak: of resident memory since it was asked last, in bytes.
            between: done where one phase follows another, so that what the first has freed is not
                in the peak of the second.
        """
        self._clock, self._peak, self._between = clock, peak or take_peak_rss, between
        self._name = STARTING
        self._since_s = clock()
        self._found: dict[str, PhaseFigures] = {}

    def begin(self, name: str) -> None:
        """The phase before ends, this one begins."""
        if name != self._name:
            self._between()
        now_s, peak = self._clock(), self._peak()
        before = self._found.get(self._name, PhaseFigures(0.0, 0))
        self._found[self._name] = PhaseFigures(
            before.seconds + now_s - self._since_s, max(before.peak_rss_bytes, peak)
        )
        self._name, self._since_s = name, now_s

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """A phase in the middle of the present one."""
        outer = self._name
        self.begin(name)
        try:
            yield
        finally:
            self.begin(outer)

    def take(self) -> dict[str, dict[str, float]]:
        """All phases since the last call, the present one as far as it has come."""
        self.begin(self._name)
        found, self._found = self._found, {}
        return {name: asdict(figures) for name, figures in found.items() if figures.seconds > 0}


def take_peak_rss() -> int:
    """Bytes of resident memory that this process has held at most since the last call; 0: unknown.

    The peak is reset, so it belongs to whoever asks first: one meter a process.
    """
    try:
        line = next(each for each in _STATUS.read_text().splitlines() if each.startswith("VmHWM"))
        _CLEAR_REFS.write_text(_FORGET_PEAK)
    except (OSError, StopIteration) as error:
        logger.debug("no peak of memory: %s", error)
        return 0
    return int(line.split()[1]) * 1024
