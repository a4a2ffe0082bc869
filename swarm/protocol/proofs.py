"""Certificates, and the paths along which a manifest is believed, as bytes; see `trust.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field, TypeAdapter

from swarm.canonical import canonical
from swarm.protocol.digests import Buffer
from swarm.protocol.messages import Certificate, Link
from swarm.protocol.schemas import MAX_LINKS, OnWire, parse

MAX_PROOF_BYTES = 8 * 2**20
"""Of 16 links at 1,024 members; a certificate of theirs has 420 kB, a head 60."""


@dataclass(frozen=True)
class Proof(OnWire):
    """Why a COMMIT's manifest counts as decided."""

    certificate: Certificate | None
    path: Annotated[tuple[Link, ...], Field(max_length=MAX_LINKS)]


_PROOF = TypeAdapter(Proof)


def encode_proof(proof: Proof) -> bytes:
    """A proof as a blob."""
    return canonical(_PROOF.dump_python(proof, mode="json"))


def decode_proof(encoded: Buffer) -> Proof:
    """Certificate and path of a COMMIT, from bytes that are not trusted.

    Raises:
        BadMessage: not of the schema.
    """
    return parse(_PROOF, encoded, "proof")
