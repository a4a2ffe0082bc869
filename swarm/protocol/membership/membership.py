"""Who takes part in the next round, and which members vote [R7, R8].

Policies: member removal, joiner limits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from types import MappingProxyType
from typing import Any

from swarm.protocol.values.invitation import (
    Credential,
    Invitation,
    Used,
    invitation_problem,
    still_good,
    with_use,
)
from swarm.protocol.values.manifest import (
    SEASONED_ROUNDS,
    Digest,
    FormerMember,
    Manifest,
    Member,
    PeerId,
    turn,
)

TRIAL_ROUNDS = 10
"""So many rounds have to count a trainee before it votes, and a newcomer before it owns more than
the fair share (ownership cap). So a peer that cannot do the work that it claims, or leaves early,
delays few experts."""


Members = Mapping[PeerId, Member]


@dataclass(frozen=True)
class Electorate:
    """The members of the next manifest, with or without a vote, and why votes changed."""

    members: dict[PeerId, Member]
    reasons: tuple[str, ...]


Elect = Callable[[Members, Collection[PeerId], str], Electorate]
"""The type of `with_voters`."""


def most_unvouched(num_vouched: int) -> int:
    """The largest number of unvouched voters, given the number of vouched members.

    They are less than a third of all voters, so they form no majority and block none. With one or
    two vouched voters, none are allowed: of two votes, that of the first convener alone decides.
    """
    return max(0, (num_vouched - 1) // 2)


def with_voters(members: Members, contributors: Collection[PeerId], seed: str) -> Electorate:
    """Gives votes to vouched members and trainees that earned them; takes excess votes away [R7].

    An unvouched voter becomes a trainee again when too few vouched members are left.

    Args:
        members: members of the next manifest. Their counted rounds include this round, and their
            votes are still those of the parent.
        contributors: peers whose work this round counted.
        seed: decides the order in which trainees that have earned a vote get it.

    Returns:
        At least one voter: if all voters leave, the trainee that was counted in the most rounds
        gets a vote.
    """
    vouched = {peer for peer, member in members.items() if member.vouched}
    voted = {peer for peer, member in members.items() if member.votes}
    if not vouched:  # there is no vouched member whom others could outvote
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
    """The member after a round, with one more counted round if that round counted it."""
    return replace(member, counted=min(SEASONED_ROUNDS, member.counted + is_counted))


def on_trial(members: Mapping[PeerId, Member]) -> tuple[PeerId, ...]:
    """Members that fewer than `TRIAL_ROUNDS` rounds have counted since they joined."""
    return tuple(peer for peer, member in members.items() if member.counted < TRIAL_ROUNDS)


def steadiest(
    members: Mapping[PeerId, Member], peers: Collection[PeerId], setbacks: int, *, seed: str
) -> frozenset[PeerId]:
    """The peers that stay in a round which was restarted because trainees were missing from it.

    Policy: roster repair.

    This bounds the restarts of a campaign, however many trainees vanish one after the other. Voters
    stay. At the second setback, the quarter of the trainees stays that was counted in the most
    rounds. At each further setback, a quarter of these trainees stays. The others offer their
    experts later (late offers).

    Args:
        members: members of the tip.
        peers: peers that have offered and were not missing.
        setbacks: how often the round was restarted to leave out trainees.
        seed: decides the order of trainees that were counted equally often.
    """
    voters = {peer for peer in peers if peer in members and members[peer].votes}
    trainees = [peer for peer in peers if peer in members and peer not in voters]
    trainees.sort(key=lambda peer: (-members[peer].counted, turn(seed, peer), peer))
    kept = len(trainees) >> (2 * max(0, setbacks - 1))
    return frozenset([*voters, *trainees[:kept]] or peers)


def why_no_vote(manifest: Manifest, peer: PeerId) -> str | None:
    """Why a trainee has no vote; None for voters and strangers."""
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
    """The peers, those counted in the most rounds first."""
    return sorted(peers, key=lambda p: (-members[p].counted, turn(seed, p), p))


def _heir(members: Members, seed: str) -> Electorate:
    heir = _by_work(members, members, seed)[0]
    return Electorate(
        {**members, heir: replace(members[heir], votes=True)},
        (f"{heir} votes from now on: nobody else would be left to decide",),
    )


MAX_ABSENT = 1024
"""The most vouched former members that a manifest remembers. Members that may not invite are
forgotten first; among equals, those that left first."""
NOTHING_SAID: Mapping[PeerId, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Membership:
    """The members of the next manifest, and why members joined, left or changed."""

    members: dict[PeerId, Member]
    """The members in peer-id order."""
    reasons: tuple[str, ...]
    invited: dict[PeerId, Credential] = field(default_factory=dict)
    """Credentials of peers that vote by invitation, in peer-id order."""
    invitations: dict[Digest, Used] = field(default_factory=dict)
    """Invitations that were used and are still valid."""
    absent: dict[PeerId, FormerMember] = field(default_factory=dict)
    """Vouched peers that are not members, in peer-id order."""


def next_members(
    parent: Manifest,
    *,
    heard: Collection[PeerId],
    contributors: Collection[PeerId],
    leaving: Collection[PeerId],
    joiners: Mapping[PeerId, float],
    seed: str,
    silent_limit: int = 3,
    capacities: Mapping[PeerId, float] = NOTHING_SAID,
    rooms: Mapping[PeerId, int] = NOTHING_SAID,
    guests: Guests | None = None,
    elect: Elect = with_voters,
) -> Membership:
    """Counts silent rounds, removes leavers, admits joiners, and gives votes that were earned.

    A stranger starts as a trainee. The founder votes at once, and so do peers for which an anchor
    vouches now or vouched before. In a run that is not open, nobody else may join. A voter is never
    removed for not contributing: otherwise a slow majority would lose its votes by the rounds that
    it misses.

    Args:
        parent: manifest whose members decide.
        heard: peers that sent any READY to the convener in this campaign.
        contributors: peers whose offers are in the round.
        leaving: peers that asked to leave.
        joiners: capacity of strangers that asked to join. At most as many join as there are members
            (at least one), in an order that the seed decides.
        seed: decides that order.
        silent_limit: K. A member is removed after more than K silent rounds.
        capacities: capacities of members that declared a capacity in this campaign; others keep
            theirs.
        rooms: rooms of members that declared a room, and of joiners; others keep theirs.
        guests: decides who may join, and for whom anchors vouch; None: anybody may join, as a
            trainee.
        elect: decides who votes.

    Returns:
        At least one member: when everybody would leave and nobody joins, all members stay listed.
    """
    present, said = {*heard, *contributors}, (capacities, rooms)
    members, reasons = _staying(parent, present, leaving, silent_limit, said)
    members = {peer: counted(member, peer in contributors) for peer, member in members.items()}
    strangers = _in_turn(joiners.keys() - parent.members.keys() - {*leaving}, seed)
    guests = guests or Guests.of(parent, NOTHING_SAID, run="", is_open=True)
    members, of_guests = guests.vouched_for(members)
    newcomers, more = guests.taken_in({peer: joiners[peer] for peer in strangers})
    members |= {peer: _fitted(each, rooms.get(peer)) for peer, each in newcomers.items()}
    if not members:
        return _unchanged(parent, heard)
    elected = elect(guests.charged(members), contributors, seed)
    return Membership(
        dict(sorted(elected.members.items())),
        (*reasons, *of_guests, *more, *elected.reasons),
        dict(sorted(guests.came_with.items())),
        still_good(guests.uses, parent.round + 1),
        absent_after(parent, members, parent.round + 1, guests.given),
    )


def _in_turn(peers: Collection[PeerId], seed: str) -> list[PeerId]:
    return sorted(peers, key=lambda peer: (turn(seed, peer), peer))


def absent_after(
    parent: Manifest,
    members: Collection[PeerId],
    number: int,
    given: Mapping[PeerId, int] = NOTHING_SAID,
) -> dict[PeerId, FormerMember]:
    """Vouched peers that are not members after a manifest.

    Args:
        parent: the manifest before.
        members: the members after it.
        number: training round of the manifest.
        given: how many peers each inviter has admitted by now, where that changed.
    """
    gone = {
        peer: FormerMember(number, member.invites, given.get(peer, member.given), member.weight)
        for peer, member in parent.members.items()
        if member.vouched
    }
    absent = {p: each for p, each in {**parent.absent, **gone}.items() if p not in members}
    last = sorted(absent, key=lambda p: (absent[p].invites > 0, absent[p].since, p))[-MAX_ABSENT:]
    return {peer: absent[peer] for peer in sorted(last)}


def come_back(parent: Manifest, peer: PeerId, capacity: float) -> Member | None:
    """A returning vouched member, or the founder, as a member; None for other peers."""
    if before := parent.absent.get(peer):
        new = Member(1, capacity, counted=0, invites=before.invites, given=before.given)
        return replace(new, weight=before.weight)
    return Member(1, capacity, counted=0) if peer == parent.founding.founder else None


def _unchanged(parent: Manifest, heard: Collection[PeerId]) -> Membership:
    """The membership with all members unchanged, since otherwise there would be none."""
    return Membership(
        {
            peer: replace(member, silent=0 if peer in heard else member.silent)
            for peer, member in sorted(parent.members.items())
        },
        ("all members stay listed: nobody else would be left to continue the run",),
        invitations=still_good(parent.invitations, parent.round + 1),
        absent=dict(parent.absent),
    )


@dataclass
class Guests:
    """Decides peer by peer which peers may join, and which peers are vouched for [R8].

    Attributes:
        shown: the credential of each peer that has shown one.
        uses: uses of invitations: those in the parent, and by guests admitted since.
        came_with: the credentials of the guests admitted since.
        given: number of peers that each inviter of these guests has admitted so far.
    """

    parent: Manifest
    shown: Mapping[PeerId, Credential]
    uses: dict[Digest, Used]
    is_open: bool
    run: str
    came_with: dict[PeerId, Credential] = field(default_factory=dict)
    given: dict[PeerId, int] = field(default_factory=dict)

    @classmethod
    def of(
        cls, parent: Manifest, shown: Mapping[PeerId, Credential], *, run: str, is_open: bool
    ) -> Guests:
        """The state before any guest is admitted."""
        return cls(parent, shown, dict(parent.invitations), is_open, run)

    def vouched_for(
        self, members: Mapping[PeerId, Member]
    ) -> tuple[dict[PeerId, Member], list[str]]:
        """The members with the rights that their credentials give, and a sentence a change."""
        known, reasons = dict(members), []
        for peer in sorted(self.shown.keys() & members.keys()):
            if not self.is_raised(peer, members[peer]):
                continue
            invitation = self._use(peer)
            known[peer] = replace(
                members[peer],
                vouched=True,
                invites=max(members[peer].invites, invitation.invites),
                weight=max(members[peer].weight, invitation.weight),
            )
            reasons.append(f"{invitation.inviter} vouches for {peer}")
        return known, reasons

    def is_raised(self, peer: PeerId, member: Member) -> bool:
        """Whether a member's credential gives the member a right that it does not have yet."""
        shown = self.shown.get(peer)
        if shown is None:
            return False
        used = self.uses.get(shown.invitation.name)
        is_new = used is None or peer not in used.peers
        lacks = member.weight < shown.invitation.weight
        if peer != self.parent.founding.founder:
            lacks = lacks or not member.vouched or member.invites < shown.invitation.invites
        return is_new and lacks and self._problem_of(shown.invitation, peer) is None

    def taken_in(
        self, capacities: Mapping[PeerId, float]
    ) -> tuple[dict[PeerId, Member], list[str]]:
        """The strangers that become members, in the given order, and why or why not."""
        room, num_refused = max(1, len(self.parent.members)), 0
        members: dict[PeerId, Member] = {}
        reasons = []
        for peer, capacity in capacities.items():
            if not self.may_come(peer):
                num_refused += 1
            elif len(members) == room:
                reasons.append(f"{peer} not yet taken in: {room} joiners a round")
            else:
                members[peer], reason = self.received(peer, capacity)
                reasons.append(reason)
        if num_refused:
            reasons.append(f"{num_refused} strangers not taken in: not invited")
        return members, reasons

    def may_come(self, peer: PeerId) -> bool:
        """Whether a stranger may become a member now."""
        return self.is_open or self.problem(peer) is None

    def problem(self, peer: PeerId) -> str | None:
        """Why nobody vouches for a peer; None when somebody does."""
        if peer == self.parent.founding.founder or peer in self.parent.absent:
            return None
        if peer not in self.shown:
            return "it has no invitation"
        return self._problem_of(self.shown[peer].invitation, peer)

    def _problem_of(self, invitation: Invitation, peer: PeerId) -> str | None:
        return invitation_problem(
            invitation,
            peer,
            run=self.run,
            number=self.parent.round + 1,
            uses=self.uses,
            left=self._left_to(invitation.inviter),
        )

    def _left_to(self, inviter: PeerId) -> float:
        """How many peers an inviter may still admit."""
        if inviter == self.parent.founding.founder:
            return inf
        member = self.parent.members.get(inviter)
        return member.invites - self.given.get(inviter, member.given) if member else 0

    def _use(self, peer: PeerId) -> Invitation:
        """Counts the use of an invitation by a guest; a repeated use does not count again."""
        credential = self.came_with[peer] = self.shown[peer]
        invitation = credential.invitation
        inviter = self.parent.members.get(invitation.inviter)
        used = self.uses.get(invitation.name)
        if inviter is not None and inviter.invites and (used is None or peer not in used.peers):
            before = self.given.get(invitation.inviter, inviter.given)
            self.given[invitation.inviter] = before + invitation.cost
        self.uses = with_use(self.uses, invitation, peer)
        return invitation

    def charged(self, members: Mapping[PeerId, Member]) -> dict[PeerId, Member]:
        """The members, each with the number of peers that it has admitted by now."""
        return {
            peer: replace(member, given=self.given[peer]) if peer in self.given else member
            for peer, member in members.items()
        }

    def received(self, peer: PeerId, capacity: float) -> tuple[Member, str]:
        """The newcomer as a member, and a sentence about its admission."""
        if back := come_back(self.parent, peer, capacity):
            return back, f"{peer} joined again, vouched for before"
        if self.problem(peer) is None:
            invitation = self._use(peer)
            new = Member(1, capacity, counted=0, weight=invitation.weight)
            guest = replace(new, invites=invitation.invites)
            return guest, f"{peer} joined, invited by {invitation.inviter}"
        trainee = Member(1, capacity, counted=0, votes=False, vouched=False)
        return trainee, f"{peer} joined as a trainee"


