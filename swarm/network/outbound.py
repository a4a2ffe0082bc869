"""Messages on their way out: what they refer to is put where their receivers can fetch it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from swarm.network.blobs import BlobStore
from swarm.protocol.manifest import Digest
from swarm.protocol.messages import Header, Message
from swarm.protocol.wire import encode

KEPT = 256
REPEATED = 4
"""Messages of which the bytes are kept: a convener posts the same one or two to all members."""


@dataclass(frozen=True)
class _Encoded:
    header: Header
    message: Message
    payload: bytes
    digests: tuple[Digest, ...]


class Outbound:
    """Encodes messages; `digest in outbound` says whether a blob went with one lately."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._sent: deque[Digest] = deque(maxlen=KEPT)
        """Offers, manifests and certificates."""
        self._encoded: deque[_Encoded] = deque(maxlen=REPEATED)

    def __contains__(self, digest: Digest) -> bool:
        return digest in self._sent

    def encode(self, header: Header, message: Message) -> bytes:
        """The message's payload, with what it refers to put into the store.

        Raises:
            StateError: the store cannot take it.
        """
        for known in self._encoded:
            # The very same object, so that nothing has to be compared.
            if known.header is header and known.message is message and self._has(known.digests):
                return known.payload
        payload, attachments = encode(header, message)
        for digest, blob in attachments.items():
            if digest not in self._sent:
                self._sent.append(digest)
            self._store.put(blob, digest)
        self._encoded.append(_Encoded(header, message, payload, tuple(attachments)))
        return payload

    def _has(self, digests: tuple[Digest, ...]) -> bool:
        return all(self._store.has(digest) for digest in digests)
