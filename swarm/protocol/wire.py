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
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from swarm.canonical import canonical
from swarm.errors import BadMessage, StateError
from swarm.protocol.digests import Buffer, digest_of
from swarm.protocol.evidence import MAX_EVIDENCE_BYTES, encode_evidence, known_evidence
from swarm.protocol.foreign import foreign_manifest
from swarm.protocol.invitation import as_plain
from swarm.protocol.manifest import MAX_MANIFEST_BYTES, Manifest
from swarm.protocol.messages import (
    Accept,
    Accepted,
    Commit,
    Evidence,
    Header,
    Hello,
    Message,
    Offer,
    Prepare,
    Propose,
    Ready,
    Reduced,
    Roster,
    with_delta,
)
from swarm.protocol.offers import (
    MAX_OFFER_BYTES,
    MAX_ROSTER_BYTES,
    decode_roster,
    known_offer,
    offers_in,
)
from swarm.protocol.proofs import MAX_PROOF_BYTES, decode_proof, encode_proof
from swarm.protocol.schemas import (
    MAX_REASON_CHARACTERS,
    AcceptedSchema,
    AcceptSchema,
    AnyMessage,
    BlobSchema,
    CommitSchema,
    FrameSchema,
    HelloSchema,
    PrepareSchema,
    ProposeSchema,
    ReadySchema,
    ReducedSchema,
    RosterListSchema,
    RosterSchema,
    parse,
    signature_text,
)

MAX_MESSAGE_BYTES = 64 * 2**10


def encode(header: Header, message: Message) -> tuple[bytes, dict[str, bytes]]:
    """A message as bytes.

    Returns:
        The payload, and the blobs that it refers to, by digest; the sender must be able to serve
        them.

    Raises:
        StateError: the message is too large; none is whose lists have the lengths of the schemas.
    """
    attachments: dict[str, bytes] = {}
    body = _body(message, attachments)
    frame = {
        "header": {"code": header.code, "tip": header.tip, "generation": header.generation},
        "message": {"type": type(message).__name__.lower(), **body},
    }
    payload = canonical(frame)
    if len(payload) > MAX_MESSAGE_BYTES:
        kind = type(message).__name__.upper()
        raise StateError(f"a {kind} of {len(payload)} bytes would be over {MAX_MESSAGE_BYTES}")
    return payload, attachments


def attachments_of(payload: Buffer) -> tuple[tuple[str, int], ...]:
    """Digest and size of every blob that a message refers to, to be fetched before decoding it.

    Raises:
        BadMessage: the payload is not of the schema, or a blob is announced too large.
    """
    return summary_of(payload)[2]


def summary_of(payload: Buffer) -> tuple[Header, str, tuple[tuple[str, int], ...]]:
    """Header and type of a message, and what `attachments_of` says of it, from one look at it.

    Raises:
        BadMessage: the payload is not of the schema, or a blob is announced too large.
    """
    frame = _frame(payload)
    attached = tuple((blob.digest, blob.num_bytes) for blob in _attached(frame.message))
    return frame.header.value(), frame.message.type, attached


def attachments_within(
    payload: Buffer, attachments: Mapping[str, bytes]
) -> tuple[tuple[str, int], ...]:
    """Digest and size of every blob that what is beside a message names in turn: a roster's offers.

    Raises:
        BadMessage: an attachment is missing or wrong, or announces a blob too large.
    """
    listed = _roster_list(_frame(payload).message, attachments)
    return tuple((blob.digest, blob.num_bytes) for blob in offers_in(listed))


def holders_of(payload: Buffer, attachments: Mapping[str, bytes]) -> dict[str, tuple[str, ...]]:
    """Digest of what a message needs -> peers that hold it, as far as the message tells.

    Of a proposed manifest and its evidence those that accepted it, of an offer in a roster the one
    that made it.

    `attachments` are what is here of those that `attachments_of` names.

    Raises:
        BadMessage: the payload is not of the schema, or an attachment is not.
    """
    message = _frame(payload).message
    if isinstance(message, ProposeSchema):
        blobs = [message.manifest, message.evidence]
        return {blob.digest: tuple(message.holders) for blob in blobs if blob}
    if isinstance(message, RosterSchema) and message.list and message.list.digest in attachments:
        listed = _roster_list(message, attachments)
        return {blob.digest: (peer,) for peer, blob in listed.offers.items()} if listed else {}
    return {}


