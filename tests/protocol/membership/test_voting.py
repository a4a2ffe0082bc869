"""The voters from the next height on: those without an anchor's word stay few [R7]."""

from dataclasses import replace

import pytest

from swarm.protocol.membership.membership import (
    TRIAL_ROUNDS,
    most_unvouched,
    steadiest,
    why_no_vote,
    with_voters,
)
from swarm.protocol.values.manifest import SEASONED_ROUNDS, Manifest, Member
from tests.protocol.membership.test_membership import decide, parent_of

VOUCHED = Member(0, 1.0)
UNVOUCHED = replace(VOUCHED, vouched=False)
TRAINEE = Member(0, 1.0, counted=0, votes=False, vouched=False)
ROUNDS = 1000


def swarm(vouched: int, unvouched: int = 0, **trainees: int) -> dict[str, Member]:
    """Voters with and without an anchor's word, and trainees that were counted for some rounds."""
    members = {f"v{index:03}": VOUCHED for index in range(vouched)}
    members |= {f"u{index:03}": UNVOUCHED for index in range(unvouched)}
    return members | {peer: replace(TRAINEE, counted=n) for peer, n in trainees.items()}


def voters_after(members: dict[str, Member], seed: str = "s") -> set[str]:
    elected = with_voters(members, list(members), seed=seed).members
    assert elected.keys() == members.keys()
    return {peer for peer, member in elected.items() if member.votes}


def new_voters(members: dict[str, Member], seed: str = "s") -> set[str]:
    return voters_after(members, seed) - {peer for peer, each in members.items() if each.votes}


def test_a_trainee_votes_after_ten_rounds_that_counted_it() -> None:
    assert not new_voters(swarm(8, a=TRIAL_ROUNDS - 1))
    assert new_voters(swarm(8, a=TRIAL_ROUNDS)) == {"a"}
    elected = with_voters(swarm(8, a=TRIAL_ROUNDS), ["a"], seed="s")
    assert elected.reasons == ("a votes from now on: 10 rounds have counted it",)


def test_a_trainee_that_this_round_did_not_count_gets_no_vote_in_it() -> None:
    elected = with_voters(swarm(8, a=TRIAL_ROUNDS), ["v000"], seed="s")
    assert not elected.members["a"].votes


def test_one_unvouched_trainee_a_round_becomes_a_voter_in_an_order_by_lot() -> None:
    trainees = {f"t{index}": TRIAL_ROUNDS for index in range(7)}
    chosen = [new_voters(swarm(100, **trainees), seed=f"{seed}") for seed in range(40)]
    assert {len(peers) for peers in chosen} == {1}
    assert set.union(*chosen) == set(trainees)
    said = with_voters(swarm(100, **trainees), trainees, seed="s").reasons[-1]
    assert said == "6 trainees wait for their vote: 49 unvouched voters at most"


@pytest.mark.parametrize(
    ("vouched", "most"), [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 2), (8, 3), (64, 31)]
)
def test_unvouched_voters_are_less_than_a_third_of_all(vouched: int, most: int) -> None:
    assert most_unvouched(vouched) == most
    assert vouched == 0 or 3 * most < vouched + most
    if vouched:
        full = swarm(vouched, most, t=SEASONED_ROUNDS)
        assert not new_voters(full), "however many rounds have counted it"


@pytest.mark.parametrize("honest", [1, 3, 8, 64])
@pytest.mark.parametrize("keys", [1, 40, 300])
def test_keys_that_work_are_no_majority_and_block_none_in_a_thousand_rounds(
    honest: int, keys: int
) -> None:
    """With the real `next_members`: the keys ask in each round, and each round counts them all."""
    parent = replace(parent_of(), members=swarm(honest))
    names = [f"k{index:03}" for index in range(keys)]
    is_settled = False
    for number in range(ROUNDS):
        if is_settled and number % 100:
            continue  # nothing but the seed differs from round to round
        joiners = dict.fromkeys(names, 1.0)
        membership = decide(
            parent, contributors=list(parent.members), joiners=joiners, seed=f"{number}"
        )
        is_settled = membership.members == parent.members
        voters = {peer for peer, member in membership.members.items() if member.votes}
        blocking = voters.intersection(names)
        assert len(voters - blocking) == honest
        assert 3 * len(blocking) < len(voters) or not blocking
        assert 2 * honest > len(voters), "the honest decide alone"
        parent = replace(parent, members=membership.members)
    assert is_settled and len(blocking) == min(keys, most_unvouched(honest))


def test_unvouched_voters_lose_their_votes_when_the_vouched_leave() -> None:
    """Otherwise they would be the majority once some vouched peers are off for the night."""
    members = swarm(5, 2, t=SEASONED_ROUNDS)
    members["u001"] = replace(UNVOUCHED, counted=TRIAL_ROUNDS)
    assert voters_after(members) == {*(f"v00{i}" for i in range(5)), "u000", "u001"}
    left = {peer: member for peer, member in members.items() if peer not in ("v003", "v004")}
    assert voters_after(left) == {"v000", "v001", "v002", "u000"}, "the hardest worker stays"
    said = with_voters(left, list(left), seed="s").reasons
    assert "u001 has no vote any more: too few vouched members are left" in said
    del left["v002"]
    assert voters_after(left) == {"v000", "v001"}


def test_unvouched_voters_go_on_where_no_vouched_member_is_left() -> None:
    assert voters_after(swarm(0, 2, t=SEASONED_ROUNDS)) == {"u000", "u001"}


def test_a_member_that_an_anchor_vouches_for_votes_at_once() -> None:
    members = swarm(2, t=0)
    members["t"] = replace(TRAINEE, vouched=True)
    assert new_voters(members) == {"t"}


def test_where_all_voters_leave_the_trainee_that_most_rounds_have_counted_votes() -> None:
    assert new_voters(swarm(0, a=0, b=3, c=2)) == {"b"}
    assert len(new_voters(swarm(0, a=0, b=0))) == 1


def test_a_trainee_is_told_what_it_lacks() -> None:
    def said(vouched: int, counted: int, unvouched: int = 0) -> str:
        parent: Manifest = replace(parent_of(), members=swarm(vouched, unvouched, a=counted))
        assert why_no_vote(parent, "v000") is None
        assert why_no_vote(parent, "nobody") is None
        return why_no_vote(parent, "a") or ""

    assert said(8, 3) == "this peer has no vote yet: 3 of 10 rounds have counted it"
    full = said(8, 12, unvouched=3)
    assert "10 of 10" in full and "with 8 vouched members 3 others vote at most" in full
    alone = said(1, 0)
    assert "0 of 10" in alone and "swarm-invite --for a" in alone


def test_a_round_that_trainees_hold_up_goes_on_with_fewer_of_them_each_time() -> None:
    members = swarm(3, **{f"t{index:02}": index % 10 for index in range(40)})
    kept = [steadiest(members, members, setbacks, seed="s") for setbacks in range(5)]
    voters = {peer for peer, member in members.items() if member.votes}
    assert kept[0] == kept[1] == members.keys(), "the missed one is left out, the others stay"
    assert [len(peers - voters) for peers in kept] == [40, 40, 10, 2, 0]
    assert all(voters <= peers for peers in kept)
    assert all(members[peer].counted >= 7 for peer in kept[2] - voters), "those that have worked"
    only_trainees = members.keys() - voters
    assert steadiest(members, only_trainees, 9, seed="s") == only_trainees
