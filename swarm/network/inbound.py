"""Control messages of other peers: judge, fetch what they refer to, decode, verify, hand on.

What passes here is what its sender may send, has the right schema, all its attached blobs, and only
signatures that hold. The one message of strangers that names blobs is their COMMIT (`proving.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from base64 import b64decode
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from swarm.errors import BadMessage, HostileInput, StateError, TooCostly
from swarm.network.blobs import BlobStore
from swarm.network.costs import Costs
from swarm.network.fetch import Downloads, Want
from swarm.network.identity import verify
from swarm.network.ledger import Cost, Held, Ledger
from swarm.network.proving import Proving
from swarm.network.tasks import Tasks
from swarm.network.transfers import Transfers
from swarm.protocol.claims import Standing, claim_of, refusal_of
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
from swarm.protocol.trust import Foothold
from swarm.protocol.wire import attachments_of, attachments_within, decode, holders_of

logger = logging.getLogger(__name__)

ATTACHMENT_DEADLINE_S = 20.0
MANY = 16
"""More blobs beside a message are asked of others first."""
MAX_SHOWN = 256
"""Blobs of which it is kept who has shown them."""
MAX_SHOWN_BY = 16
BYTES_A_SIGNATURE = 2**10
"""A signature is checked in the time in which so much JSON is read: a certificate of more than
256 takes more than 30 ms, so another thread looks at it."""


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
        transfers: Transfers,
        ledger: Ledger,
        run: str,
        deliver: Callable[[Event], None],
        foothold: Callable[[], Foothold],
    ) -> None:
        """Waits for messages.

        Args:
            transfers: fetch what members name, and aside what strangers name.
            ledger: says who is a member, and what each sender may cost.
            run: its id, which signatures bind.
            deliver: takes each message that is in order.
            foothold: what this peer believes, and strangers may prove more from.
        """
        self._downloads = transfers.downloads
        self._proving = Proving(
            transfers.aside, transfers.downloads.store, foothold, partial(_sound, run=run)
        )
        self._ledger, self._run, self._deliver = ledger, run, deliver
        self.refused: Counter[str] = Counter()
        self._shown = Shown()
        self._tasks = Tasks("the inbox")

    def take(self, source: PeerId, payload: bytes) -> None:
        """Takes one message, in the node's loop; what is wrong with it is counted and dropped."""
        now_s = time.monotonic()
        try:
            self._ledger.take(source, Cost.SECONDS, 0, now_s)
            held = self._ledger.take(source, Cost.PENDING, 1, now_s)
        except TooCostly as error:
            self.refused[error.reason] += 1
            return
        self._tasks.spawn(self._receive(source, payload, held))

    async def stop(self) -> None:
        """Drops what is on its way."""
        await self._tasks.stop()

    async def _receive(self, source: PeerId, payload: bytes, held: Held) -> None:
        is_member = self._ledger.is_member(source)
        costs = Costs(source, self._ledger)
        try:
            async with asyncio.timeout(ATTACHMENT_DEADLINE_S):
                opening = self._open if is_member else self._open_of_stranger
                header, message = await opening(source, payload, costs)
            self._deliver(Received(source, header, message))
        except HostileInput as error:
            self.refused[error.reason] += 1
            level = logging.WARNING if is_member else logging.DEBUG  # a stranger fills no log
            logger.log(level, "from=%s refused=%s: %s", source[-6:], error.reason, error)
        except TimeoutError:
            logger.debug("from=%s dropped: its attachments did not arrive", source[-6:])
        except StateError as error:
            logger.error("from=%s dropped: %s", source[-6:], error)
        finally:
            self._ledger.give_back(held, time.monotonic())

    async def _open(self, source: PeerId, payload: bytes, costs: Costs) -> tuple[Header, Message]:
        downloads, shown = self._downloads, self._shown
        header, message = await open_message(
            source, payload, downloads.store, downloads, shown=shown, costs=costs
        )
        return header, await self._verified(header, message, source, costs)

    async def _open_of_stranger(
        self, source: PeerId, payload: bytes, costs: Costs
    ) -> tuple[Header, Message]:
        """Opens what a stranger sent, if it may; none of it comes to the peer's own store.

        Raises:
            HostileInput: it may not, or it costs too much, or proves nothing.
        """
        claim = await costs.parsing(partial(claim_of, payload))
        refusal = refusal_of(claim, Standing.STRANGER)
        if refusal:
            raise BadMessage(refusal, f"a stranger may not send this {claim.kind.upper()}")
        if claim.kind == "commit":
            return await self._proving.open(source, payload, claim, costs)
        header, message = await costs.parsing(partial(decode, payload, {}))
        return header, await self._verified(header, message, source, costs)

    async def _verified(
        self, header: Header, message: Message, source: PeerId, costs: Costs
    ) -> Message:
        work = partial(verified, header, message, source, self._run)
        return await costs.parsing(work, num_bytes=_signatures(message) * BYTES_A_SIGNATURE)


