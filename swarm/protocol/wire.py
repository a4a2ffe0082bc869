"""Messages and offers as bytes.

A message is one JSON object of at most 64 kB. Offers and manifests never travel inside it: it
names their digests and sizes, and they follow as blobs that the receiver fetches first. So a
message stays small with a hundred peers, and a repeated one costs nothing.

Everything that comes from the network is checked against a strict schema before it becomes a
value: unknown keys, wrong types, names that could be file paths, sizes out of bounds are refused.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

from swarm.errors import BadMessage
from swarm.protocol.digests import Buffer, digest_of
from swarm.protocol.foreign import foreign_manifest
from swarm.protocol.invitation import as_plain
from swarm.protocol.manifest import MAX_MANIFEST_BYTES, Manifest
from swarm.protocol.messages import (
    Accept,
    Accepted,
    Certificate,
    Commit,
    Header,
    Hello,
    Link,
    Message,
    Offer,
    OfferedUnit,
    Prepare,
    Propose,
    Ready,
    Reduced,
    ReducedUnit,
    Roster,
    Signature,
)
from swarm.protocol.schemas import (
    MAX_REASON_CHARACTERS,
    AcceptSchema,
    AnyMessage,
    BlobSchema,
    CommitSchema,
    FrameSchema,
    HelloSchema,
    OfferSchema,
    PrepareSchema,
    ProofSchema,
    ProposeSchema,
    ReadySchema,
    ReducedSchema,
    RosterSchema,
    parse,
)

MAX_MESSAGE_BYTES = 64 * 2**10
MAX_OFFER_BYTES = 2 * 2**20
MAX_PROOF_BYTES = 8 * 2**20
"""Of 16 links at 1,024 members; a certificate of theirs has 420 kB, a head 60."""
MAX_OFFERS = 512
"""Offers that are kept decoded: those of two rounds of 256 peers, some 150 kB each for a 7B."""

# ---------------------------------------------------------------- messages


def encode(header: Header, message: Message) -> tuple[bytes, dict[str, bytes]]:
    """A message as bytes.

    Returns:
        The payload, and the blobs that it refers to, by digest; the sender must be able to serve
        them.
    """
    attachments: dict[str, bytes] = {}
    body = _body(message, attachments)
    frame = {
        "header": {"code": header.code, "tip": header.tip, "generation": header.generation},
        "message": {"type": type(message).__name__.lower(), **body},
    }
    payload = canonical(frame)
    assert len(payload) <= MAX_MESSAGE_BYTES, f"a {type(message).__name__} of {len(payload)} bytes"
    return payload, attachments


def attachments_of(payload: Buffer) -> tuple[tuple[str, int], ...]:
    """Digest and size of every blob that a message refers to, to be fetched before decoding it.

    Raises:
        BadMessage: the payload is not of the schema, or a blob is announced too large.
    """
    return kind_and_attachments(payload)[1]


def kind_and_attachments(payload: Buffer) -> tuple[str, tuple[tuple[str, int], ...]]:
    """The type of a message, and what `attachments_of` says of it, from one look at it.

    Raises:
        BadMessage: the payload is not of the schema, or a blob is announced too large.
    """
    message = _frame(payload).message
    return message.type, tuple((blob.digest, blob.num_bytes) for blob in _attached(message))


def holders_of(payload: Buffer) -> dict[str, tuple[str, ...]]:
    """Digest of what is beside a message -> peers that hold it, as far as the message tells.

    Of a proposed manifest those that accepted it, of an offer in a roster the one that made it.

    Raises:
        BadMessage: the payload is not of the schema.
    """
    message = _frame(payload).message
    if isinstance(message, ProposeSchema):
        return {message.manifest.digest: tuple(message.holders)}
    if isinstance(message, RosterSchema):
        return {blob.digest: (peer,) for peer, blob in message.offers.items()}
    return {}


def decode(payload: Buffer, attachments: Mapping[str, bytes]) -> tuple[Header, Message]:
    """A message from bytes that are not trusted.

    Args:
        payload: what came over the wire.
        attachments: the blobs that `attachments_of` names.

    Raises:
        BadMessage: not of the schema, or an attachment is missing, wrong or not of its schema.
        BadManifest: an attached manifest is none.
    """
    frame = _frame(payload)
    blobs = {}
    for blob in _attached(frame.message):
        content = attachments.get(blob.digest)
        if content is None:
            raise BadMessage("attachment_missing", f"attachment {blob.digest[:12]} is missing")
        if len(content) != blob.num_bytes or digest_of(content) != blob.digest:
            raise BadMessage("attachment_digest", f"attachment {blob.digest[:12]} is another")
        blobs[blob.digest] = content
    return frame.header.value(), _message(frame.message, blobs)


def _body(message: Message, attachments: dict[str, bytes]) -> dict[str, Any]:
    """The message's own fields, with every offer and manifest moved to the attachments."""

    def attach(content: Offer | Manifest | bytes | None) -> dict[str, Any] | None:
        if content is None:
            return None
        if isinstance(content, Manifest):
            digest, blob = content.blob, content.encoded
        elif isinstance(content, bytes):
            digest, blob = digest_of(content), content
        else:
            digest, blob = _offer_blob(content)
        attachments[digest] = blob
        return {"digest": digest, "num_bytes": len(blob)}

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
                "wish": vars(message.wish) if message.wish else None,
                "invitation": as_plain(message.invitation) if message.invitation else None,
            }
        case Roster():
            body = {
                "roster_id": message.roster_id,
                "offers": {peer: attach(offer) for peer, offer in message.offers.items()},
                "reducers": list(message.reducers),
            }
        case Reduced():
            body = {
                "roster_id": message.roster_id,
                "results": {unit: vars(result) for unit, result in message.results.items()},
                "missing": {
                    peer: why[:MAX_REASON_CHARACTERS] for peer, why in message.missing.items()
                },
            }
        case Propose():
            body = {"manifest": attach(message.manifest), "holders": list(message.holders)}
        case Accept():
            body = {"digest": message.digest, "signature": _signed(message.signature)}
        case Commit():
            return {
                "manifest": attach(message.manifest),
                "parent": attach(message.parent),
                "proof": attach(_proof(message)),
            }
        case Prepare():
            body = {}
    return {"ballot": message.ballot._asdict(), **body}


