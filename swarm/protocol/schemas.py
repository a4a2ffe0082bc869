"""What messages, offers and the record must look like as JSON: strict, bounded, nothing extra."""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from collections.abc import Iterable
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from swarm.config.bounds import MAX_ROUND_TOKENS
from swarm.config.explaining import refusal
from swarm.errors import BadMessage
from swarm.protocol.digests import Buffer
from swarm.protocol.invitation import Invitation
from swarm.protocol.manifest import Head
from swarm.protocol.messages import (
    MAX_ATTEMPT,
    Ballot,
    Certificate,
    Header,
    Link,
    ReducedUnit,
    Signature,
)

MAX_REASON_CHARACTERS = 120
MAX_LINKS = 256
"""Of one proof; a peer that needs more asks again from where it ended."""

_HEX_DIGEST = r"^[0-9a-f]{64}$"
PEER = r"^[1-9A-HJ-NP-Za-km-z]{1,52}$"
"""Base58, as long as an id of an Ed25519 key at most; a peer that signs or is called has one."""
_UNIT = r"^(expert|shared)\.[0-9]{1,6}$"
_SIGNATURE = r"^[A-Za-z0-9+/]{85}[AQgw]==$"
GENERATION = r"^[0-9a-f]{1,32}$"
IS_DIGEST, IS_GENERATION = re.compile(_HEX_DIGEST), re.compile(GENERATION)
IS_PEER, IS_UNIT, IS_SIGNATURE = re.compile(PEER), re.compile(_UNIT), re.compile(_SIGNATURE)
IS_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")
MAX_REFORMS = 512
MAX_HOLDERS = 16
"""That a PROPOSE names: those that were the last to say that they have everything."""
MAX_MISSING = 64
"""Peers that one REDUCED says cannot be had."""
MAX_RESULTS = 100
"""Units of one REDUCED."""

DigestText = Annotated[str, Field(pattern=_HEX_DIGEST)]
PeerText = Annotated[str, Field(pattern=PEER)]
SignatureText = Annotated[str, Field(pattern=_SIGNATURE)]
UnitText = Annotated[str, Field(pattern=_UNIT)]
Generation = Annotated[str, Field(pattern=GENERATION)]
Count = Annotated[int, Field(ge=0, le=2**62)]
# Sums over a run stay below the bound of counts.
RoundCount = Annotated[int, Field(ge=0, le=MAX_ROUND_TOKENS)]
Peers = Annotated[list[PeerText], Field(max_length=4096)]
UplinkMbit = Annotated[int, Field(ge=0, le=10**6)]
Reducers = Annotated[dict[PeerText, UplinkMbit], Field(max_length=4096)]
Height = Annotated[int, Field(ge=0, le=2**40)]
Electors = Annotated[int, Field(ge=0, le=2**20)]
CodeList = Annotated[
    list[tuple[Height, tuple[Electors, Generation] | tuple[()]]],
    Field(min_length=1, max_length=MAX_REFORMS + 1),
]
Why = Annotated[str, Field(pattern=rf"^[ !#-\[\]-~]{{0,{MAX_REASON_CHARACTERS}}}$")]
"""A reason of which each character takes one byte in JSON."""
Capacity = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class Schema(BaseModel):
    """Base: unknown keys and wrong types are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


class BlobSchema(Schema):
    """Digest and size of something that travels, or lies, beside the message."""

    digest: DigestText
    num_bytes: Count


class ResultSchema(BlobSchema):
    """What a reducer found of a unit."""

    delta: DigestText | None = None

    def value(self) -> ReducedUnit:
        """As the protocol knows it."""
        return ReducedUnit(self.digest, self.num_bytes, self.delta)


class BallotSchema(Schema):
    """A ballot."""

    attempt: Annotated[int, Field(ge=0, le=MAX_ATTEMPT)]
    convener: PeerText

    def value(self) -> Ballot:
        """As the protocol knows it."""
        return Ballot(self.attempt, self.convener)


class RecordedBallotSchema(BallotSchema):
    """A ballot on disk: one beyond the bound must be repaired, not lost (`abstaining.repaired`)."""

    attempt: Count


class HeaderSchema(Schema):
    """A header."""

    code: CodeList
    tip: DigestText
    generation: Generation

    def value(self) -> Header:
        """As the protocol knows it."""
        return Header(tuple(self.code), self.tip, self.generation)


class AcceptedSchema(Schema):
    """A vote inside a READY."""

    ballot: BallotSchema
    manifest: BlobSchema
    evidence: BlobSchema | None


def signature_text(signature: Signature) -> str:
    """A signature in JSON."""
    return b64encode(signature).decode()


class CertificateSchema(Schema):
    """A certificate."""

    ballot: BallotSchema
    signatures: dict[PeerText, SignatureText]

    def value(self) -> Certificate:
        """As the protocol knows it."""
        signatures = {peer: b64decode(signed) for peer, signed in sorted(self.signatures.items())}
        return Certificate(self.ballot.value(), signatures)


class LinkSchema(Schema):
    """One step of a proof."""

    head: Head
    certificate: CertificateSchema | None
    parent: Head | None

    def value(self) -> Link:
        """As the protocol knows it.

        Raises:
            BadMessage: something in a head is no name.
        """
        for head in (self.head, self.parent):
            if head is not None:
                _require_names(head)
        certificate = self.certificate.value() if self.certificate else None
        return Link(self.head, certificate, self.parent)


def wrong_name(*kinds: tuple[re.Pattern[str], Iterable[str]]) -> str | None:
    """The first name that is not of its kind's pattern; None if all are."""
    names = ((pattern, name) for pattern, names in kinds for name in names)
    return next((name for pattern, name in names if not pattern.fullmatch(name)), None)


