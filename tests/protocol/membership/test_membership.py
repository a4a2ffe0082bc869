from dataclasses import replace

import pytest

from swarm.protocol.membership.membership import TRIAL_ROUNDS, next_members, on_trial
from swarm.protocol.values.manifest import SEASONED_ROUNDS, Kind, Member
from tests.protocol.round_pump import found, make_rules


def parent_of(**silent):
    """A manifest whose members have been silent for given numbers of rounds."""
    members = {peer: Member(rounds, 2.0) for peer, rounds in silent.items()}
    fields = {"height": 5, "round": 4, "kind": Kind.QUORUM, "parent": "0" * 64}
    return found(make_rules(), ["f"], members=members, contributors=(), dealt={}, **fields)


def decide(parent, **options):
    nobody = {"heard": (), "contributors": (), "leaving": (), "joiners": {}, "seed": "s"}
    return next_members(parent, **nobody | options)


def test_a_member_that_was_heard_stays_although_it_never_contributes():
    parent = parent_of(a=0, b=3)
    for _ in range(10):
        membership = decide(parent, heard=("b",), contributors=("a",))
        assert membership.members == {"a": Member(0, 2.0), "b": Member(0, 2.0)}
        parent = replace(parent, members=membership.members)


def test_a_contributor_counts_as_heard():
    assert decide(parent_of(a=2, b=1), contributors=("a", "b")).members["a"].silent == 0


def test_a_silent_member_is_removed_after_more_than_three_rounds():
    parent = parent_of(a=0, b=0)
    for silent in (1, 2, 3):
        membership = decide(parent, contributors=("a",))
        assert membership.members["b"].silent == silent
        assert membership.reasons == ()
        parent = replace(parent, members=membership.members)
    membership = decide(parent, contributors=("a",))
    assert list(membership.members) == ["a"]
    assert membership.reasons == ("b removed: silent for 4 rounds, more than 3",)


def test_a_leaver_goes_although_it_contributed():
    membership = decide(parent_of(a=0, b=0), contributors=("a", "b"), leaving=("b",))
    assert list(membership.members) == ["a"]
    assert membership.reasons == ("b removed: it asked to leave",)


def test_a_member_has_the_capacity_that_it_declared_last():
    two, capacities = ("a", "b"), {"a": 2.0, "b": 0.5}
    membership = decide(
        parent_of(a=0, b=0, c=0), heard=two, contributors=two, capacities=capacities
    )
    assert [member.capacity for member in membership.members.values()] == [2.0, 0.5, 2.0]
    assert membership.reasons == ("b has capacity 0.5 now, had 2",)


def test_a_joiner_is_listed_with_its_capacity_and_must_speak_soon():
    membership = decide(parent_of(b=0), contributors=("b",), joiners={"a": 0.5})
    newcomer = Member(1, 0.5, counted=0, votes=False, vouched=False)
    assert list(membership.members.items()) == [("a", newcomer), ("b", Member(0, 2.0))]
    assert membership.reasons == ("a joined as a trainee",)


def test_a_trial_ends_with_the_tenth_round_that_counted_the_member():
    parent = replace(parent_of(a=0, b=0), members={"a": Member(0, 1.0, counted=0)})
    for _ in range(TRIAL_ROUNDS):
        assert on_trial(parent.members) == ("a",)
        heard = replace(parent, members=decide(parent, heard=("a",)).members)
        assert heard.members["a"].counted == parent.members["a"].counted, "it did not contribute"
        parent = replace(parent, members=decide(parent, contributors=("a",)).members)
    assert on_trial(parent.members) == ()
    for _ in range(SEASONED_ROUNDS):
        parent = replace(parent, members=decide(parent, contributors=("a",)).members)
    assert parent.members["a"].counted == SEASONED_ROUNDS


def test_a_member_or_a_leaver_that_asks_to_join_is_no_joiner():
    membership = decide(
        parent_of(a=0), contributors=("a",), leaving=("b",), joiners={"a": 9.0, "b": 1.0}
    )
    assert membership.members == {"a": Member(0, 2.0)}


@pytest.mark.parametrize("num_members", [1, 2, 3])
def test_joiners_never_outnumber_the_members_and_the_seed_draws_them(num_members):
    members = {f"m{index}": 0 for index in range(num_members)}
    joiners = {f"j{index}": 1.0 for index in range(6)}
    taken = set()
    for seed in range(40):
        membership = decide(parent_of(**members), heard=members, joiners=joiners, seed=f"{seed}")
        new = sorted(membership.members.keys() - members.keys())
        assert len(new) == num_members
        taken.update(new)
        waiting = joiners.keys() - set(new)
        for peer in waiting:
            assert f"{peer} not yet taken in: {num_members} joiners a round" in membership.reasons
    assert taken == set(joiners)


def test_the_last_members_cannot_all_be_removed():
    membership = decide(parent_of(a=0, b=0), heard=("a", "b"), leaving=("a", "b"))
    assert list(membership.members) == ["a", "b"]
    assert membership.reasons[0].startswith("all members stay listed")


def test_all_members_may_leave_to_a_joiner():
    membership = decide(parent_of(a=0), heard=("a",), leaving=("a",), joiners={"b": 1.0})
    assert list(membership.members) == ["b"]
