"""When a convener stops waiting for offers: silent peers, late peers, worthwhile peers."""

from dataclasses import replace
from typing import Any

import pytest

from swarm.protocol.messages.events import Expected
from swarm.protocol.rounds.policies.roster_deadline import (
    Absent,
    Absentees,
    OpenRoster,
    Word,
    keeps_word,
    why_close,
)
from swarm.protocol.timing.deadlines import Timers
from tests.protocol.round_pump import make_offer, make_rules, start_swarm

TIMERS = Timers()
BUSY = Absent("D", silent_s=1.0, remaining_s=None, worked_s=10.0)
ROSTER = OpenRoster(
    age_s=10.0,
    waited_s=1.0,
    num_offers=3,
    num_members=4,
    quorum_answers=True,
    fastest_s=9.0,
    absent=(BUSY,),
)


def absent(**changes: Any) -> OpenRoster:
    return replace(ROSTER, absent=(replace(BUSY, **changes),))


def test_a_roster_with_all_offers_closes_at_once() -> None:
    full = replace(ROSTER, num_offers=4, absent=())
    assert why_close(full, TIMERS) == "roster closed with 4 of 4 offers: nobody else is waited for"


def test_without_any_offer_there_is_nothing_to_close() -> None:
    assert why_close(replace(ROSTER, num_offers=0, absent=()), TIMERS) is None
    assert why_close(replace(ROSTER, num_offers=0, age_s=1e6), TIMERS) is None


def test_a_peer_that_says_nothing_of_its_steps_is_waited_for() -> None:
    assert why_close(ROSTER, TIMERS) is None


def test_a_silent_peer_is_not_waited_for() -> None:
    why = why_close(absent(silent_s=6.5), TIMERS)
    assert why == "roster closed with 3 of 4 offers: peer D silent for 6.5 s (limit 6.0)"


def test_a_silent_peer_whose_machine_refuses_messages_is_waited_for_half_as_long() -> None:
    assert why_close(absent(is_gone=True, silent_s=2.9), TIMERS) is None
    why = why_close(absent(is_gone=True, silent_s=3.0), TIMERS)
    said = "peer D refuses messages, silent for 3.0 s (limit 3.0)"
    assert why == f"roster closed with 3 of 4 offers: {said}"


@pytest.mark.parametrize(("remaining_s", "waits"), [(0.0, True), (3.3, True), (3.4, False)])
def test_a_late_peer_is_waited_for_while_its_work_is_worth_more(
    remaining_s: float, waits: bool
) -> None:
    """Three peers that wait for 3.33 s lose as much as the fourth's 10 s of work."""
    why = why_close(absent(remaining_s=remaining_s), TIMERS)
    assert (why is None) == waits
    if why:
        assert "needs 3.4 s more, which costs 3 peers more than its 10.0 s of work" in why


LATE = replace(BUSY, remaining_s=30.0, worked_s=300.0, word=Word(330.0, -30.0))
MANY = replace(ROSTER, num_offers=42, num_members=64, fastest_s=300.0)


@pytest.mark.parametrize(("num_late", "waits"), [(22, True), (5, True), (4, False)])
def test_voters_that_are_late_are_worth_waiting_for_together(num_late: int, waits: bool) -> None:
    """42 that wait for 30 s lose 1,260 s, as much as the work of 4.2 peers in 300 s."""
    roster = replace(MANY, absent=(LATE,) * num_late)
    assert (why_close(roster, TIMERS) is None) == keeps_word(roster, TIMERS) == waits


@pytest.mark.parametrize(
    "changes",
    [
        {"votes": False},
        {"silent_s": 100.0},
        {"is_gone": True, "silent_s": 4.0},
        {"word": Word(330.0, 200.0)},
        {"is_behind": True},
    ],
    ids=str,
)
def test_who_is_not_only_late_is_worth_nothing_to_the_others(changes: dict[str, Any]) -> None:
    """Many keys that claim to be late must not delay few voters."""
    others = (replace(LATE, **changes),) * 30
    roster = replace(MANY, waited_s=1000.0, absent=(*(LATE,) * 4, *others))
    assert why_close(roster, TIMERS) and not keeps_word(roster, TIMERS)


