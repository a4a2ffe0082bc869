"""Invitations: signed by an anchor, so that newcomers vote at once [R8]. Pure.

An anchor signs (run, key, uses, invites, weight, last round). The key is the public half of a key
pair that is made for this invitation alone. With the private half, which the guest gets, it signs
the run and its own peer id. This signature is the *possession*. READY and manifest carry possession
and invitation. A copy of both is worthless to any other peer. If the guest's peer id is known when
the invitation is made, the key may be the guest's own.

An invitation expires with a *round*, not at a time: clocks differ, and every acceptor of a manifest
must come to the same answer, even a year later.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from swarm.config.section import Strict
from swarm.errors import InvitationError
from swarm.protocol.values.digests import digest_of

MAX_USES = 1024
MAX_INVITES = 2**20
MAX_WEIGHT = 64
"""Most ordinary members whose work an anchor may trust one member to do."""
MAX_ROUND = 2**31 - 1
MAX_TEXT = 4096
"""Most characters of an invitation's text, which usually has about 600."""
GATHERING = "gathering-"
"""Prefix of the name of a run that is not founded yet; the founder's nonce follows."""
_PREFIX = "swarm-invitation-"
_Peer = Annotated[str, Field(pattern=r"^[A-Za-z0-9]{1,128}$")]
_Signature = Annotated[str, Field(pattern=r"^([A-Za-z0-9+/]{85}[AQgw]==)?$")]
Possession = _Signature
"""A signature by an invitation's key over `possession_statement`, in base64."""
_Round = Annotated[int, Field(ge=0, le=MAX_ROUND)]


@dataclass(frozen=True)
class Invitation(Strict):
    """The fields that an anchor signed, with its signature in base64."""

    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")]
    key: _Peer
    """Public key, as a peer id. Guests prove with its private half that they were given the
    invitation."""
    uses: Annotated[int, Field(ge=1, le=MAX_USES)]
    """How many peers may join with the invitation; a peer that returns does not count again."""
    invites: Annotated[int, Field(ge=0, le=MAX_INVITES)]
    """How many peers each guest may invite in turn; with 0 the guest is not an anchor."""
    last_round: _Round
    """The last round whose manifest may admit a guest with this invitation."""
    inviter: _Peer
    signature: _Signature
    weight: Annotated[int, Field(ge=1, le=MAX_WEIGHT)] = 1
    """The work of each guest may count like that of this many ordinary members (mean weights, deal
    sizes)."""

    @cached_property
    def statement(self) -> bytes:
        """The bytes that the inviter signs."""
        return (
            f"swarm invite {self.run} {self.key} {self.uses} {self.invites} {self.weight} "
            f"{self.last_round} {self.inviter}"
        ).encode()

    @cached_property
    def name(self) -> str:
        """The name under which its uses are counted: the digest of the signed text."""
        return digest_of(self.statement)

    @property
    def cost(self) -> int:
        """How much of the inviter's quota one guest takes, for itself and for its own guests.

        A guest of weight w counts as w.
        """
        return self.weight + self.invites


@dataclass(frozen=True)
class Credential(Strict):
    """An invitation, and a guest's proof that it was given the invitation."""

    invitation: Invitation
    possession: Possession


def possession_statement(run: str, guest: str) -> bytes:
    """The bytes that an invitation's key signs for one guest."""
    return f"swarm join {run} {guest}".encode()


@dataclass(frozen=True)
class Used(Strict):
    """The uses of an invitation that is still valid."""

    last_round: _Round
    peers: tuple[_Peer, ...]
    """The peers that joined with the invitation, in the order of joining."""


Uses = Mapping[str, Used]
"""The uses of each used and still valid invitation, by its name."""


