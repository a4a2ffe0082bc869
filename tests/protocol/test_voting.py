"""Who votes from the next height on: votes are earned by work, slowly, and few at a time [R7]."""

from dataclasses import replace

import pytest

from swarm.protocol.manifest import SEASONED_ROUNDS, Member
from swarm.protocol.voting import FEW, TRIAL_ROUNDS, steadiest, why_no_vote, with_voters
from tests.protocol.test_membership import parent_of

OLD = Member(0, 1.0)
TRAINEE = Member(0, 1.0, counted=0, votes=False)


def swarm(old: int, young: int = 0, **trainees: int) -> dict[str, Member]:
    """So many voters, some of them young, and trainees that so many rounds have counted."""
    members = {f"v{index:03}": OLD for index in range(old)}
    members |= {f"y{index:03}": replace(OLD, counted=TRIAL_ROUNDS) for index in range(young)}
    return members | {peer: replace(TRAINEE, counted=n) for peer, n in trainees.items()}


def new_voters(members: dict[str, Member], *, is_open: bool = True, seed: str = "s") -> set[str]:
    elected = with_voters(members, list(members), seed=seed, is_open=is_open).members
    assert elected.keys() == members.keys()
    assert all(elected[peer].votes for peer, member in members.items() if member.votes)
    return {peer for peer, member in elected.items() if member.votes and not members[peer].votes}


def test_a_trainee_votes_after_ten_rounds_that_counted_it() -> None:
    assert not new_voters(swarm(FEW, a=TRIAL_ROUNDS - 1))
    assert new_voters(swarm(FEW, a=TRIAL_ROUNDS)) == {"a"}
    elected = with_voters(swarm(FEW, a=TRIAL_ROUNDS), ["a"], seed="s", is_open=True)
    assert elected.reasons == ("a votes from now on: 10 rounds have counted it",)


def test_a_trainee_that_this_round_did_not_count_gets_no_vote_in_it() -> None:
    elected = with_voters(swarm(FEW, a=TRIAL_ROUNDS), ["v000"], seed="s", is_open=True)
    assert not elected.members["a"].votes


@pytest.mark.parametrize(("voters", "most"), [(8, 1), (19, 1), (20, 2), (49, 4)])
def test_a_tenth_of_the_voters_come_in_a_round_at_most_in_an_order_by_lot(
    voters: int, most: int
) -> None:
    trainees = {f"t{index}": TRIAL_ROUNDS for index in range(7)}
    chosen = [new_voters(swarm(voters, **trainees), seed=f"{seed}") for seed in range(40)]
    assert {len(peers) for peers in chosen} == {most}
    assert set.union(*chosen) == set(trainees)
    said = with_voters(swarm(voters, **trainees), trainees, seed="s", is_open=True).reasons[-1]
    assert f"{7 - most} trainees wait" in said


@pytest.mark.parametrize("old", [8, 9, 30, 200])
def test_the_young_stay_under_a_quarter_so_that_all_may_vanish_at_once(old: int) -> None:
    members = swarm(old, **{f"t{index:03}": TRIAL_ROUNDS for index in range(300)})
    for number in range(400):
        elected = with_voters(members, list(members), seed=f"{number}", is_open=True).members
        if elected == members:
            break
        members = elected
    voters = [peer for peer, member in members.items() if member.votes]
    young = len(voters) - old
    assert 0 < 4 * young < len(voters)
    assert 4 * (young + 1) >= len(voters) + 1, "it takes as many as it may"
    assert 2 * old > len(voters), "the others are a quorum without them"


def test_a_voter_is_young_until_fifty_rounds_have_counted_it_and_never_if_invited() -> None:
    members = swarm(8, young=2, a=TRIAL_ROUNDS)
    assert not new_voters(members)
    last = replace(members["y000"], counted=SEASONED_ROUNDS - 1)
    assert not new_voters({**members, "y000": last})
    assert new_voters({**members, "y000": replace(last, counted=SEASONED_ROUNDS)}) == {"a"}
    assert new_voters({**members, "y000": replace(last, invited=True)}) == {"a"}


def test_a_small_open_swarm_takes_one_voter_a_round_after_one_round() -> None:
    for voters in range(1, FEW):
        assert len(new_voters(swarm(0, young=voters, a=1, b=1))) == 1
        assert not new_voters(swarm(0, young=voters, a=0, b=0))
        assert not new_voters(swarm(voters, a=1), is_open=False)
    assert not new_voters(swarm(0, young=FEW, a=1, b=TRIAL_ROUNDS))


def test_where_all_voters_leave_the_trainee_that_most_rounds_have_counted_votes() -> None:
    assert new_voters(swarm(0, a=0, b=3, c=2)) == {"b"}
    assert len(new_voters(swarm(0, a=0, b=0))) == 1


def test_a_trainee_is_told_what_it_lacks() -> None:
    def said(voters: int, counted: int, young: int = 0) -> str:
        members = swarm(voters, young, a=counted)
        parent = replace(parent_of(), members=members)
        assert why_no_vote(parent, "v000", is_open=True) is None
        assert why_no_vote(parent, "nobody", is_open=True) is None
        return why_no_vote(parent, "a", is_open=True) or ""

    assert said(8, 3) == "this peer has no vote yet: 3 of 10 rounds have counted it"
    assert said(3, 0) == "this peer has no vote yet: 0 of 1 rounds have counted it"
    full = said(8, 12, young=2)
    assert "10 of 10" in full and "only 0 trainees" in full and "of which 2 are young" in full


def test_a_round_that_trainees_hold_up_goes_on_with_fewer_of_them_each_time() -> None:
    members = swarm(3, **{f"t{index:02}": index % 10 for index in range(40)})
    kept = [steadiest(members, members, setbacks, seed="s") for setbacks in range(5)]
    voters = {peer for peer, member in members.items() if member.votes}
    assert kept[0] == kept[1] == members.keys(), "who was missed is left out, the others stay"
    assert [len(peers - voters) for peers in kept] == [40, 40, 10, 2, 0]
    assert all(voters <= peers for peers in kept)
    assert all(members[peer].counted >= 7 for peer in kept[2] - voters), "those that have worked"
    only_trainees = members.keys() - voters
    assert steadiest(members, only_trainees, 9, seed="s") == only_trainees
