"""CPU threads of this peer: how many torch uses, and a pool that works on units in parallel."""

from __future__ import annotations

import logging
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from swarm.background import SYSTEM, Joinable
from swarm.config import ComputeSection, RunConfig
from swarm.data.masks import Masks
from swarm.deltas.unit_deltas import Parts
from swarm.errors import OutOfMemory
from swarm.experts import Slice
from swarm.model.routing import RoutingControls
from swarm.train.engine.engine import StepStats
from swarm.train.fallback_engine import Fits, SteppingEngine
from swarm.train.planning.ladder import EnginePlan

logger = logging.getLogger(__name__)


GAIN = 0.9
"""More threads are used if a step then takes at most this share of the time with fewer."""
GAIN_TO_STAY = 0.95
"""In place of `GAIN` for the number in use, so that noise does not change the choice."""
BUSY_SHARE = 0.8
"""If a thread gets less of a core than this, other programs use the core too."""
PASSES = 5
"""Each number of threads is measured at most this often; the numbers take turns."""
LEAST_BUDGET_S = 3.0
BUDGET_OF_ROUND = 0.05
"""Measuring takes at most this share of a round's local steps, or `LEAST_BUDGET_S`."""
SLOWER = 1.5
"""The threads are measured again once steps take this many times as long, or as short, as at the
last choice."""
WINDOW = 8
"""Number of steps of which the median is compared."""
REST_S = 180.0
"""Least time between two measurements."""


@dataclass(frozen=True)
class Trial:
    """One measured computation.

    Attributes:
        threads: number that computed.
        seconds: wall time.
        cpu_s: CPU time of the calling thread.
    """

    threads: int
    seconds: float
    cpu_s: float


@dataclass(frozen=True)
class Choice:
    """A number of threads, and the reason."""

    threads: int
    reason: str


def candidates(cores: int) -> tuple[int, ...]:
    """The numbers of threads to try on this many cores: 1, 2, 4 ... and all of them."""
    powers = [2**k for k in range(cores.bit_length()) if 2**k < cores]
    return (*powers, cores)


def budget_s(steps: int, step_s: float) -> float:
    """Time limit of measuring, for a round with this many steps of this length."""
    return max(LEAST_BUDGET_S, BUDGET_OF_ROUND * steps * step_s)


def choose(trials: Sequence[Trial], current: int | None = None) -> Choice:
    """The number of threads to compute with.

    Args:
        trials: at least one, with any numbers of threads; the median of each number counts.
        current: the number in use since an earlier choice.
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
    """The number of threads if there was only time for a short computation with one thread."""
    if crowded := _crowded([short]):
        return Choice(1, crowded)
    return Choice(otherwise, "a step takes too long to be measured")


def _crowded(trials: Sequence[Trial]) -> str | None:
    """A sentence if, in the median trial, one thread shared its core with other programs."""
    shares = [trial.cpu_s / trial.seconds for trial in trials if trial.threads == 1]
    if not shares or statistics.median(shares) >= BUSY_SHARE:
        return None
    share = statistics.median(shares)
    return f"one thread gets only {share:.0%} of a core, others use the rest"


@dataclass
class StepWatch:
    """Notices when steps have become slower or faster than at the last choice.

    Attributes:
        measured_s: when the last choice was made.
    """

    measured_s: float
    _first: list[float] = field(default_factory=list)
    _last: list[float] = field(default_factory=list)

    def saw(self, seconds_per_token: float, now_s: float) -> str | None:
        """Records a step.

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


SHORT_TOKENS = 64
"""Length of the piece of a sequence that is computed if a micro-batch takes too long."""
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota: Path = _QUOTA) -> int:
    """Cores that this process may use: its affinity, or the container's quota if that is less."""
    cores = len(os.sched_getaffinity(0))
    try:
        limit, _, period = quota.read_text().partition(" ")
    except OSError:
        return cores
    return min(cores, max(1, math.ceil(int(limit) / int(period)))) if limit.isdigit() else cores


def start_threads(compute: ComputeSection) -> None:
    """Sets the threads of the calling thread: the configured number, or all usable cores.

    torch starts with `OMP_NUM_THREADS` of the environment, which limits the number of cores used.
    """
    torch.set_num_threads(compute.threads or min(torch.get_num_threads(), usable_cores()))


def is_exact(run: RunConfig) -> bool:
    """Whether a run computes and sends only fp32 values, and so is SPES to the bit with one thread.

    More threads add sums in another order. Peers still agree on the computed values.
    """
    types = {run.train.compute, run.train.frozen, run.wire.shared, run.wire.experts}
    return types == {"fp32"} and {run.wire.shared_coding, run.wire.experts_coding} == {"none"}


