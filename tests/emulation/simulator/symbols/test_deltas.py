"""Units that move by deltas, in whole simulated swarms: class deltas, its rules one at a time."""

import pytest

from swarm.emulation.simulator.fault_schedule import run_schedule
from swarm.emulation.simulator.mutants.delta_mutants import DELTA_MUTANTS
from tests.emulation.simulator.schedules import as_found

CAUGHT = {
    "own_delta_stays": (0, "E2"),
    "own_delta_twice": (0, "E2"),
    "known_delta_begins_anew": (0, "E5"),
    "miss_begins_anew": (0, "E5"),
    "any_base_goes_on": (2, "E2"),
    "unknown_delta_taken": (1, "E2"),
    "tokens_carried": (4, "I16"),
    "encoded_anew": (2, "E3"),
    "reported_before_durable": (1, "E4"),
    "left_over_at_once": (1, "E2"),
    "left_over_after_jump": (372, "E5"),
    "deltas_collected": (0, "E4"),
    "votes_without_deltas": (4, "E4"),
}
"""Mutant -> seed of class deltas and the invariant that breaks. After a change of the simulator
find new ones with `scripts/simulate --classes R --mutant NAME`."""


@pytest.mark.parametrize("name", DELTA_MUTANTS)
def test_a_removed_rule_of_deltas_breaks_an_invariant(name: str) -> None:
    mutant, (seed, invariant) = DELTA_MUTANTS[name], CAUGHT[name]
    without = run_schedule("R", seed, tested=mutant, mix=mutant.mix).violation
    assert without is not None, f"nothing noticed the lack of {mutant.rule}"
    assert without.startswith(invariant)


@pytest.mark.parametrize("seed", [6, 14, 197])
def test_deltas_survive_what_befalls_their_peers(seed: int) -> None:
    """The schedules include crashes, odd arithmetic, a jump over heights, and an abandoned fork."""
    assert run_schedule("R", seed).violation is None


def test_deltas_survive_a_liar_beside_odd_arithmetic() -> None:
    """A value that a peer computes differently arrives whole here, and is proposed again."""
    assert as_found("Y", 13).violation is None


def test_a_convener_that_is_silent_about_others_keeps_late_offers() -> None:
    """The liar itself failed here: a late offer contributes nothing, but is declared."""
    assert as_found("Y", 57_000_149).violation is None


@pytest.mark.parametrize("seed", [2, 9])
def test_deltas_move_in_slices_of_a_cycle(seed: int) -> None:
    """Offers are repeated on a reform, and in some schedules only one part moves by deltas."""
    assert run_schedule("r", seed).violation is None