def _require_names(head: Head) -> None:
    digests = [name for name in (head.parent, head.seed, head.body) if name is not None]
    generations = [head.generation, *(id_ for _, (_, id_) in head.lineage)]
    wrong = wrong_name(
        (IS_DIGEST, digests),
        (IS_GENERATION, generations),
        (IS_PEER, (head.founder, *head.voters)),
    )
    if wrong is not None:
        raise BadMessage("head_names", f"{wrong[:80]!r} is no name in a head")
    if list(head.voters) != sorted(set(head.voters)):
        raise BadMessage("head_names", "a head's voters are not in order")


class ProofSchema(Schema):
    """Why a COMMIT's manifest counts as decided."""

    certificate: CertificateSchema | None
    path: Annotated[list[LinkSchema], Field(max_length=MAX_LINKS)]


class HelloSchema(Schema):
    """HELLO."""

    type: Literal["hello"]
    ask: bool


class PrepareSchema(Schema):
    """PREPARE."""

    type: Literal["prepare"]
    ballot: BallotSchema


class ReadySchema(Schema):
    """READY."""

    type: Literal["ready"]
    ballot: BallotSchema
    offer: BlobSchema | None
    accepted: AcceptedSchema | None
    capacity: Capacity
    leave: bool
    dialable: bool
    remaining_s: Seconds | None
    worked_s: Seconds
    fetched_s: Seconds
    wish: SignatureText | None
    invitation: Invitation | None
    stalls_in_s: Seconds | None
    uplink_mbit: UplinkMbit
    signature: SignatureText


class RosterSchema(Schema):
    """ROSTER."""

    type: Literal["roster"]
    ballot: BallotSchema
    roster_id: DigestText
    list: BlobSchema | None


class RosterListSchema(Schema):
    """The blob beside a ROSTER: it grows with the swarm, and names blobs itself."""

    offers: dict[PeerText, BlobSchema]
    reducers: Reducers


class ReducedSchema(Schema):
    """REDUCED."""

    type: Literal["reduced"]
    ballot: BallotSchema
    roster_id: DigestText
    results: Annotated[dict[UnitText, ResultSchema], Field(max_length=MAX_RESULTS)]
    missing: Annotated[dict[PeerText, Why], Field(max_length=MAX_MISSING)]
    signature: SignatureText


class ProposeSchema(Schema):
    """PROPOSE."""

    type: Literal["propose"]
    ballot: BallotSchema
    manifest: BlobSchema
    holders: Annotated[list[PeerText], Field(max_length=MAX_HOLDERS)]
    evidence: BlobSchema | None


class AcceptSchema(Schema):
    """ACCEPT."""

    type: Literal["accept"]
    ballot: BallotSchema
    digest: DigestText
    signature: SignatureText


class CommitSchema(Schema):
    """COMMIT."""

    type: Literal["commit"]
    manifest: BlobSchema
    parent: BlobSchema | None
    proof: BlobSchema


AnyMessage = (
    HelloSchema
    | PrepareSchema
    | ReadySchema
    | RosterSchema
    | ReducedSchema
    | ProposeSchema
    | AcceptSchema
    | CommitSchema
)


class FrameSchema(Schema):
    """A whole message."""

    header: HeaderSchema
    message: Annotated[AnyMessage, Field(discriminator="type")]


class OfferedUnitSchema(Schema):
    """One unit of an offer."""

    digest: DigestText
    num_bytes: Count
    base: DigestText
    delta: DigestText | None = None


class OfferSchema(Schema):
    """An offer's blob."""

    tip: DigestText
    steps: RoundCount
    tokens: RoundCount
    seconds: Seconds
    units: dict[UnitText, OfferedUnitSchema]


class RecordedVoteSchema(Schema):
    """The record's vote."""

    ballot: RecordedBallotSchema
    manifest: str
    evidence: str | None


class RecordSchema(Schema):
    """The record; manifests are kept as their exact bytes."""

    tip: str
    certificate: CertificateSchema | None
    parent: str | None
    promised: RecordedBallotSchema | None
    accepted: RecordedVoteSchema | None
    abstain_until_height: Count


S = TypeVar("S", bound=Schema)


def parse(schema: type[S], encoded: Buffer, what: str) -> S:
    """Checks foreign bytes against a schema.

    Raises:
        BadMessage: they are not of it; the message names the first wrong field.
    """
    try:
        return schema.model_validate_json(bytes(encoded))
    except ValidationError as error:
        raise BadMessage(f"{what}_schema", f"{what} field {refusal(error)}") from error
