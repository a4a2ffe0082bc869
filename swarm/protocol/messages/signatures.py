"""Who may send which message, and which signatures a message has. Pure: the shell verifies them."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache

from swarm.errors import HostileInput
from swarm.protocol.messages import messages
from swarm.protocol.messages.events import Record
from swarm.protocol.messages.message_bytes import BareMessage
from swarm.protocol.values.digests import Buffer
from swarm.protocol.values.invitation import Credential, Invitation, possession_statement
from swarm.protocol.values.manifest import Digest, Manifest, PeerId, Wish, leave_statement

MAX_STRANGER_PROOF_BYTES = 2**20
"""Enough for 16 links at 256 members. Each has two heads of 14 kB, and 129 signatures of 64 bytes,
which take 19 kB with their names."""
FROM_MEMBERS_ONLY = frozenset({"roster", "reduced", "propose", "accept"})
"""Steps of a round in which only members take part."""
FROM_VOTERS_ONLY = frozenset({"roster", "propose", "accept"})
"""Steps in which no trainee takes part, since it neither convenes nor votes [R7]."""


class Standing(StrEnum):
    """The role of a sender, as the receiver sees it."""

    VOTER = "voter"
    TRAINEE = "trainee"
    STRANGER = "stranger"


@dataclass(frozen=True)
class Claim:
    """The kind, attachments and header that a message claims to have.

    Attributes:
        kind: type of the message as on the wire.
        attachments: digest and size of each attachment. A COMMIT has manifest, proof and perhaps
            the parent.
        header: the header of the message.
    """

    kind: str
    attachments: tuple[tuple[Digest, int], ...]
    header: messages.Header | None = None


def claim_of(payload: Buffer) -> Claim:
    """The claim of a message.

    Raises:
        BadMessage: it is not of the schema, or an attachment is announced too large.
    """
    bare = BareMessage(payload)
    return Claim(bare.kind, bare.attachments, bare.header)


def outline_of(message: messages.Message) -> Claim:
    """The claim of a decoded message, without the digests and sizes of its attachments."""
    named: list[object] = []
    if isinstance(message, messages.Ready):
        vote = message.accepted
        named = [message.offer, vote and vote.manifest, vote and vote.evidence]
    elif isinstance(message, messages.Roster):
        named = list(message.offers.values())
    elif isinstance(message, messages.Propose):
        named = [message.manifest, message.evidence]
    elif isinstance(message, messages.Commit):
        named = [message.manifest, "proof", message.parent]
    return Claim(type(message).__name__.lower(), tuple(("", 0) for one in named if one))


def refusal_of(claim: Claim, standing: Standing) -> str | None:
    """Why a message is refused because of its sender, in a short word; None if it is not.

    | from a stranger | |
    |---|---|
    | HELLO, PREPARE | taken: they name no blobs, and show a returning peer who is ahead |
    | READY | taken without offer and vote, as a wish to join |
    | COMMIT | taken with a small proof, which decides whether its manifest is fetched |
    | ROSTER, REDUCED, PROPOSE, ACCEPT | refused: no stranger takes part in a round |

    From a trainee, ROSTER, PROPOSE and ACCEPT are refused.
    """
    if standing is Standing.VOTER:
        return None
    if standing is Standing.TRAINEE:
        return f"{claim.kind}_of_trainee" if claim.kind in FROM_VOTERS_ONLY else None
    if claim.kind in FROM_MEMBERS_ONLY or (claim.kind == "ready" and claim.attachments):
        return f"{claim.kind}_of_stranger"
    if claim.kind == "commit" and claim.attachments[1][1] > MAX_STRANGER_PROOF_BYTES:
        return "proof_of_stranger"
    return None


def who_takes_part(record: Record) -> tuple[frozenset[PeerId], frozenset[PeerId]]:
    """The peers that may take part in a round of which this peer hears, and the trainees of these.

    These are the members of three manifests: the tip, its parent, and the manifest that this peer
    voted for. Some peers may still have the parent as their tip, and others may have applied the
    third. The returned trainees vote in none of the three.
    """
    manifests = _plausible(record)
    members = frozenset(peer for manifest in manifests for peer in manifest.members)
    return members, members.difference(*(manifest.voters for manifest in manifests))


def standing_in(record: Record, peer: PeerId) -> Standing:
    """The role of a sender for a peer with this record."""
    manifests = _plausible(record)
    if any(peer in manifest.voters for manifest in manifests):
        return Standing.VOTER
    is_member = any(peer in manifest.members for manifest in manifests)
    return Standing.TRAINEE if is_member else Standing.STRANGER


def _plausible(record: Record) -> list[Manifest]:
    manifests = [record.tip, record.parent, record.accepted and record.accepted.manifest]
    return [manifest for manifest in manifests if manifest]


Holds = Callable[[PeerId, bytes, messages.Signature], bool]
"""Whether a peer has signed a statement."""


def verified(
    header: messages.Header, message: messages.Message, source: PeerId, run: str, holds: Holds
) -> messages.Message:
    """The message with only those signatures that are valid.

    Invalid signatures of certificates and evidence are only dropped, since the others may be
    enough. If they are not, the message itself is refused.

    Raises:
        HostileInput: an ACCEPT, READY or REDUCED without its sender's signature; a wish to leave
            without its peer's signature; or a credential of another peer. READYs and proposed
            manifests contain such wishes and credentials.
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
    if isinstance(message, messages.Commit):
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
    if isinstance(message, messages.Propose):
        evidence = _evidence(message.evidence, message.manifest, run, holds)
        return message if evidence is message.evidence else replace(message, evidence=evidence)
    if isinstance(message, messages.Ready) and message.accepted:
        vote = message.accepted
        evidence = _evidence(vote.evidence, vote.manifest, run, holds)
        if evidence is not vote.evidence:
            shown = messages.Accepted(vote.ballot, vote.manifest, evidence)
            return replace(message, accepted=shown)
    return message


