"""Peers that fetch ahead of proposals keep all invariants [D2]."""

from __future__ import annotations

import pytest

from swarm.emulation.simulator.batch import Job, run_job


@pytest.mark.parametrize("fault_class", "ADFJRr")
def test_schedules_with_faults_break_no_invariant(fault_class: str) -> None:
    for seed in range(4):
        outcome = run_job(Job(fault_class, seed, is_ahead=True))
        where = f"scripts/simulate --fetch-ahead --replay {fault_class}:{seed}"
        assert outcome.violation is None, f"{outcome.violation}; trace: {where}"


def test_a_schedule_with_and_without_is_not_the_same() -> None:
    """Else nothing would be fetched ahead there."""
    assert run_job(Job("J", 0, is_ahead=True)) != run_job(Job("J", 0))
