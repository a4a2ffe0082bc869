"""How messages, offers and the record become bytes.

A message is one JSON object: type, header and fields. Offers and manifests never stand in it;
each is a blob of its own (canonical JSON), named by `{"@offer": [digest, bytes]}` or
`{"@manifest": [digest, bytes]}`, which the receiver fetches from the sender first. Byte strings
are `{"@bytes": BASE64}`. So a message stays under 64 kB with a hundred peers.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError

from swarm.errors import BadMessage
from swarm.protocol.digests import Buffer, digest_of
from swarm.protocol.events import Record
from swarm.protocol.manifest import MAX_MANIFEST_BYTES, Digest, Manifest, decode_manifest
from swarm.protocol.messages import (
    Accept,
    Commit,
    Header,
    Hello,
    Message,
    Offer,
    Prepare,
    Propose,
    Ready,
    Reduced,
    Roster,
)

MAX_PAYLOAD_BYTES = 200_000
MAX_OFFER_BYTES = 4 * 2**20
MAX_ATTACHMENTS = 512

Attachments = dict[Digest, bytes]
_KINDS: dict[str, type[Message]] = {
    kind.__name__.lower(): kind
    for kind in (Hello, Prepare, Ready, Roster, Reduced, Propose, Accept, Commit)
}
_SCHEMAS: dict[type, TypeAdapter[Any]] = {
    kind: TypeAdapter(kind) for kind in (*_KINDS.values(), Header, Offer, Record)
}
_LIMITS = {"@offer": MAX_OFFER_BYTES, "@manifest": MAX_MANIFEST_BYTES}
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class _Reference:
    """A place in a message where an attached blob belongs."""

    kind: str
    digest: Digest
    num_bytes: int


def encode(header: Header, message: Message) -> tuple[bytes, Attachments]:
    """The payload of a message and the blobs that it refers to, by digest."""
    attachments: Attachments = {}
    fields = {
        "type": type(message).__name__.lower(),
        "header": _plain(header, attachments),
        "fields": _plain(message, attachments),
    }
    return _json(fields), attachments


def attachments_of(payload: bytes) -> tuple[tuple[Digest, int], ...]:
    """Digest and size of each blob that a payload refers to.

    Raises:
        BadMessage: the payload is too large, no JSON, or refers to too much.
    """
    found: dict[Digest, int] = {}
    _walk(
        _parsed(payload), lambda reference: found.setdefault(reference.digest, reference.num_bytes)
    )
    if len(found) > MAX_ATTACHMENTS:
        raise BadMessage("message_schema", f"a message refers to {len(found)} blobs")
    return tuple(found.items())


def decode(payload: bytes, attachments: Mapping[Digest, Buffer]) -> tuple[Header, Message]:
    """Reads a message whose attached blobs are here.

    Raises:
        BadMessage: not of the schema, or a blob is missing or not what it should be.
        BadManifest: an attached manifest is not one.
    """
    values = _resolved(_parsed(payload), attachments)
    if not isinstance(values, dict) or values.keys() != {"type", "header", "fields"}:
        raise BadMessage("message_schema", "a message has a type, a header and fields")
    kind = _KINDS.get(values["type"]) if isinstance(values["type"], str) else None
    if kind is None:
        raise BadMessage("message_schema", f"unknown message type {values['type']!r:.40}")
    return _validated(Header, values["header"]), _validated(kind, values["fields"])


def encode_offer(offer: Offer) -> bytes:
    """An offer's blob: canonical JSON."""
    return _json(_plain(dataclasses.asdict(offer), {}))


def decode_offer(encoded: Buffer) -> Offer:
    """Reads an offer from the bytes of its blob.

    Raises:
        BadMessage: too large or not of the schema.
    """
    if len(encoded) > MAX_OFFER_BYTES:
        raise BadMessage("offer_size", f"an offer of {len(encoded)} bytes is too large")
    offer: Offer = _validated(Offer, _loads(bytes(encoded), "offer"))
    return offer


def encode_record(record: Record) -> bytes:
    """The protocol's record with all manifests in it, for the disk."""
    attachments: Attachments = {}
    plain = _plain(record, attachments)
    texts = {digest: blob.decode() for digest, blob in attachments.items()}
    return _json({"record": plain, "attached": texts})


