"""Progress of long work: a log line every 15 s for people, and every change for a progress bar.

Each change is a record of the logger `swarm.progress` that carries a `Progress`. One record in 15 s
has the level INFO, the others have DEBUG. `peers/command_line/command.py` draws the records as a
bar.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

logger = logging.getLogger(__name__)

EVERY_S = 15.0
Item = TypeVar("Item")


@dataclass(frozen=True)
class Progress:
    """How far one piece of work is.

    Attributes:
        what: the work, such as "round 3/8".
        unit: what is counted, in the singular, such as "step".
        done: number of units that are done.
        total: number of all units.
        left_s: expected seconds until the end. None if not known.
        details: text with further figures.
    """

    what: str
    unit: str
    done: int
    total: int
    left_s: float | None = None
    details: str = ""

    def __str__(self) -> str:
        parts = [f"{self.what}: {self.unit} {self.done} of {self.total}", self.details]
        if self.left_s is not None:
            parts.append(f"{duration(self.left_s)} left")
        return ", ".join(part for part in parts if part)


class Reporter:
    """Logs the progress of one piece of work."""

    def __init__(self, what: str, unit: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.what, self.unit = what, unit
        self._clock = clock
        self._begin_s = self._said_s = clock()

    def at(
        self, done: int, total: int, details: str = "", left_s: float | None = None
    ) -> Progress | None:
        """Records that `done` of `total` are done. Returns the progress if a line was due.

        `left_s` are seconds until the end. By default they follow from the pace so far.
        """
        now_s = self._clock()
        if left_s is None and 0 < done <= total:
            left_s = (now_s - self._begin_s) / done * (total - done)
        is_due = now_s - self._said_s >= EVERY_S
        if is_due:
            self._said_s = now_s
        progress = Progress(self.what, self.unit, done, total, left_s, details)
        level = logging.INFO if is_due else logging.DEBUG
        logger.log(level, "%s", progress, extra={"progress": progress})
        return progress if is_due else None

    def each(self, items: Iterable[Item], total: int) -> Iterator[Item]:
        """The items one by one. An item counts as done once the next item is asked for."""
        for done, item in enumerate(items, 1):
            yield item
            self.at(done, total)


def fetching(also: Callable[[int, int], None] | None = None) -> Callable[[int, int], None]:
    """A callback that reports the fetched and total bytes of a model, and also calls `also`."""
    reporter = Reporter("fetching the model", "MB")

    def say(here: int, total: int) -> None:
        if also:
            also(here, total)
        reporter.at(here // 10**6, total // 10**6)
        if here == total:
            logger.info("fetched the model, %.1f MB", total / 1e6)

    return say


def reading(name: str, total_bytes: int, documents: Iterable[bytes]) -> Iterator[bytes]:
    """The documents of a text one by one. Reports how many MB of the text were read.

    Packed files hold more text than their size, so the total may grow while they are read.
    """
    reporter, num_bytes = Reporter(f"reading {name}", "MB"), 0
    for document in documents:
        yield document
        before, num_bytes = num_bytes // 10**6, num_bytes + len(document)
        if num_bytes // 10**6 > before:
            reporter.at(num_bytes // 10**6, max(total_bytes, num_bytes) // 10**6 + 1)
    done = num_bytes // 10**6 + 1
    reporter.at(done, done)


def duration(seconds: float) -> str:
    """A time in words of one unit or two: "40 s", "12 min", "3.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
