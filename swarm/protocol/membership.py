"""Who elects the next round [R1, R2]."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from swarm.protocol.manifest import Manifest, Member, PeerId, turn

TRIAL_ROUNDS = 10
"""Rounds in which a member that was taken in owns no more than the fair share [R4]: who claims a
capacity and cannot do the work, or leaves, has held up few experts by then."""


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
) -> Membership:
    """Counts silence, lets leavers go and takes joiners in.

    Not contributing never removes a voter: a live majority that is merely slow would otherwise
    be voted out by the rounds it was too late for. Only silence does, and asking to leave.

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

    Returns:
        At least one member: when everybody would go and nobody joins, those that were to leave
        stay listed, since a manifest without members could never have a successor.
    """
    members, reasons = _staying(
        parent, {*heard, *contributors}, leaving, silent_limit, capacities or {}
    )
    members = {peer: tried(member, peer in contributors) for peer, member in members.items()}
    strangers = [peer for peer in joiners if peer not in parent.members and peer not in leaving]
    strangers.sort(key=lambda peer: (turn(seed, peer), peer))
    room = max(1, len(parent.members))
    for peer in strangers[:room]:
        members[peer] = Member(1, joiners[peer], trial=TRIAL_ROUNDS)
        reasons.append(f"{peer} joined")
    reasons.extend(f"{peer} not yet taken in: {room} joiners a round" for peer in strangers[room:])
    if not members:
        return Membership(
            {
                peer: replace(member, silent=0 if peer in heard else member.silent)
                for peer, member in sorted(parent.members.items())
            },
            ("all members stay listed: nobody else would be left to continue the run",),
        )
    return Membership(dict(sorted(members.items())), tuple(reasons))


def tried(member: Member, is_counted: bool) -> Member:
    """The member after a round, one round less on trial if it contributed."""
    return replace(member, trial=max(0, member.trial - is_counted))


def on_trial(members: Mapping[PeerId, Member]) -> tuple[PeerId, ...]:
    """Members that were taken in lately."""
    return tuple(peer for peer, member in members.items() if member.trial)


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
