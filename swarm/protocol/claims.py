"""Who may send what, judged before anything that a message names is fetched."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from swarm.protocol.digests import Buffer
from swarm.protocol.events import Record
from swarm.protocol.manifest import Digest, PeerId
from swarm.protocol.messages import Commit, Message, Propose, Ready, Roster
from swarm.protocol.wire import kind_and_attachments

MAX_STRANGER_ATTACHMENT_BYTES = 2**20
"""One manifest of about a hundred peers. A swarm whose manifests are larger is entered by joining,
which asks for the tip instead of waiting to be told."""
FROM_MEMBERS_ONLY = frozenset({"roster", "reduced", "propose", "accept"})
"""Steps of a round in which only members have a part."""


class Standing(StrEnum):
    """What a sender is to the receiver."""

    MEMBER = "member"
    STRANGER = "stranger"


@dataclass(frozen=True)
class Claim:
    """What a message says that it is: its type as on the wire, digest and size of attachments."""

    kind: str
    attachments: tuple[tuple[Digest, int], ...]


def claim_of(payload: Buffer) -> Claim:
    """The claim of a message.

    Raises:
        BadMessage: it is not of the schema, or an attachment is announced too large.
    """
    return Claim(*kind_and_attachments(payload))


def outline_of(message: Message) -> Claim:
    """What the claim of a decoded message says, but for what its attachments are called."""
    named: list[object] = []
    if isinstance(message, Ready):
        vote = message.accepted
        named = [message.offer, vote and vote.manifest, vote and vote.evidence]
    elif isinstance(message, Roster):
        named = list(message.offers.values())
    elif isinstance(message, Propose):
        named = [message.manifest, message.evidence]
    elif isinstance(message, Commit):
        named = [message.manifest, message.parent, "proof"]
    return Claim(type(message).__name__.lower(), tuple(("", 0) for one in named if one))


def refusal_of(claim: Claim, standing: Standing) -> str | None:
    """Why a message is refused for its sender, in a short word; None if it is not.

    | from a stranger | |
    |---|---|
    | HELLO, PREPARE | taken: they name nothing, and tell who was away that others are ahead |
    | READY | taken without offer and vote, as a wish to join |
    | COMMIT | taken with small manifests: it is judged by its certificate, not by its sender |
    | ROSTER, REDUCED, PROPOSE, ACCEPT | refused: no stranger has a part in a round |
    """
    if standing is Standing.MEMBER:
        return None
    if claim.kind in FROM_MEMBERS_ONLY or (claim.kind == "ready" and claim.attachments):
        return f"{claim.kind}_of_stranger"
    if any(num_bytes > MAX_STRANGER_ATTACHMENT_BYTES for _, num_bytes in claim.attachments):
        return "attachment_of_stranger"
    return None


def plausible_members(record: Record) -> frozenset[PeerId]:
    """Everybody who may rightly take part in a round that this peer hears of.

    The members of the tip; of its parent, which some may still be on; and of the manifest that this
    peer has voted for, which others may have applied already.
    """
    manifests = [record.tip, record.parent, record.accepted and record.accepted.manifest]
    return frozenset(peer for manifest in manifests if manifest for peer in manifest.members)
