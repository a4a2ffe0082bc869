"""What messages, offers and the record must look like as JSON: strict, bounded, nothing extra."""

from __future__ import annotations

import re
from typing import Annotated, Literal, TypeVar

from pydantic import Base64Bytes, BaseModel, ConfigDict, Field, ValidationError

from swarm.config.bounds import MAX_ROUND_TOKENS
from swarm.errors import BadMessage
from swarm.protocol.digests import Buffer
from swarm.protocol.messages import MAX_ATTEMPT, Ballot, Certificate, Header, Signature

MAX_REASON_CHARACTERS = 120

_HEX_DIGEST = r"^[0-9a-f]{64}$"
_PEER = r"^[A-Za-z0-9]{1,128}$"
_UNIT = r"^(expert|shared)\.[0-9]{1,6}$"
_GENERATION = r"^[0-9a-f]{1,64}$"
IS_DIGEST, IS_GENERATION = re.compile(_HEX_DIGEST), re.compile(_GENERATION)
IS_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")
IS_PEER, IS_UNIT = re.compile(_PEER), re.compile(_UNIT)
MAX_REFORMS = 512

DigestText = Annotated[str, Field(pattern=_HEX_DIGEST)]
PeerText = Annotated[str, Field(pattern=_PEER)]
UnitText = Annotated[str, Field(pattern=_UNIT)]
Generation = Annotated[str, Field(pattern=_GENERATION)]
Count = Annotated[int, Field(ge=0, le=2**62)]
# Sums over a run stay below the bound of counts.
RoundCount = Annotated[int, Field(ge=0, le=MAX_ROUND_TOKENS)]
Peers = Annotated[list[PeerText], Field(max_length=4096)]
Capacity = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]


class Schema(BaseModel):
    """Base: unknown keys and wrong types are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, hide_input_in_errors=True)


class BlobSchema(Schema):
    """Digest and size of something that travels, or lies, beside the message."""

    digest: DigestText
    num_bytes: Count


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

    code: Annotated[
        list[tuple[Count, tuple[Count, Generation] | tuple[()]]],
        Field(min_length=1, max_length=MAX_REFORMS + 1),
    ]
    tip: DigestText
    generation: Generation

    def value(self) -> Header:
        """As the protocol knows it."""
        return Header(tuple(self.code), self.tip, self.generation)


class AcceptedSchema(Schema):
    """A vote inside a READY."""

    ballot: BallotSchema
    manifest: BlobSchema


class SignatureSchema(Schema):
    """A signature with its key, in base64."""

    public_key: Annotated[Base64Bytes, Field(max_length=1024)]
    signature: Annotated[Base64Bytes, Field(max_length=1024)]

    def value(self) -> Signature:
        """As the protocol knows it."""
        return Signature(self.public_key, self.signature)


class CertificateSchema(Schema):
    """A certificate."""

    ballot: BallotSchema
    signatures: dict[PeerText, SignatureSchema]

    def value(self) -> Certificate:
        """As the protocol knows it."""
        signatures = {peer: signed.value() for peer, signed in sorted(self.signatures.items())}
        return Certificate(self.ballot.value(), signatures)


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


class RosterSchema(Schema):
    """ROSTER."""

    type: Literal["roster"]
    ballot: BallotSchema
    roster_id: DigestText
    offers: dict[PeerText, BlobSchema]
    reducers: Peers


class ReducedSchema(Schema):
    """REDUCED."""

    type: Literal["reduced"]
    ballot: BallotSchema
    roster_id: DigestText
    results: dict[UnitText, BlobSchema]
    missing: dict[PeerText, Annotated[str, Field(max_length=MAX_REASON_CHARACTERS)]]


class ProposeSchema(Schema):
    """PROPOSE."""

    type: Literal["propose"]
    ballot: BallotSchema
    manifest: BlobSchema
    holders: Peers


class AcceptSchema(Schema):
    """ACCEPT."""

    type: Literal["accept"]
    ballot: BallotSchema
    digest: DigestText
    signature: SignatureSchema


class CommitSchema(Schema):
    """COMMIT."""

    type: Literal["commit"]
    manifest: BlobSchema
    certificate: CertificateSchema | None
    parent: BlobSchema | None


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
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in problem["loc"])[:120]
        raise BadMessage(
            f"{what}_schema", f"{what} field {place}: {problem['msg'][:300]}"
        ) from error