class ThreadedEngine(SteppingEngine):
    """A stepping engine that chooses its number of threads, again whenever step times change.

    For use by one thread. Measurements change no value of the engine; see `Engine.rehearse`.
    """

    def __init__(
        self,
        run: RunConfig,
        plan: EnginePlan,
        folder: Path | None = None,
        fits: Fits = lambda *_: True,
        *,
        cores: int,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """Makes the engine of a plan; at the first step it measures with 1 to `cores` threads."""
        super().__init__(run, plan.options, plan.below, folder, fits)
        self._clock, self._cpu_clock = clock, cpu_clock
        self._numbers = candidates(cores)
        self._steps = run.round.local_steps
        self._micro_rows = run.train.micro_batch_sequences
        self._watch: StepWatch | None = None
        self._why: str | None = "not measured yet"

    def step(
        self,
        tokens_BT1: Tensor,
        *,
        lr: float,
        controls: RoutingControls | None = None,
        masks: Masks | None = None,
    ) -> StepStats:
        """See `Engine`."""
        if self._why is not None:
            self._choose(tokens_BT1, self._why)
        began_s = self._clock()
        stats = super().step(tokens_BT1, lr=lr, controls=controls, masks=masks)
        assert self._watch is not None
        now_s = self._clock()
        self._why = self._watch.saw((now_s - began_s) / stats.tokens, now_s)
        return stats

    def _choose(self, tokens_BT1: Tensor, why: str) -> None:
        current = torch.get_num_threads() if self._watch is not None else None
        short, trials = self._trials(tokens_BT1)
        if trials:
            choice = choose(trials, current)
        else:
            choice = choose_unmeasured(short, current or self._numbers[-1])
        torch.set_num_threads(choice.threads)
        logger.info("threads: %d (%s; %s)", choice.threads, choice.reason, why)
        self._watch = StepWatch(self._clock())

    def _trials(self, tokens_BT1: Tensor) -> tuple[Trial, list[Trial]]:
        """Computes a short piece, then with each number of threads as time allows."""
        short_BT1 = tokens_BT1[:1, : SHORT_TOKENS + 1]
        micro_BT1 = tokens_BT1[: self._micro_rows]
        began_s = self._clock()
        self._trial(short_BT1, self._numbers[-1])  # allocates memory
        short = self._trial(short_BT1, 1)
        per_token_s = short.seconds / short_BT1[:, 1:].numel()
        left_s = budget_s(self._steps, per_token_s * tokens_BT1[:, 1:].numel())
        left_s -= self._clock() - began_s
        piece_BT1, piece_s = micro_BT1, per_token_s * micro_BT1[:, 1:].numel()
        if left_s < 2 * piece_s * len(self._numbers):
            piece_BT1, piece_s = short_BT1, short.seconds
        trials: list[Trial] = []
        for _ in range(PASSES):
            if left_s < piece_s * len(self._numbers):
                break
            passed_s = self._clock()
            trials += [self._trial(piece_BT1, threads) for threads in self._numbers]
            left_s -= self._clock() - passed_s
        return short, trials

    def _trial(self, tokens_BT1: Tensor, threads: int) -> Trial:
        torch.set_num_threads(threads)
        began_s, cpu_began_s = self._clock(), self._cpu_clock()
        self.rehearse(tokens_BT1)
        return Trial(threads, self._clock() - began_s, self._cpu_clock() - cpu_began_s)


WORTH_ELEMENTS = 2**22
"""Work on fewer elements takes less time than the start of threads."""

Item = TypeVar("Item")
Result = TypeVar("Result")


class OneAtATime:
    """Lets several threads use the parts of an engine that is made for one thread."""

    def __init__(self, engine: Parts) -> None:
        self._engine, self._lock = engine, threading.Lock()

    def read_part(self, part: Slice) -> Tensor:
        """See `Engine`."""
        with self._lock:
            return self._engine.read_part(part)

    def write_part(self, part: Slice, values: Tensor) -> None:
        """See `Engine`."""
        with self._lock:
            self._engine.write_part(part, values)


class UnitThreads:
    """Threads, the caller's included, that each compute with one thread of torch."""

    def __init__(self, number: int) -> None:
        self.number = number

    def each(
        self, work: Callable[[Item], Result], items: Sequence[Item], elements: int
    ) -> list[Result]:
        """The results of `work` for each item, in their order.

        After an error no further item is begun, and the error is raised once all threads have
        ended. If a thread cannot be started, the others do its work.

        Args:
            work: may be called by several threads at once, in any order.
            items: such as units.
            elements: elements of all items together; with few elements the caller works alone.
        """
        if min(self.number, len(items)) == 1 or elements < WORTH_ELEMENTS:
            return [work(item) for item in items]
        found: dict[int, Result] = {}
        errors: list[BaseException] = []
        todo, lock = iter(range(len(items))), threading.Lock()

        def run() -> None:
            torch.set_num_threads(1)
            while not errors:
                with lock:
                    index = next(todo, None)
                if index is None:
                    return
                try:
                    found[index] = work(items[index])
                except BaseException as error:  # noqa: BLE001 - the caller raises it
                    errors.append(error)

        usual = torch.get_num_threads()
        threads = _started(run, min(self.number, len(items)) - 1)
        run()
        for thread in threads:
            thread.join()
        torch.set_num_threads(usual)  # for this thread, and new threads
        if errors:
            raise errors[0]
        return [found[index] for index in range(len(items))]


ONE_THREAD = UnitThreads(1)


def _started(run: Callable[[], None], number: int) -> list[Joinable]:
    started = []
    with suppress(OutOfMemory):  # the others do its work
        for _ in range(number):
            started.append(SYSTEM.start(run, "swarm-units"))
    return started
