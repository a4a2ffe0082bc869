"""Who votes from the next height on [R7]. Pure.

A vote is a share in every later decision, and a key costs nothing. So it is earned by work that
rounds have counted, slowly, and by few at a time: however many keys come, and whenever they all
vanish, the voters that were there before are a quorum without them.

A swarm of fewer than `FEW` voters is more endangered by losing one of them than by keys that do
real work first: there one counted round is enough, so that a run outlives its founder.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from swarm.protocol.manifest import SEASONED_ROUNDS, Manifest, Member, PeerId, turn

TRIAL_ROUNDS = 10
"""Rounds that have to count a trainee before it votes, and before a newcomer owns more than the
fair share [R5]: a peer that claims a capacity and cannot do the work, or leaves, has held up few
experts by then."""
FEW = 8
"""Below so many voters an open run takes a new one in each round, after one that counted it."""
SHARE = 10
"""At most one new voter for so many voters a round, and one at least."""
YOUNG_SHARE = 4
"""Fewer than one voter in so many is young: all of them may vanish at once."""


Members = Mapping[PeerId, Member]


@dataclass(frozen=True)
class Electorate:
    """The members of the next manifest, each with its vote or without, and why votes were given."""

    members: dict[PeerId, Member]
    reasons: tuple[str, ...]


Elect = Callable[[Members, Collection[PeerId], str, bool], Electorate]
"""What `with_voters` is."""


def with_voters(
    members: Members, contributors: Collection[PeerId], seed: str, is_open: bool
) -> Electorate:
    """Gives votes to trainees that have earned them [R7].

    Args:
        members: of the next manifest, this round counted; those that voted before still do.
        contributors: peers that this round counted.
        seed: of the order in which trainees that have earned their vote get it.
        is_open: whether strangers may become members, so that few voters take in others fast.

    Returns:
        At least one voter: if all of them leave, the trainee that most rounds have counted votes.
    """
    trainees = [peer for peer, member in members.items() if not member.votes]
    if len(trainees) == len(members):
        return _heir(members, trainees, seed)
    num_voters = len(members) - len(trainees)
    is_small = is_open and num_voters < FEW
    needed = 1 if is_small else TRIAL_ROUNDS
    earned = [p for p in trainees if p in contributors and members[p].counted >= needed]
    earned.sort(key=lambda peer: (turn(seed, peer), peer))
    room = room_for_voters(members, num_voters, is_small=is_small)
    chosen = earned[:room]
    reasons = [
        f"{peer} votes from now on: {members[peer].counted} rounds have counted it"
        for peer in chosen
    ]
    if earned[room:]:
        reasons.append(
            f"{len(earned) - room} trainees wait for their vote: {room} more for {num_voters} "
            f"voters, of which {_num_young(members)} are young"
        )
    return Electorate(
        {p: replace(m, votes=True) if p in chosen else m for p, m in members.items()},
        tuple(reasons),
    )


def room_for_voters(members: Mapping[PeerId, Member], num_voters: int, *, is_small: bool) -> int:
    """How many trainees may become voters in one round.

    Each of them is young, and after it those that are must be less than a quarter of all voters.
    """
    if is_small:
        return 1
    room, young = max(1, num_voters // SHARE), _num_young(members)
    while room and YOUNG_SHARE * (young + room) >= num_voters + room:
        room -= 1
    return room


def is_young(member: Member) -> bool:
    """Whether a voter has earned its vote lately; for an invited one somebody vouches."""
    return member.votes and not member.invited and member.counted < SEASONED_ROUNDS


def counted(member: Member, is_counted: bool) -> Member:
    """The member after a round, one round older if that counted it."""
    return replace(member, counted=min(SEASONED_ROUNDS, member.counted + is_counted))


def on_trial(members: Mapping[PeerId, Member]) -> tuple[PeerId, ...]:
    """Members that were taken in lately."""
    return tuple(peer for peer, member in members.items() if member.counted < TRIAL_ROUNDS)


def steadiest(
    members: Mapping[PeerId, Member], peers: Collection[PeerId], setbacks: int, *, seed: str
) -> frozenset[PeerId]:
    """With whom a round goes on that had to begin anew, since trainees were missed in it [C4].

    However many keys vanish one after the other, a campaign begins anew a few times only: voters
    stay, of the trainees after the first setback those that most rounds have counted, a quarter,
    then a quarter of these, and so on. The experts of the others come later [O2].

    Args:
        members: of the tip.
        peers: that have offered and were not missed.
        setbacks: how often the round has begun anew without trainees.
        seed: of the order among those that were counted equally often.
    """
    voters = {peer for peer in peers if peer in members and members[peer].votes}
    trainees = [peer for peer in peers if peer in members and peer not in voters]
    trainees.sort(key=lambda peer: (-members[peer].counted, turn(seed, peer), peer))
    kept = len(trainees) >> (2 * max(0, setbacks - 1))
    return frozenset([*voters, *trainees[:kept]] or peers)


def why_no_vote(manifest: Manifest, peer: PeerId, *, is_open: bool) -> str | None:
    """What a trainee lacks to vote; None for voters and strangers."""
    member = manifest.members.get(peer)
    if member is None or member.votes:
        return None
    num_voters = len(manifest.voters)
    is_small = is_open and num_voters < FEW
    needed = 1 if is_small else TRIAL_ROUNDS
    had = f"{min(member.counted, needed)} of {needed} rounds have counted it"
    if member.counted < needed:
        return f"this peer has no vote yet: {had}"
    room = room_for_voters(manifest.members, num_voters, is_small=is_small)
    return (
        f"this peer has no vote yet: {had}, but only {room} trainees may become voters in a round "
        f"now, with {num_voters} voters of which {_num_young(manifest.members)} are young"
    )


def _heir(members: Mapping[PeerId, Member], trainees: list[PeerId], seed: str) -> Electorate:
    heir = min(trainees, key=lambda p: (-members[p].counted, turn(seed, p), p))
    return Electorate(
        {**members, heir: replace(members[heir], votes=True)},
        (f"{heir} votes from now on: nobody else would be left to decide",),
    )


def _num_young(members: Mapping[PeerId, Member]) -> int:
    return sum(is_young(member) for member in members.values())
