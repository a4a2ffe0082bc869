"""Signs invitations, and says whether one is signed."""

from __future__ import annotations

import secrets
from base64 import b64decode, b64encode
from dataclasses import replace

from swarm.network.identity import Identity, peer_id_of, verify
from swarm.protocol.invitation import Invitation


def invite(identity: Identity, run: str, *, uses: int, last_round: int) -> Invitation:
    """A new invitation, signed with a peer's key."""
    key = b64encode(identity.public_key).decode()
    unsigned = Invitation(
        run, secrets.token_hex(16), uses, last_round, identity.peer_id, key, signature=""
    )
    signature = b64encode(identity.sign(unsigned.statement)).decode()
    return replace(unsigned, signature=signature)


def is_signed(invitation: Invitation) -> bool:
    """Whether the peer that an invitation names as its inviter has signed it."""
    try:
        key, signature = b64decode(invitation.public_key), b64decode(invitation.signature)
    except ValueError:
        return False
    is_of_inviter = peer_id_of(key) == invitation.inviter
    return is_of_inviter and verify(key, invitation.statement, signature)
