"""Claims of peers about work, invitations and networks, and the rules that limit them."""

from __future__ import annotations

import pytest

from swarm.emulation.simulator.mutants.extended_mutants import CLAIMS_MUTANTS
from tests.emulation.simulator.schedules import require_missed, require_sound

CAUGHT_BY_SCHEDULE = {
    "all_tokens_weigh": "X:0",
    "all_tokens_count": "X:0",
    "own_clock": "X:0",
    "any_deal": "X:0",
    "copied_invitations": "X:0",
    "any_number_of_uses": "A:14",
    "never_expired": "A:20",
    "any_number_of_guests": "A:16",
    "any_number_of_trainees": "V:2",
    "votes_are_kept": "A:0",
}
"""Mutant -> fault class and seed. After a change of the simulator find new ones with
`scripts/simulate --classes X --mutant NAME`."""


@pytest.mark.parametrize("seed", range(4))
def test_honest_peers_agree_and_go_on_with_a_member_that_overstates_its_work(seed: int) -> None:
    require_sound("X", seed)


def test_every_mutant_has_a_schedule() -> None:
    assert CAUGHT_BY_SCHEDULE.keys() == CLAIMS_MUTANTS.keys()


@pytest.mark.parametrize("name", CAUGHT_BY_SCHEDULE)
def test_a_removed_rule_breaks_an_invariant(name: str) -> None:
    require_missed(CLAIMS_MUTANTS[name], CAUGHT_BY_SCHEDULE[name])
