"""Rounds that exchange slices of the units, under the faults of all classes.

Policies: slice schedule, due units.
"""

import pytest

from swarm.emulation.simulator.faults.extended import EXTENDED
from swarm.emulation.simulator.faults.faults import CLASSES
from swarm.emulation.simulator.faults.hostile import SLICED
from swarm.emulation.simulator.mutants.extended_mutants import ALL_MUTANTS
from swarm.emulation.simulator.mutants.overlap_mutants import SLICE_MUTANTS
from tests.emulation.simulator.schedules import require_missed, require_sound

SEEDS = [
    pytest.param(range(1), id="one"),
    pytest.param(range(1, 40), id="many", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
]
CAUGHT = {
    "overdue_forgotten": "a:15",
    "units_not_due": "a:0",
    "stagger_by_peer": "a:0",
    "renewed_parts_kept": "b:0",
    "parts_dropped": "b:0",
    "offer_forgotten": "o:1",
    "steps_taken_for_known": "u:4",
}
"""Mutant -> fault class and seed. After a change of the simulator find new ones with
`scripts/simulate --classes abou --mutant NAME`."""


@pytest.mark.parametrize("seeds", SEEDS)
@pytest.mark.parametrize("fault_class", sorted({**CLASSES, **EXTENDED}))
def test_no_schedule_with_slices_breaks_an_invariant(fault_class: str, seeds: range) -> None:
    for seed in seeds:
        require_sound(fault_class.lower(), seed)


def test_each_class_is_there_with_slices_too() -> None:
    assert {*CLASSES, *EXTENDED} <= {name.upper() for name in SLICED}
    assert all(mix.is_sliced for mix in SLICED.values())


@pytest.mark.parametrize("name", CAUGHT)
def test_a_removed_rule_of_slices_breaks_an_invariant(name: str) -> None:
    require_missed(ALL_MUTANTS[name], CAUGHT[name])


def test_every_mutant_of_slices_is_caught() -> None:
    assert CAUGHT.keys() == SLICE_MUTANTS.keys()
