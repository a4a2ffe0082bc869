"""A short month of each group of classes is sound, and its audit finds faults."""

import gc
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.emulation.longevity.audit import Allowed, Audit, Scale, lengths
from swarm.emulation.longevity.runner import MUTANTS, Job, run_job
from swarm.emulation.longevity.scenarios import SCENARIOS, SHORT
from swarm.network.wire.link_health import LinkHealth

QUICK = ("hanging_thread_joined", "deadline_begins_again", "old_exports_stay")
"""Mutants that are caught within a second or two. `exhaustive` tries all."""


SHORTER = {"transport": Scale(1.5, 420)}
"""The five days of fetches, which its mutants need, take half of the time of all short months."""


@pytest.mark.slow
@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
def test_a_short_month_is_sound(scenario: str) -> None:
    outcome = run_job(Job(scenario, SHORTER.get(scenario, SHORT[scenario])))
    assert not outcome.problems, outcome.warnings


@pytest.mark.parametrize(
    "name",
    [*QUICK, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in MUTANTS if n not in QUICK)],
)
def test_a_fault_that_is_put_back_is_shown(name: str) -> None:
    mutant = MUTANTS[name]
    outcome = run_job(Job(mutant.scenario, SHORT[mutant.scenario], mutant=name))
    assert any(mutant.shown_by in problem for problem in outcome.problems), outcome.problems


@pytest.mark.exhaustive
@pytest.mark.parametrize("scenario", sorted(SCENARIOS))
def test_a_month_of_ten_thousand_rounds_is_sound(scenario: str) -> None:
    outcome = run_job(Job(scenario, Scale(30.0, 10_000), memory=True))
    assert not outcome.problems, outcome.warnings


@pytest.fixture(autouse=True)
def garbage_of_others() -> Iterator[None]:
    """Objects of other tests are not examined with each sample."""
    gc.freeze()
    yield
    gc.unfreeze()


class Grown:
    """A world in which a container has one of the given lengths at each sample."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.threads: Any = SimpleNamespace(living=set(), crashed=[])
        self.loop: Any = SimpleNamespace(
            num_timers=0, helpers=0, failures=[], forget_cancelled=lambda: None
        )
        self.internet: Any = SimpleNamespace(open_sockets=set())
        self.said: Any = SimpleNamespace(counts=Counter())

    def audited(self, sizes: list[int], *allowed: Allowed) -> list[str]:
        lines, world = LinkHealth(), self
        audit = Audit(world, {"lines": lines}, allowed=list(allowed))  # type: ignore[arg-type]
        audit.rate("beats", 100.0, lambda: self.now_s / 100)
        for number, size in enumerate(sizes):
            self.now_s = 86_400.0 * number / len(sizes)
            lines._lines = {str(k): object() for k in range(size)}  # type: ignore[misc]
            audit.sample()
        return audit.problems()


def test_what_grows_with_time_is_seen_and_what_reaches_its_bound_is_not() -> None:
    assert not Grown().audited([min(100 * k, 400) for k in range(40)])
    (problem,) = Grown().audited([10 * k for k in range(40)])
    assert problem == "LinkHealth._lines grows: 190 in the second quarter, 390 in the last"


def test_growth_that_is_meant_is_allowed_as_far_as_it_is() -> None:
    sizes = [10 * k for k in range(40)]
    assert not Grown().audited(sizes, Allowed("LinkHealth._lines", 400, "one for each look"))
    assert Grown().audited(sizes, Allowed("LinkHealth._lines", 400, "few", most=300))


def test_what_happens_too_rarely_is_seen_but_for_quiet_moments() -> None:
    world = Grown()
    audit = Audit(world)  # type: ignore[arg-type]
    beats = [0.0]
    audit.rate("beats", 10.0, lambda: beats[0])
    for number in range(12):
        world.now_s = 1000.0 * number
        beats[0] += 0 if number == 5 else 100
        audit.sample()
    assert ["beats: 0 times" in problem for problem in audit.problems()] == [True]
    audit.quiet = [(4500.0, 4600.0)]
    assert not audit.problems()


def test_a_container_has_the_name_of_its_class_whatever_leads_to_it() -> None:
    lines = LinkHealth()
    lines._lines = {"a": object(), "b": object()}  # type: ignore[dict-item]
    found = dict(lengths([[lines], {"again": lines}]))
    assert found["LinkHealth._lines"] == 2
