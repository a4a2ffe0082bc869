"""Invitations: guests, inviters, uses, duration, and equal computation by all peers [R8]."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.errors import InvitationError, SwarmError
from swarm.protocol.membership.membership import (
    MAX_ABSENT,
    Guests,
    Membership,
    next_members,
    why_no_vote,
)
from swarm.protocol.messages.message_bytes import decode, encode
from swarm.protocol.messages.messages import Ballot, Ready
from swarm.protocol.rounds.policies.checks import members_problem
from swarm.protocol.values.invitation import (
    MAX_TEXT,
    Credential,
    Invitation,
    PrivateInvitation,
    Used,
    as_text,
    from_text,
    invitation_problem,
    still_good,
    with_use,
)
from swarm.protocol.values.manifest import Manifest, Member
from tests.protocol.messages.test_rounds_membership import join
from tests.protocol.round_pump import found, header_of, in_training, make_rules

RUN = "run-1"
RULES = replace(make_rules(), run=RUN, is_open=False)
GOOD = Invitation(RUN, "K", 2, 0, 5, "A", "A" * 86 + "==")
LINE = as_text(PrivateInvitation(GOOD, "0" * 64))


def shown(invitation: Invitation) -> Credential:
    """A guest's credential. The shell checks its signatures."""
    return Credential(invitation, "A" * 86 + "==")


def problem(invitation: Invitation = GOOD, peer: str = "Z", **changes: object) -> str | None:
    known: dict[str, object] = {"run": RUN, "number": 5, "uses": {}, "left": 9}
    return invitation_problem(invitation, peer, **known | changes)  # type: ignore[arg-type]


def test_an_invitation_is_good_for_its_run_its_rounds_its_uses_and_from_an_anchor() -> None:
    assert problem() is None
    assert "for another run" in (problem(run="run-2") or "")
    gathering = replace(GOOD, run="gathering-1")
    assert "this run has begun" in (problem(gathering) or "")
    assert "is not an anchor" in (problem(left=0) or "")
    assert "may let in 2 more peers, and this invitation takes 3" in (
        problem(replace(GOOD, invites=2), left=2) or ""
    )
    expired = problem(number=6) or ""
    assert expired == ("the invitation has expired: it was good until round 5, the next is round 6")
    full = {GOOD.name: Used(5, ("X", "Y"))}
    assert "used up: 2 of 2 peers" in (problem(uses=full) or "")
    assert problem(peer="Y", uses=full) is None, "a returning guest does not count again"
    assert problem(uses={GOOD.name: Used(5, ("X",))}) is None


def test_two_invitations_share_no_uses_whoever_made_them() -> None:
    other = replace(GOOD, inviter="B", key="L")
    names = {GOOD.name, other.name, replace(GOOD, uses=3).name, replace(GOOD, last_round=6).name}
    assert len(names) == 4
    assert replace(GOOD, signature="other").name == GOOD.name, "a signature may be made again"


def test_uses_are_counted_as_long_as_the_invitation_is_good() -> None:
    uses = with_use(with_use({}, GOOD, "Z"), GOOD, "Y")
    assert uses == with_use(uses, GOOD, "Z") == {GOOD.name: Used(5, ("Z", "Y"))}
    assert still_good(uses, 4) == uses
    assert still_good(uses, 5) == {}


# ---------------------------------------------------------------- as text


def test_the_line_that_people_pass_on_reads_as_it_was_written() -> None:
    assert from_text(f"  {LINE}\n") == PrivateInvitation(GOOD, "0" * 64)
    assert len(LINE) < MAX_TEXT and "\n" not in LINE


@given(st.integers(0, len(LINE) - 1), st.characters())
def test_a_changed_line_is_another_invitation_or_a_typed_error(place: int, mark: str) -> None:
    try:
        assert isinstance(from_text(LINE[:place] + mark + LINE[place + 1 :]), PrivateInvitation)
    except SwarmError as error:
        assert isinstance(error, InvitationError)


@pytest.mark.parametrize("text", ["", "x", "swarm-invitation-", LINE[:-9], "y" * 10**6])
def test_what_is_no_invitation_is_told_so(text: str) -> None:
    with pytest.raises(InvitationError, match=r"not an invitation|damaged"):
        from_text(text)


