"""What of a round follows from parent and manifest, computed anew [R1, R2, R4, R5, R7, R8]. Pure.

A convener says whom it heard, who asked to join and who asked to leave. Everything else about
members and owners follows from that, so a proposal is compared with what its own claims lead to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from swarm.protocol.manifest import Manifest, Member, PeerId
from swarm.protocol.membership import Membership
from swarm.protocol.rounds.composition import NO_WISH, Attendance, members_after, owners_after
from swarm.protocol.rounds.rules import Rules


def members_problem(manifest: Manifest, parent: Manifest, rules: Rules) -> str | None:
    """Why these cannot be the members after a round; None when they can [R1, R2, R7, R8].

    Silence counts on or begins anew, capacity and room change only when their member was heard,
    nobody goes unless it was silent for too long or has signed a wish to, not too many come, and
    nobody votes that has not earned it.
    """
    gone = parent.members.keys() - manifest.members.keys()
    unsigned = sorted(set(wishes_of(manifest, parent, rules)) - manifest.wishes.keys())
    if unsigned:
        return f"it lets {unsigned[0]} go, which has not signed a wish to leave"
    if not manifest.wishes.keys() <= gone:
        return "it holds wishes to leave of others than those that it lets go"
    claimed = _without_pace(manifest.members)
    guests = (manifest.invited, manifest.invitations, manifest.absent)
    for possible in _possible(manifest, parent, rules):
        found = (possible.invited, possible.invitations, possible.absent)
        if (_without_pace(possible.members), found) == (claimed, guests):
            return None
    first = next(_possible(manifest, parent, rules))
    expected = _without_pace(first.members)
    if expected == claimed:
        return "its invitations do not follow from its parent"
    different = [
        peer for peer in sorted({*expected, *claimed}) if expected.get(peer) != claimed.get(peer)
    ]
    return f"its member {different[0]} does not follow from its parent"


def _possible(manifest: Manifest, parent: Manifest, rules: Rules) -> Iterator[Membership]:
    """What membership there is by the manifest's own claims.

    Either those went that it lets go, or all would have gone: then they stay listed.
    """
    heard = {peer for peer, member in manifest.members.items() if member.silent == 0}
    for leaving in (wishes_of(manifest, parent, rules), tuple(parent.members)):
        attendance = Attendance(
            heard=heard,
            leaving=dict.fromkeys(leaving, NO_WISH),
            joiners={
                peer: member.capacity
                for peer, member in manifest.members.items()
                if peer not in parent.members
            },
            capacities={peer: manifest.members[peer].capacity for peer in heard},
            rooms={
                peer: member.room
                for peer, member in manifest.members.items()
                if peer in heard or peer not in parent.members
            },
            credentials=manifest.invited,
        )
        yield members_after(parent, manifest.contributors, attendance, rules)


def wishes_of(manifest: Manifest, parent: Manifest, rules: Rules) -> tuple[PeerId, ...]:
    """Members that a manifest lets go although they were not silent for too long."""
    return tuple(
        peer
        for peer, member in parent.members.items()
        if peer not in manifest.members
        and (peer in manifest.contributors or member.silent + 1 <= rules.silent_rounds)
    )


def _without_pace(members: Mapping[PeerId, Member]) -> dict[PeerId, Member]:
    """The pace is judged by itself: contributors say their own."""
    return {peer: replace(member, tokens_per_s=0.0) for peer, member in members.items()}


def ownership_problem(manifest: Manifest, parent: Manifest, rules: Rules) -> str | None:
    """Why these cannot be the owners after a round; None when they can [R4, R5]."""
    expected = owners_after(
        parent, manifest.members, manifest.contributors, manifest.entries, rules
    ).owners
    for expert, owners in manifest.owners.items():
        if owners != expected[expert]:
            wrong, right = (", ".join(each) or "nobody" for each in (owners, expected[expert]))
            return f"expert {expert} goes to {wrong}, not {right}"
    return None
