"""Signs invitations, reads received ones, and proves their possession."""

from __future__ import annotations

from base64 import b64encode
from dataclasses import replace

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarm.errors import InvitationError
from swarm.network.wire.identity import Identity, identity_of, verify
from swarm.protocol.messages import signatures
from swarm.protocol.values.invitation import (
    Credential,
    Invitation,
    PrivateInvitation,
    from_text,
    possession_statement,
)
from swarm.protocol.values.manifest import PeerId


def invite(
    identity: Identity,
    run: str,
    *,
    uses: int,
    last_round: int,
    invites: int = 0,
    guest: PeerId | None = None,
    secret: str | None = None,
    weight: int = 1,
) -> PrivateInvitation:
    """A new invitation, signed with a peer's key.

    Args:
        identity: identity of the inviter.
        run: id of the run.
        uses: number of peers that may join with it.
        last_round: the last round whose manifest may admit a peer with the invitation.
        invites: how many peers each peer that joins with it may invite.
        guest: the only peer that may use it, named by its key; None for any peer that gets it.
        secret: private key of the invitation in hex digits. None for a new key.
        weight: number of ordinary members whose work is believed of each peer that joins with it.
    """
    if guest:
        secret, key = "", guest
    else:
        secret = secret or Ed25519PrivateKey.generate().private_bytes_raw().hex()
        key = identity_of(secret).peer_id
    me = identity.peer_id
    unsigned = Invitation(run, key, uses, invites, last_round, me, signature="", weight=weight)
    return PrivateInvitation(
        replace(unsigned, signature=_signed(identity, unsigned.statement)), secret
    )


def credential_for(private: PrivateInvitation, identity: Identity) -> Credential:
    """The credential that a peer shows; after this the private key is no longer needed.

    Raises:
        InvitationError: the invitation is for another peer.
    """
    require_guest(private, identity.peer_id)
    invitation = private.invitation
    signer = identity_of(private.secret) if private.secret else identity
    statement = possession_statement(invitation.run, identity.peer_id)
    return Credential(invitation, _signed(signer, statement))


def require_guest(private: PrivateInvitation, peer: PeerId) -> None:
    """Refuses an invitation that is for another peer.

    Raises:
        InvitationError: the invitation is for another peer.
    """
    if not private.secret and private.invitation.key != peer:
        raise InvitationError(
            f"the invitation is for the peer {private.invitation.key}, and this is {peer}",
            hint="ask for one that is for this peer, or start with that peer's --state-dir",
        )


def is_of(credential: Credential, peer: PeerId) -> bool:
    """Whether both signatures of a credential are valid for this peer."""
    return signatures.credential_problem(credential, peer, verify) is None


def proves(possession: str, key: PeerId, run: str, guest: PeerId) -> bool:
    """Whether a possession was signed by the invitation's key, for this run and guest."""
    return signatures.is_possession(possession, key, run, guest, verify)


def read_invitation(text: str) -> PrivateInvitation:
    """The invitation in a line that swarm-invite printed.

    Args:
        text: the word that begins with `swarm-invitation-`.

    Raises:
        InvitationError: the text is no invitation, or was damaged.
    """
    private = from_text(text)
    is_whole = signatures.is_signed(private.invitation, verify)
    if private.secret and identity_of(private.secret).peer_id != private.invitation.key:
        is_whole = False
    if not is_whole:
        raise InvitationError(
            "the invitation is damaged: its signature does not hold",
            hint="pass on the whole line that swarm-invite printed",
        )
    return private


def _signed(signer: Identity, statement: bytes) -> str:
    return b64encode(signer.sign(statement)).decode()
