"""Messages, offers, proofs and evidence as bytes, and the checks before they are trusted."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, TypeAdapter

from swarm.canonical import canonical
from swarm.config.section import MAX_COUNT
from swarm.errors import BadManifest, BadMessage, StateError
from swarm.protocol.messages import messages, schemas
from swarm.protocol.values.digests import Buffer, digest_of
from swarm.protocol.values.manifest import MAX_MANIFEST_BYTES, Manifest, Member, decode_manifest
from swarm.protocol.values.work import book_of, book_problem

MAX_EVIDENCE_BYTES = 8 * 2**20
"""Evidence of 1,024 members and as many strangers, with 1,000 means, has half this size."""
_EVIDENCE = TypeAdapter(messages.Evidence)


def encode_evidence(evidence: messages.Evidence) -> bytes:
    """Evidence as a blob."""
    return canonical(_EVIDENCE.dump_python(evidence))


def decode_evidence(encoded: Buffer) -> messages.Evidence:
    """Evidence from bytes that are not trusted.

    Raises:
        BadMessage: too large, not of the schema, or not canonical.
    """
    if len(encoded) > MAX_EVIDENCE_BYTES:
        raise BadMessage("evidence_size", f"evidence of {len(encoded)} bytes is too large")
    evidence = schemas.parse(_EVIDENCE, encoded, "evidence")
    if encode_evidence(evidence) != bytes(encoded):
        raise BadMessage("evidence_schema", "the evidence is not in canonical form")
    return evidence


@lru_cache(maxsize=4)
def known_evidence(encoded: bytes) -> messages.Evidence:
    """`decode_evidence` with a cache, since a proposal is repeated."""
    return decode_evidence(encoded)


MAX_OFFER_BYTES = 2 * 2**20
MAX_ROSTER_BYTES = 2**18
"""Limit of a roster's list; that of 1,024 offers and reducers has some 212 kB."""
MAX_OFFERS = 512
"""Most offers that are kept decoded: those of two rounds of 256 peers."""
MAX_OFFERS_BYTES = 64 * 2**20
"""Limit of the encoded size of all kept offers. Decoded, an offer takes four times its encoded
size, and a trainee may send offers of 2 MiB. An offer for a 7B with 256 peers has some 150 kB."""


class KnownOffers:
    """A cache of decoded offers; the same offers come with each answer to a poll, and in rosters.

    May be called from any thread.
    """

    def __init__(self) -> None:
        """Starts empty."""
        self._offers: OrderedDict[bytes, messages.Offer] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Encoded size of the offers that are kept."""
        return sum(map(len, list(self._offers)))

    def __call__(self, encoded: bytes) -> messages.Offer:
        """The offer; the same object for as long as it is kept.

        Raises:
            BadMessage: see `decode_offer`.
        """
        known = self._offers.pop(encoded, None)
        if known is not None:
            return self._offers.setdefault(known.encoded, known)  # as the latest
        offer = decode_offer(encoded)
        vars(offer).update(
            encoded=encoded, digest=digest_of(encoded)
        )  # as its properties keep them
        offer = self._offers.setdefault(encoded, offer)
        self._forget()
        return offer

    def cache_clear(self) -> None:
        """Empties the cache, as that of a cached function."""
        self._offers.clear()

    def _forget(self) -> None:
        """Drops the least recently used offers."""
        kept = list(self._offers)
        number, num_bytes = len(kept), sum(map(len, kept))
        for oldest in kept:
            if number <= MAX_OFFERS and num_bytes <= MAX_OFFERS_BYTES:
                return
            self._offers.pop(oldest, None)
            number, num_bytes = number - 1, num_bytes - len(oldest)


known_offer = KnownOffers()


def decode_offer(encoded: Buffer) -> messages.Offer:
    """An offer from bytes that are not trusted.

    Raises:
        BadMessage: too large, not of the schema, or not canonical.
    """
    if len(encoded) > MAX_OFFER_BYTES:
        raise BadMessage("offer_size", f"an offer of {len(encoded)} bytes is too large")
    offer = schemas.parse(messages.OFFER, encoded, "offer")
    if offer.encoded != bytes(encoded):
        raise BadMessage("offer_schema", "the offer is not in canonical form")
    return offer


@dataclass(frozen=True)
class RosterList(schemas.OnWire):
    """The attachment of a ROSTER: it grows with the swarm, and names blobs itself."""

    offers: Annotated[Mapping[schemas.PeerText, schemas.Blob], AfterValidator(schemas.in_order)]
    reducers: messages.Uplinks


_ROSTER_LIST = TypeAdapter(RosterList)


@lru_cache(maxsize=2)
def decode_roster(encoded: bytes) -> RosterList:
    """The list of a roster; cached, since rosters are repeated.

    Raises:
        BadMessage: not of the schema.
    """
    return schemas.parse(_ROSTER_LIST, encoded, "roster")


def encode_roster(listed: RosterList) -> bytes:
    """The list of a roster as a blob."""
    return canonical(_ROSTER_LIST.dump_python(listed))


MAX_PROOF_BYTES = 8 * 2**20
"""Enough for 16 links at 1,024 members, with certificates of 420 kB and heads of 60 kB."""


@dataclass(frozen=True)
class Proof(schemas.OnWire):
    """Why a COMMIT's manifest counts as decided."""

    certificate: messages.Certificate | None
    path: Annotated[tuple[messages.Link, ...], Field(max_length=schemas.MAX_LINKS)]


