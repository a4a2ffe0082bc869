"""Checks that a month changes nothing: sizes, files, timers, threads and rates stay as they were.

Sizes are sampled through the month, and the last quarter is compared with the second. A bounded
size has reached its bound in the second quarter. A size that grows with time about doubles between
these quarters.
"""

from __future__ import annotations

import gc
import logging
import sys
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import count, pairwise
from math import inf
from pathlib import Path
from typing import Any

from swarm.emulation.longevity.month import DAY_S, World

GROWTH = 1.25
"""Largest ratio of a bounded size in the last quarter to its size in the second quarter."""
SLACK = 24
"""Entries by which any container may grow, because the work under way differs."""
SLACK_BYTES = 256 * 1024
"""Bytes by which memory may always grow."""
SLACK_BLOCKS = 20_000
"""Allocated blocks of Python by which the process may always grow."""
SLACK_FILE_BYTES = 16 * 1024
"""Bytes by which files of one kind may always grow."""
SAMPLES = 48
FAILED = "%s failed; it begins again in %g s"
"""The text that `swarm.background` logs when supervised work fails."""
MAX_DEPTH = 14


@dataclass(frozen=True)
class Allowed:
    """Growth that is intended.

    Attributes:
        pattern: part of the name of a size.
        per_day: largest growth in a day.
        why: the reason why the growth is intended.
        most: the largest final size. inf for growth without end.
    """

    pattern: str
    per_day: float
    why: str
    most: float = inf


@dataclass
class Rate:
    """An event that has to happen regularly."""

    name: str
    count: Callable[[], float]
    every_s: float
    """The longest mean time from one event to the next, without outages."""
    seen: list[tuple[float, float]] = field(default_factory=list)


class Broken(Exception):
    """The month has shown faults. The text names all of them."""


@dataclass
class Audit:
    """Samples a world and judges it.

    Attributes:
        roots: long-lived objects by name. All objects that they reach through our classes are
            measured.
        folders: folders whose files are measured, by name.
        allowed: growth that is intended.
        quiet: intervals (from, to) in which rates are not checked, such as outages.
    """

    world: World
    roots: dict[str, Any] = field(default_factory=dict)
    folders: dict[str, Path] = field(default_factory=dict)
    allowed: list[Allowed] = field(default_factory=list)
    rates: list[Rate] = field(default_factory=list)
    quiet: list[tuple[float, float]] = field(default_factory=list)
    samples: list[tuple[float, dict[str, float]]] = field(default_factory=list)
    failures: int = 0
    """Failures of supervised work that the scenario causes."""
    facts: list[str] = field(default_factory=list)
    """Faults that the scenario itself has found."""

    def rate(self, name: str, every_s: float, count: Callable[[], float]) -> None:
        """Demands that a count rises by one within `every_s`, on average between samples."""
        self.rates.append(Rate(name, count, every_s))

    def demand(self, holds: bool, what: str) -> None:
        """Notes a fault unless a condition holds."""
        if not holds and what not in self.facts:
            self.facts.append(what)

    def sample(self) -> None:
        """Measures all sizes now."""
        now_s, sizes = self.world.now_s, dict[str, float]()
        for name, size in lengths(list(self.roots.values())):
            sizes[name] = sizes.get(name, 0) + size
        for name, folder in self.folders.items():
            for kind, size in files(folder):
                sizes[f"file {name}/{kind}"] = sizes.get(f"file {name}/{kind}", 0) + size
        self.world.loop.forget_cancelled()
        sizes["timers"] = self.world.loop.num_timers
        sizes["threads"] = len(self.world.threads.living)
        sizes["open sockets"] = len(self.world.internet.open_sockets)
        sizes["helpers"] = self.world.loop.helpers
        gc.collect()
        sizes["allocated blocks"] = sys.getallocatedblocks() - 8 * sum(
            len(s) for _, s in self.samples
        )
        if tracemalloc.is_tracing():
            sizes["memory"] = tracemalloc.get_traced_memory()[0] - self._own_bytes()
        self.samples.append((now_s, sizes))
        for rate in self.rates:
            rate.seen.append((now_s, rate.count()))

    def _own_bytes(self) -> float:
        """The approximate bytes of these samples themselves."""
        return sum(100 * len(sizes) for _, sizes in self.samples)

    def problems(self) -> list[str]:
        """Texts of all faults."""
        return [
            *self.facts,
            *self._growing(),
            *self._rare(),
            *self._failing(),
            *(f"thread {name} ended with {e!r}" for name, e in self.world.threads.crashed),
            *(f"nobody saw: {failure}" for failure in dict.fromkeys(self.world.loop.failures)),
        ]

    def require_sound(self) -> None:
        """Raises Broken if there were faults."""
        if problems := self.problems():
            raise Broken("; ".join(problems))

    def _failing(self) -> Iterator[str]:
        failed = self.world.said.counts[logging.ERROR, FAILED]
        if failed > self.failures:
            yield f"supervised work failed {failed} times, {self.failures} were meant"

    def _growing(self) -> Iterator[str]:
        if len(self.samples) < 8:
            yield f"only {len(self.samples)} samples"
            return
        quarter = len(self.samples) // 4
        middle, last = self.samples[quarter : 2 * quarter], self.samples[-quarter:]
        days = (last[-1][0] - middle[-1][0]) / 86_400
        names = {name for _, sizes in self.samples for name in sizes}
        for name in sorted(names):
            before = max(sizes.get(name, 0) for _, sizes in middle)
            after = max(sizes.get(name, 0) for _, sizes in last)
            meant = [each for each in self.allowed if each.pattern in name]
            allowed = sum(each.per_day for each in meant) * days
            too_large = any(after > each.most for each in meant)
            if too_large or after > GROWTH * before + _slack(name) + allowed:
                yield f"{name} grows: {before:.0f} in the second quarter, {after:.0f} in the last"

    def _rare(self) -> Iterator[str]:
        for rate in self.rates:
            slow = [
                (begin_s, end_s, count)
                for begin_s, end_s, count in _between(rate.seen)
                if not self._is_quiet(begin_s, end_s)
                and count * rate.every_s < 0.8 * (end_s - begin_s) - rate.every_s
            ]
            if slow:
                begin_s, end_s, count = slow[0]
                yield (
                    f"{rate.name}: {count:g} times in {end_s - begin_s:.0f} s from day "
                    f"{begin_s / 86_400:.2f} on, at least every {rate.every_s:g} s was due"
                )

    def _is_quiet(self, begin_s: float, end_s: float) -> bool:
        return any(begin_s < until_s and end_s > from_s for from_s, until_s in self.quiet)