def test_only_those_are_counted_that_come_as_soon() -> None:
    """Waiting pays for the first five, but not for those that need ten times as long."""
    slow = replace(LATE, remaining_s=600.0, word=Word(900.0, -600.0))
    assert why_close(replace(MANY, absent=(*(slow,) * 10, *(LATE,) * 5)), TIMERS) is None
    assert why_close(replace(MANY, absent=(*(slow,) * 10, *(LATE,) * 4)), TIMERS)


@pytest.mark.parametrize(("remaining_s", "waits"), [(23.3, True), (23.4, False)])
def test_while_the_others_take_their_next_steps_waiting_costs_nothing(
    remaining_s: float, waits: bool
) -> None:
    """20 s during their steps, then 3.33 s of three peers (stall deadline)."""
    why = why_close(replace(absent(remaining_s=remaining_s), spare_s=20.0), TIMERS)
    assert (why is None) == waits
    if why:
        assert "needs 23.4 s more, 20.0 s of it during their steps, which costs 3 peers" in why


def test_who_is_silent_or_breaks_its_word_is_not_waited_for_beside_steps_either() -> None:
    spare = replace(absent(silent_s=6.5, remaining_s=1.0), spare_s=60.0)
    assert why_close(spare, TIMERS) is not None
    late = replace(absent(remaining_s=0.0, word=Word(10.0, 40.0)), spare_s=60.0)
    assert why_close(late, TIMERS) is not None


def test_to_fetch_the_tip_is_work_that_would_be_lost() -> None:
    """Otherwise a peer whose fetch takes as long as a round would always be excluded."""
    alone = replace(absent(remaining_s=18.0, worked_s=1.0), num_offers=1)
    assert why_close(alone, TIMERS) is not None
    came = replace(alone.absent[0], fetched_s=18.0)
    assert why_close(replace(alone, absent=(came,)), TIMERS) is None
    assert why_close(replace(alone, absent=(came,), num_offers=2), TIMERS) is not None


BEHIND = replace(BUSY, silent_s=19.0, worked_s=0.0, is_behind=True)


@pytest.mark.parametrize(("num_offers", "limit_s"), [(1, 18.0), (2, 18.0), (4, 9.0), (36, 1.0)])
def test_those_that_fetch_are_waited_for_as_long_as_their_next_rounds_are_worth(
    num_offers: int, limit_s: float
) -> None:
    """The fastest worked for 9 s. The limit is twice that, half of 8 rounds of one peer."""
    roster = replace(ROSTER, num_offers=num_offers, num_members=num_offers + 1, absent=(BEHIND,))
    assert why_close(replace(roster, waited_s=limit_s - 0.1), TIMERS) is None
    why = why_close(replace(roster, waited_s=limit_s), TIMERS)
    assert why and f"still fetches the tip, {limit_s} s after a quorum (limit {limit_s})" in why


def test_the_more_peers_wait_the_less_a_late_one_is_worth() -> None:
    assert why_close(absent(remaining_s=3.1), TIMERS) is None
    many = replace(absent(remaining_s=3.1), num_offers=11, num_members=12)
    assert why_close(many, TIMERS) is not None


def test_a_peer_that_is_nearly_done_is_waited_for_whatever_it_is_worth() -> None:
    """Rounds of a second on a busy machine must not lose tokens."""
    short = replace(absent(remaining_s=2.9, worked_s=1.0), age_s=1.0, waited_s=0.5)
    assert why_close(short, TIMERS) is None


def test_what_a_late_peer_has_worked_itself_is_what_counts() -> None:
    """A restarted convener does not count the round as young."""
    assert why_close(replace(absent(remaining_s=100.0, worked_s=3500.0), age_s=5.0), TIMERS) is None
    assert why_close(absent(remaining_s=100.0, worked_s=5.0), TIMERS) is not None


def test_everybody_who_is_missing_needs_a_reason_of_its_own() -> None:
    silent = Absent("E", silent_s=9.0, remaining_s=None, worked_s=10.0)
    late = Absent("F", silent_s=1.0, remaining_s=30.0, worked_s=10.0)
    why = why_close(replace(ROSTER, absent=(silent, late)), TIMERS)
    assert why is not None and "peer E silent" in why and "peer F needs" in why
    assert why_close(replace(ROSTER, absent=(silent, late, BUSY)), TIMERS) is None


