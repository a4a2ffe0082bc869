"""Rounds that overlap with the next local steps, under faults.

Policies: overlapped adoption, overlap accounting, overlapped deals.
"""

from functools import partial

import pytest

from swarm.emulation.simulator.faults.extended import OVERLAPPED
from swarm.emulation.simulator.faults.hostile import ALL_CLASSES
from swarm.emulation.simulator.mutants.extended_mutants import ALL_MUTANTS
from swarm.emulation.simulator.mutants.overlap_mutants import OVERLAP_MUTANTS
from tests.emulation.simulator.schedules import require_missed, require_sound
from tests.protocol.values import test_training, test_training_ahead

CLASSES = sorted(name for name in ALL_CLASSES if name.upper() in OVERLAPPED)
SEEDS = [
    pytest.param(range(3), id="few"),
    pytest.param(range(3, 60), id="many", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
]
CAUGHT = {
    "rest_dealt_to_others": "O:0",
    "behind_forgotten": "O:1",
    "counted_twice": "O:0",
    "lost_steps_counted": "U:6",
    "two_in_flight": "O:0",
}
"""Mutant -> fault class and seed. After a change of the simulator find new ones with
`scripts/simulate --classes Ou --mutant NAME`."""
BY_DIRECTED_TEST = {
    "other_line_counted": partial(
        test_training_ahead.test_steps_count_on_another_line_only_if_it_deals_their_samples,
        is_mine=False,
    )
}
"""Few of several thousand schedules have two reforms of one manifest with different deals."""


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("fault_class", CLASSES)
def test_no_overlapped_schedule_breaks_an_invariant(fault_class: str, seeds: range) -> None:
    for seed in seeds:
        require_sound(fault_class, seed)


@pytest.mark.parametrize("name", CAUGHT)
def test_a_removed_rule_of_overlap_breaks_an_invariant(name: str) -> None:
    require_missed(ALL_MUTANTS[name], CAUGHT[name])


def test_every_mutant_of_overlap_is_caught() -> None:
    assert CAUGHT.keys() | BY_DIRECTED_TEST.keys() == OVERLAP_MUTANTS.keys()


@pytest.mark.parametrize("name", BY_DIRECTED_TEST)
def test_a_removed_rule_of_overlap_fails_its_directed_test(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    BY_DIRECTED_TEST[name]()
    monkeypatch.setattr(test_training, "Training", OVERLAP_MUTANTS[name].training)
    with pytest.raises(AssertionError):
        BY_DIRECTED_TEST[name]()
