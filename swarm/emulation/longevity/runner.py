"""Runs scenarios of a month, with or without a mutant, and says what broke."""

from __future__ import annotations

import time
import tracemalloc
from contextlib import nullcontext
from dataclasses import dataclass

from swarm.emulation.longevity.audit import Audit
from swarm.emulation.longevity.mutants import MUTANTS
from swarm.emulation.longevity.scale import Scale
from swarm.emulation.longevity.scenarios import SCENARIOS
from swarm.emulation.longevity.world import world


@dataclass(frozen=True)
class Outcome:
    """What came of one scenario.

    Attributes:
        scenario: its name.
        problems: what was not as it has to be; empty if all was.
        days: of virtual time that passed.
        seconds: that it took.
        sizes: the last sample.
        warnings: how often what was logged, of warnings and errors.
    """

    scenario: str
    problems: list[str]
    days: float
    seconds: float
    sizes: dict[str, float]
    warnings: dict[str, int]


@dataclass(frozen=True)
class Job:
    """A scenario to run; see `run_scenario`, and `mutants` for names of faults."""

    scenario: str
    scale: Scale
    seed: int = 0
    memory: bool = False
    mutant: str | None = None


def run_job(job: Job) -> Outcome:
    """Runs it, with its fault if there is one."""
    with MUTANTS[job.mutant].planted() if job.mutant else nullcontext():
        return run_scenario(job.scenario, job.scale, job.seed, memory=job.memory)


def run_scenario(name: str, scale: Scale, seed: int = 0, *, memory: bool = False) -> Outcome:
    """One scenario; `memory` traces allocations, which takes twice the time."""
    began_s, found, failure = time.monotonic(), list[Audit](), ""
    with world(seed) as month:

        def main() -> None:
            found.append(SCENARIOS[name](month, scale))

        if memory:
            tracemalloc.start()
        try:
            month.run(main)
        except Exception as error:  # noqa: BLE001
            failure = f"the scenario ended with {error!r}"
        finally:
            tracemalloc.stop()
        problems = [failure] if failure else found[0].problems()
        warnings = {
            text: count for (level, text), count in month.said.counts.most_common() if level >= 30
        }
        sizes = found[0].samples[-1][1] if found and found[0].samples else {}
        return Outcome(
            name, problems, month.now_s / 86_400, time.monotonic() - began_s, sizes, warnings
        )