@pytest.mark.parametrize(
    "change",
    [
        {"uses": 0},
        {"uses": 2000},
        {"invites": -1},
        {"last_round": 2**31},
        {"weight": 0},
        {"weight": 65},
    ],
)
def test_an_invitation_beyond_the_bounds_is_none(change: dict[str, int]) -> None:
    with pytest.raises(InvitationError):
        from_text(as_text(PrivateInvitation(replace(GOOD, **change), "")))


def test_a_ready_carries_it() -> None:
    tip = found(RULES, ["A"])
    ready = Ready(Ballot(0, "A"), None, None, 1.0, credential=shown(GOOD))
    assert decode(encode(header_of(tip), ready)[0], {})[1] == ready


# ---------------------------------------------------------------- who becomes a member


def parent_of(**changes: object) -> Manifest:
    known: dict[str, object] = {"run": RUN, "round": 4}
    return replace(found(RULES, ["A", "B"]), **known | changes)  # type: ignore[arg-type]


def guests_of(
    parent: Manifest, brought: Mapping[str, Invitation | None], *, is_open: bool
) -> Guests:
    credentials = {peer: shown(each) for peer, each in brought.items() if each}
    return replace(RULES, is_open=is_open).guests(parent, credentials)


def came(
    parent: Manifest,
    brought: Mapping[str, Invitation | None],
    *,
    is_open: bool = False,
    leaving: tuple[str, ...] = (),
    joining: bool = True,
) -> Membership:
    """The members after these peers have come with invitations."""
    return next_members(
        parent,
        heard=list(parent.members),
        contributors=list(parent.members),
        leaving=leaving,
        joiners=dict.fromkeys(brought, 1.0) if joining else {},
        seed=parent.digest,
        guests=guests_of(parent, brought, is_open=is_open),
    )


def came_with(parent: Manifest, brought: dict[str, Invitation]) -> Membership:
    """The members after members have shown invitations."""
    return came(parent, brought, is_open=True, joining=False)


def child_of(parent: Manifest, membership: Membership) -> Manifest:
    return replace(
        parent,
        members=membership.members,
        contributors=tuple(parent.members),
        invited=membership.invited,
        invitations=membership.invitations,
        absent=membership.absent,
        round=parent.round + 1,
    )


def test_a_guest_votes_at_once_and_is_an_anchor_only_if_the_invitation_says_so() -> None:
    membership = came(parent_of(), {"Z": GOOD})
    member = membership.members["Z"]
    assert member.votes and member.vouched and not member.counted
    assert membership.invited == {"Z": shown(GOOD)}
    assert membership.invitations == {}, "it was good until this round"
    assert "Z joined, invited by A" in membership.reasons
    later = came(parent_of(), {"Z": replace(GOOD, last_round=9, invites=1)})
    assert list(later.invitations.values()) == [Used(9, ("Z",))]
    child = parent_of(members=later.members)
    assert child.is_anchor("Z") and child.is_anchor("A") and not child.is_anchor("B")
    assert child.head.anchored == {"A", "Z"}
    assert not parent_of(members=membership.members).is_anchor("Z")


def test_an_anchor_lets_in_as_many_as_its_invitation_says_and_the_manifest_counts() -> None:
    members = {"A": Member(0, 1.0), "Z": Member(0, 1.0, invites=2)}
    parent = parent_of(members=members)
    by_z = [replace(GOOD, inviter="Z", key=key, last_round=9) for key in "KLM"]
    first = came(parent, {"P": by_z[0]})
    assert first.members["P"].vouched and first.members["Z"].given == 1
    second = came(child_of(parent, first), {"Q": by_z[1], "R": by_z[2]})
    assert second.members["Z"].given == 2, "one of the two came"
    assert len(second.members.keys() & {"Q", "R"}) == 1
    with_guests = came(child_of(parent, first), {"Q": replace(by_z[1], invites=1)})
    assert "Q" not in with_guests.members, "its own guests are of the same total"
    gone = came(child_of(parent, first), {}, leaving=("Z",))
    back = came(child_of(child_of(parent, first), gone), {"Z": None})
    assert (back.members["Z"].invites, back.members["Z"].given) == (2, 1), "leaving refills nothing"


