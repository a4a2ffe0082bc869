"""The cost of faults, from histories: affected rounds, lost seconds, time lived, goodput."""

import pytest

from swarm.emulation.fault_verdict import (
    Happened,
    fault_reports,
    goodput,
    living_s,
    rounds_hit,
    rounds_of,
    rounds_without_owner,
    spread,
)

Event = dict[str, object]


def applied(number: int, time: float, contributors: str = "pq") -> Event:
    return {
        "event": "applied",
        "kind": "quorum",
        "height": number,
        "round": number,
        "digest": str(number),
        "time": time,
        "tokens": number * 100,
        "contributors": list(contributors),
    }


def started(peer: str, time: float) -> Event:
    return {"event": "started", "peer_id": peer, "time": time}


STEADY = [applied(number, 10.0 * number) for number in range(1, 6)]
"""Rounds of 10 s with both peers."""
KILLED = [
    *STEADY,
    applied(6, 66.0, "p"),
    applied(7, 76.0, "p"),
    applied(8, 86.0),
    applied(9, 96.0),
]
"""The round in which q died takes 16 s. q is back in the eighth round."""
KILL = Happened("kill", (1,), at_s=53.0, until_s=70.0)


def histories(events: list[Event] = KILLED) -> list[list[Event]]:
    return [[started("p", 0.0), *events], [started("q", 0.0), started("q", 72.0)]]


def test_a_round_lasts_from_the_first_peer_that_had_the_one_before() -> None:
    one = [applied(1, 10.0), applied(2, 13.0)]
    (second,) = rounds_of([one, [applied(1, 9.0)]])
    assert (second.number, second.seconds, second.tokens) == (2, 4.0, 100)


def test_a_kill_hits_the_rounds_until_its_peer_contributes_again() -> None:
    assert [hit.number for hit in rounds_hit(KILL, histories())] == [6, 7, 8]
    forever = Happened("kill", (1,), at_s=53.0)
    assert [hit.number for hit in rounds_hit(forever, histories())] == [6]


def test_a_fault_costs_what_its_rounds_took_longer_than_the_quiet_ones() -> None:
    (report,) = fault_reports([KILL], histories(), started_s=3.0)
    assert report["seconds_lost"] == 6.0
    assert (report["round"], report["at_s"], report["for_s"]) == (6, 50.0, 17.0)
    assert report["back_after_s"] == 33.0


def test_who_is_dead_paused_or_still_starting_could_not_have_trained() -> None:
    events = histories()[1]
    assert living_s(1, [KILL], events, (20.0, 96.0)) == pytest.approx(33.0 + 24.0)
    pause = Happened("pause", (1,), at_s=80.0, until_s=90.0)
    assert living_s(1, [KILL, pause], events, (20.0, 96.0)) == pytest.approx(33.0 + 14.0)


def test_who_is_cut_off_is_expected_to_train() -> None:
    cut = Happened("cut", (0,), at_s=30.0, until_s=60.0)
    assert living_s(0, [cut], histories()[0], (20.0, 96.0)) == 76.0


def test_goodput_is_one_without_faults_and_counts_what_a_fault_cost() -> None:
    assert goodput([], histories(STEADY), 2).share == pytest.approx(1.0)
    found = goodput([KILL], histories(), 4)
    # Two peers make 10 tokens a second. After the fifth round p lives for 46 s, and q for 3 + 24 s.
    assert found.tokens_per_s == pytest.approx(5.0)
    assert found.committed_tokens == 400
    assert found.possible_tokens == pytest.approx(5.0 * (46.0 + 3.0 + 24.0))


def test_no_pace_is_higher_than_what_local_steps_allow() -> None:
    found = goodput([KILL], histories(), 4, 4.0)
    assert found.tokens_per_s == 4.0
    assert found.possible_tokens == pytest.approx(4.0 * (46.0 + 3.0 + 24.0))
    assert goodput([KILL], histories(), 4, 6.0) == goodput([KILL], histories(), 4)


def test_without_rounds_there_is_no_goodput() -> None:
    assert goodput([], [[], []], 4).share is None


def test_the_spread_of_ten_values_has_the_ninth_as_its_90th_percentile() -> None:
    assert spread([float(value) for value in range(10, 0, -1)]) == {
        "median": 5.5,
        "p90": 9.0,
        "max": 10.0,
    }
    assert spread([]) == {}


def owned_by(owner: str, events: list[Event]) -> list[Event]:
    """The same, with an expert of this owner."""
    return [{**event, "owned": [1], "owners": {"1": [owner]}} for event in events]


def unowned(p: list[Event], q: list[Event]) -> int:
    return rounds_without_owner(KILL, [[started("p", 0.0), *p], [started("q", 0.0), *q]])


def test_experts_of_the_dead_are_without_owner_until_somebody_else_has_them() -> None:
    """q had the expert. p gets it with the eighth round, or q is back in the seventh."""
    before = owned_by("q", STEADY)
    assert unowned([*owned_by("q", KILLED[:7]), *owned_by("p", KILLED[7:])], before) == 2
    back = owned_by("q", [applied(7, 76.0)])
    assert unowned(owned_by("q", KILLED), [*before, *back]) == 1


def test_who_comes_back_to_the_merge_after_a_round_is_there() -> None:
    merge = owned_by("q", [{**applied(7, 77.0), "kind": "merge"}])
    assert unowned(owned_by("q", KILLED), [*owned_by("q", STEADY), *merge]) == 1


def test_an_adopter_that_is_killed_itself_is_not_held_against_the_first_fault() -> None:
    """r is given the expert with the seventh round, and never applies this round."""
    p = [*owned_by("q", KILLED[:6]), *owned_by("r", KILLED[6:])]
    assert unowned(p, owned_by("q", STEADY)) == 1


def test_who_applies_a_round_only_when_the_next_has_ended_was_not_there() -> None:
    late = owned_by("q", [applied(number, 95.0) for number in (6, 7, 8)])
    assert unowned(owned_by("q", KILLED), [*owned_by("q", STEADY), *late]) == 2
