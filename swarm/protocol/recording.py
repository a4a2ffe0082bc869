"""What the protocol keeps on disk beside blobs, as bytes: the record, and links of the chain."""

from __future__ import annotations

from swarm.canonical import canonical
from swarm.errors import BadMessage
from swarm.protocol.digests import Buffer
from swarm.protocol.events import Record
from swarm.protocol.evidence import decode_evidence, encode_evidence
from swarm.protocol.manifest import MAX_MANIFEST_BYTES, decode_manifest
from swarm.protocol.messages import Accepted, Link
from swarm.protocol.proofs import certified, linked
from swarm.protocol.schemas import LinkSchema, RecordedVoteSchema, RecordSchema, parse

MAX_KEPT_BYTES = 5 * MAX_MANIFEST_BYTES


def encode_record(record: Record) -> bytes:
    """The record for the disk, manifests included."""
    accepted = record.accepted
    return canonical(
        {
            "tip": record.tip.encoded.decode(),
            "certificate": certified(record.certificate),
            "parent": record.parent.encoded.decode() if record.parent else None,
            "promised": record.promised._asdict() if record.promised else None,
            "accepted": accepted
            and {
                "ballot": accepted.ballot._asdict(),
                "manifest": accepted.manifest.encoded.decode(),
                "evidence": encode_evidence(accepted.evidence).decode()
                if accepted.evidence
                else None,
            },
            "abstain_until_height": record.abstain_until_height,
        }
    )


def decode_record(encoded: Buffer) -> Record:
    """The record from the disk.

    Raises:
        BadMessage: too large or not of the schema.
        BadManifest: one of its manifests is none.
    """
    if len(encoded) > MAX_KEPT_BYTES:
        raise BadMessage("record_size", f"a record of {len(encoded)} bytes is too large")
    parsed = parse(RecordSchema, encoded, "record")
    return Record(
        decode_manifest(parsed.tip.encode()),
        parsed.certificate.value() if parsed.certificate else None,
        decode_manifest(parsed.parent.encode()) if parsed.parent is not None else None,
        parsed.promised.value() if parsed.promised else None,
        _vote(parsed.accepted) if parsed.accepted else None,
        parsed.abstain_until_height,
    )


def _vote(vote: RecordedVoteSchema) -> Accepted:
    evidence = None if vote.evidence is None else decode_evidence(vote.evidence.encode())
    return Accepted(vote.ballot.value(), decode_manifest(vote.manifest.encode()), evidence)


def encode_link(link: Link) -> bytes:
    """A link for the disk."""
    return canonical(linked(link))


def decode_link(encoded: Buffer) -> Link:
    """A link from the disk.

    Raises:
        BadMessage: not of the schema.
    """
    return parse(LinkSchema, encoded, "link").value()