async def open_message(
    source: PeerId,
    payload: bytes,
    store: BlobStore,
    downloads: Downloads,
    *,
    shown: Shown | None = None,
    costs: Costs | None = None,
) -> tuple[Header, Message]:
    """Fetches what a message refers to, then what that names in turn, and decodes it.

    Its sender is asked first, then whoever holds the blob by this message or has `shown` it before:
    one uplink should not have to carry a manifest to everybody. The offers of a large roster are
    asked of those that made them: from the convener alone 256 peers would get 2 GB in all.

    Raises:
        BadMessage: not of the schema.
        TooCostly: its sender has had too much fetched already; without `costs` it may have all.
    """
    costs = costs or Costs(source, Ledger())
    shown = shown or Shown()
    blobs: dict[Digest, bytes] = {}
    for named_by in (partial(attachments_of, payload), partial(attachments_within, payload, blobs)):
        wanted = await costs.parsing(named_by)
        for digest, _ in wanted:
            shown.note(digest, source)
        absent = [(digest, size) for digest, size in wanted if not store.has(digest)]
        if absent:
            costs.fetching(sum(size for _, size in absent))
            wants = _wants(source, absent, holders_of(payload, blobs), shown)
            await downloads.fetch(wants, check=None, on_blob=_ignore, on_failure=_ignore)
        blobs |= {digest: bytes(store.get(digest) or b"") for digest, _ in wanted}
    size = sum(map(len, blobs.values()))
    return await costs.parsing(partial(decode, payload, blobs), num_bytes=size)


def _wants(
    source: PeerId,
    absent: Sequence[tuple[Digest, int]],
    holders: Mapping[Digest, tuple[PeerId, ...]],
    shown: Shown,
) -> list[Want]:
    """From whom to fetch what is not here."""
    wants = []
    for digest, size in absent:
        named = holders.get(digest, ())[:MAX_SHOWN_BY]
        sources = [source, *shown.by(digest), *named]
        if len(absent) > MANY:
            sources = [*named, *sources]
        wants.append(Want(digest, size, tuple(dict.fromkeys(sources))))
    return wants


def _ignore(*_: str) -> None:
    """Attachments are waited for as a whole, so single arrivals are no news."""


def _signatures(message: Message) -> int:
    """How many signatures a COMMIT shows; of other messages what they show is few."""
    if not isinstance(message, Commit):
        return 0
    shown = (message.certificate, *(link.certificate for link in message.path))
    return sum(len(each.signatures) for each in shown if each)


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
    if isinstance(message, Commit):
        path = tuple(
            replace(
                link,
                certificate=link.certificate and _sound(link.certificate, link.head.digest, run),
            )
            for link in message.path
        )
        certificate = message.certificate and _sound(
            message.certificate, message.manifest.digest, run
        )
        return replace(message, certificate=certificate, path=path)
    return message


def _sound(certificate: Certificate, digest: Digest, run: str) -> Certificate:
    """The certificate with only those signatures that are right."""
    ballot = certificate.ballot
    signatures = {
        peer: signature
        for peer, signature in certificate.signatures.items()
        if _signed_by(peer, signature, run, ballot, digest)
    }
    return Certificate(ballot, signatures)


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
        signature = b64decode(wish, validate=True)
    except ValueError:
        return False
    return verify(peer, leave_statement(run, tip), signature)


def _signed_by(
    peer: PeerId, signature: Signature, run: str, ballot: Ballot, digest: Digest
) -> bool:
    return verify(peer, accept_statement(run, ballot, digest), signature)
