"""Certificates, and the paths along which a manifest is believed, as bytes; see `trust.py`."""

from __future__ import annotations

import json
from typing import Any

from swarm.canonical import canonical
from swarm.protocol.digests import Buffer
from swarm.protocol.messages import Certificate, Commit, Link
from swarm.protocol.schemas import ProofSchema, parse, signature_text

MAX_PROOF_BYTES = 8 * 2**20
"""Of 16 links at 1,024 members; a certificate of theirs has 420 kB, a head 60."""


def certified(certificate: Certificate | None) -> dict[str, Any] | None:
    """A certificate as JSON."""
    if certificate is None:
        return None
    return {
        "ballot": certificate.ballot._asdict(),
        "signatures": {peer: signature_text(s) for peer, s in certificate.signatures.items()},
    }


def encode_proof(commit: Commit) -> bytes:
    """Certificate and path of a COMMIT as a blob."""
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


def decode_proof(encoded: Buffer) -> tuple[Certificate | None, tuple[Link, ...]]:
    """Certificate and path of a COMMIT, from bytes that are not trusted.

    Raises:
        BadMessage: not of the schema.
    """
    proof = parse(ProofSchema, encoded, "proof")
    certificate = proof.certificate.value() if proof.certificate else None
    return certificate, tuple(link.value() for link in proof.path)
