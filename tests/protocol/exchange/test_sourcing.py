from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.protocol.exchange.sourcing import (
    FIRST_REST_S,
    LONGEST_REST_S,
    STALLED_S,
    WHOLE_S,
    Failure,
    FetchAttempts,
    Limits,
    Sourcing,
)

MB = 10**6


def asking(*keys, sources=("a",), **limits):
    """After these blobs of a megabyte were asked of their first source."""
    sourcing = Sourcing(Limits(**limits))
    for key in keys:
        sourcing.want(key, MB, sources)
    sourcing.assign(0.0)
    return sourcing


def chosen(sourcing, now=0.0):
    return {a.key: a.peer for a in sourcing.assign(now)}


def reasons(sourcing, now=0.0):
    return {a.key: a.reason for a in sourcing.assign(now)}


def test_the_first_source_is_asked():
    sourcing = Sourcing()
    sourcing.want("blob", MB, ["b", "a"])
    assert chosen(sourcing) == {"blob": "b"}
    assert chosen(sourcing) == {}, "nothing is asked for twice"


def test_a_source_that_is_full_is_helped_by_the_next_and_the_reason_says_so():
    sourcing = Sourcing(Limits(bytes_per_peer=2 * MB))
    for number in range(5):
        sourcing.want(number, MB, ["first", "second"])
    assignments = sourcing.assign(0.0)
    assert [a.peer for a in assignments] == ["first", "first", "second", "second"]
    assert assignments[0].reason == "source 1 of 2"
    assert assignments[2].reason == "source 2 of 2: first has 2.0 MB to send first"
    sourcing.done(0)
    assert chosen(sourcing) == {4: "first"}


def test_many_small_blobs_are_limited_by_their_number():
    sourcing = Sourcing(Limits(jobs_per_peer=3))
    for number in range(5):
        sourcing.want(number, 1, ["a"])
    assert len(sourcing.assign(0.0)) == 3


def test_empty_blobs_are_asked_for_too():
    sourcing = Sourcing()
    sourcing.want("empty", 0, ["a"])
    assert chosen(sourcing) == {"empty": "a"}


def test_a_silent_peer_rests_twice_as_long_after_each_failure_and_others_take_over():
    sourcing = asking("blob", sources=["a", "b"], rest_s=1.0, longest_rest_s=3.0)
    sourcing.failed("blob", Failure.SILENT, "no_progress", 0.0)
    assert reasons(sourcing, 0.1) == {"blob": "source 2 of 2: a rests 0.9 s more (no_progress)"}
    for now, until in [(10.0, 11.0), (20.0, 22.0), (30.0, 33.0), (40.0, 43.0)]:
        sourcing = sourcing if now > 10 else Sourcing(Limits(rest_s=1.0, longest_rest_s=3.0))
        sourcing.want("only", MB, ["a"])
        sourcing.assign(now)
        sourcing.failed("only", Failure.SILENT, "no_progress", now)
        assert chosen(sourcing, until - 0.01) == {}
        assert sourcing.next_time(now) == until


def test_several_streams_that_break_at_once_are_one_failure():
    sourcing = asking("x", "y", rest_s=1.0)
    sourcing.failed("x", Failure.SILENT, "ended_early", 0.0)
    sourcing.failed("y", Failure.SILENT, "ended_early", 0.1)
    assert sourcing.next_time(0.1) == 1.0


def test_a_success_ends_the_memory_of_failures():
    sourcing = asking("x", rest_s=1.0)
    sourcing.failed("x", Failure.SILENT, "ended_early", 0.0)
    sourcing.assign(1.0)
    sourcing.done("x")
    sourcing.want("y", MB, ["a"])
    sourcing.assign(2.0)
    sourcing.failed("y", Failure.SILENT, "ended_early", 2.0)
    assert sourcing.next_time(2.0) == 3.0


def test_a_missing_blob_rests_alone():
    sourcing = asking("absent", "present")
    sourcing.failed("absent", Failure.MISSING, "missing", 0.0)
    sourcing.done("present")
    sourcing.want("other", MB, ["a"])
    assert chosen(sourcing, 0.1) == {"other": "a"}
    assert chosen(sourcing, 1.0) == {"absent": "a"}


def test_wrong_bytes_are_never_asked_of_the_same_peer_again():
    sourcing = asking("blob", "another", sources=["liar"], rest_s=1.0)
    sourcing.failed("blob", Failure.WRONG, "blob_digest", 0.0)
    sourcing.released("another")
    assert chosen(sourcing, 0.5) == {}, "and it rests"
    assert chosen(sourcing, 100.0) == {"another": "liar"}
    sourcing.want("blob", MB, ["liar", "honest"])
    assert chosen(sourcing, 100.0) == {"blob": "honest"}