_PROOF = TypeAdapter(Proof)


def encode_proof(proof: Proof) -> bytes:
    """A proof as a blob."""
    return canonical(_PROOF.dump_python(proof, mode="json"))


def decode_proof(encoded: Buffer) -> Proof:
    """Certificate and path of a COMMIT, from bytes that are not trusted.

    Raises:
        BadMessage: not of the schema.
    """
    return schemas.parse(_PROOF, encoded, "proof")


MAX_AMOUNT = 1e12


@lru_cache(maxsize=4)
def foreign_manifest(encoded: bytes) -> Manifest:
    """A manifest with valid names and valid sample numbers; cached, since manifests are repeated.

    Raises:
        BadManifest: it is not a manifest, a name in it is invalid, or its samples are out of order.
    """
    manifest = decode_manifest(encoded)
    wrong = schemas.wrong_name(
        (schemas.IS_DIGEST, _digests(manifest)),
        (schemas.IS_GENERATION, (manifest.generation, *(id_ for _, (_, id_) in manifest.lineage))),
        (schemas.IS_PEER, _peers(manifest)),
        (schemas.IS_SIGNATURE, manifest.wishes.values()),
        (schemas.IS_DIGEST, manifest.invitations),
        (schemas.IS_UNIT, [*manifest.entries, *manifest.sources]),
        (schemas.IS_NAME, {entry.coding for entry in manifest.entries.values()}),
        (schemas.IS_NAME, [manifest.run] if manifest.run else []),
    )
    if wrong is not None:
        raise BadManifest("manifest_names", f"{wrong[:80]!r} is not a valid name in a manifest")
    if not manifest.sources.keys() <= manifest.entries.keys():
        raise BadManifest("manifest_names", "a manifest renews a unit without a value")
    if not all(0 <= count <= MAX_COUNT for count in _counts(manifest)):
        raise BadManifest("manifest_counts", f"a count in a manifest is not 0 .. {MAX_COUNT}")
    amounts = [amount for member in manifest.members.values() for amount in _amounts(member)]
    if not all(0 <= amount <= MAX_AMOUNT for amount in amounts):  # NaN fails this, too
        raise BadManifest("manifest_counts", f"an amount in a manifest is not 0 .. {MAX_AMOUNT:g}")
    problem = book_problem(book_of(manifest))
    if problem:
        raise BadManifest("manifest_book", f"manifest at height {manifest.height}: {problem}")
    return manifest


def _digests(manifest: Manifest) -> Iterator[str]:
    yield from manifest.founding.blobs
    if manifest.founding.text:
        yield manifest.founding.text.digest
    yield from (name for name in (manifest.parent, manifest.seed) if name is not None)
    for entry in manifest.entries.values():
        yield entry.digest
        yield from (name for name in (entry.base, entry.delta) if name is not None)
    for values in manifest.sources.values():
        yield from (digest for _, digest in values)


def _counts(manifest: Manifest) -> Iterator[int]:
    yield from (manifest.height, manifest.round, manifest.step, manifest.tokens, manifest.merged)
    yield from manifest.founding.blobs.values()
    yield from manifest.work.values()
    yield from manifest.owners
    yield from (member.silent for member in manifest.members.values())
    yield from (member.counted for member in manifest.members.values())
    for member in manifest.members.values():
        yield from (member.room, member.invites, member.given, member.weight)
    for absent in manifest.absent.values():
        yield from (absent.since, absent.invites, absent.given, absent.weight)
    for entry in manifest.entries.values():
        yield from (entry.num_bytes, entry.version)
    for height, (num_members, _) in manifest.lineage:
        yield from (height, num_members)