def _fitted(member: Member, room: int | None) -> Member:
    """The member with the room that it declared, if it declared one."""
    return member if room is None else replace(member, room=room)


def _staying(
    parent: Manifest,
    present: Collection[PeerId],
    leaving: Collection[PeerId],
    silent_limit: int,
    declared: tuple[Mapping[PeerId, float], Mapping[PeerId, int]],
) -> tuple[dict[PeerId, Member], list[str]]:
    """The parent's members that neither left nor were silent for too many rounds."""
    members: dict[PeerId, Member] = {}
    reasons = []
    capacities, rooms = declared
    for peer, member in sorted(parent.members.items()):
        silent = 0 if peer in present else member.silent + 1
        if peer in leaving:
            reasons.append(f"{peer} removed: it asked to leave")
        elif silent > silent_limit:
            reasons.append(f"{peer} removed: silent for {silent} rounds, more than {silent_limit}")
        else:
            capacity = capacities.get(peer, member.capacity)
            if capacity != member.capacity:
                reasons.append(f"{peer} has capacity {capacity:g} now, had {member.capacity:g}")
            known = replace(member, silent=silent, capacity=capacity)
            members[peer] = now = _fitted(known, rooms.get(peer))
            if now.room != member.room:
                reasons.append(f"{peer} has room for {now.room} experts now, had {member.room}")
    return members, reasons