def test_a_peer_that_is_vouched_for_comes_back_as_it_was_and_needs_to_show_nothing() -> None:
    parent = parent_of()
    gone = came(parent, {}, leaving=("B",))
    assert gone.absent.keys() == {"B"}
    later = replace(child_of(parent, gone), round=1000)
    back = came(later, {"B": None, "X": None})
    assert back.members["B"].votes and back.members["B"].vouched
    assert "X" not in back.members and not back.absent
    trainee = Member(0, 1.0, counted=40, votes=False, vouched=False)
    open_run = parent_of(members={**parent.members, "T": trainee})
    assert "T" not in came(open_run, {}, leaving=("T",)).absent, "nobody has vouched for it"


def test_the_peers_that_a_manifest_remembers_are_bounded() -> None:
    members = {f"m{number:04}": Member(9, 1.0) for number in range(MAX_ABSENT + 9)}
    parent = parent_of(members={"A": Member(0, 1.0), "Z": Member(9, 1.0, invites=1), **members})
    absent = next_members(
        parent, heard=["A"], contributors=["A"], leaving=(), joiners={}, seed="s"
    ).absent
    assert len(absent) == MAX_ABSENT and "Z" in absent


def test_an_anchor_vouches_for_a_member() -> None:
    trainee = Member(0, 1.0, counted=3, votes=False, vouched=False)
    parent = parent_of(members={**parent_of().members, "T": trainee})
    membership = came_with(parent, {"T": replace(GOOD, key="T", uses=1)})
    member = membership.members["T"]
    assert member.votes and member.vouched and member.counted == 4
    assert membership.invited.keys() == {"T"}
    assert "A vouches for T" in membership.reasons
    assert not came_with(parent, {"T": replace(GOOD, inviter="B")}).members["T"].votes
    anchor = parent_of(members={**parent.members, "T": Member(0, 1.0, invites=2, given=2)})
    again = came_with(anchor, {"T": replace(GOOD, last_round=9, invites=2)})
    assert again.members["T"] == anchor.members["T"], "nothing is gained"


def test_an_anchor_trusts_a_guest_with_the_work_of_several_members() -> None:
    heavy = replace(GOOD, last_round=9, weight=8)
    parent = parent_of()
    guest = came(parent, {"Z": heavy})
    assert child_of(parent, guest).trusted == {"Z": 8}
    gone = came(child_of(parent, guest), {}, leaving=("Z",))
    back = came(child_of(child_of(parent, guest), gone), {"Z": None})
    assert back.members["Z"].weight == 8, "a guest comes back as it was"
    member = came_with(parent, {"B": replace(heavy, key="B")}).members["B"]
    assert member.weight == 8
    lighter = came_with(parent_of(members={"A": Member(0, 1.0), "B": member}), {"B": GOOD})
    assert lighter.members["B"].weight == 8


def test_the_founder_trusts_itself_with_more_and_nobody_else_may() -> None:
    heavy = replace(GOOD, key="A", last_round=9, weight=8)
    assert came_with(parent_of(), {"A": heavy}).members["A"].weight == 8
    by_other = replace(heavy, inviter="B")
    assert came_with(parent_of(), {"A": by_other}).members["A"].weight == 1


def test_a_guest_of_weight_w_takes_w_of_what_its_inviter_may_let_in() -> None:
    members = {"A": Member(0, 1.0), "Y": Member(0, 1.0, invites=8)}
    by_guest = replace(GOOD, inviter="Y", last_round=9, weight=8)
    membership = came(parent_of(members=members), {"Z": by_guest})
    assert membership.members["Z"].weight == 8 and membership.members["Y"].given == 8
    more = came(parent_of(members=members), {"Z": replace(by_guest, weight=9)})
    assert "Z" not in more.members


def test_only_the_invited_and_the_founder_come_into_an_invited_run() -> None:
    bad = replace(GOOD, inviter="B")
    membership = came(parent_of(), {"X": None, "Y": bad, "Z": GOOD})
    assert membership.members.keys() == {"A", "B", "Z"}
    assert "2 strangers not taken in: not invited" in membership.reasons
    without_founder = parent_of(members={"B": Member(0, 1.0)})
    assert came(without_founder, {"A": None}).members["A"].votes


