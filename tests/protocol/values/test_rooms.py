"""No peer gets an expert that does not fit. An expert that fits nowhere waits, frozen."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.config import MergingConfig
from swarm.experts import expert_unit
from swarm.protocol.membership.ownership import assign, losses_survived
from swarm.protocol.values.manifest import Kind, Manifest
from tests.protocol.messages.test_rounds_membership import join
from tests.protocol.round_pump import Pump, make_rules, start_swarm

PEERS = "abcdef"


@st.composite
def cases(draw):
    """Any previous assignment and any rooms, with any change of members."""
    number = draw(st.integers(1, 8))
    names = draw(st.lists(st.sampled_from(PEERS), min_size=1, unique=True))
    some = st.lists(st.sampled_from(PEERS), unique=True, max_size=3)
    previous = {expert: tuple(sorted(draw(some))) for expert in range(number)}
    members = {peer: draw(st.sampled_from([1.0, 1.0, 0.5, 3.7, 1e9])) for peer in names}
    arguments = {
        "stale": draw(st.lists(st.integers(0, number - 1), unique=True)),
        "rooms": {peer: draw(st.integers(0, 6)) for peer in names},
        "silent": draw(some),
        "on_trial": draw(some),
        "owners_per_expert": draw(st.integers(1, 3)),
        "num_experts": number,
        "seed": draw(st.text("ab", max_size=2)),
    }
    return previous, members, draw(st.lists(st.sampled_from(PEERS), unique=True)), arguments


def load_of(owners):
    return Counter(peer for each in owners.values() for peer in each)


@settings(max_examples=200)
@given(cases())
def test_nobody_is_given_what_does_not_fit_and_nobody_idles_while_an_expert_waits(case):
    previous, members, contributors, arguments = case
    rooms, wanted = arguments["rooms"], min(arguments["owners_per_expert"], len(members))
    assignment = assign(previous, members, contributors, **arguments)
    load = load_of(assignment.owners)
    for peer in members:
        own = {e for e, owners in assignment.owners.items() if peer in owners}
        before = {e for e, owners in previous.items() if peer in owners}
        assert load[peer] <= rooms[peer] or own <= before
    full = {peer for peer in members if load[peer] >= rooms[peer]}
    for owners in assignment.owners.values():
        assert len(owners) == wanted or set(members) - set(owners) <= full
    again = assign(assignment.owners, members, contributors, **arguments)
    assert again.owners == assignment.owners
    assert again.reasons == ()


@settings(max_examples=100)
@given(cases())
def test_a_first_owner_comes_before_any_second_one_and_over_full_members_are_relieved(case):
    previous, members, contributors, arguments = case
    rooms = arguments["rooms"]
    assignment = assign(previous, members, contributors, **arguments)
    load = load_of(assignment.owners)
    if () in assignment.owners.values():
        doubled = (owners for owners in assignment.owners.values() if len(owners) > 1)
        assert all(load[peer] > rooms[peer] for owners in doubled for peer in owners)
    for peer in set(members):
        for other in set(contributors) & set(members) - set(arguments["on_trial"]):
            has_room = load[other] < min(rooms[other], 2)  # which is within anybody's limit
            if load[peer] > rooms[peer] and has_room:
                own = {e for e, owners in assignment.owners.items() if peer in owners}
                assert all(other in assignment.owners[expert] for expert in own)


def test_losing_a_peer_does_not_give_the_others_more_than_fits_them():
    arguments = {"stale": (), "owners_per_expert": 1, "num_experts": 6, "seed": ""}
    before = {0: ("a",), 1: ("a",), 2: ("b",), 3: ("b",), 4: ("c",), 5: ("c",)}
    rooms = {"a": 3, "b": 2}
    after = assign(before, dict.fromkeys("ab", 1.0), "ab", rooms=rooms, **arguments)
    assert load_of(after.owners) == {"a": 3, "b": 2}
    (waiting,) = (expert for expert, owners in after.owners.items() if not owners)
    assert (
        f"expert {waiting}: peer c left, waits for an owner: 2 members have room for 5 in all"
        in after.reasons
    )
    with_d = dict.fromkeys("abd", 1.0)
    found_room = assign(after.owners, with_d, "ab", rooms={**rooms, "d": 1}, **arguments)
    assert found_room.owners == {**after.owners, waiting: ("d",)}
    (reason,) = found_room.reasons
    assert reason.startswith(f"expert {waiting}: given to d, load 1/1, held to 1 instead of")
    assert reason.endswith("the 2 of its capacity: no more fit it")


def rounds_of(rooms, **rounds) -> tuple[Pump, Manifest]:
    """Three peers with two experts each. Peer c dies in the first round."""
    pump = start_swarm("abc", make_rules(experts=6, **rounds), rooms=rooms)
    pump.run_rounds(1)
    pump.kill("c")
    pump.run(400.0, lambda: "c" not in pump.tip_of("a").members)
    return pump, pump.tip_of("a")


@pytest.mark.parametrize("rounds", [{}, {"stagger": True, "experts_every": 2}], ids=str)
def test_an_expert_that_fits_nowhere_survives_rounds_frozen_and_goes_to_a_joiner(rounds) -> None:
    pump, tip = rounds_of({"a": 3, "b": 2}, **rounds)
    (waiting,) = (expert for expert, owners in tip.owners.items() if not owners)
    unit = expert_unit(waiting)
    assert tip.ownerless == {unit}
    assert {peer: member.room for peer, member in tip.members.items()} == {"a": 3, "b": 2}
    entry = tip.entries[unit]
    assert unit not in pump.rules.schedule.due(tip)
    pump.run_rounds(tip.round + 4, "ab", within_s=400.0)
    later = pump.tip_of("a")
    assert later.entries[unit] == entry
    others = [e.version for name, e in later.entries.items() if name != unit]
    assert min(others) > later.round - 3, "all others are renewed as usual"
    join(pump, "d", via="a")
    pump.run(pump.now + 100, lambda: "d" in pump.tip_of("a").members)
    assert pump.tip_of("a").owners[waiting] == ("d",)
    pump.run(pump.now + 100, lambda: pump.tip_of("a").entries[unit] != entry)
    assert pump.tip_of("a").entries[unit].source == "d"


def test_a_member_whose_room_has_grown_gets_the_expert_that_waits() -> None:
    pump, tip = rounds_of({"a": 3, "b": 2})
    pump.rooms["b"] = 4
    pump.run_rounds(tip.round + 2, "ab")
    tip = pump.tip_of("a")
    assert not tip.ownerless
    said = {reason for manifest in pump.nodes["a"].applied for reason in manifest.reasons}
    assert "b has room for 4 experts now, had 2" in said


def test_a_reform_gives_nobody_more_than_fits_it() -> None:
    pump = start_swarm("abc", make_rules(experts=6), rooms={"a": 3})
    pump.run_rounds(1)
    pump.kill("b", "c")
    assert pump.run(4000.0, lambda: pump.tip_of("a").kind is Kind.REFORM)
    assert load_of(pump.tip_of("a").owners) == {"a": 3}
    pump.run_rounds(4, "a", within_s=400.0)


def test_how_many_losses_machines_survive_whichever_are_lost() -> None:
    assert losses_survived(8, [4, 4, 4, 4]) == 2
    assert losses_survived(8, [2, 2, 2, 2]) == 0
    assert losses_survived(8, [2, 2, 2, 1]) is None
    assert losses_survived(8, [2, 2, 2, 1], 0.5) == 1, "the largest are lost first"
    assert losses_survived(8, [8]) == 0


def test_an_expert_that_waits_takes_part_in_merges() -> None:
    merging = MergingConfig(alpha=0.1, top_k=2, interval_steps=10, decay_steps=10**6)
    pump, tip = rounds_of({"a": 3, "b": 2}, merging=merging)
    (waiting,) = (expert for expert, owners in tip.owners.items() if not owners)
    entry = tip.entries[expert_unit(waiting)]
    pump.run_to_height(tip.height + 4, "ab")
    merges = [m for m in pump.nodes["b"].applied[-4:] if m.kind is Kind.MERGE]
    merged = merges[-1].entries[expert_unit(waiting)]
    assert (merged.version, merged.digest == entry.digest) == (entry.version, False)
    assert merges[-1].owners == tip.owners
