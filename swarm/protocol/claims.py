"""Who may send what, judged before anything that a message names is fetched."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from swarm.protocol.digests import Buffer
from swarm.protocol.events import Record
from swarm.protocol.manifest import Digest, Manifest, PeerId
from swarm.protocol.messages import Commit, Header, Message, Propose, Ready, Roster
from swarm.protocol.wire import BareMessage

MAX_STRANGER_PROOF_BYTES = 2**20
"""Of 16 links at 256 members: two heads of 14 kB each, and 129 signatures of 64 bytes, which take
19 kB with their names."""
FROM_MEMBERS_ONLY = frozenset({"roster", "reduced", "propose", "accept"})
"""Steps of a round in which only members have a part."""
FROM_VOTERS_ONLY = frozenset({"roster", "propose", "accept"})
"""Steps in which a trainee has none either: it convenes nothing and does not vote [R7]."""


class Standing(StrEnum):
    """What a sender is to the receiver."""

    VOTER = "voter"
    TRAINEE = "trainee"
    STRANGER = "stranger"


@dataclass(frozen=True)
class Claim:
    """What a message says that it is.

    Attributes:
        kind: its type as on the wire.
        attachments: digest and size of each; of a COMMIT manifest, proof and perhaps the parent.
        header: what its sender says of itself.
    """

    kind: str
    attachments: tuple[tuple[Digest, int], ...]
    header: Header | None = None


def claim_of(payload: Buffer) -> Claim:
    """The claim of a message.

    Raises:
        BadMessage: it is not of the schema, or an attachment is announced too large.
    """
    bare = BareMessage(payload)
    return Claim(bare.kind, bare.attachments, bare.header)


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
        named = [message.manifest, "proof", message.parent]
    return Claim(type(message).__name__.lower(), tuple(("", 0) for one in named if one))


def refusal_of(claim: Claim, standing: Standing) -> str | None:
    """Why a message is refused for its sender, in a short word; None if it is not.

    | from a stranger | |
    |---|---|
    | HELLO, PREPARE | taken: they name nothing, and tell who was away that others are ahead |
    | READY | taken without offer and vote, as a wish to join |
    | COMMIT | taken with a small proof, which says whether its manifest is fetched at all |
    | ROSTER, REDUCED, PROPOSE, ACCEPT | refused: no stranger has a part in a round |

    Of a trainee's messages ROSTER, PROPOSE and ACCEPT are refused.
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
    """Everybody who may rightly take part in a round that this peer hears of, and the trainees.

    The members of the tip; of its parent, which some may still be on; and of the manifest that this
    peer has voted for, which others may have applied already. Trainees vote in none of these.
    """
    manifests = _plausible(record)
    members = frozenset(peer for manifest in manifests for peer in manifest.members)
    return members, members.difference(*(manifest.voters for manifest in manifests))


def standing_in(record: Record, peer: PeerId) -> Standing:
    """What a sender is to a peer with this record."""
    manifests = _plausible(record)
    if any(peer in manifest.voters for manifest in manifests):
        return Standing.VOTER
    is_member = any(peer in manifest.members for manifest in manifests)
    return Standing.TRAINEE if is_member else Standing.STRANGER


def _plausible(record: Record) -> list[Manifest]:
    manifests = [record.tip, record.parent, record.accepted and record.accepted.manifest]
    return [manifest for manifest in manifests if manifest]
