"""Runs many schedules on several processes, and collects their outcomes."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context
from multiprocessing.synchronize import Event

from swarm.emulation.simulator.fault_schedule import Outcome, run_schedule
from swarm.emulation.simulator.mutants.extended_mutants import ALL_MUTANTS

CHUNK = 10
"""Schedules that a process takes at a time."""
GARBAGE = 100_000
"""Objects between garbage collections. A collection every 700 objects would take 1/5 of the
time."""


@dataclass
class Tally:
    """Totals of one fault class."""

    runs: int = 0
    rounds: int = 0
    merges: int = 0
    reforms: int = 0
    slowest_recovery_s: float = 0.0
    violations: list[Outcome] = field(default_factory=list)

    def add(self, outcome: Outcome) -> None:
        """Adds the outcome of a schedule."""
        self.runs += 1
        self.rounds += outcome.rounds
        self.merges += outcome.merges
        self.reforms += outcome.reforms
        if outcome.violation is None:
            self.slowest_recovery_s = max(self.slowest_recovery_s, outcome.recovery_s)
        else:
            self.violations.append(outcome)


@dataclass(frozen=True)
class Job:
    """One schedule to run, with the real code unless it names a mutant."""

    fault_class: str
    seed: int
    mutant: str | None = None


def jobs_of(
    classes: Sequence[str],
    schedules: int,
    first_seed: int,
    mutant: str | None = None,
) -> list[Job]:
    """A number of schedules spread evenly over the classes, in turn."""
    return [
        Job(classes[index % len(classes)], first_seed + index // len(classes), mutant)
        for index in range(schedules)
    ]


def run_job(job: Job) -> Outcome:
    """Runs one schedule, with the mutant's code and faults if the job names a mutant."""
    if job.mutant is None:
        return run_schedule(job.fault_class, job.seed)
    mutant = ALL_MUTANTS[job.mutant]
    return run_schedule(job.fault_class, job.seed, tested=mutant, mix=mutant.mix)


def run_jobs(jobs: Sequence[Job], processes: int) -> Iterator[Outcome]:
    """Yields outcomes in the order of the jobs. Once the generator is closed, no job begins."""
    if processes <= 1:
        with collecting_rarely():
            yield from map(run_job, jobs)
        return
    context = get_context("fork")
    stop = context.Event()
    pool = ProcessPoolExecutor(processes, context, _heed, (stop,))
    try:
        yield from _in_order(pool, jobs, processes)
    finally:
        stop.set()  # a pool cannot take back jobs from its processes
        pool.shutdown(cancel_futures=True)


def _in_order(pool: Executor, jobs: Sequence[Job], processes: int) -> Iterator[Outcome]:
    """Keeps every process busy without queueing everything at once."""
    chunks = iter([jobs[start : start + CHUNK] for start in range(0, len(jobs), CHUNK)])
    pending = [pool.submit(_run_chunk, chunk) for chunk in islice(chunks, 3 * processes)]
    while pending:
        yield from pending.pop(0).result()
        pending += [pool.submit(_run_chunk, chunk) for chunk in islice(chunks, 1)]


@contextmanager
def collecting_rarely() -> Iterator[None]:
    """Collects garbage every `GARBAGE` objects, since cycles live until a schedule's end."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(GARBAGE)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


_STOPS: list[Event] = []
"""The event that tells this process of a pool to begin no further job."""


def _heed(stop: Event) -> None:
    _STOPS[:] = [stop]


def _run_chunk(jobs: Sequence[Job]) -> list[Outcome]:
    with collecting_rarely():
        return [run_job(job) for job in jobs if not any(stop.is_set() for stop in _STOPS)]
