"""Control messages of other peers: judge, fetch what they refer to, decode, verify, hand on.

What passes here is what its sender may send, has the right schema, all its attached blobs, and only
signatures that hold. What strangers have fetched here is in memory only, until it is decoded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from base64 import b64decode
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TypeVar

from swarm.errors import BadMessage, HostileInput, StateError, TooCostly
from swarm.network.blobs import BlobStore
from swarm.network.fetch import Downloads, Want
from swarm.network.identity import peer_id_of, verify
from swarm.network.invitations import is_signed
from swarm.network.ledger import Cost, Held, Ledger
from swarm.network.tasks import Tasks
from swarm.network.transfers import Transfers
from swarm.protocol.claims import Claim, Standing, claim_of, refusal_of
from swarm.protocol.events import Event, Received
from swarm.protocol.invitation import Invitation
from swarm.protocol.manifest import Digest, Manifest, PeerId, Wish, leave_statement
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

ATTACHMENT_DEADLINE_S = 20.0
LARGE_BYTES = 2**18
"""Attachments of more are decoded in another thread: a roster of 256 peers takes a second."""
MANY = 16
"""More blobs beside a message are asked of others first."""
MAX_SHOWN = 256
"""Blobs of which it is kept who has shown them."""
MAX_SHOWN_BY = 16

Result = TypeVar("Result")


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
        self, transfers: Transfers, ledger: Ledger, run: str, deliver: Callable[[Event], None]
    ) -> None:
        """Waits for messages.

        Args:
            transfers: fetch what members name, and aside what strangers name.
            ledger: says who is a member, and what each sender may cost.
            run: its id, which signatures bind.
            deliver: takes each message that is in order.
        """
        self._downloads, self._aside = transfers.downloads, transfers.aside
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
                opening = self._open if is_member else self._open_aside
                header, message = await opening(source, payload, costs)
            message = await costs.parsing(partial(verified, header, message, source, self._run))
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
        if self._ledger.is_trainee(source):
            await _require_claim(payload, Standing.TRAINEE, costs)
        return await open_message(
            source, payload, downloads.store, downloads, shown=shown, costs=costs
        )

    async def _open_aside(
        self, source: PeerId, payload: bytes, costs: Costs
    ) -> tuple[Header, Message]:
        """Opens what a stranger sent, if it may; none of it comes to the peer's own store.

        Raises:
            HostileInput: it may not, or it costs too much.
        """
        claim = await _require_claim(payload, Standing.STRANGER, costs)
        own, aside = self._downloads.store, self._aside.store
        digests = [digest for digest, _ in claim.attachments]
        aside.pin(digests)
        try:
            for digest in digests:
                if (blob := own.get(digest)) is not None:
                    aside.put(blob, digest)
            return await open_message(source, payload, aside, self._aside, costs=costs)
        finally:
            aside.unpin(digests)
            aside.collect(())


class Costs:
    """What one message costs its sender."""

    def __init__(self, source: PeerId, ledger: Ledger) -> None:
        self._source, self._ledger = source, ledger

    def fetching(self, num_bytes: int) -> None:
        """Charges attachments that are not here; raises TooCostly."""
        self._ledger.take(self._source, Cost.BYTES, num_bytes, time.monotonic())

    async def parsing(self, work: Callable[[], Result], *, off_loop: bool = False) -> Result:
        """Does some work, perhaps in another thread, and charges the processor time it took."""
        spent_s: list[float] = []
        try:
            if off_loop:
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(None, _timed, work, spent_s)
            return _timed(work, spent_s)
        finally:
            self._ledger.charge(self._source, Cost.SECONDS, sum(spent_s), time.monotonic())


async def _require_claim(payload: bytes, standing: Standing, costs: Costs) -> Claim:
    """What a message claims to be, if its sender may send that; raises BadMessage."""
    claim = await costs.parsing(partial(claim_of, payload))
    refusal = refusal_of(claim, standing)
    if refusal:
        raise BadMessage(refusal, f"a {standing} may not send this {claim.kind.upper()}")
    return claim


def _timed(work: Callable[[], Result], spent_s: list[float]) -> Result:
    began_s = time.thread_time()
    try:
        return work()
    finally:
        spent_s.append(time.thread_time() - began_s)


async def open_message(
    source: PeerId,
    payload: bytes,
    store: BlobStore,
    downloads: Downloads,
    *,
    shown: Shown | None = None,
    costs: Costs | None = None,
) -> tuple[Header, Message]:
    """Fetches what a message refers to and decodes it.

    Its sender is asked first, then whoever holds the blob by this message or has `shown` it before:
    one uplink should not have to carry a manifest to everybody. The offers of a large roster are
    asked of those that made them: from the convener alone 256 peers would get 2 GB in all.

    Raises:
        BadMessage: not of the schema.
        TooCostly: its sender has had too much fetched already; without `costs` it may have all.
    """
    costs = costs or Costs(source, Ledger())
    wanted = await costs.parsing(partial(attachments_of, payload))
    shown = shown or Shown()
    for digest, _ in wanted:
        shown.note(digest, source)
    absent = [(digest, size) for digest, size in wanted if not store.has(digest)]
    if absent:
        costs.fetching(sum(size for _, size in absent))
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
    is_large = sum(map(len, blobs.values())) > LARGE_BYTES
    return await costs.parsing(partial(decode, payload, blobs), off_loop=is_large)


def _ignore(*_: str) -> None:
    """Attachments are waited for as a whole, so single arrivals are no news."""


def verified(header: Header, message: Message, source: PeerId, run: str) -> Message:
    """The message with only those signatures that are right.

    Raises:
        HostileInput: an ACCEPT that its sender did not sign, or a wish to leave that its peer
            did not, or an invitation that its inviter did not, be they in a READY or in a
            manifest that is to be voted for.
    """
    for invitation in _invitations(message):
        if not is_signed(invitation):
            raise HostileInput(
                "bad_signature", f"{invitation.inviter[-6:]} has not signed an invitation"
            )
    for peer, tip, wish in _wishes(message, source, header):
        if not _wishes_to_leave(peer, tip, wish, run):
            raise HostileInput("bad_signature", f"{peer[-6:]} has not signed a wish to leave")
    if isinstance(message, Accept) and not _signed_by(
        source, message.signature, run, message.ballot, message.digest
    ):
        raise HostileInput("bad_signature", "an ACCEPT is not signed by its sender")
    if isinstance(message, Commit):
        path = tuple(
            replace(link, certificate=_sound(link.certificate, link.head.digest, run))
            for link in message.path
        )
        certificate = _sound(message.certificate, message.manifest.digest, run)
        return replace(message, certificate=certificate, path=path)
    return message


def _sound(certificate: Certificate | None, digest: Digest, run: str) -> Certificate | None:
    """The certificate with only those signatures that are right."""
    if certificate is None:
        return None
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
    if isinstance(message, Ready) and message.wish:
        yield source, header.tip, message.wish
    for manifest in _undecided(message):
        for peer, wish in manifest.wishes.items():
            yield peer, manifest.parent or "", wish


def _invitations(message: Message) -> Iterator[Invitation]:
    """The invitations that a message holds, and that nobody has voted for yet."""
    if isinstance(message, Ready) and message.invitation:
        yield message.invitation
    for manifest in _undecided(message):
        yield from manifest.invited.values()


def _undecided(message: Message) -> Iterator[Manifest]:
    """The manifests in a message that are to be voted for."""
    if isinstance(message, Ready) and message.accepted:
        yield message.accepted.manifest
    elif isinstance(message, Propose):
        yield message.manifest


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