def decode(payload: Buffer, attachments: Mapping[str, bytes]) -> tuple[Header, Message]:
    """A message from bytes that are not trusted.

    The attachments are those that `attachments_of` and `attachments_within` name.

    Raises:
        BadMessage: not of the schema, or an attachment is missing, wrong or not of its schema.
        BadManifest: an attached manifest is none.
    """
    frame = _frame(payload)
    beside = [*_attached(frame.message)]
    listed = _roster_list(frame.message, attachments)
    blobs = {blob.digest: _content(blob, attachments) for blob in (*beside, *offers_in(listed))}
    return frame.header.value(), _message(frame.message, blobs)


def _content(blob: BlobSchema, attachments: Mapping[str, bytes]) -> bytes:
    """What is beside a message, if it is what the message says."""
    content = attachments.get(blob.digest)
    if content is None:
        raise BadMessage("attachment_missing", f"attachment {blob.digest[:12]} is missing")
    if len(content) != blob.num_bytes or digest_of(content) != blob.digest:
        raise BadMessage("attachment_digest", f"attachment {blob.digest[:12]} is another")
    return content


def _roster_list(message: AnyMessage, attachments: Mapping[str, bytes]) -> RosterListSchema | None:
    """The list beside a ROSTER; None for all other messages."""
    if not isinstance(message, RosterSchema) or message.list is None:
        return None
    return decode_roster(_content(message.list, attachments))


def _body(message: Message, attachments: dict[str, bytes]) -> dict[str, Any]:
    """The message's own fields, with all that travels beside it moved to the attachments."""
    attach = partial(_attach, attachments)
    body: dict[str, Any]
    match message:
        case Hello(ask):
            return {"ask": ask}
        case Ready():
            body = {
                "offer": attach(message.offer),
                "accepted": _vote(message.accepted, attach),
                "capacity": float(message.capacity),
                "leave": message.leave,
                "dialable": message.dialable,
                "remaining_s": message.remaining_s,
                "worked_s": message.worked_s,
                "fetched_s": message.fetched_s,
                "wish": message.wish,
                "invitation": as_plain(message.invitation) if message.invitation else None,
                "stalls_in_s": message.stalls_in_s,
                "uplink_mbit": message.uplink_mbit,
                "signature": signature_text(message.signature),
            }
        case Roster():
            offers = {peer: attach(offer) for peer, offer in message.offers.items()}
            named = {"offers": offers, "reducers": dict(message.reducers)} if offers else None
            listed = canonical(named) if named else None
            body = {"roster_id": message.roster_id, "list": attach(listed)}
        case Reduced():
            body = {
                "roster_id": message.roster_id,
                "results": {unit: with_delta(vars(each)) for unit, each in message.results.items()},
                "signature": signature_text(message.signature),
                "missing": {peer: _brief(why) for peer, why in message.missing.items()},
            }
        case Propose():
            body = {
                "manifest": attach(message.manifest),
                "holders": list(message.holders),
                "evidence": attach(message.evidence),
            }
        case Accept():
            body = {"digest": message.digest, "signature": signature_text(message.signature)}
        case Commit():
            return {
                "manifest": attach(message.manifest),
                "parent": attach(message.parent),
                "proof": attach(encode_proof(message)),
            }
        case Prepare():
            body = {}
    return {"ballot": message.ballot._asdict(), **body}


def _attach(
    attachments: dict[str, bytes], content: Offer | Manifest | Evidence | bytes | None
) -> dict[str, Any] | None:
    """Adds what travels beside a message to its attachments; returns what the message says."""
    if content is None:
        return None
    if isinstance(content, Manifest):
        digest, blob = content.blob, content.encoded
    elif isinstance(content, Offer):
        digest, blob = content.digest, content.encoded
    else:
        blob = encode_evidence(content) if isinstance(content, Evidence) else content
        digest = digest_of(blob)
    attachments[digest] = blob
    return {"digest": digest, "num_bytes": len(blob)}


def _brief(why: str) -> str:
    """A reason as a message may hold it: short, and a byte for each character."""
    return re.sub(r"[^ !#-\[\]-~]", "?", why[:MAX_REASON_CHARACTERS])