def _amounts(member: Member) -> tuple[float, float]:
    return member.capacity, member.tokens_per_s


def _peers(manifest: Manifest) -> Iterator[str]:
    yield manifest.founding.founder
    yield from (*manifest.members, *manifest.contributors, *manifest.work, *manifest.dealt)
    yield from (*manifest.wishes, *manifest.invited, *manifest.absent)
    for owners in manifest.owners.values():
        yield from owners
    for entry in manifest.entries.values():
        yield entry.source
    for values in manifest.sources.values():
        yield from (peer for peer, _ in values)


MAX_MESSAGE_BYTES = 64 * 2**10


@dataclass(frozen=True)
class SentRoster(schemas.OnWire):
    """A ROSTER as it travels."""

    ballot: messages.PossibleBallot
    roster_id: schemas.DigestText
    list: Annotated[RosterList, schemas.BESIDE] | None
    type: Literal["roster"] = "roster"


@dataclass(frozen=True)
class SentCommit(schemas.OnWire):
    """A COMMIT as it travels; its attachments are in the order that `Claim` documents."""

    manifest: Annotated[Manifest, schemas.BESIDE]
    proof: Annotated[Proof, schemas.BESIDE]
    parent: Annotated[Manifest, schemas.BESIDE] | None
    type: Literal["commit"] = "commit"


SentMessage = (
    messages.Hello
    | messages.Prepare
    | messages.Ready
    | SentRoster
    | messages.Reduced
    | messages.Propose
    | messages.Accept
    | SentCommit
)


@dataclass(frozen=True)
class Frame(schemas.OnWire):
    """A whole message."""

    header: messages.Header
    message: Annotated[SentMessage, Field(discriminator="type")]


_FRAME = TypeAdapter(Frame)


_KINDS: Mapping[type, tuple[int, Callable[[bytes], object]]] = {
    messages.Offer: (MAX_OFFER_BYTES, known_offer),
    Manifest: (MAX_MANIFEST_BYTES, foreign_manifest),
    messages.Evidence: (MAX_EVIDENCE_BYTES, known_evidence),
    RosterList: (MAX_ROSTER_BYTES, decode_roster),
    Proof: (MAX_PROOF_BYTES, decode_proof),
}
"""Kind of attachment -> its largest size, and how it is read."""


class _Beside:
    """The attachments of one message that is written or read; see `schemas.Attachments`."""

    def __init__(self, blobs: Mapping[str, Buffer] | None = None) -> None:
        """Reads with these blobs; without blobs, fields keep their references."""
        self._blobs = blobs
        self.named: list[schemas.Blob] = []
        self.out: dict[str, bytes] = {}

    def received(self, kind: type, blob: schemas.Blob) -> object:
        """The attachment that a message refers to.

        Raises:
            BadMessage: the attachment is missing, wrong, or announced larger than its kind may be.
        """
        limit, read = _KINDS[kind]
        _require_size(blob, limit)
        self.named.append(blob)
        return blob if self._blobs is None else read(_content(blob, self._blobs))

    def sent(self, value: object) -> schemas.Blob:
        """Attaches a value to the message."""
        if isinstance(value, Manifest):
            digest, encoded = value.blob, value.encoded
        elif isinstance(value, messages.Offer):
            digest, encoded = value.digest, value.encoded
        else:
            encoded = _encoded(value)
            digest = digest_of(encoded)
        self.out[digest] = encoded
        return schemas.Blob(digest, len(encoded))


def _encoded(value: object) -> bytes:
    if isinstance(value, RosterList):
        return encode_roster(value)
    if isinstance(value, Proof):
        return encode_proof(value)
    assert isinstance(value, messages.Evidence)
    return encode_evidence(value)


def encode(header: messages.Header, message: messages.Message) -> tuple[bytes, dict[str, bytes]]:
    """A message as bytes.

    Returns:
        The payload, and the blobs that it refers to, by digest; the sender must be able to serve
        them.

    Raises:
        StateError: the message is too large. No message within the schemas' limits is.
    """
    beside = _Beside()
    frame = Frame(header, _as_sent(message, beside))
    payload = canonical(_FRAME.dump_python(frame, context=beside))
    if len(payload) > MAX_MESSAGE_BYTES:
        kind = type(message).__name__.upper()
        raise StateError(f"a {kind} of {len(payload)} bytes would be over {MAX_MESSAGE_BYTES}")
    return payload, beside.out


