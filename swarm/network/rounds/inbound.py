"""Control messages of other peers: judge, fetch what they refer to, decode, verify, hand on.

The proof behind a stranger's COMMIT is judged first, and the manifest only if the proof holds [L1].
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from swarm.background import Tasks
from swarm.errors import BadMessage, HostileInput, StateError, TooCostly
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch.fetcher import Downloads, Want
from swarm.network.rounds.transfers import Transfers
from swarm.network.wire.identity import verify
from swarm.network.wire.ledger import LARGE_BYTES, Cost, Costs, Held, Ledger
from swarm.protocol.chain.trust import Foothold, Sound
from swarm.protocol.messages import messages, signatures
from swarm.protocol.messages.events import Event, Received
from swarm.protocol.messages.message_bytes import BareMessage, decode, decode_proof
from swarm.protocol.messages.signatures import Claim, Standing, claim_of, refusal_of
from swarm.protocol.rounds.policies.slow_links import in_turn
from swarm.protocol.values.digests import Buffer
from swarm.protocol.values.manifest import Digest, PeerId

logger = logging.getLogger(__name__)


MAX_SOURCES = 16


class CommitProofs:
    """Opens COMMITs of strangers."""

    def __init__(
        self, aside: Downloads, own: BlobStore, foothold: Callable[[], Foothold], sound: Sound
    ) -> None:
        """Waits for them.

        Args:
            aside: fetches into memory.
            own: what this peer has already.
            foothold: what this peer believes now.
            sound: drops signatures that are wrong.
        """
        self._aside, self._own = aside, own
        self._foothold, self._sound = foothold, sound

    async def open(
        self, source: PeerId, payload: bytes, claim: Claim, costs: Costs
    ) -> tuple[messages.Header, messages.Message]:
        """The COMMIT with all signatures checked, or a HELLO if it has nothing to prove here.

        The HELLO says what the header does: that the sender is ahead, say, and may be asked.

        Raises:
            HostileInput: the proof does not hold, or its sender has cost too much.
        """
        (body, body_bytes), (proof, proof_bytes), *more = claim.attachments
        parent = more[0][0] if more else None
        with self._pinned([digest for digest, _ in claim.attachments]):
            blob = await self._proof(source, proof, proof_bytes, costs)
            judge = partial(self._proved, blob, body, parent)
            path = await costs.parsing(judge, off_loop=proof_bytes > LARGE_BYTES)
            if path is None:
                assert claim.header is not None
                return claim.header, messages.Hello(ask=False)
            await self._fetch(source, path, [(body, body_bytes), *more], costs)
            blobs = {digest: self._blob(digest) for digest, _ in claim.attachments}
            size = sum(map(len, blobs.values()))
            header, commit = await costs.parsing(
                partial(decode, payload, blobs), off_loop=size > LARGE_BYTES
            )
        assert isinstance(commit, messages.Commit)
        if commit.manifest.digest != path[-1].head.digest:
            raise BadMessage("false_proof", "the manifest has another head than was proved")
        return header, replace(commit, certificate=path[-1].certificate, path=path)

    async def _proof(self, source: PeerId, digest: Digest, num_bytes: int, costs: Costs) -> bytes:
        if not self._aside.store.has(digest):
            costs.fetching(1, Cost.PROOFS)
            costs.fetching(num_bytes)
            await self._bring([Want(digest, num_bytes, (source,))])
        return self._blob(digest)

    def _proved(
        self, proof: bytes, body: Digest, parent: Digest | None
    ) -> tuple[messages.Link, ...] | None:
        path = decode_proof(proof).path
        return self._foothold().proved(path, body, parent, self._sound)

    async def _fetch(
        self,
        source: PeerId,
        path: Sequence[messages.Link],
        manifests: Sequence[tuple[Digest, int]],
        costs: Costs,
    ) -> None:
        """Brings manifests that are known to be right from who has them: one uplink is little."""
        certificate = path[-1].certificate
        signers = sorted(certificate.signatures) if certificate else []
        sources = tuple(dict.fromkeys([source, *signers]))[:MAX_SOURCES]
        missing = [(name, size) for name, size in manifests if not self._aside.store.has(name)]
        if missing:
            costs.fetching(sum(size for _, size in missing), Cost.MANIFESTS)
            await self._bring([Want(digest, size, sources) for digest, size in missing])

    async def _bring(self, wants: Sequence[Want]) -> None:
        await self._aside.fetch(wants)

    def _blob(self, digest: Digest) -> bytes:
        return bytes(self._aside.store.get(digest) or b"")

    @contextmanager
    def _pinned(self, digests: Sequence[Digest]) -> Iterator[None]:
        """Keeps blobs, and those that this peer has, in memory meanwhile and no longer."""
        store = self._aside.store
        store.pin(digests)
        try:
            for digest in digests:
                if (blob := self._own.get(digest)) is not None:
                    store.put(blob, digest)
            yield
        finally:
            store.unpin(digests)
            store.collect(())


ATTACHMENT_DEADLINE_S = 20.0
MANY = 16
"""Where a message has more blobs, they are asked of other peers first. Evidence of more peers is
checked in another thread."""
RELAYED_S = 10.0
"""So long a proposal is asked of its relays alone; repeated after that, of its convener too."""
MAX_SHOWN = 256
"""Blobs for which the peers that showed them are remembered."""
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
        judge: Callable[[messages.Message], object] = lambda _: None,
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
        self._proving = CommitProofs(
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

    def _checked(
        self, header: messages.Header, message: messages.Message, source: PeerId
    ) -> messages.Message:
        message = verified(header, message, source, self._run)
        self._judge(message)
        return message

    async def _open(
        self, source: PeerId, payload: bytes, costs: Costs
    ) -> tuple[messages.Header, messages.Message]:
        downloads, shown = self._downloads, self._shown
        if self._ledger.is_trainee(source):
            await _require_claim(payload, Standing.TRAINEE, costs)
        header, message = await open_message(
            source, payload, downloads.store, downloads, shown=shown, costs=costs, me=self._me
        )
        return header, await self._verified(header, message, source, costs)

    async def _open_of_stranger(
        self, source: PeerId, payload: bytes, costs: Costs
    ) -> tuple[messages.Header, messages.Message]:
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
        self, header: messages.Header, message: messages.Message, source: PeerId, costs: Costs
    ) -> messages.Message:
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
) -> tuple[messages.Header, messages.Message]:
    """Fetches what a message refers to, then what that names in turn, and decodes it.

    Its sender is asked first, then peers that hold the blob by this message or have `shown` it:
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


def _is_much(message: messages.Message) -> bool:
    """Whether to check a message in another thread: it shows a signature of each of many peers."""
    if isinstance(message, messages.Commit):
        certificates = (message.certificate, *(link.certificate for link in message.path))
        return sum(len(each.signatures) for each in certificates if each) > MANY
    shown = message.accepted if isinstance(message, messages.Ready) else message
    evidence = shown.evidence if isinstance(shown, messages.Propose | messages.Accepted) else None
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


def verified(
    header: messages.Header, message: messages.Message, source: PeerId, run: str
) -> messages.Message:
    """The message with its right signatures alone; see `swarm.protocol.messages.signatures`."""
    return signatures.verified(header, message, source, run, verify)
