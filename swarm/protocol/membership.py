"""Who takes part in the next round, and who of them elects it [R1, R2, R7, R8]."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from swarm.protocol.invitation import Invitation, Used, invitation_problem, still_good, with_use
from swarm.protocol.manifest import Digest, Manifest, Member, PeerId, turn
from swarm.protocol.voting import Elect, counted, with_voters

NOTHING_SAID: Mapping[PeerId, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Membership:
    """The members of the next manifest, and why anybody came or went."""

    members: dict[PeerId, Member]
    """In peer-id order."""
    reasons: tuple[str, ...]
    invited: dict[PeerId, Invitation] = field(default_factory=dict)
    """With what newcomers came that vote at once, in peer-id order."""
    invitations: dict[Digest, Used] = field(default_factory=dict)
    """Invitations that were used and are still good."""


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
    is_open: bool = True,
    invitations: Mapping[PeerId, Invitation] | None = None,
    run: str = "",
    elect: Elect = with_voters,
) -> Membership:
    """Counts silence, lets leavers go, takes joiners in, and gives votes to who has earned them.

    A stranger is a trainee at first, who was removed before likewise; the founder and who is
    invited vote at once. In a run that is not open nobody else comes. Not contributing never
    removes a voter: a live majority that is merely slow would otherwise be voted out by the rounds
    it was too late for. Only silence does, and asking to leave.

    Args:
        parent: manifest whose members decide.
        heard: peers that sent any READY to the convener in this campaign.
        contributors: peers whose offers are in the round.
        leaving: peers that asked to leave.
        joiners: capacity of strangers that asked to join. At most as many are taken as there are
            members (at least one), in an order that the seed draws.
        seed: of that order.
        silent_limit: K; a member goes after more than so many silent rounds.
        capacities: of members that declared one in this campaign; others keep theirs.
        rooms: likewise, and of joiners.
        is_open: whether strangers become members without an invitation.
        invitations: those that joiners have shown, signed by whom they name.
        run: its id, which invitations name.
        elect: gives votes.

    Returns:
        At least one member: when everybody would go and nobody joins, those that were to leave
        stay listed, since a manifest without members could never have a successor.
    """
    present, said = {*heard, *contributors}, (capacities, rooms)
    members, reasons = _staying(parent, present, leaving, silent_limit, said)
    members = {peer: counted(member, peer in contributors) for peer, member in members.items()}
    strangers = [peer for peer in joiners if peer not in parent.members and peer not in leaving]
    strangers.sort(key=lambda peer: (turn(seed, peer), peer))
    guests = Guests.of(parent, invitations or {}, run=run, is_open=is_open)
    newcomers, reasons_of_guests = guests.taken_in({peer: joiners[peer] for peer in strangers})
    members |= {peer: _fitted(member, rooms.get(peer)) for peer, member in newcomers.items()}
    if not members:
        return _unchanged(parent, heard)
    elected = elect(members, contributors, seed, is_open)
    return Membership(
        dict(sorted(elected.members.items())),
        (*reasons, *reasons_of_guests, *elected.reasons),
        dict(sorted(guests.came_with.items())),
        still_good(guests.uses, parent.round + 1),
    )


def _unchanged(parent: Manifest, heard: Collection[PeerId]) -> Membership:
    """All members stay, although none would."""
    return Membership(
        {
            peer: replace(member, silent=0 if peer in heard else member.silent)
            for peer, member in sorted(parent.members.items())
        },
        ("all members stay listed: nobody else would be left to continue the run",),
        invitations=still_good(parent.invitations, parent.round + 1),
    )


@dataclass
class Guests:
    """Who may come, one newcomer after the other [R8].

    Attributes:
        shown: the invitation of each joiner that has one.
        uses: of invitations, by the parent and by those that have come since.
        came_with: the invitations of those.
    """

    parent: Manifest
    shown: Mapping[PeerId, Invitation]
    uses: dict[Digest, Used]
    is_open: bool
    run: str
    came_with: dict[PeerId, Invitation] = field(default_factory=dict)

    @classmethod
    def of(
        cls, parent: Manifest, shown: Mapping[PeerId, Invitation], *, run: str, is_open: bool
    ) -> Guests:
        """Before anybody has come."""
        return cls(parent, shown, dict(parent.invitations), is_open, run)

    def taken_in(
        self, capacities: Mapping[PeerId, float]
    ) -> tuple[dict[PeerId, Member], list[str]]:
        """Those of these strangers that become members, in their order, and why or why not."""
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
        is_founder = peer == self.parent.founding.founder
        return self.is_open or is_founder or self.problem(peer) is None

    def problem(self, peer: PeerId) -> str | None:
        """Why a stranger does not count as invited; None when it does."""
        invitation = self.shown.get(peer)
        if invitation is None:
            return "it has no invitation"
        return invitation_problem(
            invitation,
            peer,
            run=self.run,
            number=self.parent.round + 1,
            uses=self.uses,
            is_anchor=self.parent.is_anchor(invitation.inviter),
        )

    def received(self, peer: PeerId, capacity: float) -> tuple[Member, str]:
        """The newcomer as a member, and what to say about it."""
        if self.problem(peer) is None:
            invitation = self.came_with[peer] = self.shown[peer]
            self.uses = with_use(self.uses, invitation, peer)
            member = Member(1, capacity, counted=0, invited=True)
            return member, f"{peer} joined, invited by {invitation.inviter}"
        if peer == self.parent.founding.founder:
            return Member(1, capacity, counted=0), f"{peer} joined again, the founder"
        return Member(1, capacity, counted=0, votes=False), f"{peer} joined as a trainee"


def _fitted(member: Member, room: int | None) -> Member:
    """The member with the room that it has declared, if it has."""
    return member if room is None else replace(member, room=room)


def _staying(
    parent: Manifest,
    present: Collection[PeerId],
    leaving: Collection[PeerId],
    silent_limit: int,
    declared: tuple[Mapping[PeerId, float], Mapping[PeerId, int]],
) -> tuple[dict[PeerId, Member], list[str]]:
    """The parent's members that neither left nor were silent for too long."""
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
