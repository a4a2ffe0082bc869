"""Catches the removal of each rule of the protocol page that a model check once caught.

One recorded schedule catches most removals. For a few rare ones, a directed test of the round
machine runs a second time on the machine without the rule.
"""

from collections.abc import Callable
from functools import partial

import pytest

from swarm.emulation.simulator.mutants.mutants import MUTANTS
from tests.emulation.simulator.schedules import require_fails, require_missed
from tests.hostile import test_garbage_values
from tests.hostile.test_invented_members import alone
from tests.hostile.test_invented_members import (
    test_nobody_votes_for_members_and_owners_that_do_not_follow as nobody_votes_for,
)
from tests.protocol.messages import test_rounds_takeover

CAUGHT_BY_SCHEDULE = {
    "accept_before_fetch": "A:0",
    "accepted_not_persisted": "A:0",
    "accept_before_write": "D:2",
    "no_phase_1": "E:35",
    "any_half": "C:11",
    "joiners_vote": "B:12",
    "older_roster": "C:10",
    "apply_before_blobs": "A:0",
    "duplicate_commit_restarts": "A:0",
    "fetch_never_dropped": "A:51",
    "votes_cross_tips": "C:85",
    "no_base_check": "C:0",
    "offered_before_saved": "A:0",
    "no_takeover": "A:1",
    "no_reform": "C:2",
    "generation_counted": "D:1",
    "reform_although_quorum": "C:5",
    "most_tokens_win": "D:28",
    "merge_on_apply": "D:0",
    "due_by_own_count": "D:7",
    "round_while_due": "D:0",
    "due_by_kind": "C:22",
    "due_by_rise": "C:22",
    "no_phase_1_at_merge": "C:212",
    "accepted_merge_not_persisted": "D:0",
    "accept_merge_before_blobs": "D:0",
    "accept_only_own_merge": "B:39",
    "no_base_check_at_merge": "C:47",
    "tip_before_collected": "D:1",
    # Rare mutants, caught after hundreds of schedules. They have a directed test as well.
    "promise_in_memory": "C:46",
    "promise_not_recorded": "C:71",
    "lowest_accepted": "C:233",
}
"""Mutant -> fault class and seed. After a change of the simulator find new ones with
`scripts/simulate --mutant NAME`."""

CAUGHT_BY_DIRECTED_TEST: dict[str, Callable[[], None]] = {
    "promise_in_memory": (
        test_rounds_takeover.test_a_convener_of_a_lower_ballot_is_refused_with_the_promised_one
    ),
    "promise_not_recorded": (
        test_rounds_takeover.test_a_convener_of_a_lower_ballot_is_refused_with_the_promised_one
    ),
    "lowest_accepted": (
        test_rounds_takeover.test_of_several_votes_the_one_with_the_highest_ballot_is_proposed_again
    ),
    "any_proposal": partial(nobody_votes_for, alone),
    "liar_convenes_on": partial(nobody_votes_for, alone),
    "any_update": test_garbage_values.test_garbage_is_left_out_of_every_round_at_once,
    "ballot_zero_reused": (
        test_rounds_takeover.test_a_restarted_first_convener_never_uses_ballot_zero_again
    ),
}


def test_every_mutant_is_caught_by_something() -> None:
    assert CAUGHT_BY_SCHEDULE.keys() | CAUGHT_BY_DIRECTED_TEST.keys() == MUTANTS.keys()


@pytest.mark.parametrize("name", CAUGHT_BY_SCHEDULE)
def test_a_removed_rule_breaks_an_invariant(name: str) -> None:
    require_missed(MUTANTS[name], CAUGHT_BY_SCHEDULE[name])


@pytest.mark.parametrize("name", CAUGHT_BY_DIRECTED_TEST)
def test_a_removed_rule_fails_its_directed_test(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = (AssertionError, ValueError)
    require_fails(CAUGHT_BY_DIRECTED_TEST[name], MUTANTS[name], monkeypatch, errors)
