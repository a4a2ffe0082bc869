"""Rounds of minutes and hours in virtual time: which peers a round waits for, and how long."""

from collections.abc import Callable

import pytest

from swarm.emulation.simulator.mutants.extended_mutants import WAITING_MUTANTS
from swarm.emulation.simulator.peers.participant import UnderTest
from swarm.protocol.values.manifest import Kind
from tests.emulation.simulator.long_rounds import Course, Work, go_through

Check = Callable[[UnderTest], None]
ALL = {"p0", "p1", "p2", "p3"}
HOUR = 3600.0


def steps(*step_s: float, num_steps: int = 20) -> dict[str, Work]:
    return {f"p{rank}": Work(seconds, num_steps) for rank, seconds in enumerate(step_s)}


def attempts(course: Course) -> list[int]:
    """Attempts of the rounds with a certificate at the newest manifest's peers."""
    records = [node.disk.record for node in course.world.alive()]
    return [record.certificate.ballot.attempt for record in records if record.certificate]


# ---------------------------------------------------------------- time-outs that do not grow


@pytest.mark.parametrize("stuck_from", [1, 3])
def test_a_peer_that_lives_and_never_offers_does_not_lengthen_rounds_more_and_more(stuck_from):
    works = steps(6.0, 6.0, 6.0, num_steps=10) | {"p3": Work(6.0, 10, stuck_from=stuck_from)}
    course = go_through(works, 100)
    assert course.widest.roster_s <= 1.5 * 60.0 + 6.0
    assert course.widest.reform_s == 600.0
    assert max(course.durations_s) < 95.0  # once: nobody waits for it twice
    later = course.durations_s[stuck_from:]
    assert len(later) >= 97 and max(later) < 75.0
    assert all(present == ALL - {"p3"} for present in course.contributors[stuck_from:])


# ---------------------------------------------------------------- words


def all_who_say_when_are_counted(tested: UnderTest) -> None:
    course = go_through(steps(120.0, 122.0, 124.0, 126.0), 2, tested=tested)
    assert course.contributors == [ALL, ALL]
    assert course.durations_s == pytest.approx([2520.0, 2520.0], abs=3.0)
    assert set(attempts(course)) == {0}, "a convener was replaced for waiting"


def a_word_that_slips_does_not_bind_for_ever(tested: UnderTest) -> None:
    slow = Work(12.0, 100, slip=2.0)
    course = go_through({**steps(60.0, 60.0), "p2": slow}, 1, tested=tested)
    assert course.durations_s[0] < 2300.0  # it would need 2,388
    assert course.contributors == [{"p0", "p1"}]


def who_hangs_is_waited_for_in_vain_once(tested: UnderTest) -> None:
    works = steps(60.0, 60.0, 60.0) | {"p3": Work(60.0, 20, stuck_from=2)}
    course = go_through(works, 4, tested=tested)
    assert course.contributors == [ALL, *[ALL - {"p3"}] * 3]
    assert max(course.durations_s[2:]) < 1.05 * 1200.0


def who_is_cut_off_while_it_works_is_counted(tested: UnderTest) -> None:
    def cut(course: Course) -> None:
        course.world.split((("p0", "p1", "p2"), ("p3",)))
        course.world.at(1200.0, course.world.split, ())

    works = {peer: Work(120.0, 20) for peer in ALL}
    course = go_through(works, 2, at=[(700.0, cut)], tested=tested)
    assert course.contributors == [ALL, ALL]
    assert not any(
        manifest.kind is Kind.REFORM for manifest in course.world.invariants.manifests.values()
    )


def a_thin_line_holds_nobody_up(tested: UnderTest) -> None:
    """One uplink of 1 Mbit/s and three of 20: its expert alone, 9 MB to three peers, takes 72 s.

    The round counts the peer without its expert, because its shared tensors take no longer than its
    work is worth.
    """
    uplinks = dict.fromkeys(sorted(ALL), 2.5e6) | {"p3": 0.125e6}
    course = go_through(
        {peer: Work(6.0, 10) for peer in sorted(ALL)},
        4,
        uplinks=uplinks,
        unit_bytes=3_000_000,
        tested=tested,
    )
    assert max(course.durations_s[:3]) < 60.0 + 15.0  # 68 to 73 s, depending on the convener
    assert not any("p3" in contributors for contributors in course.contributors[:3])
    assert ("p3",) not in course.applied[2][1].owners.values(), "its expert went stale"
    assert course.contributors[3] == ALL and course.durations_s[3] < 60.0 + 35.0