def _vote(
    accepted: Accepted | None, attach: Callable[[Manifest | Evidence | None], dict[str, Any] | None]
) -> dict[str, Any] | None:
    if accepted is None:
        return None
    return {
        "ballot": accepted.ballot._asdict(),
        "manifest": attach(accepted.manifest),
        "evidence": attach(accepted.evidence),
    }


def _frame(payload: Buffer) -> FrameSchema:
    if len(payload) > MAX_MESSAGE_BYTES:
        raise BadMessage("message_size", f"a message of {len(payload)} bytes is too large")
    return parse(FrameSchema, payload, "message")


def _attached(message: AnyMessage) -> Iterator[BlobSchema]:
    """The blobs beside a message.

    Raises:
        BadMessage: one is announced larger than its kind may be.
    """
    for blob, limit in _references(message):
        if blob.num_bytes > limit:
            raise BadMessage("attachment_size", f"an attachment of {blob.num_bytes} bytes")
        yield blob


def _references(message: AnyMessage) -> Iterator[tuple[BlobSchema, int]]:
    """The blobs beside a message, and how large each may be."""
    if isinstance(message, ReadySchema):
        if message.offer:
            yield message.offer, MAX_OFFER_BYTES
        if message.accepted:
            yield message.accepted.manifest, MAX_MANIFEST_BYTES
            if message.accepted.evidence:
                yield message.accepted.evidence, MAX_EVIDENCE_BYTES
    elif isinstance(message, RosterSchema):
        if message.list:
            yield message.list, MAX_ROSTER_BYTES
    elif isinstance(message, ProposeSchema | CommitSchema):
        yield message.manifest, MAX_MANIFEST_BYTES
        if isinstance(message, ProposeSchema):
            if message.evidence:
                yield message.evidence, MAX_EVIDENCE_BYTES
        else:  # in the order that `Claim` promises
            yield message.proof, MAX_PROOF_BYTES
            if message.parent:
                yield message.parent, MAX_MANIFEST_BYTES


def _message(body: AnyMessage, blobs: Mapping[str, bytes]) -> Message:
    """The message's value, with its attachments decoded."""
    match body:
        case HelloSchema():
            return Hello(body.ask)
        case PrepareSchema():
            return Prepare(body.ballot.value())
        case ReadySchema():
            return Ready(
                body.ballot.value(),
                known_offer(blobs[body.offer.digest]) if body.offer else None,
                _accepted(body.accepted, blobs) if body.accepted else None,
                body.capacity,
                body.leave,
                body.dialable,
                body.remaining_s,
                body.worked_s,
                body.fetched_s,
                body.wish,
                body.invitation,
                body.stalls_in_s,
                body.uplink_mbit,
                b64decode(body.signature),
            )
        case RosterSchema():
            listed = _roster_list(body, blobs)
            named = sorted(listed.offers.items()) if listed else ()
            offers = {peer: known_offer(blobs[blob.digest]) for peer, blob in named}
            able = dict(sorted(listed.reducers.items())) if listed else {}
            return Roster(body.ballot.value(), body.roster_id, offers, able)
        case ReducedSchema():
            results = {unit: found.value() for unit, found in sorted(body.results.items())}
            return Reduced(
                body.ballot.value(),
                body.roster_id,
                results,
                body.missing,
                b64decode(body.signature),
            )
        case ProposeSchema():
            manifest = _manifest(body.manifest, blobs)
            evidence = _evidence(body.evidence, blobs)
            return Propose(body.ballot.value(), manifest, tuple(body.holders), evidence)
        case AcceptSchema():
            return Accept(body.ballot.value(), body.digest, b64decode(body.signature))
        case CommitSchema():
            certificate, path = decode_proof(blobs[body.proof.digest])
            parent = _manifest(body.parent, blobs) if body.parent else None
            return Commit(_manifest(body.manifest, blobs), certificate, parent, path)


def _manifest(blob: BlobSchema, blobs: Mapping[str, bytes]) -> Manifest:
    return foreign_manifest(blobs[blob.digest])


def _evidence(blob: BlobSchema | None, blobs: Mapping[str, bytes]) -> Evidence | None:
    return known_evidence(blobs[blob.digest]) if blob else None


def _accepted(vote: AcceptedSchema, blobs: Mapping[str, bytes]) -> Accepted:
    manifest = _manifest(vote.manifest, blobs)
    return Accepted(vote.ballot.value(), manifest, _evidence(vote.evidence, blobs))