def test_nobody_is_looked_at_behind_the_first_that_is_waited_for() -> None:
    silent = Absent("E", silent_s=9.0, remaining_s=None, worked_s=10.0)
    looks = []

    def look(peer: str) -> Absent:
        looks.append(peer)
        return silent if peer == "E" else replace(BUSY, peer=peer)

    absentees = Absentees(["E", *(f"busy{number}" for number in range(254))], look)
    roster = replace(ROSTER, absent=absentees)
    assert why_close(roster, TIMERS) is None
    assert keeps_word(roster, TIMERS)
    assert looks == ["E", "busy0"]
    assert len(absentees) == len(roster.names.split(", ")) == len(looks) == 255


HOUR = replace(ROSTER, age_s=3700.0, waited_s=100.0, fastest_s=3600.0)


@pytest.mark.parametrize(
    ("contributed", "total_s", "limit_s"),
    [(True, 3600.0, 450.0), (False, 3600.0, 112.5), (True, 10.0, 6.0), (False, 10.0, 6.0)],
)
def test_who_says_that_it_is_done_may_be_late_by_a_part_of_its_word(
    contributed: bool, total_s: float, limit_s: float
) -> None:
    """Time to write its offer to disk. It is less if the previous round waited without success."""
    for over_s, waits in ((limit_s - 0.1, True), (limit_s, False)):
        word = Word(total_s, over_s)
        done = replace(BUSY, remaining_s=0.0, worked_s=3700.0, word=word, contributed=contributed)
        why = why_close(replace(HOUR, absent=(done,)), TIMERS)
        assert (why is None) == waits
        if why:
            assert f"not ready {limit_s:.1f} s after its word (limit {limit_s:.1f})" in why


def test_who_is_still_at_work_may_take_half_as_long_again_if_that_pays() -> None:
    def why(over_s: float) -> str | None:
        word = Word(3600.0, over_s)
        late = replace(BUSY, remaining_s=60.0, worked_s=3600.0 + over_s, word=word)
        return why_close(replace(HOUR, waited_s=over_s, num_offers=1, absent=(late,)), TIMERS)

    assert why(1799.0) is None
    said = why(1800.0)
    assert said is not None and "not ready 1800.0 s after its word (limit 1800.0)" in said


def test_what_a_peer_is_overdue_counts_among_what_waiting_for_it_costs() -> None:
    """Its steps would always end in 200 s, so past waiting must count."""
    late = replace(BUSY, remaining_s=200.0, worked_s=4600.0, word=Word(3600.0, 1000.0))
    roster = replace(HOUR, waited_s=1000.0, absent=(late,))
    assert why_close(replace(roster, num_offers=3), TIMERS) is None
    why = why_close(replace(roster, num_offers=4, num_members=5), TIMERS)
    assert why is not None and "needs 200.0 s more, 1000.0 s after its word, which costs 4" in why


@pytest.mark.parametrize(
    ("contributed", "worked_s", "limit_s"),
    [(True, 40.0, 14.0), (False, 40.0, 6.0), (True, 3600.0, 112.5), (False, 3600.0, 112.5)],
)
def test_who_says_nothing_is_expected_to_be_about_as_fast_as_a_quorum(
    contributed: bool, worked_s: float, limit_s: float
) -> None:
    for waited_s, waits in ((limit_s - 0.1, True), (limit_s, False)):
        mute = replace(BUSY, worked_s=worked_s + waited_s, contributed=contributed)
        why = why_close(replace(HOUR, waited_s=waited_s, absent=(mute,)), TIMERS)
        assert (why is None) == waits


# ---------------------------------------------------------------- without a quorum of offers

FEW = replace(HOUR, age_s=2400.0, waited_s=None, num_offers=1, fastest_s=2400.0)
SLOW = replace(BUSY, remaining_s=120.0, worked_s=2400.0, word=Word(2520.0, -120.0))
LONG = Timers(roster_late_s=30.0, wordless_s=1800.0)