class BareMessage:
    """A message, parsed once, as far as it can be read without its attachments.

    Attributes:
        header: the header of the message.
        kind: type of the message as on the wire.
        attachments: digest and size of every blob that the message refers to, to be fetched before
            it is decoded.
        relays: peers that relay the attachments of a PROPOSE (blob relays); empty for any other
            message.
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
        self.relays = frame.message.relays if isinstance(frame.message, messages.Propose) else ()
        self._message, self._named = frame.message, beside.named

    def attachments_within(self, attachments: Mapping[str, Buffer]) -> tuple[tuple[str, int], ...]:
        """Digest and size of each blob that an attachment names: the offers in a roster's list.

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
        """The peers that hold each attachment according to the message, by the attachment's digest.

        The holders of a proposed manifest and its evidence are the peers that accepted it. The
        holder of an offer in a roster is its maker.

        `attachments`: the message's attachments that are here.

        Raises:
            BadMessage: an attachment is not of its schema.
        """
        if isinstance(self._message, messages.Propose):
            return dict.fromkeys((blob.digest for blob in self._named), self._message.holders)
        is_roster = isinstance(self._message, SentRoster) and self._named
        if is_roster and self._named[0].digest in attachments:
            listed = decode_roster(_content(self._named[0], attachments))
            return {blob.digest: (peer,) for peer, blob in listed.offers.items()}
        return {}


def decode(
    payload: Buffer, attachments: Mapping[str, Buffer]
) -> tuple[messages.Header, messages.Message]:
    """A message from bytes that are not trusted.

    `attachments`: the blobs that the message's `BareMessage` names, and blobs that these name.

    Raises:
        BadMessage: the message is not of the schema, or an attachment is missing, wrong or not of
            its schema.
        BadManifest: an attached manifest is invalid.
    """
    frame = _frame(payload, _Beside(attachments))
    match frame.message:
        case SentRoster(ballot, roster_id, listed):
            offers = {}
            for peer, blob in listed.offers.items() if listed else ():
                _require_size(blob, MAX_OFFER_BYTES)
                offers[peer] = known_offer(_content(blob, attachments))
            return frame.header, messages.Roster(
                ballot, roster_id, offers, listed.reducers if listed else {}
            )
        case SentCommit(manifest, proof, parent):
            return frame.header, messages.Commit(manifest, proof.certificate, parent, proof.path)
        case message:
            return frame.header, message


def _as_sent(message: messages.Message, beside: _Beside) -> SentMessage:
    """The message in the form in which it is sent."""
    match message:
        case messages.Roster(ballot, roster_id, offers, reducers):
            named = {peer: beside.sent(offer) for peer, offer in offers.items()}
            return SentRoster(ballot, roster_id, RosterList(named, reducers) if named else None)
        case messages.Commit(manifest, certificate, parent, path):
            return SentCommit(manifest, Proof(certificate, path), parent)
        case messages.Reduced():
            return replace(message, missing={p: _brief(why) for p, why in message.missing.items()})
        case _:
            return message


def _frame(payload: Buffer, beside: _Beside) -> Frame:
    if len(payload) > MAX_MESSAGE_BYTES:
        raise BadMessage("message_size", f"a message of {len(payload)} bytes is too large")
    return schemas.parse(_FRAME, payload, "message", beside)


def _require_size(blob: schemas.Blob, limit: int) -> None:
    if blob.num_bytes > limit:
        raise BadMessage("attachment_size", f"an attachment of {blob.num_bytes} bytes")


def _content(blob: schemas.Blob, attachments: Mapping[str, Buffer]) -> bytes:
    """A copy of an attachment, which must have the announced digest."""
    content = attachments.get(blob.digest)
    if content is None:
        raise BadMessage("attachment_missing", f"attachment {blob.digest[:12]} is missing")
    if len(content) != blob.num_bytes or digest_of(copied := bytes(content)) != blob.digest:
        raise BadMessage("attachment_digest", f"attachment {blob.digest[:12]} has other content")
    return copied


def _brief(why: str) -> str:
    """A reason as a message may carry it: short, with one byte for each character."""
    return re.sub(r"[^ !#-\[\]-~]", "?", why[: schemas.MAX_REASON_CHARACTERS])
