"""Draws for which peers anchors vouch in a schedule, with which credentials and when [R7, R8].

Without guests, newcomers would never vote in a small swarm, so joining voters would go untested.
"""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from swarm.emulation.simulator.peers.participant import Setup
from swarm.emulation.simulator.symbols.signing import sign
from swarm.protocol.values.invitation import (
    MAX_ROUND,
    MAX_USES,
    Credential,
    Invitation,
    possession_statement,
)
from swarm.protocol.values.manifest import PeerId

KEY = "i"
"""Prefix of the name of an invitation's key. The first guest's name follows."""
AT_ONCE, LATER = 0.4, 0.35
"""Share of the strangers that come with an invitation, and share that an anchor vouches for later.
The others have to earn their vote."""
SHARED = 0.3
"""Chance that a guest shares the invitation of the previous guest, even if it is used up."""
INVITES = (0, 0, 1, 6)
USES = (1, 1, 2, MAX_USES)
WEIGHTS = (1, 1, 1, 3)
LAST_ROUNDS = (MAX_ROUND, MAX_ROUND, MAX_ROUND, 4)


@dataclass(frozen=True)
class Guests:
    """The credentials that anchors give."""

    at_once: Mapping[PeerId, Credential]
    """Credentials with which strangers come."""
    later: Mapping[PeerId, Credential]
    """Credentials that peers get later, and with which they start again."""


def guest_of(invitation: Invitation, peer: PeerId) -> Credential:
    """The credential that a peer makes from an invitation."""
    possession = sign(invitation.key, possession_statement(invitation.run, peer))
    return Credential(invitation, b64encode(possession).decode())


def invitation_by(
    inviter: PeerId,
    run: str,
    key: PeerId,
    *,
    uses: int = MAX_USES,
    invites: int = 0,
    weight: int = 1,
    last_round: int = MAX_ROUND,
) -> Invitation:
    """An invitation as its inviter signs it."""
    unsigned = Invitation(run, key, uses, invites, last_round, inviter, "", weight)
    signature = b64encode(sign(inviter, unsigned.statement)).decode()
    return Invitation(run, key, uses, invites, last_round, inviter, signature, weight)


def all_invited(peers: Iterable[PeerId], setup: Setup) -> dict[PeerId, Credential]:
    """Credentials of these peers, all by the founder's invitation."""
    invitation = invitation_by(setup.founders[0], setup.rules.run, KEY)
    return {peer: guest_of(invitation, peer) for peer in peers}


def drawn_guests(
    strangers: Sequence[PeerId], known: Collection[PeerId], setup: Setup, random: Random
) -> Guests:
    """Some strangers come with an invitation. For others an anchor vouches later.

    The founder vouches later for half of the known peers.

    Inviters are the founder and guests that may invite, even guests that never get a vote.
    """
    founder, run = setup.founders[0], setup.rules.run
    anchors: list[PeerId] = []
    at_once: dict[PeerId, Credential] = {}
    later: dict[PeerId, Credential] = {}
    line: Invitation | None = None
    for peer in strangers:
        if line is None or random.random() >= SHARED:
            line = invitation_by(
                random.choice([founder, *anchors[-1:]]),
                run,
                KEY + peer,
                uses=random.choice(USES),
                invites=random.choice(INVITES),
                weight=random.choice(WEIGHTS),
                last_round=random.choice(LAST_ROUNDS),
            )
        chance = random.random()
        if chance < AT_ONCE:
            at_once[peer] = guest_of(line, peer)
        elif chance < AT_ONCE + LATER:
            later[peer] = guest_of(line, peer)
        if line.invites and chance < AT_ONCE:
            anchors.append(peer)
    for peer in known:
        if random.random() < 0.5:
            later[peer] = guest_of(invitation_by(founder, run, KEY + peer), peer)
    return Guests(at_once, later)
