"""Invitations: who vouches for a newcomer, so that it votes at once [R8]. Pure.

An anchor, that is the founder or who was invited itself, signs (run, nonce, uses, last round). The
newcomer's READY carries that, and the manifest that takes it in keeps it, so that every acceptor
can check it, and counts its uses as long as it is good.

It expires with a *round*, not with a time: clocks differ, and every acceptor of a manifest must
come to the same answer, now and when it is shown the manifest a year later.
"""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from swarm.errors import InvitationError
from swarm.protocol.digests import digest_of
from swarm.protocol.strict import Strict

MAX_USES = 1024
MAX_ROUND = 2**31 - 1
MAX_TEXT = 4096
"""Characters of an invitation as people pass it on; it has about 370."""
_PREFIX = "swarm-invitation-"
_Peer = Annotated[str, Field(pattern=r"^[A-Za-z0-9]{1,128}$")]
_Signature = Annotated[str, Field(pattern=r"^([A-Za-z0-9+/]{85}[AQgw]==)?$")]
_Round = Annotated[int, Field(ge=0, le=MAX_ROUND)]


@dataclass(frozen=True)
class Invitation(Strict):
    """What an anchor signed, with its signature in base64."""

    run: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")]
    nonce: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """Random, so that no two invitations share their uses."""
    uses: Annotated[int, Field(ge=1, le=MAX_USES)]
    """How many peers may come with it; one that comes back does not count again."""
    last_round: _Round
    """Of the manifests that it may still take somebody in."""
    inviter: _Peer
    signature: _Signature

    @cached_property
    def statement(self) -> bytes:
        """The bytes that the inviter signs."""
        return (
            f"swarm invite {self.run} {self.nonce} {self.uses} {self.last_round} {self.inviter}"
        ).encode()

    @cached_property
    def name(self) -> str:
        """Under which its uses are counted: a digest of all that was signed."""
        return digest_of(self.statement)


@dataclass(frozen=True)
class Used(Strict):
    """What became of an invitation that is still good."""

    last_round: _Round
    peers: tuple[_Peer, ...]
    """Who came with it, the first before the others."""


Uses = Mapping[str, Used]
"""Name of each invitation that was used and is good -> by whom."""


def invitation_problem(
    invitation: Invitation, peer: str, *, run: str, number: int, uses: Uses, is_anchor: bool
) -> str | None:
    """Why an invitation does not make this peer an anchor; None when it does [R8].

    Whether it is signed is for the shell to say.

    Args:
        invitation: what the peer has sent.
        peer: who comes.
        run: id of the run.
        number: training round of the manifest that is to take it in.
        uses: by the manifest before, and by who comes in the same round earlier.
        is_anchor: whether the inviter is one, by the manifest before.
    """
    if invitation.run != run:
        return f"the invitation is for another run, {invitation.run}"
    if not is_anchor:
        return f"the invitation is of {invitation.inviter}, which is no anchor of this run"
    if number > invitation.last_round:
        return (
            f"the invitation has expired: it was good until round {invitation.last_round}, "
            f"the next is round {number}"
        )
    used = uses.get(invitation.name)
    if used and peer not in used.peers and len(used.peers) >= invitation.uses:
        return f"the invitation is used up: {len(used.peers)} of {invitation.uses} peers have come"
    return None


def with_use(uses: Uses, invitation: Invitation, peer: str) -> dict[str, Used]:
    """The uses once this peer has come."""
    before = uses.get(invitation.name, Used(invitation.last_round, ()))
    peers = before.peers if peer in before.peers else (*before.peers, peer)
    return {**uses, invitation.name: Used(invitation.last_round, peers)}


def still_good(uses: Uses, number: int) -> dict[str, Used]:
    """The uses that a manifest keeps: of invitations that are good after this round, by name."""
    return {name: used for name, used in sorted(uses.items()) if used.last_round > number}


# ---------------------------------------------------------------- as people pass it on

_INVITATION: TypeAdapter[Invitation] = TypeAdapter(Invitation)


def as_text(invitation: Invitation) -> str:
    """One line, which `from_text` reads."""
    return _PREFIX + urlsafe_b64encode(_INVITATION.dump_json(invitation)).decode().rstrip("=")


def from_text(text: str) -> Invitation:
    """An invitation that somebody has sent.

    Raises:
        InvitationError: it is none, or was damaged on its way.
    """
    body = text.strip()
    if len(body) > MAX_TEXT or not body.startswith(_PREFIX):
        raise InvitationError(
            f"{body[:40]!r} is no invitation: one begins with {_PREFIX}",
            hint="pass on the whole line that swarm-invite printed",
        )
    try:
        encoded = body.removeprefix(_PREFIX).encode("ascii")
        invitation = _INVITATION.validate_json(
            urlsafe_b64decode(encoded + b"=" * (-len(encoded) % 4))
        )
    except (ValueError, ValidationError) as error:
        raise InvitationError(
            "the invitation is damaged: a part of it is missing or was changed",
            hint="pass on the whole line that swarm-invite printed",
        ) from error
    return invitation


def as_plain(value: Invitation | Used) -> dict[str, object]:
    """What JSON makes of it."""
    return {each.name: getattr(value, each.name) for each in fields(value)}
