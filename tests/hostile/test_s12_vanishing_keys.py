"""S12: keys that join, train nothing or a little, and vanish cost no quorum; rounds go on."""

import pytest

from swarm.emulation.simulator.extended_mutants import EXTENDED_MUTANTS
from swarm.emulation.simulator.schedule import run_schedule
from tests.protocol.round_pump import Pump, start_swarm
from tests.protocol.test_rounds_membership import join

KEYS = "WXYZ"


def joined_by_idle_keys() -> Pump:
    pump = start_swarm("ABC")
    pump.run_to_height(2)
    for key in KEYS:
        join(pump, key).train_s = 1e9
    tip = pump.nodes["A"].machine
    pump.run(pump.now + 30, lambda: set(KEYS) <= tip.tip.members.keys())
    assert set(KEYS) <= tip.tip.members.keys()
    return pump


def test_four_idle_keys_that_vanish_hold_three_voters_up_for_seconds() -> None:
    """Before, three of seven members waited for T_reform."""
    pump = joined_by_idle_keys()
    for key in KEYS:
        pump.kill(key)
    machine = pump.nodes["A"].machine
    for _ in range(6):
        began_s, height = pump.now, machine.tip.height
        pump.run_to_height(height + 1, "ABC", within_s=pump.timers.silence_s + 3)
        assert pump.now - began_s < pump.timers.reform_s / 4
    assert machine.tip.generation == "0" and machine.tip.members.keys() == set("ABC")


@pytest.mark.parametrize("seed", [0, 1, 3, 9])
def test_fifty_keys_leave_no_gap_of_three_rounds(seed: int) -> None:
    outcome = run_schedule("V", seed)
    assert outcome.violation is None, outcome.violation


@pytest.mark.parametrize(
    ("mutant", "seed"),
    [
        ("vote_at_once", 0),
        ("all_that_have_earned_it", 0),
        ("any_number_is_young", 1),
        ("trainees_count", 0),
    ],
)
def test_each_rule_is_needed(mutant: str, seed: int) -> None:
    assert run_schedule("V", seed, cast=EXTENDED_MUTANTS[mutant].cast).violation is not None
