"""Timers: the model's values, and their dependence on a run's sizes and rates."""

from dataclasses import replace
from math import inf

import hypothesis.strategies as st
import pytest
from hypothesis import given

from swarm.protocol.timing.backoff import backoff_s
from swarm.protocol.timing.deadlines import (
    FIRST_STEP_S,
    Measured,
    Timers,
    finishes_in_time,
    local_work_left,
    production_timers,
)

SMALL = Measured(10**6, 2 * 10**6, model_bytes=2 * 10**6, rate_bytes_per_s=10**8)


def adapted(measured: Measured, roster_after_s: float = 6.0, reform_after_s: float | None = None):
    return production_timers(measured, roster_after_s=roster_after_s, reform_after_s=reform_after_s)


def test_the_defaults_are_those_of_the_model() -> None:
    timers = Timers()
    assert (timers.poll_s, timers.heartbeat_s, timers.hello_s) == (1.5, 5.0, 3.0)
    assert (timers.roster_s, timers.roster_late_s) == (6.0, 14.0)
    assert (timers.reduce_s, timers.vote_s, timers.discover_s) == (5.0, 6.0, 6.0)
    assert [timers.attempt_limit_s(attempt) for attempt in range(4)] == [41, 82, 123, 123]
    assert timers.patience_s == timers.pause_s == timers.reform_s / 2 == 30.0
    assert [timers.proposal_limit_s(attempt) for attempt in range(4)] == [27, 54, 81, 81]


def test_replaced_timers_leave_the_others_as_they_were() -> None:
    timers = replace(Timers(), reform_s=inf, vote_s=200.0)
    assert (timers.reform_s, timers.vote_s, timers.reduce_s) == (inf, 200.0, 5.0)
    # A fetch is given up even if the generation never is.
    assert timers.patience_s == timers.pause_s == 600.0


def test_a_small_run_keeps_the_smallest_values() -> None:
    found = adapted(SMALL, reform_after_s=45.0)
    timers = found.timers
    assert (timers.reduce_s, timers.vote_s) == (12.0, 12.0)
    assert timers.reform_s == 45.0
    assert "set by the run" in found.reasons[-1]


def test_transfers_may_take_three_times_what_the_rate_says() -> None:
    measured = Measured(10**9, 3 * 10**9, model_bytes=3 * 10**9, rate_bytes_per_s=10**7)
    found = adapted(measured)
    assert found.timers.reduce_s == 300.0
    assert found.timers.vote_s == 900.0
    assert "3 x 1000.0 MB at 10.0 MB/s" in found.reasons[0]


def test_a_reducer_is_not_taken_for_silent_sooner_than_any_other_peer() -> None:
    """It is left out once it was silent for half of T_red (roster repair)."""
    for roster_after_s in (1.0, 6.0, 20.0):
        found = adapted(SMALL, roster_after_s)
        assert found.timers.reduce_s / 2 == found.timers.silence_s >= roster_after_s


def test_values_that_are_made_of_deltas_take_their_time_too() -> None:
    """A fast network does not make a disk any faster."""
    sizes = Measured(10**8, 3 * 10**8, model_bytes=10**10, rate_bytes_per_s=10**9)
    coded = replace(sizes, reduced_bytes=10**9, proposed_bytes=6 * 10**9)
    found = adapted(coded)
    assert found.timers.reduce_s == pytest.approx(3 * (0.1 + 10.0))
    assert found.timers.vote_s == pytest.approx(3 * (0.3 + 60.0))
    assert "100.0 MB at 1000.0 MB/s, and 1000.0 MB of values made of it" in found.reasons[0]
    plain = adapted(sizes)
    assert (plain.timers.reduce_s, plain.timers.vote_s) == (12.0, 12.0)


def test_until_a_rate_is_known_links_count_as_slow() -> None:
    unmeasured = Measured(10**7, 10**8, model_bytes=10**8, rate_bytes_per_s=0.0)
    found = adapted(unmeasured)
    assert (found.timers.reduce_s, found.timers.vote_s) == (12.0, 120.0)
    assert "an assumed 2.5 MB/s" in found.reasons[0]


@pytest.mark.parametrize(
    ("roster_after_s", "d1", "d2"), [(1.0, 6.0, 30.0), (6.0, 6.0, 30.0), (20.0, 20.0, 100.0)]
)
def test_a_roster_waits_as_the_run_says_and_never_under_six_seconds(roster_after_s, d1, d2):
    timers = adapted(SMALL, roster_after_s).timers
    assert (timers.roster_s, timers.silence_s, timers.roster_late_s) == (d1, d1, d2)


def test_a_first_step_has_half_an_hour_and_an_attempt_is_not_as_long() -> None:
    timers = adapted(SMALL).timers
    assert timers.wordless_s == FIRST_STEP_S
    assert timers.attempt_s == 30.0 + 3 * 12.0 + 2 * 12.0


