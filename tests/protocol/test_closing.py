"""When a convener stops waiting for offers: who is silent, who is too late, who is worth it."""

from dataclasses import replace

import pytest

from swarm.protocol.deadlines import Timers
from swarm.protocol.rounds.closing import Absent, OpenRoster, why_close

TIMERS = Timers()
BUSY = Absent("D", silent_s=1.0, remaining_s=None)
ROSTER = OpenRoster(
    age_s=10.0,
    round_s=10.0,
    quorum_s=9.0,
    num_offers=3,
    num_members=4,
    quorum_answers=True,
    absent=(BUSY,),
)


def absent(**changes: float) -> OpenRoster:
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
    gone = replace(BUSY, is_gone=True)
    assert why_close(replace(ROSTER, absent=(replace(gone, silent_s=2.9),)), TIMERS) is None
    why = why_close(replace(ROSTER, absent=(replace(gone, silent_s=3.0),)), TIMERS)
    assert why == "roster closed with 3 of 4 offers: peer D gone, silent for 3.0 s (limit 3.0)"


@pytest.mark.parametrize(("remaining_s", "waits"), [(0.0, True), (3.3, True), (3.4, False)])
def test_a_late_peer_is_waited_for_while_its_work_is_worth_more(
    remaining_s: float, waits: bool
) -> None:
    """Three peers that wait for 3.33 s lose as much as the fourth would, 10 s of work."""
    why = why_close(absent(remaining_s=remaining_s), TIMERS)
    assert (why is None) == waits
    if why:
        assert "needs 3.4 s more, which costs 3 peers more than its 10.0 s of work" in why


def test_the_more_peers_wait_the_less_a_late_one_is_worth() -> None:
    assert why_close(absent(remaining_s=3.1), TIMERS) is None
    many = replace(absent(remaining_s=3.1), num_offers=11, num_members=12)
    assert why_close(many, TIMERS) is not None


def test_a_peer_that_is_nearly_done_is_waited_for_whatever_it_is_worth() -> None:
    """Rounds of a second on a busy machine must not lose tokens."""
    short = replace(absent(remaining_s=2.9), age_s=1.0, round_s=1.0, quorum_s=0.5)
    assert why_close(short, TIMERS) is None


def test_everybody_who_is_missing_needs_a_reason_of_its_own() -> None:
    silent = Absent("E", silent_s=9.0, remaining_s=None)
    late = Absent("F", silent_s=1.0, remaining_s=30.0)
    both = replace(ROSTER, absent=(silent, late))
    why = why_close(both, TIMERS)
    assert why is not None and "peer E silent" in why and "peer F needs" in why
    assert why_close(replace(ROSTER, absent=(silent, late, BUSY)), TIMERS) is None


def test_without_a_quorum_of_offers_nobody_is_given_up_before_the_last_limit() -> None:
    few = replace(absent(remaining_s=100.0, silent_s=100.0), quorum_s=None, num_offers=1)
    assert why_close(few, TIMERS) is None
    why = why_close(replace(few, age_s=14.0), TIMERS)
    assert why is not None and "D not ready after 14.0 s (last limit)" in why
    assert why_close(replace(few, age_s=14.0, quorum_answers=False), TIMERS) is None


def test_who_does_not_keep_its_word_is_waited_for_no_longer_than_anybody() -> None:
    late = replace(absent(remaining_s=0.0), age_s=13.5, round_s=13.5)
    why = why_close(late, TIMERS)
    assert why is not None and "limit 13.5, a quorum was after 9.0" in why
