"""Which members vote from the next height on [R7]. Pure.

A vote is a share in every later decision, and a key costs nothing. Nor does work prove much: many
keys can share one machine. So members that an anchor vouches for always keep more than two thirds
of the votes. Others earn a vote by work that rounds have counted, one a round, up to
`most_unvouched`. However many keys come, and whenever they all vanish, the vouched voters decide
without them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from swarm.protocol.manifest import SEASONED_ROUNDS, Manifest, Member, PeerId, turn

TRIAL_ROUNDS = 10
"""Rounds that have to count a trainee before it votes, and before a newcomer owns more than the
fair share [R5]: a peer that claims a capacity and cannot do the work, or leaves, has held up few
experts by then."""


Members = Mapping[PeerId, Member]


@dataclass(frozen=True)
class Electorate:
    """The members of the next manifest, each with its vote or without, and why votes were given."""

    members: dict[PeerId, Member]
    reasons: tuple[str, ...]


Elect = Callable[[Members, Collection[PeerId], str], Electorate]
"""What `with_voters` is."""


def most_unvouched(num_vouched: int) -> int:
    """How many voters may be without an anchor's word where so many have it.

    They are less than a third of all voters, so they are no majority and block none. With one or
    two vouched voters there are none: half of two votes decides, with the first convener's.
    """
    return max(0, (num_vouched - 1) // 2)


def with_voters(members: Members, contributors: Collection[PeerId], seed: str) -> Electorate:
    """Gives votes to the vouched and to trainees that have earned them; takes some away [R7].

    An unvouched voter becomes a trainee again when too few vouched members are left.

    Args:
        members: of the next manifest, this round counted; those that voted before still do.
        contributors: peers that this round counted.
        seed: of the order in which trainees that have earned their vote get it.

    Returns:
        At least one voter: if all of them leave, the trainee that most rounds have counted votes.
    """
    vouched = {peer for peer, member in members.items() if member.vouched}
    voted = {peer for peer, member in members.items() if member.votes}
    if not vouched:  # nobody is left that could be outvoted
        return Electorate(dict(members), ()) if voted else _heir(members, seed)
    most, unvouched = most_unvouched(len(vouched)), voted - vouched
    kept = _by_work(members, unvouched, seed)[:most]
    earned = [
        peer
        for peer in members.keys() - vouched - voted
        if peer in contributors and members[peer].counted >= TRIAL_ROUNDS
    ]
    earned.sort(key=lambda peer: (turn(seed, peer), peer))
    chosen = earned[: min(1, most - len(kept))]
    voters = vouched.union(kept, chosen)
    return Electorate(
        {p: replace(m, votes=p in voters) if m.votes != (p in voters) else m
         for p, m in members.items()},
        tuple(_reasons(members, voters, len(earned) - len(chosen), most)),
    )  # fmt: skip


def _reasons(members: Members, voters: set[PeerId], waiting: int, most: int) -> Iterator[str]:
    for peer, member in members.items():
        if peer in voters and not member.votes and not member.vouched:
            yield f"{peer} votes from now on: {member.counted} rounds have counted it"
        elif peer in voters and not member.votes:
            yield f"{peer} votes from now on: an anchor vouches for it"
        elif member.votes and peer not in voters:
            yield f"{peer} has no vote any more: too few vouched members are left"
    if waiting:
        yield f"{waiting} trainees wait for their vote: {most} unvouched voters at most"


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


def why_no_vote(manifest: Manifest, peer: PeerId) -> str | None:
    """What a trainee lacks to vote; None for voters and strangers."""
    member = manifest.members.get(peer)
    if member is None or member.votes:
        return None
    num_vouched = len(manifest.vouched)
    most = most_unvouched(num_vouched)
    had = f"{min(member.counted, TRIAL_ROUNDS)} of {TRIAL_ROUNDS} rounds have counted it"
    if most and member.counted < TRIAL_ROUNDS:
        return f"this peer has no vote yet: {had}"
    return (
        f"this peer has no vote: {had}, and with {num_vouched} vouched members {most} others vote "
        f"at most; an anchor may vouch for it with swarm-invite --for {peer}"
    )


def _by_work(members: Members, peers: Collection[PeerId], seed: str) -> list[PeerId]:
    """Those that most rounds have counted before the others."""
    return sorted(peers, key=lambda p: (-members[p].counted, turn(seed, p), p))


def _heir(members: Members, seed: str) -> Electorate:
    heir = _by_work(members, members, seed)[0]
    return Electorate(
        {**members, heir: replace(members[heir], votes=True)},
        (f"{heir} votes from now on: nobody else would be left to decide",),
    )