@pytest.mark.parametrize(
    ("reduce_bytes", "vote_bytes"), [(0, 0), (10**6, 10**9), (10**9, 10**9), (10**9, 2 * 10**10)]
)
def test_time_outs_contain_each_other_and_follow_the_bytes_of_a_round(
    reduce_bytes: int, vote_bytes: int
) -> None:
    """An attempt once took 3 T_red + 2 T_vote, longer than T_reform for any larger run."""
    measured = Measured(reduce_bytes, vote_bytes, model_bytes=10**11, rate_bytes_per_s=10**7)
    timers = adapted(measured).timers
    assert timers.reduce_s <= timers.vote_s < timers.attempt_s <= timers.reform_s
    round_s = (reduce_bytes + vote_bytes) / 10**7
    assert timers.attempt_s <= max(90.0, 30.0 + 5 * round_s)
    assert timers.reform_s <= max(600.0, 30.0 + 5 * round_s)
    # A roster may be closed with a line that needs 2.5 T_red (slow-link exclusion); then the vote
    # still fits.
    assert 2.5 * timers.reduce_s + timers.vote_s / 3 <= timers.attempt_s - timers.roster_late_s


def test_a_fetch_has_patience_for_a_model_of_which_rounds_move_a_part() -> None:
    measured = Measured(10**6, 10**7, model_bytes=3 * 10**10, rate_bytes_per_s=10**7)
    timers = adapted(measured).timers
    assert (timers.reform_s, timers.pause_s, timers.patience_s) == (600.0, 300.0, 4500.0)
    fixed = adapted(measured, reform_after_s=60.0).timers
    assert (fixed.reform_s, fixed.pause_s, fixed.patience_s) == (60.0, 30.0, 4500.0)


def test_a_lost_majority_is_given_up_after_ten_minutes_or_what_an_attempt_may_take() -> None:
    def reform_s(proposal_bytes: int) -> float:
        measured = Measured(0, proposal_bytes, proposal_bytes, rate_bytes_per_s=10**7)
        return adapted(measured).timers.reform_s

    assert reform_s(10**9) == 600.0
    assert reform_s(2 * 10**10) == 30.0 + 2 * 12.0 + 6000.0


@pytest.mark.parametrize(
    ("steps_left", "step_s", "remaining_s", "finishes"),
    [(10, 1.0, 20.0, True), (11, 1.0, 20.0, False), (0, 5.0, 0.0, True), (50, 0.0, 20.0, True)],
)
def test_a_leaver_finishes_what_takes_half_of_its_time(steps_left, step_s, remaining_s, finishes):
    decision, reason = finishes_in_time(steps_left, step_s, remaining_s)
    assert decision is finishes
    assert f"{steps_left} steps of {step_s:.2f} s in {remaining_s / 2:.1f} s" in reason


@pytest.mark.parametrize(
    ("done", "step_s", "steps", "seconds"),
    [
        pytest.param(0, 0.0, 5, None, id="the pace is not known"),
        pytest.param(2, 3.0, 3, 9.0, id="three more"),
        pytest.param(5, 3.0, 0, 0.0, id="all done"),
    ],
)
def test_in_the_exact_mode_all_steps_are_taken(done, step_s, steps, seconds):
    left = local_work_left(5, done, step_s)
    assert (left.steps, left.seconds) == (steps, seconds)


@pytest.mark.parametrize(
    ("done", "step_s", "remaining_s", "steps", "seconds"),
    [
        pytest.param(0, 0.0, 60.0, 100, 60.0, id="the first is begun, nothing is known"),
        pytest.param(0, 0.0, -5.0, 100, 0.0, id="the first is begun, however late it is"),
        pytest.param(4, 10.0, 20.0, 2, 20.0, id="exactly two more"),
        pytest.param(4, 10.0, 19.9, 1, 19.9, id="the second would end after the end"),
        pytest.param(4, 10.0, 9.9, 0, 0.0, id="none would end in time"),
        pytest.param(1, 99.0, -39.0, 0, 0.0, id="the first took longer than the round"),
        pytest.param(98, 1.0, 60.0, 2, 2.0, id="the deal ends first"),
        pytest.param(100, 1.0, 60.0, 0, 0.0, id="the deal is used up"),
    ],
)
def test_with_an_agreed_end_a_step_is_begun_if_it_ends_in_time(
    done, step_s, remaining_s, steps, seconds
):
    left = local_work_left(100, done, step_s, remaining_s)
    assert (left.steps, left.seconds) == (steps, seconds)
    assert "dealt" in left.reason


@given(st.floats(0.01, 100), st.floats(0.01, 3600))
def test_a_peer_of_any_speed_uses_the_agreed_time_but_less_than_a_step(step_s, seconds):
    """For a steady peer. A peer whose first step exceeds the round takes that step."""
    done = 0
    while local_work_left(10**6, done, step_s if done else 0.0, seconds - done * step_s).steps:
        done += 1
        if done > 2000:
            return  # as steady as before
    assert done >= 1
    assert done == 1 or done * step_s <= seconds * (1 + 1e-9)
    assert (done + 1) * step_s > seconds * (1 - 1e-9)


def test_a_rest_doubles_with_each_failure_up_to_its_limit() -> None:
    assert [backoff_s(n, 0.5, 3.0) for n in (1, 2, 3, 4, 5, 10**6)] == [
        0.5,
        1.0,
        2.0,
        3.0,
        3.0,
        3.0,
    ]
