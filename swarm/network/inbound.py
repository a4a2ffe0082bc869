"""Control messages of other peers: judge, fetch what they refer to, decode, verify, hand on.

What passes here is what its sender may send, has the right schema, all its attached blobs, and only
signatures that hold. The one message of strangers that names blobs is their COMMIT (`proving.py`).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from swarm.background import Tasks
from swarm.errors import BadMessage, HostileInput, StateError, TooCostly
from swarm.network.blobs import BlobStore
from swarm.network.costs import LARGE_BYTES, Costs
from swarm.network.fetch import Downloads, Want
from swarm.network.identity import verify
from swarm.network.ledger import Cost, Held, Ledger
from swarm.network.proving import Proving
from swarm.network.transfers import Transfers
from swarm.protocol import signatures
from swarm.protocol.claims import Claim, Standing, claim_of, refusal_of
from swarm.protocol.digests import Buffer
from swarm.protocol.events import Event, Received
from swarm.protocol.manifest import Digest, PeerId
from swarm.protocol.messages import Accepted, Commit, Header, Message, Propose, Ready
from swarm.protocol.rounds.relays import in_turn
from swarm.protocol.trust import Foothold
from swarm.protocol.wire import BareMessage, decode

logger = logging.getLogger(__name__)

ATTACHMENT_DEADLINE_S = 20.0
MANY = 16
"""More blobs beside a message are asked of others first, and evidence of more peers is checked in
another thread."""
RELAYED_S = 10.0
"""So long a proposal is asked of its relays alone; repeated after that, of its convener too."""
MAX_SHOWN = 256
"""Blobs of which it is kept who has shown them."""
MAX_SHOWN_BY = 16


class Shown:
    """Who has sent messages with which blobs, and so can be asked for them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Has seen nothing; `clock` is in seconds."""
        self._clock = clock
        self._peers: OrderedDict[Digest, dict[PeerId, None]] = OrderedDict()
        self._first_s: dict[Digest, float] = {}

    def note(self, digest: Digest, peer: PeerId) -> None:
        """A message of this peer has named the blob."""
        self._first_s.setdefault(digest, self._clock())
        peers = self._peers.setdefault(digest, {})
        self._peers.move_to_end(digest)
        if len(peers) < MAX_SHOWN_BY:
            peers[peer] = None
        while len(self._peers) > MAX_SHOWN:
            oldest, _ = self._peers.popitem(last=False)
            del self._first_s[oldest]

    def age_s(self, digest: Digest) -> float:
        """Since a message named the blob first."""
        return self._clock() - self._first_s.get(digest, self._clock())

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
        *,
        foothold: Callable[[], Foothold],
        judge: Callable[[Message], object] = lambda _: None,
        me: PeerId = "",
    ) -> None:
        """Waits for messages.

        Args:
            transfers: fetch what members name, and aside what strangers name.
            ledger: says who is a member, and what each sender may cost.
            run: its id, which signatures bind.
            deliver: takes each message that is in order.
            foothold: what this peer believes, and strangers may prove more from.
            judge: works out beforehand, in another thread if it is much, what will be asked of a
                message when it is delivered.
            me: this peer, which others may count on to pass a proposal on.
        """
        self._downloads = transfers.attached
        self._proving = Proving(
            transfers.aside,
            transfers.downloads.store,
            foothold,
            partial(signatures.sound, run=run, holds=verify),
        )
        self._ledger, self._run, self._deliver = ledger, run, deliver
        self._judge, self._me = judge, me
        self.refused: Counter[str] = Counter()
        self._shown = Shown()
        self._turn = asyncio.Lock()
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
        costs = Costs(source, self._ledger, self._turn if is_member else None)
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
            self.refused["late_attachments"] += 1
            level = logging.INFO if is_member else logging.DEBUG
            logger.log(level, "from=%s dropped: its attachments did not arrive", source[-6:])
        except StateError as error:
            logger.error("from=%s dropped: %s", source[-6:], error)
        finally:
            self._ledger.give_back(held, time.monotonic())

    def _checked(self, header: Header, message: Message, source: PeerId) -> Message:
        message = verified(header, message, source, self._run)
        self._judge(message)
        return message

    async def _open(self, source: PeerId, payload: bytes, costs: Costs) -> tuple[Header, Message]:
        downloads, shown = self._downloads, self._shown
        if self._ledger.is_trainee(source):
            await _require_claim(payload, Standing.TRAINEE, costs)
        header, message = await open_message(
            source, payload, downloads.store, downloads, shown=shown, costs=costs, me=self._me
        )
        return header, await self._verified(header, message, source, costs)

    async def _open_of_stranger(
        self, source: PeerId, payload: bytes, costs: Costs
    ) -> tuple[Header, Message]:
        """Opens what a stranger sent, if it may; none of it comes to the peer's own store.

        Raises:
            HostileInput: it may not, or it costs too much, or proves nothing.
        """
        claim = await _require_claim(payload, Standing.STRANGER, costs)
        if claim.kind == "commit":
            return await self._proving.open(source, payload, claim, costs)
        header, message = await costs.parsing(partial(decode, payload, {}))
        return header, await self._verified(header, message, source, costs)

    async def _verified(
        self, header: Header, message: Message, source: PeerId, costs: Costs
    ) -> Message:
        check = partial(self._checked, header, message, source)
        return await costs.parsing(check, off_loop=_is_much(message))


async def _require_claim(payload: bytes, standing: Standing, costs: Costs) -> Claim:
    """What a message claims to be, if its sender may send that; raises BadMessage."""
    claim = await costs.parsing(partial(claim_of, payload))
    refusal = refusal_of(claim, standing)
    if refusal:
        raise BadMessage(refusal, f"a {standing} may not send this {claim.kind.upper()}")
    return claim


async def open_message(
    source: PeerId,
    payload: bytes,
    store: BlobStore,
    downloads: Downloads,
    *,
    shown: Shown | None = None,
    costs: Costs | None = None,
    me: PeerId = "",
) -> tuple[Header, Message]:
    """Fetches what a message refers to, then what that names in turn, and decodes it.

    Its sender is asked first, then whoever holds the blob by this message or has `shown` it before:
    one uplink should not have to carry a manifest to everybody. The offers of a large roster are
    asked of those that made them: from the convener alone 256 peers would get 2 GB in all. A
    proposal that names relays is asked of these alone for `RELAYED_S`, but by themselves [D4].

    Raises:
        BadMessage: not of the schema.
        TooCostly: its sender has had too much fetched already; without `costs` it may have all.
    """
    costs = costs or Costs(source, Ledger())
    shown = shown or Shown()
    blobs: dict[Digest, Buffer] = {}
    bare = await costs.parsing(partial(BareMessage, payload))

    async def bring(wanted: Sequence[tuple[Digest, int]]) -> None:
        for digest, _ in wanted:
            shown.note(digest, source)
        absent = [(digest, size) for digest, size in wanted if not store.has(digest)]
        if absent:
            costs.fetching(sum(size for _, size in absent))
            wants = _wants(source, absent, bare.holders(blobs), shown)
            if bare.relays and me not in bare.relays:
                wants = [_relayed(want, in_turn(bare.relays, me), shown) for want in wants]
            await downloads.fetch(wants, on_failure=_log_failure)
        # As they lie in the store: 255 peers that wait for their turn may show one manifest.
        blobs.update({digest: store.get(digest) or b"" for digest, _ in wanted})

    await bring(bare.attachments)
    await bring(await costs.parsing(partial(bare.attachments_within, blobs)))
    size = sum(map(len, blobs.values()))
    return await costs.parsing(partial(decode, payload, blobs), off_loop=size > LARGE_BYTES)


def _is_much(message: Message) -> bool:
    """Whether to check a message in another thread: it shows a signature of each of many peers."""
    if isinstance(message, Commit):
        certificates = (message.certificate, *(link.certificate for link in message.path))
        return sum(len(each.signatures) for each in certificates if each) > MANY
    shown = message.accepted if isinstance(message, Ready) else message
    evidence = shown.evidence if isinstance(shown, Propose | Accepted) else None
    return evidence is not None and len(evidence.declared) > MANY


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


def _relayed(want: Want, relays: Sequence[PeerId], shown: Shown) -> Want:
    """Asks relays, and all others once these have had their time."""
    others = want.sources if shown.age_s(want.digest) >= RELAYED_S else ()
    return replace(want, sources=tuple(dict.fromkeys([*relays, *others])))


def _log_failure(digest: str, peer: str, reason: str) -> None:
    logger.debug("attachment %s from=%s: %s", digest[:12], peer[-6:], reason)


def verified(header: Header, message: Message, source: PeerId, run: str) -> Message:
    """The message with only those signatures that are right; see `swarm.protocol.signatures`."""
    return signatures.verified(header, message, source, run, verify)
