"""What is shown for a proposed manifest, as bytes; see `swarm.protocol.rounds.evidence`."""

from __future__ import annotations

from base64 import b64decode
from functools import lru_cache
from typing import Annotated, Any

from pydantic import Field

from swarm.canonical import canonical
from swarm.errors import BadMessage
from swarm.protocol.digests import Buffer
from swarm.protocol.messages import Declaration, Declared, Evidence, Report, with_delta
from swarm.protocol.schemas import (
    Capacity,
    DigestText,
    PeerText,
    Reducers,
    ResultSchema,
    Schema,
    Seconds,
    SignatureText,
    UnitText,
    parse,
    signature_text,
)

MAX_EVIDENCE_BYTES = 8 * 2**20
"""At 1,024 members and as many strangers, with 1,000 means: half of it."""
MAX_REPORTS = 4096


class DeclaredSchema(Schema):
    """A signed declaration."""

    offer: DigestText | None
    seconds: Seconds
    capacity: Capacity
    leave: bool
    signature: SignatureText

    def value(self) -> Declared:
        """As the protocol knows it."""
        said = Declaration(self.offer, self.seconds, self.capacity, self.leave)
        return Declared(said, b64decode(self.signature))


class ReportSchema(Schema):
    """Signed results."""

    reducer: PeerText
    results: dict[UnitText, ResultSchema]
    signature: SignatureText

    def value(self) -> Report:
        """As the protocol knows it."""
        results = {unit: mean.value() for unit, mean in sorted(self.results.items())}
        return Report(self.reducer, results, b64decode(self.signature))


class EvidenceSchema(Schema):
    """Evidence."""

    declared: dict[PeerText, DeclaredSchema]
    able: Reducers
    roster_id: DigestText
    reports: Annotated[list[ReportSchema], Field(max_length=MAX_REPORTS)]


def encode_evidence(evidence: Evidence) -> bytes:
    """Evidence as a blob."""
    return canonical(
        {
            "declared": {peer: _declared(each) for peer, each in evidence.declared.items()},
            "able": dict(evidence.able),
            "roster_id": evidence.roster_id,
            "reports": [
                {
                    "reducer": report.reducer,
                    "results": {
                        unit: with_delta(vars(mean)) for unit, mean in report.results.items()
                    },
                    "signature": signature_text(report.signature),
                }
                for report in evidence.reports
            ],
        }
    )


def _declared(declared: Declared) -> dict[str, Any]:
    return {**vars(declared.declaration), "signature": signature_text(declared.signature)}


def decode_evidence(encoded: Buffer) -> Evidence:
    """Evidence from bytes that are not trusted.

    Raises:
        BadMessage: too large, not of the schema, or not canonical.
    """
    if len(encoded) > MAX_EVIDENCE_BYTES:
        raise BadMessage("evidence_size", f"evidence of {len(encoded)} bytes is too large")
    parsed = parse(EvidenceSchema, encoded, "evidence")
    evidence = Evidence(
        {peer: each.value() for peer, each in sorted(parsed.declared.items())},
        dict(sorted(parsed.able.items())),
        parsed.roster_id,
        tuple(report.value() for report in parsed.reports),
    )
    if encode_evidence(evidence) != bytes(encoded):
        raise BadMessage("evidence_schema", "the evidence is not in canonical form")
    return evidence


@lru_cache(maxsize=4)
def known_evidence(encoded: bytes) -> Evidence:
    """`decode_evidence` of what may have come before: a proposal is repeated."""
    return decode_evidence(encoded)
