"""A signed message that a third peer passes on: who sent it is proved without a connection."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from swarm.errors import BadMessage
from swarm.network.identity import Identity, peer_id_of, verify
from swarm.protocol.digests import digest_of

_SIZES = struct.Struct(">BHHH")
MAX_KEY_BYTES = 1024


class Letter(IntEnum):
    """What an envelope holds."""

    MESSAGE = 1  # wants no answer but that it was handled
    REQUEST = 2  # a question
    ANSWER = 3  # to an envelope, whose digest it is bound to
    STREAM = 4  # opens a stream through a relay


@dataclass(frozen=True)
class Envelope:
    """An opened envelope: its content is from `source` and was meant for the opener."""

    letter: Letter
    source: str
    payload: bytes


def seal(identity: Identity, letter: Letter, destination: str, payload: bytes) -> bytes:
    """Signs a payload for one destination: a peer id, or for an answer the question's digest.

    Costs about 1 ms and 560 bytes.
    """
    signature = identity.sign(_statement(letter, destination, payload))
    key, to = identity.public_key, destination.encode()
    sizes = _SIZES.pack(letter, len(key), len(signature), len(to))
    return b"".join((sizes, key, signature, to, payload))


def open_sealed(sealed: bytes, destination: str) -> Envelope:
    """The content of an envelope that was sealed for this destination; about 0.1 ms.

    Raises:
        BadMessage: malformed, for somebody else, or not signed by its sender.
    """
    try:
        number, key_bytes, signature_bytes, to_bytes = _SIZES.unpack_from(sealed)
        letter = Letter(number)
    except (struct.error, ValueError) as error:
        raise BadMessage("envelope_schema", "no envelope") from error
    body = memoryview(sealed)[_SIZES.size :]
    if key_bytes > MAX_KEY_BYTES or len(body) < key_bytes + signature_bytes + to_bytes:
        raise BadMessage("envelope_schema", "the envelope's sizes make no sense")
    key, rest = bytes(body[:key_bytes]), body[key_bytes:]
    signature, rest = bytes(rest[:signature_bytes]), rest[signature_bytes:]
    to, payload = bytes(rest[:to_bytes]), bytes(rest[to_bytes:])
    if to != destination.encode():
        raise BadMessage("envelope_destination", "the envelope is for somebody else")
    if not verify(key, _statement(letter, destination, payload), signature):
        raise BadMessage("envelope_signature", "the envelope is not signed by its sender")
    return Envelope(letter, peer_id_of(key), payload)


def _statement(letter: Letter, destination: str, payload: bytes) -> bytes:
    return f"swarm letter {letter:d} {destination} {digest_of(payload)}".encode()
