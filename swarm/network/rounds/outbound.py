"""Messages on their way out: what they refer to is put where their receivers can fetch it."""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from swarm.experts import expert_of_unit
from swarm.network.blobs.blob_store import BlobStore
from swarm.protocol.messages.message_bytes import encode
from swarm.protocol.messages.messages import Header, Message, Offer
from swarm.protocol.values.manifest import Digest

HELD_S = 30.0
"""How long what a message refers to is held for its receivers, who drop the message after 20 s: a
certificate, say, is in no manifest, so that the next collection would take it from under them."""
KEPT = 256
"""Blobs of messages that are known as such, and the most that are held."""
REPEATED = 4
"""Messages whose bytes are kept: a convener posts the same one or two to all members."""


@dataclass(frozen=True)
class _Encoded:
    header: Header
    message: Message
    payload: bytes
    digests: tuple[Digest, ...]


class Outbound:
    """Encodes messages; `digest in outbound` says whether a blob went with one lately."""

    def __init__(self, store: BlobStore, clock: Callable[[], float] = time.monotonic) -> None:
        """Has sent nothing; `clock` is in seconds."""
        self._store, self._clock = store, clock
        self._sent: deque[Digest] = deque(maxlen=KEPT)
        """Offers, manifests and certificates."""
        self._held: OrderedDict[Digest, float] = OrderedDict()
        """The latest of them, with when they were sent last; the oldest is first."""
        self._encoded: deque[_Encoded] = deque(maxlen=REPEATED)
        self._experts = frozenset[Digest]()

    def offered(self, offer: Offer) -> None:
        """What this peer offers now; from any thread."""
        experts = [u for unit, u in offer.units.items() if expert_of_unit(unit) is not None]
        self._experts = frozenset(d for u in experts for d in (u.digest, u.delta) if d)

    def may_wait(self, digest: Digest) -> bool:
        """Whether a blob is an expert that this peer offers: means of others wait for the rest."""
        return digest in self._experts

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._sent

    def encode(self, header: Header, message: Message) -> bytes:
        """The message's payload. Blobs that it refers to are put into the store and pinned there.

        Raises:
            StateError: the store cannot take it.
        """
        self._release()
        for known in self._encoded:
            # The very same object, so that nothing has to be compared.
            if known.header is header and known.message is message and self._has(known.digests):
                self._hold(known.digests)
                return known.payload
        payload, attachments = encode(header, message)
        self._hold(attachments)
        for digest, blob in attachments.items():
            if digest not in self._sent:
                self._sent.append(digest)
            self._store.put(blob, digest)
        self._encoded.append(_Encoded(header, message, payload, tuple(attachments)))
        return payload

    def _hold(self, digests: Iterable[Digest]) -> None:
        """Pins the blobs that are not pinned yet, before they can be collected."""
        for digest in digests:
            if digest not in self._held:
                self._store.pin([digest])
            self._held[digest] = self._clock()
            self._held.move_to_end(digest)

    def _release(self) -> None:
        """Lets go of what nobody can be waiting for any more, or of the oldest of too much."""
        too_old = self._clock() - HELD_S
        while self._held:
            digest, sent = next(iter(self._held.items()))
            if sent > too_old and len(self._held) <= KEPT:
                break
            del self._held[digest]
            self._store.unpin([digest])

    def _has(self, digests: tuple[Digest, ...]) -> bool:
        return all(self._store.has(digest) for digest in digests)
