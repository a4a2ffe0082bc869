"""Encodes outgoing messages, and stores the blobs that they name for their receivers to fetch."""

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
"""How long the blobs of a message are kept for its receivers, which drop the message after 20 s.
Without this, the next collection would delete blobs that no manifest names, such as
certificates."""
KEPT = 256
"""Most remembered blobs of messages, and most blobs kept for receivers."""
REPEATED = 4
"""Number of messages whose bytes are cached, since a convener sends one or two to all members."""


@dataclass(frozen=True)
class _Encoded:
    header: Header
    message: Message
    payload: bytes
    digests: tuple[Digest, ...]


class Outbound:
    """Encodes messages; `digest in outbound` says whether a recent message named a blob."""

    def __init__(self, store: BlobStore, clock: Callable[[], float] = time.monotonic) -> None:
        """Has sent no message; `clock` is in seconds."""
        self._store, self._clock = store, clock
        self._sent: deque[Digest] = deque(maxlen=KEPT)
        """Offers, manifests and certificates."""
        self._held: OrderedDict[Digest, float] = OrderedDict()
        """The pinned blobs, each with the time of the last message that named it; oldest first."""
        self._encoded: deque[_Encoded] = deque(maxlen=REPEATED)
        self._experts = frozenset[Digest]()

    def offered(self, offer: Offer) -> None:
        """Notes this peer's current offer; may be called from any thread."""
        experts = [u for unit, u in offer.units.items() if expert_of_unit(unit) is not None]
        self._experts = frozenset(d for u in experts for d in (u.digest, u.delta) if d)

    def may_wait(self, digest: Digest) -> bool:
        """Whether a blob is an expert that this peer offers; blobs for means are sent first."""
        return digest in self._experts

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._sent

    def encode(self, header: Header, message: Message) -> bytes:
        """The message's payload. Puts the blobs that it names into the store, and pins them.

        Raises:
            StateError: the store cannot take them.
        """
        self._release()
        for known in self._encoded:
            # Compared by identity, since a comparison of contents would take long.
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
        """Pins blobs that are not yet pinned, before they can be deleted."""
        for digest in digests:
            if digest not in self._held:
                self._store.pin([digest])
            self._held[digest] = self._clock()
            self._held.move_to_end(digest)

    def _release(self) -> None:
        """Unpins blobs for which no receiver waits now, and the oldest of too many."""
        too_old = self._clock() - HELD_S
        while self._held:
            digest, sent = next(iter(self._held.items()))
            if sent > too_old and len(self._held) <= KEPT:
                break
            del self._held[digest]
            self._store.unpin([digest])

    def _has(self, digests: tuple[Digest, ...]) -> bool:
        return all(self._store.has(digest) for digest in digests)