def a_thin_line_is_not_waited_for(tested: UnderTest) -> None:
    """Its peer is 10 s late. Its work would be worth this wait, but its slow line excludes it."""
    uplinks = dict.fromkeys(sorted(ALL), 2.5e6) | {"p3": 0.125e6}
    course = go_through(
        {peer: Work(7.0 if peer == "p3" else 6.0, 10) for peer in sorted(ALL)},
        2,
        uplinks=uplinks,
        unit_bytes=3_000_000,
        tested=tested,
    )
    assert max(course.durations_s) < 60.0 + 12.0
    assert course.contributors == [ALL - {"p3"}] * 2


CAUGHT: dict[str, Check] = {
    "thin_lines_awaited": a_thin_line_holds_nobody_up,
    "thin_absentees_awaited": a_thin_line_is_not_waited_for,
    "words_ignored": all_who_say_when_are_counted,
    "waiting_ages_campaign": all_who_say_when_are_counted,
    "collecting_ages_attempt": all_who_say_when_are_counted,
    "last_word_counts": a_word_that_slips_does_not_bind_for_ever,
    "always_trusted": who_hangs_is_waited_for_in_vain_once,
    "reforms_at_work": who_is_cut_off_while_it_works_is_counted,
}


@pytest.mark.parametrize("check", dict.fromkeys(CAUGHT.values()), ids=lambda check: check.__name__)
def test_of_a_long_round(check: Check) -> None:
    check(UnderTest())


@pytest.mark.parametrize("name", WAITING_MUTANTS)
def test_a_removed_rule_of_waiting_is_caught(name: str) -> None:
    with pytest.raises(AssertionError):
        CAUGHT[name](WAITING_MUTANTS[name])


# ---------------------------------------------------------------- rounds of an hour


def local_steps(step_s: float) -> Work:
    """All peers take the same number. A peer that is eight times slower is late by its own word."""
    return Work(step_s, 100)


def seconds(step_s: float) -> Work:
    """All peers take as many steps as fit an hour."""
    return Work.of_seconds(HOUR, step_s)


ALONE = [(True, False, False), (False, True, False), (False, False, True)]
ALL_AT_ONCE = (True, True, True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "has_stuck", "restarts", "is_unequal"),
    [
        (seconds, *ALL_AT_ONCE),
        (local_steps, *ALL_AT_ONCE),
        # Each single fault, and all together.
        *[
            pytest.param(mode, *what, marks=pytest.mark.exhaustive)
            for mode in (seconds, local_steps)
            for what in ALONE
        ],
    ],
)
def test_in_rounds_of_an_hour_all_who_said_in_time_are_counted(
    mode, has_stuck, restarts, is_unequal
):
    equal = sorted(ALL | {"p4"})  # a quorum is left with one slow, one stuck and one restarted
    works = {peer: mode(36.0) for peer in equal}
    if is_unequal:
        works["slow"] = mode(8 * 36.0)
    if has_stuck:
        works["stuck"] = Work(36.0, 100, stuck_from=1)
    restarted: list[str] = []

    def restart(course: Course) -> None:
        restarted.append(course.convener())
        course.restart_convener()

    course = go_through(
        works,
        3,
        at=[(1.5 * HOUR, restart)] if restarts else [],
        round_seconds=HOUR if mode is seconds else None,
    )
    in_time = {peer for peer, work in works.items() if work.total_s < 1.01 * HOUR} - {"stuck"}
    for number, present in enumerate(course.contributors):
        assert present >= in_time - set(restarted if number == 1 else ())
    fast = next(peer for peer in equal if peer not in restarted)
    assert course.utilisation(fast, works[fast]) >= 0.95
    if is_unequal and mode is seconds:
        assert course.utilisation("slow", works["slow"]) >= 0.9
