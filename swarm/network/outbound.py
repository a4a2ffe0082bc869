"""Messages on their way out: what they refer to is put where their receivers can fetch it."""

from __future__ import annotations

from collections import deque

from swarm.network.blobs import BlobStore
from swarm.protocol.manifest import Digest
from swarm.protocol.messages import Header, Message
from swarm.protocol.wire import encode

KEPT = 256


class Outbound:
    """Encodes messages; `digest in outbound` says whether a blob went with one lately."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._sent: deque[Digest] = deque(maxlen=KEPT)
        """Offers, manifests and certificates."""

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._sent

    def encode(self, header: Header, message: Message) -> bytes:
        """The message's payload, with what it refers to put into the store.

        Raises:
            StateError: the store cannot take it.
        """
        payload, attachments = encode(header, message)
        for digest, blob in attachments.items():
            if digest not in self._sent:
                self._sent.append(digest)
            self._store.put(blob, digest)
        return payload
