"""What the protocol keeps on disk beside blobs, as bytes: the record, and links of the chain."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import TypeAdapter

from swarm.canonical import canonical
from swarm.errors import BadMessage
from swarm.protocol.digests import Buffer
from swarm.protocol.events import Record, Regained
from swarm.protocol.evidence import decode_evidence, encode_evidence
from swarm.protocol.manifest import MAX_MANIFEST_BYTES, decode_manifest
from swarm.protocol.messages import Accepted, Ballot, Certificate, Link
from swarm.protocol.schemas import IF_ANY, Count, OnWire, parse

MAX_KEPT_BYTES = 5 * MAX_MANIFEST_BYTES


@dataclass(frozen=True)
class _Vote(OnWire):
    ballot: Ballot
    """One beyond the bound must be repaired, not lost (`abstaining.repaired`)."""
    manifest: str
    evidence: str | None


@dataclass(frozen=True)
class _Kept(OnWire):
    """The record; manifests are kept as their exact bytes."""

    tip: str
    certificate: Certificate | None
    parent: str | None
    promised: Ballot | None
    accepted: _Vote | None
    abstain_until_height: Count
    regained: Annotated[Regained | None, IF_ANY] = None


_RECORD = TypeAdapter(_Kept)
_LINK = TypeAdapter(Link)


def encode_record(record: Record) -> bytes:
    """The record for the disk, manifests included."""
    vote, parent = record.accepted, record.parent
    kept = _Kept(
        record.tip.encoded.decode(),
        record.certificate,
        parent.encoded.decode() if parent else None,
        record.promised,
        _Vote(
            vote.ballot,
            vote.manifest.encoded.decode(),
            encode_evidence(vote.evidence).decode() if vote.evidence else None,
        )
        if vote
        else None,
        record.abstain_until_height,
        record.regained,
    )
    return canonical(_RECORD.dump_python(kept))


def decode_record(encoded: Buffer) -> Record:
    """The record from the disk.

    Raises:
        BadMessage: too large or not of the schema.
        BadManifest: one of its manifests is none.
    """
    if len(encoded) > MAX_KEPT_BYTES:
        raise BadMessage("record_size", f"a record of {len(encoded)} bytes is too large")
    parsed = parse(_RECORD, encoded, "record")
    return Record(
        decode_manifest(parsed.tip.encode()),
        parsed.certificate,
        decode_manifest(parsed.parent.encode()) if parsed.parent is not None else None,
        parsed.promised,
        _vote(parsed.accepted) if parsed.accepted else None,
        parsed.abstain_until_height,
        parsed.regained,
    )


def _vote(vote: _Vote) -> Accepted:
    evidence = None if vote.evidence is None else decode_evidence(vote.evidence.encode())
    return Accepted(vote.ballot, decode_manifest(vote.manifest.encode()), evidence)


def encode_link(link: Link) -> bytes:
    """A link for the disk."""
    return canonical(_LINK.dump_python(link, mode="json"))


def decode_link(encoded: Buffer) -> Link:
    """A link from the disk.

    Raises:
        BadMessage: not of the schema.
    """
    return parse(_LINK, encoded, "link")