def _slack(name: str) -> float:
    if name == "allocated blocks":
        return SLACK_BLOCKS
    if name == "memory" or name.endswith("(bytes)"):
        return SLACK_BYTES
    return SLACK_FILE_BYTES if name.startswith("file ") else SLACK


def _between(seen: Sequence[tuple[float, float]]) -> list[tuple[float, float, float]]:
    return [(a[0], b[0], b[1] - a[1]) for a, b in pairwise(seen)]


def files(folder: Path) -> Iterator[tuple[str, float]]:
    """Bytes of the files in a folder, by name with each digit as #."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            name = "".join("#" if c.isdigit() else c for c in str(path.relative_to(folder)))
            yield name, path.stat().st_size


def lengths(root: object) -> Iterator[tuple[str, float]]:
    """Lengths of all containers that an object reaches through our own classes.

    A container is named after its class and attribute, so its name does not depend on the path
    that leads there.
    """
    seen: set[int] = set()
    stack: list[tuple[object, str]] = [(root, "")]
    while stack:
        value, name = stack.pop()
        if id(value) in seen or name.count("[") > MAX_DEPTH:
            continue
        if isinstance(value, bytes | bytearray | memoryview):
            yield f"{name} (bytes)", len(value)
            continue
        if not _is_walked(value):
            continue
        seen.add(id(value))
        if isinstance(value, Mapping):
            yield name, len(value)
            stack += [(each, f"{name}[]") for each in list(value.values())]
            stack += [(key, f"{name}[]") for key in list(value) if _is_ours(key)]
        elif isinstance(value, list | tuple | Set | deque):
            yield name, len(value)
            stack += [(each, f"{name}[]") for each in list(value)]
        else:
            kind = type(value).__name__
            stack += [(v, f"{kind}.{k}") for k, v in _fields(value)]


def _is_walked(value: object) -> bool:
    return isinstance(value, Mapping | list | tuple | Set | deque) or _is_ours(value)


def _is_ours(value: object) -> bool:
    module = type(value).__module__
    return module.startswith("swarm.") and not module.startswith("swarm.emulation")


def _fields(value: object) -> list[tuple[str, object]]:
    found = list(vars(value).items()) if hasattr(value, "__dict__") else []
    for kind in type(value).__mro__:
        slots = getattr(kind, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name):
                found.append((name, getattr(value, name)))
    return found


HOUR_S = 3600.0


@dataclass(frozen=True)
class Scale:
    """How long a scenario lasts.

    Attributes:
        days: days of virtual time.
        rounds: rounds of the run in this time.
    """

    days: float
    rounds: int

    @property
    def seconds(self) -> float:
        """Seconds of virtual time."""
        return self.days * DAY_S

    @property
    def round_s(self) -> float:
        """Seconds from one round to the next."""
        return self.seconds / self.rounds


def sampler(world: World, scale: Scale, audit: Audit) -> Callable[[], None]:
    """A function that takes a sample when a sample is due. Call it often."""
    due = count(1)
    next_s = [scale.seconds / SAMPLES]

    def look() -> None:
        while world.now_s >= next_s[0]:
            audit.sample()
            next_s[0] = scale.seconds / SAMPLES * (next(due) + 1)

    return look
