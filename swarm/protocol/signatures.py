"""Which signatures a message holds, and over what. Pure: how one is checked is the shell's matter.

What passes here is signed by whom it says. The round machine never looks at signatures again.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache

from swarm.errors import HostileInput
from swarm.protocol.invitation import Credential, Invitation, possession_statement
from swarm.protocol.manifest import Digest, Manifest, PeerId, Wish, leave_statement
from swarm.protocol.messages import (
    Accept,
    Accepted,
    Certificate,
    Commit,
    Evidence,
    Header,
    Message,
    Propose,
    Ready,
    Reduced,
    Signature,
    accept_statement,
    ready_statement,
    reduced_statement,
)

Holds = Callable[[PeerId, bytes, Signature], bool]
"""Whether a peer has signed a statement."""


def verified(header: Header, message: Message, source: PeerId, run: str, holds: Holds) -> Message:
    """The message with only those signatures that are right.

    Of certificates and evidence the wrong ones are dropped: the rest may be enough, and if it
    is not, its receiver knows whom to blame.

    Raises:
        HostileInput: an ACCEPT, READY or REDUCED that its sender did not sign, or a wish to leave
            that its peer did not, or a credential of another peer, be it in a READY or in a
            manifest that is to be voted for.
    """
    for peer, credential in _credentials(message, source):
        if problem := credential_problem(credential, peer, holds):
            raise HostileInput("bad_signature", problem)
    for peer, tip, wish in _wishes(message, source, header):
        if not _wishes_to_leave(peer, tip, wish, run, holds):
            raise HostileInput("bad_signature", f"{peer[-6:]} has not signed a wish to leave")
    own = _own(header, message, run)
    if own and not holds(source, *own):
        name = type(message).__name__.upper()
        raise HostileInput("bad_signature", f"a {name} is not signed by its sender")
    if isinstance(message, Commit):
        path = tuple(
            replace(
                link,
                certificate=link.certificate
                and sound(link.certificate, link.head.digest, run, holds),
            )
            for link in message.path
        )
        certificate = message.certificate and sound(
            message.certificate, message.manifest.digest, run, holds
        )
        return replace(message, certificate=certificate, path=path)
    if isinstance(message, Propose):
        evidence = _evidence(message.evidence, message.manifest, run, holds)
        return message if evidence is message.evidence else replace(message, evidence=evidence)
    if isinstance(message, Ready) and message.accepted:
        vote = message.accepted
        evidence = _evidence(vote.evidence, vote.manifest, run, holds)
        if evidence is not vote.evidence:
            shown = Accepted(vote.ballot, vote.manifest, evidence)
            return replace(message, accepted=shown)
    return message


def _own(header: Header, message: Message, run: str) -> tuple[bytes, Signature] | None:
    """What a message's sender has to have signed, and its signature."""
    if isinstance(message, Accept):
        return accept_statement(run, message.ballot, message.digest), message.signature
    if isinstance(message, Ready):
        said = message.declared.declaration
        return ready_statement(run, header.tip, said), message.signature
    if isinstance(message, Reduced):
        return reduced_statement(run, message.roster_id, message.results), message.signature
    return None


def sound(certificate: Certificate, digest: Digest, run: str, holds: Holds) -> Certificate:
    """The certificate of a manifest with only those signatures that are right."""
    statement = accept_statement(run, certificate.ballot, digest)
    signatures = {
        peer: signature
        for peer, signature in certificate.signatures.items()
        if holds(peer, statement, signature)
    }
    return Certificate(certificate.ballot, signatures)


def _evidence(
    evidence: Evidence | None, manifest: Manifest, run: str, holds: Holds
) -> Evidence | None:
    """The evidence with only those signatures that are right; the same object if all are."""
    return evidence and _left_of(_Shown(evidence, manifest.parent or "", run, holds))


@dataclass(frozen=True)
class _Shown:
    """Evidence that all voters show with one vote.

    The very same object, so that nothing has to be compared, and a forged one is judged by itself.
    """

    name: int = field(init=False)
    evidence: Evidence = field(compare=False)
    tip: Digest
    run: str
    holds: Holds

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", id(self.evidence))


@lru_cache(maxsize=4)
def _left_of(shown: _Shown) -> Evidence:
    """What is right of evidence, verified once: that of 256 peers has 470 signatures."""
    evidence, run, holds = shown.evidence, shown.run, shown.holds
    declared = {
        peer: each
        for peer, each in evidence.declared.items()
        if holds(peer, ready_statement(run, shown.tip, each.declaration), each.signature)
    }
    reports = tuple(
        report
        for report in evidence.reports
        if holds(
            report.reducer,
            reduced_statement(run, evidence.roster_id, report.results),
            report.signature,
        )
    )
    if (len(declared), len(reports)) == (len(evidence.declared), len(evidence.reports)):
        return evidence
    return replace(evidence, declared=declared, reports=reports)


def _wishes(
    message: Message, source: PeerId, header: Header
) -> Iterator[tuple[PeerId, Digest, Wish]]:
    """Whose wishes to leave a message holds, and after which manifest they want to."""
    if isinstance(message, Ready) and message.wish:
        yield source, header.tip, message.wish
    for manifest in _undecided(message):
        for peer, wish in manifest.wishes.items():
            yield peer, manifest.parent or "", wish


def _credentials(message: Message, source: PeerId) -> Iterator[tuple[PeerId, Credential]]:
    """The credentials in a message that nobody has voted for yet, and of which peer each is."""
    if isinstance(message, Ready) and message.credential:
        yield source, message.credential
    for manifest in _undecided(message):
        yield from manifest.invited.items()


def _undecided(message: Message) -> Iterator[Manifest]:
    """The manifests in a message that are to be voted for."""
    if isinstance(message, Ready) and message.accepted:
        yield message.accepted.manifest
    elif isinstance(message, Propose):
        yield message.manifest


def is_signed(invitation: Invitation, holds: Holds) -> bool:
    """Whether the peer that an invitation names as its inviter has signed it."""
    return _holds(invitation.inviter, invitation.statement, invitation.signature, holds)


def credential_problem(credential: Credential, peer: PeerId, holds: Holds) -> str | None:
    """Why a credential is not this peer's; None when it is [R8].

    The possession names run and peer, so a copy of what is public or was relayed proves nothing.
    """
    invitation = credential.invitation
    if not is_signed(invitation, holds):
        return f"{invitation.inviter[-6:]} has not signed an invitation"
    if not is_possession(credential.possession, invitation.key, invitation.run, peer, holds):
        return f"{peer[-6:]} has not proved that it was given an invitation"
    return None


def is_possession(possession: str, key: PeerId, run: str, guest: PeerId, holds: Holds) -> bool:
    """Whether a possession is by the invitation's key, for this run and guest."""
    return _holds(key, possession_statement(run, guest), possession, holds)


def _holds(peer: PeerId, statement: bytes, encoded: str, holds: Holds) -> bool:
    """Whether a signature in base64 is right."""
    try:
        signature = b64decode(encoded, validate=True)
    except ValueError:
        return False
    return holds(peer, statement, signature)


def _wishes_to_leave(peer: PeerId, tip: Digest, wish: Wish, run: str, holds: Holds) -> bool:
    return _holds(peer, leave_statement(run, tip), wish, holds)