def invitation_problem(
    invitation: Invitation, peer: str, *, run: str, number: int, uses: Uses, left: float
) -> str | None:
    """Why an invitation does not admit this peer; None when it does [R8].

    The shell has checked both signatures of the credential.

    Args:
        invitation: the invitation that the peer has shown.
        peer: the guest.
        run: id of the run.
        number: training round of the manifest that would admit the peer.
        uses: uses in the parent manifest, and by guests of the same round.
        left: how many peers the inviter may still admit; 0 if it is not an anchor.
    """
    if invitation.run != run and invitation.run.startswith(GATHERING):
        return "the invitation was for the peers with which a run begins, and this run has begun"
    if invitation.run != run:
        return f"the invitation is for another run, {invitation.run}"
    if left <= 0:
        return (
            f"the invitation is from {invitation.inviter}, which is not an anchor of this run, or "
            "has let in as many as it may"
        )
    if number > invitation.last_round:
        return (
            f"the invitation has expired: it was good until round {invitation.last_round}, "
            f"the next is round {number}"
        )
    used = uses.get(invitation.name)
    if used and peer in used.peers:
        return None
    if used and len(used.peers) >= invitation.uses:
        return f"the invitation is used up: {len(used.peers)} of {invitation.uses} peers have come"
    if invitation.cost > left:
        inviter, cost = invitation.inviter, invitation.cost
        return f"{inviter} may let in {left:g} more peers, and this invitation takes {cost}"
    return None


def with_use(uses: Uses, invitation: Invitation, peer: str) -> dict[str, Used]:
    """The uses after this peer has joined."""
    before = uses.get(invitation.name, Used(invitation.last_round, ()))
    peers = before.peers if peer in before.peers else (*before.peers, peer)
    return {**uses, invitation.name: Used(invitation.last_round, peers)}


def still_good(uses: Uses, number: int) -> dict[str, Used]:
    """The uses, by name, of the invitations that are still valid after a round."""
    return {name: used for name, used in sorted(uses.items()) if used.last_round > number}


# ---------------------------------------------------------------- as text


@dataclass(frozen=True)
class PrivateInvitation(Strict):
    """The form that people pass on: an invitation with the private half of its key."""

    invitation: Invitation
    secret: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = field(repr=False)
    """Empty if the invitation's key is the guest's own."""


_PRIVATE: TypeAdapter[PrivateInvitation] = TypeAdapter(PrivateInvitation)
_CREDENTIAL: TypeAdapter[Credential] = TypeAdapter(Credential)


def as_text(private: PrivateInvitation) -> str:
    """The invitation as one line of text, which `from_text` reads."""
    return _PREFIX + urlsafe_b64encode(_PRIVATE.dump_json(private)).decode().rstrip("=")


def from_text(text: str) -> PrivateInvitation:
    """Reads an invitation that somebody has sent.

    Raises:
        InvitationError: the text is not an invitation, or is damaged.
    """
    body = text.strip()
    if len(body) > MAX_TEXT or not body.startswith(_PREFIX):
        raise InvitationError(
            f"{body[:40]!r} is not an invitation: one begins with {_PREFIX}",
            hint="pass on the whole line that swarm-invite printed",
        )
    try:
        encoded = body.removeprefix(_PREFIX).encode("ascii")
        return _PRIVATE.validate_json(urlsafe_b64decode(encoded + b"=" * (-len(encoded) % 4)))
    except (ValueError, ValidationError) as error:
        raise InvitationError(
            "the invitation is damaged: a part of it is missing or was changed",
            hint="pass on the whole line that swarm-invite printed",
        ) from error


def credential_bytes(credential: Credential) -> bytes:
    """The bytes in which a guest keeps a credential."""
    return _CREDENTIAL.dump_json(credential)


def credential_of(content: bytes) -> Credential | None:
    """Reads the bytes of `credential_bytes`; None if they are damaged."""
    try:
        return _CREDENTIAL.validate_json(content)
    except ValidationError:
        return None


def as_plain(value: Invitation | Credential | Used) -> dict[str, object]:
    """The value as JSON has it."""
    return {each.name: getattr(value, each.name) for each in fields(value)}
