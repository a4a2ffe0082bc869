"""Attempts to fetch one state: what counts as progress, how long each rests, and when they end."""

from swarm.protocol.fetch_attempts import (
    FIRST_REST_S,
    LONGEST_REST_S,
    STALLED_S,
    WHOLE_S,
    FetchAttempts,
)


def test_a_state_of_which_nothing_comes_is_given_up_and_rests_longer_after_each_attempt() -> None:
    now_s, attempts, rests = 1000.0, FetchAttempts.begun(1000.0, 5), []
    assert not attempts.has_failed and attempts.next_s == now_s
    while attempts.why_given_up(now_s) is None:
        attempts = attempts.failed(now_s, 5)
        rests.append(attempts.next_s - now_s)
        now_s = attempts.next_s
    assert rests[:3] == [FIRST_REST_S, 2 * FIRST_REST_S, 4 * FIRST_REST_S]
    assert max(rests) == LONGEST_REST_S
    assert STALLED_S <= now_s - 1000.0 < STALLED_S + LONGEST_REST_S
    assert attempts.why_given_up(now_s) == f"nothing of it came for {(now_s - 1000) / 3600:.1f} h"


def test_bytes_that_come_again_are_no_progress_and_a_day_is_the_most() -> None:
    attempts = FetchAttempts.begun(0.0, 0).failed(10.0, 100)
    assert (attempts.failures, attempts.next_s) == (0, 10.0) and attempts.has_failed
    attempts = attempts.failed(20.0, 40).failed(60.0, 100)
    assert (attempts.moved_s, attempts.failures) == (10.0, 2), "they had been here before"
    now_s, most = 60.0, 100
    while attempts.why_given_up(now_s) is None:
        now_s, most = now_s + 1800, most + 1
        attempts = attempts.failed(now_s, most)
    assert WHOLE_S <= now_s < WHOLE_S + 1800 and attempts.left_s(now_s) <= 0
    assert "not whole after 24." in (attempts.why_given_up(now_s) or "")