def _vote(
    accepted: Accepted | None, attach: Callable[[Manifest], dict[str, Any] | None]
) -> dict[str, Any] | None:
    if accepted is None:
        return None
    return {"ballot": accepted.ballot._asdict(), "manifest": attach(accepted.manifest)}


def _signed(signature: Signature) -> dict[str, str]:
    return {
        "public_key": b64encode(signature.public_key).decode(),
        "signature": b64encode(signature.signature).decode(),
    }


def certified(certificate: Certificate | None) -> dict[str, Any] | None:
    """A certificate as JSON."""
    if certificate is None:
        return None
    return {
        "ballot": certificate.ballot._asdict(),
        "signatures": {peer: _signed(s) for peer, s in certificate.signatures.items()},
    }


def _proof(commit: Commit) -> bytes:
    return canonical(
        {"certificate": certified(commit.certificate), "path": [*map(linked, commit.path)]}
    )


def linked(link: Link) -> dict[str, Any]:
    """A link of a proof as JSON."""
    return {
        "head": json.loads(link.head.encoded),
        "certificate": certified(link.certificate),
        "parent": link.parent and json.loads(link.parent.encoded),
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
    elif isinstance(message, RosterSchema):
        yield from ((blob, MAX_OFFER_BYTES) for blob in message.offers.values())
    elif isinstance(message, ProposeSchema | CommitSchema):
        yield message.manifest, MAX_MANIFEST_BYTES
        if isinstance(message, CommitSchema):
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
            vote = body.accepted
            return Ready(
                body.ballot.value(),
                _known_offer(blobs[body.offer.digest]) if body.offer else None,
                Accepted(vote.ballot.value(), _manifest(vote.manifest, blobs)) if vote else None,
                body.capacity,
                body.leave,
                body.dialable,
                body.remaining_s,
                body.worked_s,
                body.wish.value() if body.wish else None,
                body.invitation,
            )
        case RosterSchema():
            offers = {
                peer: _known_offer(blobs[blob.digest]) for peer, blob in sorted(body.offers.items())
            }
            return Roster(body.ballot.value(), body.roster_id, offers, tuple(body.reducers))
        case ReducedSchema():
            results = {
                unit: ReducedUnit(blob.digest, blob.num_bytes)
                for unit, blob in sorted(body.results.items())
            }
            return Reduced(body.ballot.value(), body.roster_id, results, body.missing)
        case ProposeSchema():
            manifest = _manifest(body.manifest, blobs)
            return Propose(body.ballot.value(), manifest, tuple(body.holders))
        case AcceptSchema():
            return Accept(body.ballot.value(), body.digest, body.signature.value())
        case CommitSchema():
            proof = parse(ProofSchema, blobs[body.proof.digest], "proof")
            return Commit(
                _manifest(body.manifest, blobs),
                proof.certificate.value() if proof.certificate else None,
                _manifest(body.parent, blobs) if body.parent else None,
                tuple(link.value() for link in proof.path),
            )


def _manifest(blob: BlobSchema, blobs: Mapping[str, bytes]) -> Manifest:
    return foreign_manifest(blobs[blob.digest])


# ---------------------------------------------------------------- offers


def encode_offer(offer: Offer) -> bytes:
    """An offer's blob."""
    units = {unit: vars(offered) for unit, offered in offer.units.items()}
    return canonical(
        {
            "tip": offer.tip,
            "steps": offer.steps,
            "tokens": offer.tokens,
            "seconds": float(offer.seconds),
            "units": units,
        }
    )


def _offer_blob(offer: Offer) -> tuple[str, bytes]:
    """Digest and bytes of an offer, made once: it is repeated with every answer to a poll."""
    known = vars(offer)  # where `cached_property` keeps things too
    if "blob" not in known:
        blob = encode_offer(offer)
        known["blob"] = (digest_of(blob), blob)
    return known["blob"]  # type: ignore[no-any-return]


@lru_cache(maxsize=MAX_OFFERS)
def _known_offer(encoded: bytes) -> Offer:
    """An offer that may have come before: with every answer to a poll, and in rosters."""
    offer = decode_offer(encoded)
    vars(offer)["blob"] = (digest_of(encoded), encoded)
    return offer


def decode_offer(encoded: Buffer) -> Offer:
    """An offer from bytes that are not trusted.

    Raises:
        BadMessage: too large, not of the schema, or not canonical.
    """
    if len(encoded) > MAX_OFFER_BYTES:
        raise BadMessage("offer_size", f"an offer of {len(encoded)} bytes is too large")
    parsed = parse(OfferSchema, encoded, "offer")
    offer = Offer(
        parsed.tip,
        parsed.steps,
        parsed.tokens,
        {
            unit: OfferedUnit(offered.digest, offered.num_bytes, offered.base)
            for unit, offered in sorted(parsed.units.items())
        },
        parsed.seconds,
    )
    if encode_offer(offer) != bytes(encoded):
        raise BadMessage("offer_schema", "the offer is not in canonical form")
    return offer


def canonical(value: object) -> bytes:
    """Canonical JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