def test_without_a_quorum_of_offers_everybody_who_said_when_is_waited_for() -> None:
    roster = replace(FEW, absent=(SLOW, SLOW, SLOW))
    assert why_close(roster, LONG) is None
    assert keeps_word(roster, LONG)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"silent_s": 30.0}, "silent for 30.0 s (limit 30.0)"),
        ({"word": None, "remaining_s": None}, "did not say when for 2400.0 s (limit 1800.0)"),
        ({"word": Word(2520.0, 1260.0)}, "not ready 1260.0 s after its word (limit 1260.0)"),
        ({"word": Word(4.0, 30.0)}, "not ready 30.0 s after its word (limit 30.0)"),
        ({"word": Word(38401.0, -36001.0)}, "needs 38401.0 s in all (limit 38400.0)"),
    ],
)
def test_without_a_quorum_of_offers_nobody_is_given_up_but_for_these_reasons(
    changes: dict[str, Any], reason: str
) -> None:
    roster = replace(FEW, absent=(replace(SLOW, **changes),))
    why = why_close(roster, LONG)
    assert why is not None and reason in why
    assert not keeps_word(roster, LONG)
    assert why_close(replace(roster, quorum_answers=False), LONG) is None
    assert why_close(replace(roster, absent=(*roster.absent, SLOW)), LONG) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"silent_s": 29.0},
        {"word": Word(2520.0, 1259.0)},
        {"word": Word(4.0, 29.0)},
        {"word": Word(38400.0, -36000.0)},
    ],
)
def test_without_a_quorum_of_offers_a_word_holds_this_long(changes: dict[str, Any]) -> None:
    assert why_close(replace(FEW, absent=(replace(SLOW, **changes),)), LONG) is None


def test_before_its_first_step_ends_a_peer_cannot_say_anything() -> None:
    mute = replace(BUSY, worked_s=1799.0)
    assert why_close(replace(FEW, age_s=1799.0, absent=(mute,)), LONG) is None


NEW = replace(BUSY, is_new=True, remaining_s=2.0, word=Word(12.0, -2.0))


def test_a_new_trainee_is_waited_for_as_others_are_but_not_for_long() -> None:
    roster = replace(ROSTER, absent=(NEW,))
    assert why_close(replace(roster, waited_s=5.9), TIMERS) is None
    why = why_close(replace(roster, waited_s=6.0), TIMERS)
    assert why and "is new, and voters wait for 6.0 s (limit 6.0)" in why
    voter = replace(roster, absent=(replace(NEW, is_new=False),))
    assert why_close(replace(voter, waited_s=6.0), TIMERS) is None


def test_voters_wait_for_a_new_trainee_a_quarter_of_their_work_whatever_it_says() -> None:
    says = replace(NEW, remaining_s=100.0, worked_s=1e9, word=Word(1e9, -100.0), contributed=True)
    roster = replace(HOUR, absent=(says,))
    assert why_close(replace(roster, waited_s=899.0), TIMERS) is None
    assert why_close(replace(roster, waited_s=900.0), TIMERS) is not None


def test_a_trainee_that_vanished_holds_a_round_up_no_longer_than_a_silent_voter() -> None:
    assert why_close(absent(is_new=True, silent_s=5.9), TIMERS) is None
    assert why_close(absent(is_new=True, silent_s=6.0), TIMERS) is not None


def test_offers_of_trainees_make_waiting_for_a_voter_no_dearer() -> None:
    """Otherwise keys that offer at once would make rounds exclude a slow voter."""
    slow = replace(absent(remaining_s=3.2), num_of_trainees=50, num_members=54)
    assert why_close(slow, TIMERS) is None
    assert why_close(replace(slow, num_offers=53, num_of_trainees=0), TIMERS) is not None


def test_voters_that_wait_for_nobody_else_go_on_without_a_quorum_of_offers_or_trainees() -> None:
    silent = replace(BUSY, silent_s=1e3)
    roster = replace(ROSTER, waited_s=None, num_offers=0, num_of_trainees=1, absent=(silent, NEW))
    why = why_close(roster, TIMERS)
    assert why and why.startswith("roster closed with 1 of 4 offers") and "is new" in why


@pytest.mark.parametrize("overlaps", [True, False])
def test_a_slow_member_counts_where_the_others_train_on_meanwhile(overlaps: bool) -> None:
    """Their offers declare their remaining work. Without overlap they would be idle."""
    pump = start_swarm("ABCD", replace(make_rules(), overlaps=overlaps))
    pump.train_times({"A": 10.0, "B": 10.0, "C": 10.0, "D": 18.0})
    pump.offer_of = lambda peer, tip: replace(  # type: ignore[method-assign]
        make_offer(pump.rules, peer, tip), seconds=pump.nodes[peer].train_s
    )
    pump.run_to_height(1)
    tip = pump.tip_of("A")
    for peer, node in pump.nodes.items():
        pump.give(peer, Expected(tip.digest, node.train_s))
    pump.run_to_height(2)
    assert pump.tip_of("A").contributors == (*"ABC", *("D" if overlaps else ""))