def test_strangers_without_invitations_take_no_room_from_the_invited() -> None:
    brought = dict.fromkeys([f"X{number}" for number in range(20)]) | {"Y": GOOD, "Z": GOOD}
    assert came(parent_of(), brought).members.keys() == {"A", "B", "Y", "Z"}


def test_in_an_open_run_others_are_trainees() -> None:
    late = replace(GOOD, last_round=3)
    membership = came(parent_of(), {"X": None, "Y": late}, is_open=True)
    assert not any(membership.members[peer].votes for peer in "XY")
    assert {"X joined as a trainee", "Y joined as a trainee"} <= set(membership.reasons)


def test_one_use_takes_in_one_of_those_that_come_at_once() -> None:
    once = replace(GOOD, uses=1, last_round=9)
    membership = came(parent_of(), {"X": once, "Y": once})
    assert len(membership.members.keys() & {"X", "Y"}) == 1
    child = parent_of(members=membership.members, invitations=membership.invitations, round=5)
    assert len(came(child, {"W": once}).members) == 3


# ---------------------------------------------------------------- acceptors


def test_acceptors_compute_the_same_uses_and_refuse_any_others() -> None:
    parent = parent_of()
    membership = came(parent, {"Y": replace(GOOD, last_round=9), "Z": GOOD})
    child = child_of(parent, membership)
    assert members_problem(child, parent, RULES) is None

    def inviting(**others: Invitation) -> Manifest:
        invited = {peer: shown(invitation) for peer, invitation in others.items()}
        return replace(child, invited={**child.invited, **invited})

    wrong = {
        "forgotten": replace(child, invitations={}),
        "without": replace(child, invited={"Z": shown(GOOD)}),
        "another run's": inviting(Z=replace(GOOD, run="r-2")),
        "of no anchor": inviting(Z=replace(GOOD, inviter="B")),
        "expired": inviting(Z=replace(GOOD, last_round=4)),
        "of who did not come": inviting(B=GOOD),
    }
    for name, manifest in wrong.items():
        assert members_problem(manifest, parent, RULES), name
    used = replace(parent, invitations={GOOD.name: Used(5, ("P", "Q"))})
    assert members_problem(child, used, RULES), "used up"
    made = {**child.members, "Z": Member(1, 1.0)}
    assert members_problem(replace(child, members=made), parent, RULES), "seasoned at once"


def test_acceptors_refuse_votes_that_were_not_earned() -> None:
    rules = replace(RULES, is_open=True)
    members = {peer: Member(0, 1.0) for peer in "ABCDEFGH"} | {
        "T": Member(0, 1.0, counted=8, votes=False, vouched=False)
    }
    parent = parent_of(members=members)
    child = replace(
        parent,
        members={**members, "T": replace(members["T"], counted=9)},
        contributors=tuple(members),
        round=5,
    )
    assert members_problem(child, parent, rules) is None
    for member in (
        replace(members["T"], counted=9, votes=True),
        replace(members["T"], counted=10),
        replace(members["T"], counted=9, vouched=True),
        replace(members["T"], counted=9, invites=1),
        replace(members["T"], counted=9, weight=8),
    ):
        assert members_problem(
            replace(child, members={**child.members, "T": member}), parent, rules
        )
    assert "9 of 10" in (why_no_vote(child, "T") or "")


# ---------------------------------------------------------------- between machines


def test_an_invited_peer_votes_from_the_manifest_on_that_takes_it_in() -> None:
    pump = in_training("ABC", RULES, height=1)
    guest, stranger = join(pump, "J"), join(pump, "S")
    guest.machine._peer.credential = shown(replace(GOOD, uses=1, invites=1, last_round=99))
    thief = join(pump, "T")
    assert pump.run(pump.now + 20, lambda: "J" in pump.tip_of("A").voters)
    thief.machine._peer.credential = guest.machine._peer.credential
    pump.run(pump.now + 30)
    assert pump.tip_of("A").members.keys() == set("ABCJ")
    heard = [reason.text for reason in stranger.reasons]
    assert any("admits invited peers only" in text for text in heard)
    assert any("no invitation" in text for text in heard)
    assert any("used up" in reason.text for reason in thief.reasons)
    assert "J" in pump.tip_of("A").head.anchored
