"""Control messages of other peers: fetch what they refer to, decode, verify, hand on.

What passes here has the right schema, all its attached blobs, and only signatures that hold.
"""

from __future__ import annotations

import asyncio
import logging
from base64 import b64decode
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace

from swarm.errors import HostileInput, StateError
from swarm.network.blobs import BlobStore
from swarm.network.fetch import Downloads, Want
from swarm.network.identity import peer_id_of, verify
from swarm.network.tasks import Tasks
from swarm.protocol.events import Event, Received
from swarm.protocol.manifest import Digest, PeerId, Wish, leave_statement
from swarm.protocol.messages import (
    Accept,
    Ballot,
    Certificate,
    Commit,
    Header,
    Message,
    Propose,
    Ready,
    Signature,
    accept_statement,
)
from swarm.protocol.wire import attachments_of, decode, holders_of

logger = logging.getLogger(__name__)

MAX_PENDING_PER_PEER = 32
"""Messages of one peer whose attachments are being fetched; more are dropped, peers repeat."""
ATTACHMENT_DEADLINE_S = 20.0
LARGE_BYTES = 2**18
"""Attachments of more are decoded in another thread: a roster of 256 peers takes a second."""
MANY = 16
"""More blobs beside a message are asked of others first."""
MAX_SHOWN = 256
"""Blobs of which it is kept who has shown them."""
MAX_SHOWN_BY = 16


class Shown:
    """Who has sent messages with which blobs, and so can be asked for them."""

    def __init__(self) -> None:
        self._peers: OrderedDict[Digest, dict[PeerId, None]] = OrderedDict()

    def note(self, digest: Digest, peer: PeerId) -> None:
        """A message of this peer has named the blob."""
        peers = self._peers.setdefault(digest, {})
        self._peers.move_to_end(digest)
        if len(peers) < MAX_SHOWN_BY:
            peers[peer] = None
        while len(self._peers) > MAX_SHOWN:
            self._peers.popitem(last=False)

    def by(self, digest: Digest) -> tuple[PeerId, ...]:
        """Those peers, the first to show it first."""
        return tuple(self._peers.get(digest, ()))


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
        self._shown = Shown()
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
                header, message = await open_message(
                    source, payload, self._store, self._downloads, self._shown
                )
            self._deliver(Received(source, header, verified(header, message, source, self._run)))
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
    source: PeerId,
    payload: bytes,
    store: BlobStore,
    downloads: Downloads,
    shown: Shown | None = None,
) -> tuple[Header, Message]:
    """Fetches what a message refers to and decodes it.

    Its sender is asked first, then whoever holds the blob by this message or has `shown` it before:
    one uplink should not have to carry a manifest to everybody. The offers of a large roster are
    asked of those that made them: from the convener alone 256 peers would get 2 GB in all.

    Raises:
        BadMessage: not of the schema.
    """
    wanted = attachments_of(payload)
    shown = shown or Shown()
    for digest, _ in wanted:
        shown.note(digest, source)
    absent = [(digest, size) for digest, size in wanted if not store.has(digest)]
    if absent:
        named = holders_of(payload)
        missing = []
        for digest, size in absent:
            holders = named.get(digest, ())[:MAX_SHOWN_BY]
            sources = [source, *shown.by(digest), *holders]
            if len(absent) > MANY:
                sources = [*holders, *sources]
            missing.append(Want(digest, size, tuple(dict.fromkeys(sources))))
        await downloads.fetch(missing, check=None, on_blob=_ignore, on_failure=_ignore)
    blobs = {digest: bytes(store.get(digest) or b"") for digest, _ in wanted}
    if sum(map(len, blobs.values())) <= LARGE_BYTES:
        return decode(payload, blobs)
    return await asyncio.get_running_loop().run_in_executor(None, decode, payload, blobs)


def _ignore(*_: str) -> None:
    """Attachments are waited for as a whole, so single arrivals are no news."""


def verified(header: Header, message: Message, source: PeerId, run: str) -> Message:
    """The message with only those signatures that are right.

    Raises:
        HostileInput: an ACCEPT that its sender did not sign, or a wish to leave that its peer
            did not, be it in a READY or in a manifest that is to be voted for.
    """
    for peer, tip, wish in _wishes(message, source, header):
        if not _wishes_to_leave(peer, tip, wish, run):
            raise HostileInput("bad_signature", f"{peer[-6:]} has not signed a wish to leave")
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


def _wishes(
    message: Message, source: PeerId, header: Header
) -> Iterator[tuple[PeerId, Digest, Wish]]:
    """Whose wishes to leave a message holds, and after which manifest they want to."""
    manifests = []
    if isinstance(message, Ready):
        if message.wish:
            yield source, header.tip, message.wish
        if message.accepted:
            manifests.append(message.accepted.manifest)
    elif isinstance(message, Propose):
        manifests.append(message.manifest)
    for manifest in manifests:
        for peer, wish in manifest.wishes.items():
            yield peer, manifest.parent or "", wish


def _wishes_to_leave(peer: PeerId, tip: Digest, wish: Wish, run: str) -> bool:
    try:
        key, signature = (b64decode(part) for part in (wish.public_key, wish.signature))
    except ValueError:
        return False
    return peer_id_of(key) == peer and verify(key, leave_statement(run, tip), signature)


def _signed_by(
    peer: PeerId, signature: Signature, run: str, ballot: Ballot, digest: Digest
) -> bool:
    statement = accept_statement(run, ballot, digest)
    return peer_id_of(signature.public_key) == peer and verify(
        signature.public_key, statement, signature.signature
    )
