"""Signs invitations, and reads those that somebody was sent."""

from __future__ import annotations

import secrets
from base64 import b64encode
from dataclasses import replace

from swarm.errors import InvitationError
from swarm.network.identity import Identity, verify
from swarm.protocol import signatures
from swarm.protocol.invitation import Invitation, from_text


def invite(identity: Identity, run: str, *, uses: int, last_round: int) -> Invitation:
    """A new invitation, signed with a peer's key."""
    unsigned = Invitation(
        run, secrets.token_hex(16), uses, last_round, identity.peer_id, signature=""
    )
    signature = b64encode(identity.sign(unsigned.statement)).decode()
    return replace(unsigned, signature=signature)


def is_signed(invitation: Invitation) -> bool:
    """Whether the peer that an invitation names as its inviter has signed it."""
    return signatures.is_signed(invitation, verify)


def read_invitation(text: str) -> Invitation:
    """The invitation of a line that swarm-invite printed.

    Raises:
        InvitationError: it is none, or was damaged.
    """
    invitation = from_text(text)
    if not is_signed(invitation):
        raise InvitationError(
            "the invitation is damaged: its signature does not hold",
            hint="pass on the whole line that swarm-invite printed",
        )
    return invitation
