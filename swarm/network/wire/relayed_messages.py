"""Signed envelopes for messages that a third peer relays.

The signature proves the sender, and each envelope counts once.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from itertools import count

from swarm.errors import BadMessage
from swarm.network.wire.bounded_tables import recalled
from swarm.network.wire.identity import KEY_BYTES, SIGNATURE_BYTES, Identity, peer_id_of, verify
from swarm.protocol.values.digests import digest_of

_HEAD = struct.Struct(f">B{KEY_BYTES}s{SIGNATURE_BYTES}sB")
"""Kind, the sender's key, its signature, the length of the destination."""

LENGTH = struct.Struct(">H")
"""Precedes an envelope on a stream."""


class EnvelopeKind(IntEnum):
    """The kind of an envelope's content."""

    MESSAGE = 1  # the answer only says that it was handled
    REQUEST = 2  # a question
    ANSWER = 3  # bound to the digest of the envelope that it answers
    STREAM = 4  # opens a stream through a relay
    DIRECT = 5  # opens a connection outside libp2p


@dataclass(frozen=True)
class Envelope:
    """An opened envelope: its content is from `source`, and for the peer that opened it."""

    kind: EnvelopeKind
    source: str
    payload: bytes


def seal(identity: Identity, kind: EnvelopeKind, destination: str, payload: bytes) -> bytes:
    """Signs a payload for one destination: a peer id or, for an answer, the question's digest.

    Costs about 0.1 ms and 150 bytes.
    """
    signature = identity.sign(_statement(kind, destination, payload))
    to = destination.encode()
    return _HEAD.pack(kind, identity.public_key, signature, len(to)) + to + payload


def with_length(sealed: bytes) -> bytes:
    """An envelope with its `LENGTH` before it, as on a stream."""
    return LENGTH.pack(len(sealed)) + sealed


def open_sealed(sealed: bytes, destination: str) -> Envelope:
    """The content of an envelope sealed for this destination; about 0.3 ms.

    Raises:
        BadMessage: it is malformed, for another peer, or not signed by its sender.
    """
    try:
        number, key, signature, to_bytes = _HEAD.unpack_from(sealed)
        kind = EnvelopeKind(number)
    except (struct.error, ValueError) as error:
        raise BadMessage("envelope_schema", "no envelope") from error
    body = memoryview(sealed)[_HEAD.size :]
    to, payload = bytes(body[:to_bytes]), bytes(body[to_bytes:])
    if to != destination.encode():
        raise BadMessage("envelope_destination", "the envelope is for another peer")
    source = peer_id_of(key)
    if source is None or not verify(source, _statement(kind, destination, payload), signature):
        raise BadMessage("envelope_signature", "the envelope is not signed by its sender")
    return Envelope(kind, source, payload)


def _statement(kind: EnvelopeKind, destination: str, payload: bytes) -> bytes:
    return f"swarm letter {kind:d} {destination} {digest_of(payload)}".encode()


FRESH_S = 30.0
"""How long an envelope is valid. Relays take up to 10 s, and clocks agree within 3 s."""
FRESH_MS = int(FRESH_S * 1e3)
WINDOW = 128
"""An envelope of a peer may be overtaken by fewer than this number of others."""
MAX_PEERS = 4096
"""Most remembered peers. A fresh envelope of a forgotten peer may be accepted again."""
_STAMP = struct.Struct(">QQ")


@dataclass(frozen=True)
class Stamp:
    """Distinguishes an envelope from all others of its sender to one destination.

    Attributes:
        sealed_ms: time of sealing by the DHT's clock, in milliseconds since 1970.
        number: number of the previous envelope plus one. The first number after a start is the time
            in microseconds, so that numbers of a later start are higher.
    """

    sealed_ms: int
    number: int


@dataclass
class Window:
    """The numbers seen in one sender's envelopes, and the time of the latest envelope."""

    newest: int = 0
    seen: int = 0
    """Bit i is set if the number `newest - i` was seen."""
    sealed_ms: int = 0

    def takes(self, stamp: Stamp, now_ms: int) -> bool:
        """Whether a fresh envelope is new; marks it as seen.

        An envelope whose number is too far behind the newest is refused, and so are all envelopes
        from before the sender's latest start. Once all seen envelopes have expired, their numbers
        are dropped. So a peer that set its clock back between two starts is accepted again.
        """
        if self.sealed_ms < now_ms - FRESH_MS:
            self.newest = self.seen = 0
        behind = self.newest - stamp.number
        if behind >= WINDOW or (behind >= 0 and self.seen >> behind & 1):
            return False
        if behind < 0:
            self.seen = self.seen << -behind & (1 << WINDOW) - 1 if -behind < WINDOW else 0
            self.newest, behind = stamp.number, 0
        self.seen |= 1 << behind
        self.sealed_ms = max(self.sealed_ms, stamp.sealed_ms)
        return True


class RelayedMessages:
    """Envelopes that one peer has sealed and received; times are by the DHT's clock.

    This state ends with the process, so after a restart a fresh envelope is accepted again.
    """

    def __init__(self) -> None:
        """Has sealed and seen nothing yet."""
        self._numbers: dict[str, Iterator[int]] = {}
        self._windows: dict[str, Window] = {}

    def stamped(self, destination: str, content: bytes, now_s: float) -> bytes:
        """The bytes to seal: 16 bytes that are unique for this destination, then `content`."""
        numbers = recalled(self._numbers, destination, lambda: count(int(now_s * 1e6)), MAX_PEERS)
        return _STAMP.pack(int(now_s * 1e3), next(numbers)) + content

    def take(self, source: str, stamp: Stamp, now_s: float) -> None:
        """Notes an envelope that has arrived for this peer.

        Args:
            source: signer of the envelope. The signature must be verified before.
            stamp: stamp of the envelope.
            now_s: seconds since 1970.

        Raises:
            BadMessage: it was sealed too long ago, is from the future, or has arrived before.
        """
        now_ms = int(now_s * 1e3)
        late_ms = now_ms - stamp.sealed_ms
        if abs(late_ms) > FRESH_MS:
            raise BadMessage("envelope_age", f"sealed {late_ms / 1e3:.1f} s ago by this clock")
        if not recalled(self._windows, source, Window, MAX_PEERS).takes(stamp, now_ms):
            raise BadMessage("envelope_seen", "the envelope came before, or later ones overtook it")


def split(payload: bytes) -> tuple[Stamp, bytes]:
    """Stamp and content of an envelope.

    Raises:
        BadMessage: it has no stamp.
    """
    if len(payload) < _STAMP.size:
        raise BadMessage("envelope_schema", "the envelope has no stamp")
    return Stamp(*_STAMP.unpack_from(payload)), payload[_STAMP.size :]
