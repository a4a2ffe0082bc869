"""Who takes part in the next round, and who of them elects it [R1, R2, R7]."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from swarm.protocol.manifest import Manifest, Member, PeerId, turn
from swarm.protocol.voting import counted, with_voters


@dataclass(frozen=True)
class Membership:
    """The members of the next manifest, and why anybody came or went."""

    members: dict[PeerId, Member]
    """In peer-id order."""
    reasons: tuple[str, ...]


def next_members(
    parent: Manifest,
    *,
    heard: Collection[PeerId],
    contributors: Collection[PeerId],
    leaving: Collection[PeerId],
    joiners: Mapping[PeerId, float],
    seed: str,
    silent_limit: int = 3,
    capacities: Mapping[PeerId, float] | None = None,
    is_open: bool = True,
) -> Membership:
    """Counts silence, lets leavers go, takes joiners in, and gives votes to who has earned them.

    A stranger is a trainee at first, who was removed before likewise; the founder votes at once
    whenever it comes back. Not contributing never removes a voter: a live majority that is merely
    slow would otherwise be voted out by the rounds it was too late for. Only silence does, and
    asking to leave.

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
        is_open: whether strangers become members without an invitation.

    Returns:
        At least one member: when everybody would go and nobody joins, those that were to leave
        stay listed, since a manifest without members could never have a successor.
    """
    members, reasons = _staying(
        parent, {*heard, *contributors}, leaving, silent_limit, capacities or {}
    )
    members = {peer: counted(member, peer in contributors) for peer, member in members.items()}
    strangers = [peer for peer in joiners if peer not in parent.members and peer not in leaving]
    strangers.sort(key=lambda peer: (turn(seed, peer), peer))
    room = max(1, len(parent.members))
    for peer in strangers[:room]:
        votes = peer == parent.founding.founder
        members[peer] = Member(1, joiners[peer], counted=0, votes=votes)
        reasons.append(f"{peer} joined{'' if votes else ' as a trainee'}")
    reasons.extend(f"{peer} not yet taken in: {room} joiners a round" for peer in strangers[room:])
    if not members:
        return Membership(
            {
                peer: replace(member, silent=0 if peer in heard else member.silent)
                for peer, member in sorted(parent.members.items())
            },
            ("all members stay listed: nobody else would be left to continue the run",),
        )
    elected = with_voters(members, contributors, seed=seed, is_open=is_open)
    return Membership(dict(sorted(elected.members.items())), (*reasons, *elected.reasons))


def _staying(
    parent: Manifest,
    present: Collection[PeerId],
    leaving: Collection[PeerId],
    silent_limit: int,
    capacities: Mapping[PeerId, float],
) -> tuple[dict[PeerId, Member], list[str]]:
    """The parent's members that neither left nor were silent for too long."""
    members: dict[PeerId, Member] = {}
    reasons = []
    for peer, member in sorted(parent.members.items()):
        silent = 0 if peer in present else member.silent + 1
        if peer in leaving:
            reasons.append(f"{peer} removed: it asked to leave")
        elif silent > silent_limit:
            reasons.append(f"{peer} removed: silent for {silent} rounds, more than {silent_limit}")
        else:
            declared = capacities.get(peer, member.capacity)
            if declared != member.capacity:
                reasons.append(f"{peer} has capacity {declared:g} now, had {member.capacity:g}")
            members[peer] = replace(member, silent=silent, capacity=declared)
    return members, reasons
