"""Simulated signatures, which cannot be forged and are checked on arrival."""

from __future__ import annotations

from blake3 import blake3

from swarm.errors import HostileInput
from swarm.protocol.messages.events import Record
from swarm.protocol.messages.messages import SIGNATURE_BYTES, Header, Message, Signature
from swarm.protocol.messages.signatures import outline_of, refusal_of, standing_in, verified
from swarm.protocol.values.manifest import PeerId

KEPT = 64
"""Most verified messages that are kept, because a convener posts one message to all peers."""


def sign(peer: PeerId, statement: bytes) -> Signature:
    """A peer's signature under a statement. Only code that acts for the peer may call it."""
    return blake3(peer.encode() + b"/" + statement).digest(SIGNATURE_BYTES)


def holds(peer: PeerId, statement: bytes, signature: Signature) -> bool:
    """Whether a peer has signed a statement."""
    return signature == sign(peer, statement)


class Door:
    """The place where the network delivers messages. Drops messages with wrong signatures."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._known: dict[tuple[PeerId, int, int], tuple[Header, Message, Message | None]] = {}

    def holds(self, peer: PeerId, statement: bytes, signature: Signature) -> bool:
        """Whether a peer has signed a statement."""
        return holds(peer, statement, signature)

    def let_in(self, source: PeerId, header: Header, message: Message) -> Message | None:
        """The valid part of a message; see `verified`. None for a refused message."""
        key = (source, id(header), id(message))
        if key not in self._known:
            try:
                left: Message | None = verified(header, message, source, self._run, self.holds)
            except HostileInput:
                left = None
            if len(self._known) >= KEPT:
                del self._known[next(iter(self._known))]
            self._known[key] = (header, message, left)  # keeps their ids from reuse
        return self._known[key][2]


def is_refused(source: PeerId, message: Message, record: Record) -> bool:
    """Whether a real peer would refuse the message before it fetches the attachments."""
    return refusal_of(outline_of(message), standing_in(record, source)) is not None
