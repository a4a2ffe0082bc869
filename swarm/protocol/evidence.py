"""What is shown for a proposed manifest, as bytes; see `swarm.protocol.rounds.evidence`."""

from __future__ import annotations

from functools import lru_cache

from pydantic import TypeAdapter

from swarm.canonical import canonical
from swarm.errors import BadMessage
from swarm.protocol.digests import Buffer
from swarm.protocol.messages import Evidence
from swarm.protocol.schemas import parse

MAX_EVIDENCE_BYTES = 8 * 2**20
"""At 1,024 members and as many strangers, with 1,000 means: half of it."""
_EVIDENCE = TypeAdapter(Evidence)


def encode_evidence(evidence: Evidence) -> bytes:
    """Evidence as a blob."""
    return canonical(_EVIDENCE.dump_python(evidence))


def decode_evidence(encoded: Buffer) -> Evidence:
    """Evidence from bytes that are not trusted.

    Raises:
        BadMessage: too large, not of the schema, or not canonical.
    """
    if len(encoded) > MAX_EVIDENCE_BYTES:
        raise BadMessage("evidence_size", f"evidence of {len(encoded)} bytes is too large")
    evidence = parse(_EVIDENCE, encoded, "evidence")
    if encode_evidence(evidence) != bytes(encoded):
        raise BadMessage("evidence_schema", "the evidence is not in canonical form")
    return evidence


@lru_cache(maxsize=4)
def known_evidence(encoded: bytes) -> Evidence:
    """`decode_evidence` of what may have come before: a proposal is repeated."""
    return decode_evidence(encoded)
