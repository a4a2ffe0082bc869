"""V1, R2 and I15: which members vote, which come from where, and for which an anchor vouches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from swarm.emulation.simulator.violation import require, short
from swarm.protocol.invitation import Credential, Invitation
from swarm.protocol.manifest import Manifest, PeerId


def check_votes(manifest: Manifest, parent: Manifest) -> None:
    """Votes are earned one a round, and those without an anchor's word stay under a third [R7]."""
    new = manifest.voters - parent.voters - manifest.vouched
    unvouched = manifest.voters - manifest.vouched
    earned = all(manifest.members[p].counted >= 10 for p in new)
    few = len(new) <= 1 and 2 * len(unvouched) < max(1, len(manifest.vouched))
    require(
        not manifest.vouched or (earned and few),
        "V1",
        f"{short(manifest)}: {sorted(new)} vote now, of {sorted(unvouched)} without an anchor's "
        f"word, {len(manifest.vouched)} have one",
    )


def check_trainees(
    manifest: Manifest, parent: Manifest, network_of: Callable[[PeerId], str | None]
) -> None:
    """No trainee is the fifth of its network, however many keys ask."""
    new = manifest.members.keys() - parent.members.keys() - manifest.vouched
    for network in {network_of(peer) for peer in new} - {None}:
        trainees = {*(parent.members.keys() - parent.voters), *new}
        there = sorted(peer for peer in trainees if network_of(peer) == network)
        require(len(there) <= 4, "R2", f"{short(manifest)}: {there} are of one network")


def check_vouched(
    manifest: Manifest, parent: Manifest, given: Collection[tuple[PeerId, Credential]]
) -> None:
    """Anchors vouch for what they signed and no more, and what they once said stays said [R8]."""
    name, shown = short(manifest), manifest.invited
    known = {manifest.founding.founder} | parent.vouched | parent.absent.keys()
    new, lost = manifest.vouched - known, known & manifest.members.keys() - manifest.vouched
    require(new <= shown.keys(), "I15", f"{name}: nobody vouches for {sorted(new)}")
    require(not lost, "I15", f"{name}: nobody vouches for {sorted(lost)} any more")
    for peer, credential in shown.items():
        is_own = (peer, credential) in given
        require(is_own, "I15", f"{name}: nobody has given {peer} what it shows")
        require(
            credential.invitation.last_round >= manifest.round,
            "I15",
            f"{name}: {peer} comes with what had expired",
        )
    _check_uses(manifest, parent)


def _check_uses(manifest: Manifest, parent: Manifest) -> None:
    """No more come with an invitation, or by one anchor, than may."""
    name, of_inviter = short(manifest), Counter[PeerId]()
    of_invitation: dict[Invitation, set[PeerId]] = {}
    for peer, credential in manifest.invited.items():
        invitation = credential.invitation
        of_invitation.setdefault(invitation, set()).add(peer)
        of_inviter[invitation.inviter] += invitation.weight + invitation.invites
    for invitation, guests in of_invitation.items():
        before = parent.invitations.get(invitation.name)
        came = [*(before.peers if before else ()), *sorted(guests)]
        is_fair = len(came) == len(set(came)) <= invitation.uses
        require(is_fair, "I15", f"{name}: {came} came with an invitation for {invitation.uses}")
    for inviter in of_inviter.keys() - {manifest.founding.founder}:
        anchor = parent.members.get(inviter)
        left = anchor.invites - anchor.given if anchor else 0
        wants = of_inviter[inviter]
        require(wants <= left, "I15", f"{name}: {inviter} lets in {wants}, and may {left}")
