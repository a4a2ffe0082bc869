"""Control messages of other peers: fetch what they refer to, decode, verify, hand on.

What passes here has the right schema, all its attached blobs, and only signatures that hold.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from swarm.errors import HostileInput, StateError
from swarm.network.blobs import BlobStore
from swarm.network.fetch import Downloads, Want
from swarm.network.identity import peer_id_of, verify
from swarm.network.tasks import Tasks
from swarm.protocol.events import Event, Received
from swarm.protocol.manifest import Digest, PeerId
from swarm.protocol.messages import (
    Accept,
    Ballot,
    Certificate,
    Commit,
    Header,
    Message,
    Signature,
    accept_statement,
)
from swarm.protocol.wire import attachments_of, decode

logger = logging.getLogger(__name__)

MAX_PENDING_PER_PEER = 32
"""Messages of one peer whose attachments are being fetched; more are dropped, peers repeat."""
ATTACHMENT_DEADLINE_S = 20.0


class Inbound:
    """Takes control messages off the network and hands those that are in order on as events."""

    def __init__(
        self,
        store: BlobStore,
        downloads: Downloads,
        run: str,
        deliver: Callable[[Event], None],
        refused: Counter[str],
    ) -> None:
        self._store, self._downloads, self._run = store, downloads, run
        self._deliver, self._refused = deliver, refused
        self._pending: Counter[PeerId] = Counter()
        self._tasks = Tasks("the inbox")

    def take(self, source: PeerId, payload: bytes) -> None:
        """Takes one message, in the node's loop; what is wrong with it is counted and dropped."""
        if self._pending[source] >= MAX_PENDING_PER_PEER:
            self._refused["too_many_pending"] += 1
            return
        self._pending[source] += 1
        self._tasks.spawn(self._receive(source, payload))

    async def stop(self) -> None:
        """Drops what is on its way."""
        await self._tasks.stop()

    async def _receive(self, source: PeerId, payload: bytes) -> None:
        try:
            async with asyncio.timeout(ATTACHMENT_DEADLINE_S):
                header, message = await open_message(source, payload, self._store, self._downloads)
            self._deliver(Received(source, header, verified(message, source, self._run)))
        except HostileInput as error:
            self._refused[error.reason] += 1
            logger.warning("from=%s refused=%s: %s", source[-6:], error.reason, error)
        except TimeoutError:
            logger.debug("from=%s dropped: its attachments did not arrive", source[-6:])
        except StateError as error:
            logger.error("from=%s dropped: %s", source[-6:], error)
        finally:
            self._pending[source] -= 1


async def open_message(
    source: PeerId, payload: bytes, store: BlobStore, downloads: Downloads
) -> tuple[Header, Message]:
    """Fetches what a message refers to from its sender and decodes it.

    Raises:
        BadMessage: not of the schema.
    """
    wanted = attachments_of(payload)
    missing = [Want(digest, size, (source,)) for digest, size in wanted if not store.has(digest)]
    if missing:
        await downloads.fetch(missing, check=None, on_blob=_ignore, on_failure=_ignore)
    blobs = {digest: bytes(store.get(digest) or b"") for digest, _ in wanted}
    return decode(payload, blobs)


def _ignore(*_: str) -> None:
    """Attachments are waited for as a whole, so single arrivals are no news."""


def verified(message: Message, source: PeerId, run: str) -> Message:
    """The message with only those signatures that are right.

    Raises:
        HostileInput: an ACCEPT that its sender did not sign.
    """
    if isinstance(message, Accept) and not _signed_by(
        source, message.signature, run, message.ballot, message.digest
    ):
        raise HostileInput("bad_signature", "an ACCEPT is not signed by its sender")
    if isinstance(message, Commit) and message.certificate:
        ballot, digest = message.certificate.ballot, message.manifest.digest
        signatures = {
            peer: signature
            for peer, signature in message.certificate.signatures.items()
            if _signed_by(peer, signature, run, ballot, digest)
        }
        return replace(message, certificate=Certificate(ballot, signatures))
    return message


def _signed_by(
    peer: PeerId, signature: Signature, run: str, ballot: Ballot, digest: Digest
) -> bool:
    statement = accept_statement(run, ballot, digest)
    return peer_id_of(signature.public_key) == peer and verify(
        signature.public_key, statement, signature.signature
    )
