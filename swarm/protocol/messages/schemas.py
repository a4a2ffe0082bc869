"""How the dataclasses of messages and blobs are read from JSON: strict, bounded, nothing extra.

Types of fields carry their bounds here, as pydantic's annotations; a `TypeAdapter` of a dataclass
checks foreign bytes against them and makes the value. Values that the code itself makes are not
checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

from pydantic import (
    AfterValidator,
    Field,
    GetCoreSchemaHandler,
    GetPydanticSchema,
    PlainSerializer,
    SerializationInfo,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
)

from swarm.config.run_settings import MAX_ROUND_TOKENS
from swarm.config.section import Strict, refusal
from swarm.errors import BadMessage
from swarm.protocol.values.digests import Buffer
from swarm.protocol.values.manifest import ALL_EXPERTS, Head

MAX_REASON_CHARACTERS = 120
MAX_LINKS = 256
"""Most links of one proof. One link passes over some five changes of voters (`trust.pruned`)."""

_HEX_DIGEST = r"^[0-9a-f]{64}$"
PEER = r"^[1-9A-HJ-NP-Za-km-z]{1,52}$"
"""Base58, at most as long as the id of an Ed25519 key. Each peer that signs or is dialed has such
an id."""
_UNIT = r"^(expert|shared)\.[0-9]{1,6}$"
_SIGNATURE = r"^[A-Za-z0-9+/]{85}[AQgw]==$"
GENERATION = r"^[0-9a-f]{1,32}$"
IS_DIGEST, IS_GENERATION = re.compile(_HEX_DIGEST), re.compile(GENERATION)
IS_PEER, IS_UNIT, IS_SIGNATURE = re.compile(PEER), re.compile(_UNIT), re.compile(_SIGNATURE)
IS_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,127}$")
MAX_REFORMS = 512
MAX_HOLDERS = 16
"""Most holders that a PROPOSE names: the last peers to report that they have all blobs."""
MAX_RELAYS = 16
"""Most relays that a PROPOSE names (blob relays)."""
MAX_MISSING = 64
"""Most peers that one REDUCED reports as missing."""
MAX_RESULTS = 100
"""Most units of one REDUCED."""


def in_order(values: Mapping[str, Any]) -> dict[str, Any]:
    """Sorted by name, so that nothing depends on the writer's order."""
    return dict(sorted(values.items()))


DigestText = Annotated[str, Field(pattern=_HEX_DIGEST)]
PeerText = Annotated[str, Field(pattern=PEER)]
SignatureText = Annotated[str, Field(pattern=_SIGNATURE)]
UnitText = Annotated[str, Field(pattern=_UNIT)]
Generation = Annotated[str, Field(pattern=GENERATION)]
Count = Annotated[int, Field(ge=0, le=2**62)]
# Small enough that sums over a run stay within the bound of `Count`.
RoundCount = Annotated[int, Field(ge=0, le=MAX_ROUND_TOKENS)]
Uplink = Annotated[int, Field(ge=0, le=10**6)]
"""Mbit/s; 0: not known."""
Electors = Annotated[int, Field(ge=1, le=2**20)]
Place = tuple[Annotated[int, Field(ge=0, le=2**40)], tuple[Electors, Generation] | tuple[()]]
CodeText = Annotated[tuple[Place, ...], Field(min_length=1, max_length=MAX_REFORMS + 1)]
Why = Annotated[str, Field(pattern=rf"^[ !#-\[\]-~]{{0,{MAX_REASON_CHARACTERS}}}$")]
"""A reason whose characters each take one byte in JSON."""
Capacity = Annotated[
    float, Field(gt=0, le=1e9, allow_inf_nan=False), PlainSerializer(float, return_type=float)
]
Room = Annotated[int, Field(ge=0, le=ALL_EXPERTS)]
"""Experts that fit a machine (expert ownership)."""
Seconds = Annotated[
    float, Field(ge=0, le=1e9, allow_inf_nan=False), PlainSerializer(float, return_type=float)
]
IF_ANY = Field(exclude_if=lambda value: value is None)
"""Left out of the JSON where it is None."""
DigestIfAny = Annotated[DigestText | None, IF_ANY]


def wrong_name(*kinds: tuple[re.Pattern[str], Iterable[str]]) -> str | None:
    """The first name that is not of its kind's pattern; None if all are."""
    names = ((pattern, name) for pattern, names in kinds for name in names)
    return next((name for pattern, name in names if not pattern.fullmatch(name)), None)


def _named(head: Head) -> Head:
    """A head whose names are all valid."""
    digests = [name for name in (head.parent, head.seed, head.body) if name is not None]
    generations = [head.generation, *(id_ for _, (_, id_) in head.lineage)]
    wrong = wrong_name(
        (IS_DIGEST, digests),
        (IS_GENERATION, generations),
        (IS_PEER, (head.founder, *head.voters)),
    )
    if wrong is not None:
        raise BadMessage("head_names", f"{wrong[:80]!r} is not a valid name in a head")
    if list(head.voters) != sorted(set(head.voters)):
        raise BadMessage("head_names", "a head's voters are not in order")
    return head


def read_as(form: Any) -> GetPydanticSchema:
    """Marks a type whose JSON has another form; that form's validators make a value of the type."""
    return GetPydanticSchema(lambda _, handler: handler.generate_schema(form))


NamedHead = Annotated[Head, AfterValidator(_named)]


class OnWire:
    """Base of dataclasses read from JSON: like `Strict`, but a missing key is an error too.

    Defaults are for the code alone. Each value has one JSON form, which leaves out only fields with
    a mark such as `IF_ANY`.
    """

    __pydantic_config__ = Strict.__pydantic_config__

    @classmethod
    def __get_pydantic_core_schema__(
        cls, source: type, handler: GetCoreSchemaHandler
    ) -> Any:  # pydantic_core's type, which is a module of its own
        schema = handler(source)
        whole: Any = handler.resolve_ref_schema(schema)
        for field in whole["schema"]["fields"]:
            if field["schema"]["type"] == "default" and "serialization_exclude_if" not in field:
                field["schema"] = field["schema"]["schema"]
        return schema


# ---------------------------------------------------------------- attachments


@dataclass(frozen=True)
class Blob(OnWire):
    """Digest and size of an attachment, which travels apart from the message."""

    digest: DigestText
    num_bytes: Count


class Attachments(Protocol):
    """The context in which messages are read and written."""

    def received(self, kind: type, blob: Blob) -> object:
        """The value that a message refers to; the reference itself while the blob is not here."""

    def sent(self, value: Any) -> Blob:
        """Attaches a value to a message; returns the reference that the message carries."""


def _beside(kind: type, handler: GetCoreSchemaHandler) -> Any:
    def received(blob: Blob, info: ValidationInfo[Attachments]) -> object:
        return info.context.received(kind, blob)

    def sent(value: object, info: SerializationInfo[Attachments]) -> Mapping[str, object]:
        return vars(info.context.sent(value))

    return handler.generate_schema(Annotated[Blob, AfterValidator(received), PlainSerializer(sent)])


BESIDE = GetPydanticSchema(_beside)
"""Marks the type of a field whose value travels as a blob, see `Attachments`."""

T = TypeVar("T")


def parse(schema: TypeAdapter[T], encoded: Buffer, what: str, context: object = None) -> T:
    """Checks foreign bytes against a schema.

    Raises:
        BadMessage: the bytes do not match; the message names the first wrong field.
    """
    try:
        return schema.validate_json(bytes(encoded), context=context)
    except ValidationError as error:
        raise BadMessage(f"{what}_schema", f"{what} field {refusal(error)}") from error
