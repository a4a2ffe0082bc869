"""Messages and offers as bytes.

A message is one JSON object of at most 64 KiB. Nothing that grows with the swarm travels inside
it: offers, manifests, proofs and the list of a roster follow as blobs that the receiver fetches
first, and the message names their digests and sizes. All other lists have a bound, so it is small
however many peers there are, and a repeated one costs nothing.

Everything that comes from the network is checked against a strict schema before it becomes a
value: unknown keys, wrong types, names that could be file paths, sizes out of bounds are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from swarm.canonical import canonical
from swarm.errors import BadMessage, StateError
from swarm.protocol.digests import Buffer, digest_of
from swarm.protocol.evidence import MAX_EVIDENCE_BYTES, encode_evidence, known_evidence
from swarm.protocol.foreign import foreign_manifest
from swarm.protocol.manifest import MAX_MANIFEST_BYTES, Manifest
from swarm.protocol.messages import (
    Accept,
    Commit,
    Evidence,
    Header,
    Hello,
    Message,
    Offer,
    PossibleBallot,
    Prepare,
    Propose,
    Ready,
    Reduced,
    Roster,
)
from swarm.protocol.offers import (
    MAX_OFFER_BYTES,
    MAX_ROSTER_BYTES,
    RosterList,
    decode_roster,
    encode_roster,
    known_offer,
)
from swarm.protocol.proofs import MAX_PROOF_BYTES, Proof, decode_proof, encode_proof
from swarm.protocol.schemas import (
    BESIDE,
    MAX_REASON_CHARACTERS,
    Blob,
    DigestText,
    OnWire,
    parse,
)

MAX_MESSAGE_BYTES = 64 * 2**10


@dataclass(frozen=True)
class SentRoster(OnWire):
    """A ROSTER as it travels."""

    ballot: PossibleBallot
    roster_id: DigestText
    list: Annotated[RosterList, BESIDE] | None
    type: Literal["roster"] = "roster"


@dataclass(frozen=True)
class SentCommit(OnWire):
    """A COMMIT as it travels; its fields are in the order that `Claim` promises."""

    manifest: Annotated[Manifest, BESIDE]
    proof: Annotated[Proof, BESIDE]
    parent: Annotated[Manifest, BESIDE] | None
    type: Literal["commit"] = "commit"


SentMessage = Hello | Prepare | Ready | SentRoster | Reduced | Propose | Accept | SentCommit


@dataclass(frozen=True)
class Frame(OnWire):
    """A whole message."""

    header: Header
    message: Annotated[SentMessage, Field(discriminator="type")]


_FRAME = TypeAdapter(Frame)


_KINDS: Mapping[type, tuple[int, Callable[[bytes], object]]] = {
    Offer: (MAX_OFFER_BYTES, known_offer),
    Manifest: (MAX_MANIFEST_BYTES, foreign_manifest),
    Evidence: (MAX_EVIDENCE_BYTES, known_evidence),
    RosterList: (MAX_ROSTER_BYTES, decode_roster),
    Proof: (MAX_PROOF_BYTES, decode_proof),
}
"""Of what may lie beside a message: bytes at most, and how it is read."""


class _Beside:
    """The blobs beside one message that is written or read; see `schemas.Attachments`."""

    def __init__(self, blobs: Mapping[str, Buffer] | None = None) -> None:
        """Reads with these blobs; without, fields keep the names of what travels beside them."""
        self._blobs = blobs
        self.named: list[Blob] = []
        self.out: dict[str, bytes] = {}

    def received(self, kind: type, blob: Blob) -> object:
        """What a message refers to.

        Raises:
            BadMessage: it is announced larger than its kind may be, missing or wrong.
        """
        limit, read = _KINDS[kind]
        _require_size(blob, limit)
        self.named.append(blob)
        return blob if self._blobs is None else read(_content(blob, self._blobs))

    def sent(self, value: object) -> Blob:
        """Puts a value beside the message."""
        if isinstance(value, Manifest):
            digest, encoded = value.blob, value.encoded
        elif isinstance(value, Offer):
            digest, encoded = value.digest, value.encoded
        else:
            encoded = _encoded(value)
            digest = digest_of(encoded)
        self.out[digest] = encoded
        return Blob(digest, len(encoded))


def _encoded(value: object) -> bytes:
    if isinstance(value, RosterList):
        return encode_roster(value)
    if isinstance(value, Proof):
        return encode_proof(value)
    assert isinstance(value, Evidence)
    return encode_evidence(value)


def encode(header: Header, message: Message) -> tuple[bytes, dict[str, bytes]]:
    """A message as bytes.

    Returns:
        The payload, and the blobs that it refers to, by digest; the sender must be able to serve
        them.

    Raises:
        StateError: the message is too large; none is whose lists have the lengths of the schemas.
    """
    beside = _Beside()
    frame = Frame(header, _as_sent(message, beside))
    payload = canonical(_FRAME.dump_python(frame, context=beside))
    if len(payload) > MAX_MESSAGE_BYTES:
        kind = type(message).__name__.upper()
        raise StateError(f"a {kind} of {len(payload)} bytes would be over {MAX_MESSAGE_BYTES}")
    return payload, beside.out


class BareMessage:
    """A message as far as it can be read without what travels beside it: from one look at it.

    Attributes:
        header: of the message.
        kind: its type as on the wire.
        attachments: digest and size of every blob that it refers to, to be fetched before it is
            decoded.
        relays: who passes on what a PROPOSE names [D4]; nobody of any other message.
    """

    def __init__(self, payload: Buffer) -> None:
        """Reads a message.

        Raises:
            BadMessage: the payload is not of the schema, or a blob is announced too large.
        """
        beside = _Beside()
        frame = _frame(payload, beside)
        self.header, self.kind = frame.header, frame.message.type
        self.attachments = tuple((blob.digest, blob.num_bytes) for blob in beside.named)
        self.relays = frame.message.relays if isinstance(frame.message, Propose) else ()
        self._message, self._named = frame.message, beside.named

    def attachments_within(self, attachments: Mapping[str, Buffer]) -> tuple[tuple[str, int], ...]:
        """Digest and size of every blob that what is beside it names in turn: a roster's offers.

        Raises:
            BadMessage: an attachment is missing or wrong, or announces a blob too large.
        """
        if not isinstance(self._message, SentRoster) or not self._named:
            return ()
        listed = decode_roster(_content(self._named[0], attachments))
        for blob in listed.offers.values():
            _require_size(blob, MAX_OFFER_BYTES)
        return tuple((blob.digest, blob.num_bytes) for blob in listed.offers.values())

    def holders(self, attachments: Mapping[str, Buffer]) -> dict[str, tuple[str, ...]]:
        """Digest of what it needs -> peers that hold it, as far as the message tells.

        Of a proposed manifest and its evidence those that accepted it, of an offer in a roster the
        one that made it.

        `attachments`: what is here of those that it names.

        Raises:
            BadMessage: an attachment is not of its schema.
        """
        if isinstance(self._message, Propose):
            return dict.fromkeys((blob.digest for blob in self._named), self._message.holders)
        is_roster = isinstance(self._message, SentRoster) and self._named
        if is_roster and self._named[0].digest in attachments:
            listed = decode_roster(_content(self._named[0], attachments))
            return {blob.digest: (peer,) for peer, blob in listed.offers.items()}
        return {}


def decode(payload: Buffer, attachments: Mapping[str, Buffer]) -> tuple[Header, Message]:
    """A message from bytes that are not trusted.

    The attachments are those that its `BareMessage` names, and those within these.

    Raises:
        BadMessage: not of the schema, or an attachment is missing, wrong or not of its schema.
        BadManifest: an attached manifest is none.
    """
    frame = _frame(payload, _Beside(attachments))
    match frame.message:
        case SentRoster(ballot, roster_id, listed):
            offers = {}
            for peer, blob in listed.offers.items() if listed else ():
                _require_size(blob, MAX_OFFER_BYTES)
                offers[peer] = known_offer(_content(blob, attachments))
            return frame.header, Roster(
                ballot, roster_id, offers, listed.reducers if listed else {}
            )
        case SentCommit(manifest, proof, parent):
            return frame.header, Commit(manifest, proof.certificate, parent, proof.path)
        case message:
            return frame.header, message


def _as_sent(message: Message, beside: _Beside) -> SentMessage:
    """The message with all that travels apart from it in the place where the schema has it."""
    match message:
        case Roster(ballot, roster_id, offers, reducers):
            named = {peer: beside.sent(offer) for peer, offer in offers.items()}
            return SentRoster(ballot, roster_id, RosterList(named, reducers) if named else None)
        case Commit(manifest, certificate, parent, path):
            return SentCommit(manifest, Proof(certificate, path), parent)
        case Reduced():
            return replace(message, missing={p: _brief(why) for p, why in message.missing.items()})
        case _:
            return message


def _frame(payload: Buffer, beside: _Beside) -> Frame:
    if len(payload) > MAX_MESSAGE_BYTES:
        raise BadMessage("message_size", f"a message of {len(payload)} bytes is too large")
    return parse(_FRAME, payload, "message", beside)


def _require_size(blob: Blob, limit: int) -> None:
    if blob.num_bytes > limit:
        raise BadMessage("attachment_size", f"an attachment of {blob.num_bytes} bytes")


def _content(blob: Blob, attachments: Mapping[str, Buffer]) -> bytes:
    """What is beside a message, copied, if it is what the message says."""
    content = attachments.get(blob.digest)
    if content is None:
        raise BadMessage("attachment_missing", f"attachment {blob.digest[:12]} is missing")
    if len(content) != blob.num_bytes or digest_of(copied := bytes(content)) != blob.digest:
        raise BadMessage("attachment_digest", f"attachment {blob.digest[:12]} is another")
    return copied


def _brief(why: str) -> str:
    """A reason as a message may hold it: short, and a byte for each character."""
    return re.sub(r"[^ !#-\[\]-~]", "?", why[:MAX_REASON_CHARACTERS])