def _own(
    header: messages.Header, message: messages.Message, run: str
) -> tuple[bytes, messages.Signature] | None:
    """The statement that the message's sender has to sign, and the signature in the message."""
    if isinstance(message, messages.Accept):
        return messages.accept_statement(run, message.ballot, message.digest), message.signature
    if isinstance(message, messages.Ready):
        said = message.declared.declaration
        return messages.ready_statement(run, header.tip, said), message.signature
    if isinstance(message, messages.Reduced):
        return messages.reduced_statement(
            run, message.roster_id, message.results
        ), message.signature
    return None


def sound(
    certificate: messages.Certificate, digest: Digest, run: str, holds: Holds
) -> messages.Certificate:
    """The certificate of a manifest with only those signatures that are valid."""
    statement = messages.accept_statement(run, certificate.ballot, digest)
    signatures = {
        peer: signature
        for peer, signature in certificate.signatures.items()
        if holds(peer, statement, signature)
    }
    return messages.Certificate(certificate.ballot, signatures)


def _evidence(
    evidence: messages.Evidence | None, manifest: Manifest, run: str, holds: Holds
) -> messages.Evidence | None:
    """The evidence with only those signatures that are valid; the same object if all are."""
    return evidence and _left_of(_Shown(evidence, manifest.parent or "", run, holds))


@dataclass(frozen=True)
class _Shown:
    """A cache key for evidence that all voters show with one vote.

    It compares by identity, so that a forged copy is verified by itself.
    """

    name: int = field(init=False)
    evidence: messages.Evidence = field(compare=False)
    tip: Digest
    run: str
    holds: Holds

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", id(self.evidence))


@lru_cache(maxsize=4)
def _left_of(shown: _Shown) -> messages.Evidence:
    """The valid part of evidence. It is cached: evidence of 256 peers has 470 signatures."""
    evidence, run, holds = shown.evidence, shown.run, shown.holds
    declared = {
        peer: each
        for peer, each in evidence.declared.items()
        if holds(peer, messages.ready_statement(run, shown.tip, each.declaration), each.signature)
    }
    reports = tuple(
        report
        for report in evidence.reports
        if holds(
            report.reducer,
            messages.reduced_statement(run, evidence.roster_id, report.results),
            report.signature,
        )
    )
    if (len(declared), len(reports)) == (len(evidence.declared), len(evidence.reports)):
        return evidence
    return replace(evidence, declared=declared, reports=reports)


def _wishes(
    message: messages.Message, source: PeerId, header: messages.Header
) -> Iterator[tuple[PeerId, Digest, Wish]]:
    """Each wish to leave in a message: peer, manifest after which it leaves, signature."""
    if isinstance(message, messages.Ready) and message.wish:
        yield source, header.tip, message.wish
    for manifest in _undecided(message):
        for peer, wish in manifest.wishes.items():
            yield peer, manifest.parent or "", wish


def _credentials(message: messages.Message, source: PeerId) -> Iterator[tuple[PeerId, Credential]]:
    """The credentials in a READY or a proposed manifest, each with its peer."""
    if isinstance(message, messages.Ready) and message.credential:
        yield source, message.credential
    for manifest in _undecided(message):
        yield from manifest.invited.items()


def _undecided(message: messages.Message) -> Iterator[Manifest]:
    """The manifests in a message that are to be voted for."""
    if isinstance(message, messages.Ready) and message.accepted:
        yield message.accepted.manifest
    elif isinstance(message, messages.Propose):
        yield message.manifest


def is_signed(invitation: Invitation, holds: Holds) -> bool:
    """Whether the peer that an invitation names as its inviter has signed it."""
    return _holds(invitation.inviter, invitation.statement, invitation.signature, holds)


def credential_problem(credential: Credential, peer: PeerId, holds: Holds) -> str | None:
    """Why a credential does not belong to this peer; None when it does [R8].

    The possession names run and peer. So a copied possession proves nothing for another peer.
    """
    invitation = credential.invitation
    if not is_signed(invitation, holds):
        return f"{invitation.inviter[-6:]} has not signed an invitation"
    if not is_possession(credential.possession, invitation.key, invitation.run, peer, holds):
        return f"{peer[-6:]} has not proved that it was given an invitation"
    return None


def is_possession(possession: str, key: PeerId, run: str, guest: PeerId, holds: Holds) -> bool:
    """Whether a possession is signed by the invitation's key, for this run and guest."""
    return _holds(key, possession_statement(run, guest), possession, holds)


def _holds(peer: PeerId, statement: bytes, encoded: str, holds: Holds) -> bool:
    """Whether a signature in base64 is valid."""
    try:
        signature = b64decode(encoded, validate=True)
    except ValueError:
        return False
    return holds(peer, statement, signature)


def _wishes_to_leave(peer: PeerId, tip: Digest, wish: Wish, run: str, holds: Holds) -> bool:
    return _holds(peer, leave_statement(run, tip), wish, holds)