def decode_record(encoded: bytes) -> Record:
    """Reads what `encode_record` wrote.

    Raises:
        BadMessage, BadManifest: it was changed.
    """
    values = _loads(encoded, "record")
    if not isinstance(values, dict) or values.keys() != {"record", "attached"}:
        raise BadMessage("record_schema", "the file holds no record")
    attached = {str(d): str(text).encode() for d, text in dict(values["attached"]).items()}
    record: Record = _validated(Record, _resolved(values["record"], attached))
    return record


# ---------------------------------------------------------------- values -> JSON


def _plain(value: Any, attachments: Attachments) -> Any:
    """The value in JSON's types, with manifests and offers moved into `attachments`."""
    if isinstance(value, Manifest):
        return _attach("@manifest", value.encoded, value.digest, attachments)
    if isinstance(value, Offer):
        blob = encode_offer(value)
        return _attach("@offer", blob, digest_of(blob), attachments)
    if isinstance(value, bytes):
        return {"@bytes": base64.b64encode(value).decode()}
    if isinstance(value, Enum):
        return value.value
    if dataclasses.is_dataclass(value):
        return {
            field.name: _plain(getattr(value, field.name), attachments)
            for field in dataclasses.fields(value)
        }
    if isinstance(value, Mapping):
        return {str(key): _plain(item, attachments) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item, attachments) for item in value]
    return value


def _attach(kind: str, blob: bytes, digest: Digest, attachments: Attachments) -> dict[str, Any]:
    attachments[digest] = blob
    return {kind: [digest, len(blob)]}


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


# ---------------------------------------------------------------- JSON -> values


def _parsed(payload: bytes) -> Any:
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise BadMessage("message_size", f"a message of {len(payload)} bytes is too large")
    return _loads(payload, "message")


def _loads(encoded: bytes, what: str) -> Any:
    try:
        return json.loads(encoded, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise BadMessage(f"{what}_schema", f"the {what} is no JSON: {error}") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


def _walk(value: Any, on_reference: Any) -> None:
    if isinstance(value, dict):
        reference = _reference(value)
        if reference:
            on_reference(reference)
            return
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _walk(item, on_reference)


def _reference(value: dict[str, Any]) -> _Reference | None:
    if len(value) != 1:
        return None
    kind, content = next(iter(value.items()))
    if kind not in _LIMITS:
        return None
    match content:
        case [str(digest), int(num_bytes)] if _DIGEST.fullmatch(digest):
            if 0 < num_bytes <= _LIMITS[kind]:
                return _Reference(kind, digest, num_bytes)
    raise BadMessage("message_schema", f"{kind} must name a digest and an admissible size")


def _resolved(value: Any, attachments: Mapping[Digest, Buffer]) -> Any:
    if isinstance(value, list):
        return [_resolved(item, attachments) for item in value]
    if not isinstance(value, dict):
        return value
    reference = _reference(value)
    if reference:
        return _opened(reference, attachments)
    if value.keys() == {"@bytes"}:
        try:
            return base64.b64decode(value["@bytes"], validate=True)
        except (ValueError, TypeError) as error:
            raise BadMessage("message_schema", "a byte string is not base64") from error
    return {key: _resolved(item, attachments) for key, item in value.items()}


def _opened(reference: _Reference, attachments: Mapping[Digest, Buffer]) -> Manifest | Offer:
    blob = attachments.get(reference.digest)
    if blob is None or len(blob) != reference.num_bytes:
        raise BadMessage("message_schema", f"the blob {reference.digest[:12]} is not here")
    return decode_manifest(blob) if reference.kind == "@manifest" else decode_offer(blob)


def _validated(kind: type, value: Any) -> Any:
    try:
        return _SCHEMAS[kind].validate_python(value)
    except (ValidationError, RecursionError) as error:
        problem = str(error).splitlines()
        place = problem[1].strip() if len(problem) > 1 else ""
        raise BadMessage(
            "message_schema", f"{kind.__name__} {place}: {problem[-1].strip()[:200]}"
        ) from error
