"""Which peer's uplink is too slow for a round: its bytes, and the gain of leaving it out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.experts import expert_unit
from swarm.protocol.messages.messages import Offer
from swarm.protocol.rounds.policies.rosters import plan_roster, usual_uplink
from swarm.protocol.rounds.policies.slow_links import (
    LEAST_S,
    RELAYS,
    UNEQUAL,
    RosterLinks,
    Sender,
    bytes_to_send,
    is_thinner,
    least_to_send,
    seconds_to_send,
    too_thin,
)
from tests.protocol.round_pump import found, make_offer, make_rules


@dataclass(frozen=True)
class Worker(Sender):
    """A sender, and the loss if it is excluded."""

    invested_s: float = 60.0


FAST = [Worker(peer, 5.0, waits=True, uplink_mbit=20) for peer in "ABC"]


def thin(needs_s: float, **changes: Any) -> Worker:
    return Worker(**{"peer": "D", "needs_s": needs_s, "waits": True, "uplink_mbit": 1, **changes})


def invested_s(sender: Sender) -> float:
    assert isinstance(sender, Worker)
    return sender.invested_s


def reasons_of(
    senders: Sequence[Worker], free_s: float = 0.0, limit_s: float = inf
) -> dict[str, str]:
    return too_thin(RosterLinks(senders), invested_s, free_s, limit_s)


def left_out(*senders: Worker, free_s: float = 0.0, limit_s: float = inf) -> list[str]:
    return sorted(reasons_of(senders, free_s, limit_s))


@pytest.mark.parametrize(("needs_s", "is_out"), [(24.9, False), (25.1, True)])
def test_a_line_may_hold_the_others_up_for_as_long_as_its_work_is_worth(
    needs_s: float, is_out: bool
) -> None:
    """20 s more for three peers are its 60 s of work."""
    reasons = reasons_of([*FAST, thin(needs_s)])
    assert list(reasons) == ["D"] * is_out
    if is_out:
        assert reasons["D"] == (
            "its uplink of 1 Mbit/s would be busy for 25.1 s, not 5.0, and its 60.0 s of work are "
            "not worth that to the others"
        )


def test_two_thin_lines_do_not_hide_behind_each_other() -> None:
    assert left_out(*FAST, thin(50.0), thin(49.0, peer="E")) == ["D", "E"]
    assert left_out(*FAST, thin(50.0), thin(16.0, peer="E")) == ["D"], "E alone is worth its wait"


def test_where_all_lines_are_as_thin_nobody_is_left_out() -> None:
    assert not left_out(*(thin(900.0, peer=peer) for peer in "ABCD"))


def test_seconds_beside_the_next_steps_cost_nothing() -> None:
    assert not left_out(*FAST, thin(79.0), free_s=60.0)
    assert left_out(*FAST, thin(81.0), free_s=60.0)


def test_a_line_for_which_reducers_do_not_wait_is_left_out_whatever_its_work_is_worth() -> None:
    senders = [*FAST, thin(20.0, averaged_s=16.0), thin(6.0, peer="E", averaged_s=5.0)]
    assert not left_out(*senders, limit_s=16.0)
    assert left_out(*senders, limit_s=15.9) == ["D"]
    assert not left_out(*senders, free_s=60.0, limit_s=8.0), "it needs no longer than they have"
    close = [replace(sender, averaged_s=99.0) for sender in FAST]
    assert not left_out(*close, limit_s=8.0), "nobody is much faster"


def test_rounds_of_a_second_on_a_busy_machine_do_not_lose_who_was_measured_badly() -> None:
    fast = [replace(sender, needs_s=1.0) for sender in FAST]
    assert not left_out(*fast, thin(3.9, invested_s=0.1))
    assert left_out(*fast, thin(4.1, invested_s=0.1))


def test_a_line_that_was_measured_at_half_its_rate_is_not_too_thin() -> None:
    assert not left_out(*FAST, thin(14.9, invested_s=0.1))
    assert left_out(*FAST, thin(15.1, invested_s=0.1))


def test_those_that_are_nearly_as_fast_as_others_are_not_left_out_with_a_thin_one() -> None:
    close = [replace(sender, needs_s=5.0 + n, invested_s=0.1) for n, sender in enumerate(FAST)]
    assert left_out(*close, thin(90.0, invested_s=0.1)) == ["D"]


def test_keys_that_cast_no_vote_cannot_have_a_slow_voter_left_out() -> None:
    keys = [
        Worker(f"k{number}", 0.1, waits=False, uplink_mbit=9999, invested_s=0.0)
        for number in range(50)
    ]
    assert not left_out(*FAST, thin(24.9), *keys)
    assert not left_out(thin(1e6), *keys), "a voter must be left"


def test_who_was_not_measured_is_never_left_out_and_counts_as_a_usual_line() -> None:
    unknown = [Worker(peer, 90.0, waits=True, invested_s=0.0) for peer in "XY"]
    assert not left_out(*FAST, *unknown)
    assert not left_out(*unknown, thin(90.0)), "one that is known alone is the usual one"


def test_the_more_peers_wait_the_less_a_thin_line_is_worth() -> None:
    many = [
        Worker(f"p{n:03}", 2.0 + n / 256, waits=True, uplink_mbit=20, invested_s=1800.0)
        for n in range(255)
    ]
    assert left_out(*many, thin(11.0, invested_s=1800.0)) == ["D"], "8 s of 255 are more than 1,800"


def plain_too_thin(
    senders: Sequence[Worker], free_s: float, limit_s: float
) -> list[tuple[str, float]]:
    """The rule of `too_thin` with a check of every peer: the excluded peers and reasons."""
    slowest_first = sorted(senders, key=lambda s: (not s.uplink_mbit, -s.needs_s, s.peer))
    at_least_s = max((s.needs_s for s in senders if not s.uplink_mbit), default=0.0)
    num_waiting, lost_s = sum(s.waits for s in senders), 0.0
    won, out, whole_s = 0.0, 0, 0.0
    for num, (sender, following) in enumerate(pairwise(slowest_first), 1):
        if not sender.uplink_mbit:
            break
        num_waiting -= sender.waits
        lost_s += sender.invested_s
        usual_s = max(following.needs_s, at_least_s)
        rest_s = max(usual_s, free_s)
        is_thin = sender.needs_s > max(rest_s + LEAST_S, UNEQUAL * usual_s)
        gain = (slowest_first[0].needs_s - rest_s) * num_waiting - lost_s
        if is_thin and (gain > won or sender.averaged_s > limit_s):
            won, out, whole_s = max(gain, won), num, rest_s
    return [(f"{sender.peer} {sender.invested_s:.1f}", whole_s) for sender in slowest_first[:out]]


seconds = st.one_of(
    st.sampled_from([0.0, 1.0, 1.5, 3.0, 4.0, 4.5, 9.0, 12.0, 13.5, 27.0, 40.0]),
    st.floats(0.0, 200.0),
)
workers = st.builds(
    Worker,
    peer=st.sampled_from("ABCDEFGHIJ"),  # a peer with only experts is late, and appears twice
    needs_s=seconds,
    waits=st.booleans(),
    uplink_mbit=st.sampled_from([0, 1, 20, 20, 100]),
    averaged_s=seconds,
    invested_s=st.one_of(st.sampled_from([0.0, 0.1]), st.floats(0.0, 2000.0)),
)


@given(
    st.lists(workers, max_size=12), st.one_of(st.just(0.0), seconds), st.sampled_from([5.0, inf])
)
def test_a_look_at_gaps_alone_leaves_out_whom_a_look_at_everybody_would(
    senders: list[Worker], free_s: float, limit_s: float
) -> None:
    asked: list[str] = []

    def invested(sender: Sender) -> float:
        asked.append(sender.peer)
        return invested_s(sender)

    lines = RosterLinks(senders)
    found = too_thin(lines, invested, free_s, limit_s)
    expected = plain_too_thin(senders, free_s, limit_s)
    assert list(found) == list(dict.fromkeys(who[0] for who, _ in expected))
    for who, whole_s in expected:
        assert f"{whole_s:.1f}, and its" in found[who[0]]
    of_last = {who[0]: who[2:] for who, _ in expected}
    assert all(f"its {of_last[peer]} s of work" in why for peer, why in found.items())
    first_gaps = max((num for num, _ in lines.gaps), default=0)
    assert len(asked) == first_gaps + len(expected)


def test_where_no_line_can_be_thin_nobody_is_looked_at() -> None:
    assert not RosterLinks(thin(5.0 + n, peer=f"p{n}") for n in range(20)).gaps
    assert (
        RosterLinks([*FAST, thin(50.0), thin(49.0, peer="E"), thin(90.0, uplink_mbit=0)]).gaps == ()
    )
    lines = RosterLinks([*FAST, thin(50.0), thin(49.0, peer="E")])
    assert lines.gaps == ((2, 5.0),) and lines.num_waiting == 5


# ---------------------------------------------------------------- bytes and seconds


def test_who_sends_what_in_a_round() -> None:
    """Four peers, two shared parts of 100 bytes, an expert of 100 each."""
    rules = make_rules(parts=2)
    tip = found(rules, list("ABCD"))
    plan = plan_roster(tip, {peer: make_offer(rules, peer, tip) for peer in "ABCD"}, rules)
    averages = list(plan.reducers.values())
    assert bytes_to_send(plan, rules) == {
        peer: 300 + sum(300 if peer == other else 100 for other in averages) for peer in "ABCD"
    }
    alone = plan_roster(tip, {"A": make_offer(rules, "A", tip)}, rules)
    assert bytes_to_send(alone, rules) == {"A": 0}


def test_who_has_not_offered_would_send_what_is_due_of_it_and_no_means() -> None:
    rules = make_rules(parts=2, experts=8)
    tip = found(rules, list("ABCD"))
    assert [len(owned) for owned in tip.owners.values()] == [1] * 8, "two of each peer"
    assert least_to_send("D", tip, 3, rules) == 2 * 100 + 2 * 3 * 100
    none = replace(tip, owners=dict.fromkeys(tip.owners, ("A",)))
    assert least_to_send("D", none, 3, rules) == 200
    two = replace(tip, owners=dict.fromkeys(tip.owners, ("A", "D")))
    assert least_to_send("D", two, 3, rules) == 200 + 8 * 100, "its reducer sends the mean"
    assert least_to_send("D", tip, 200, rules) == 200 + 2 * RELAYS * 100


@pytest.mark.parametrize(
    ("mbit", "usual", "is_it"), [(6, 20, True), (7, 20, False), (0, 20, False), (1, None, False)]
)
def test_a_line_is_thinner_by_the_factor_by_which_it_would_be_left_out(
    mbit: int, usual: int | None, is_it: bool
) -> None:
    assert is_thinner(mbit, usual) is is_it


def test_an_expert_goes_to_its_relays_where_there_are_any() -> None:
    peers = [f"p{number:02}" for number in range(16)]
    rules = make_rules(parts=16, experts=16)
    tip = found(rules, peers)
    offers = {peer: make_offer(rules, peer, tip) for peer in peers}
    late = Offer(tip.digest, 0, 0, {expert_unit(0): offers["p00"].units[expert_unit(0)]})
    offers["p00"] = late
    uplinks = dict.fromkeys(peers, 20)
    with_relays = plan_roster(tip, offers, rules, uplinks=uplinks)
    assert bytes_to_send(with_relays, rules)["p00"] == 100 * RELAYS
    assert bytes_to_send(plan_roster(tip, offers, rules), rules)["p00"] == 100 * 15


def test_seconds_follow_from_what_peers_say_of_their_lines() -> None:
    rules = make_rules(parts=4)
    tip = found(rules, list("ABCD"))
    plan = plan_roster(tip, {peer: make_offer(rules, peer, tip) for peer in "ABCD"}, rules)
    sent = bytes_to_send(plan, rules)
    assert seconds_to_send(sent, {}) == {}
    assert seconds_to_send(sent, {"A": 1, "B": 20, "C": 0}) == {
        peer: pytest.approx(sent[peer] * 8e-6 / mbit)
        for peer, mbit in {"A": 1, "B": 20, "C": 1, "D": 1}.items()
    }
    assert usual_uplink([20, 1]) == 1 and usual_uplink([]) is None