def test_a_released_job_is_asked_for_again_at_once():
    sourcing = asking("blob")
    sourcing.released("blob")
    assert chosen(sourcing) == {"blob": "a"}


def test_further_sources_may_be_added_while_a_job_is_asked_for():
    sourcing = asking("blob")
    sourcing.want("blob", MB, ["b"])
    sourcing.failed("blob", Failure.SILENT, "unreachable", 0.0)
    assert chosen(sourcing) == {"blob": "b"}


def test_what_is_forgotten_leaves_no_trace():
    sourcing = asking("x", "y", jobs_per_peer=1)
    sourcing.forget("x")
    sourcing.failed("x", Failure.SILENT, "too late", 0.0)
    assert chosen(sourcing) == {"y": "a"}
    sourcing.forget("y")
    assert not sourcing.knows("y")
    assert sourcing.next_time(0.0) is None


def test_sources_that_came_and_failed_leave_nothing_behind():
    limits, now = Limits(), 0.0
    sourcing = asking("lasting", sources=["steady"])
    sourcing.failed("lasting", Failure.SILENT, "unreachable", now)
    for number in range(5000):
        sourcing.want(number, MB, [f"key-{number}"])
        sourcing.assign(now, most=1)
        sourcing.failed(number, Failure.SILENT, "unreachable", now)
        sourcing.forget(number)
        now += 0.1
    assert len(sourcing._rests) <= 10 * (limits.longest_rest_s + limits.rest_s) + 2
    assert set(sourcing._waiting) | set(sourcing._preferred) <= {"steady"}


def test_a_source_that_takes_long_to_fail_rests_longer_each_time_all_the_same():
    limits = Limits()
    sourcing, now, rests = Sourcing(limits), 0.0, []
    sourcing.want("blob", MB, ["a"])
    for _ in range(7):
        assert chosen(sourcing, now) == {"blob": "a"}
        now += 2 * limits.longest_rest_s
        sourcing.failed("blob", Failure.SILENT, "no_progress", now)
        until = sourcing.next_time(now)
        rests.append(until - now)
        now = until
    assert rests == [0.5, 1, 2, 4, 8, 15, 15]


def test_jobs_that_rest_do_not_block_those_behind_them():
    sourcing = Sourcing()
    for number in range(200):
        sourcing.want(number, 1, ["a"])
    for assignment in sourcing.assign(0.0):
        sourcing.failed(assignment.key, Failure.MISSING, "missing", 0.0)
    sourcing.want("new", 1, ["a"])
    assert chosen(sourcing, 0.1) == {"new": "a"}
    assert len(sourcing.assign(1.0)) == 200


def test_preferences_that_cross_do_not_hold_each_other_up():
    sourcing = Sourcing()
    for number in range(100):
        sourcing.want(("ab", number), 1, ["a", "b"])
    for assignment in sourcing.assign(0.0):
        sourcing.failed(assignment.key, Failure.MISSING, "missing", 0.0)
    assert {a.peer for a in sourcing.assign(0.1)} == {"b"}


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 4), st.integers(1, 12))
def test_every_job_is_done_exactly_once_whatever_fails(random, num_peers, num_jobs):
    names = [f"p{number}" for number in range(num_peers)]
    sourcing = Sourcing(Limits(bytes_per_peer=3, jobs_per_peer=2))
    for number in range(num_jobs):
        sourcing.want(number, random.randint(0, 3), random.sample(names, len(names)))
    asked, done, now = {}, set(), 0.0
    for _ in range(2000):
        for assignment in sourcing.assign(now):
            assert assignment.key not in asked
            assert assignment.key not in done
            asked[assignment.key] = assignment.peer
        for peer in names:
            assert sum(p == peer for p in asked.values()) <= 2
        if asked:
            key = random.choice(sorted(asked))
            del asked[key]
            if random.random() < 0.5:
                sourcing.done(key)
                done.add(key)
            else:
                kind = random.choice([Failure.SILENT, Failure.MISSING])
                sourcing.failed(key, kind, "chance", now)
        elif len(done) < num_jobs:
            next_time = sourcing.next_time(now)
            assert next_time is not None, "somebody must be tried again"
            now = next_time
        else:
            return
    raise AssertionError(f"only {len(done)} of {num_jobs} done")


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
