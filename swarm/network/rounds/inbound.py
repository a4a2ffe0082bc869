"""Receives control messages: checks each, fetches its blobs, decodes, verifies, delivers.

The proof of a stranger's COMMIT is checked first; the manifest is fetched only if the proof is
valid [L1].
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
        """Opens nothing yet.

        Args:
            aside: fetches into memory.
            own: blobs that this peer has already.
            foothold: returns the state that this peer trusts now.
            sound: drops wrong signatures.
        """
        self._aside, self._own = aside, own
        self._foothold, self._sound = foothold, sound

    async def open(
        self, source: PeerId, payload: bytes, claim: Claim, costs: Costs
    ) -> tuple[messages.Header, messages.Message]:
        """The verified COMMIT, or a HELLO if the COMMIT proves nothing new.

        The header of the HELLO may show that the sender is ahead, so that it can be asked.

        Raises:
            HostileInput: the proof is invalid, or the sender has cost too much.
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
        """Fetches proved manifests from several holders, since one uplink is slow."""
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
        """Keeps these blobs in memory during the block; copies blobs that the peer already has."""
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
"""If more blobs of a message than this are missing, other peers are asked before its sender.
Evidence of more peers than this is checked in another thread."""
RELAYED_S = 10.0
"""For this long, a proposal's blobs are requested from its relays alone; after that, from its
convener too."""
MAX_SHOWN = 256
"""Limit of blobs in `Shown`, which remembers the peers whose messages named each blob."""
MAX_SHOWN_BY = 16


class Shown:
    """For each blob, the peers whose messages named it, and so can be asked for it."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Has seen no message; `clock` is in seconds."""
        self._clock = clock
        self._peers: OrderedDict[Digest, dict[PeerId, None]] = OrderedDict()
        self._first_s: dict[Digest, float] = {}

    def note(self, digest: Digest, peer: PeerId) -> None:
        """Notes that a message of this peer named the blob."""
        self._first_s.setdefault(digest, self._clock())
        peers = self._peers.setdefault(digest, {})
        self._peers.move_to_end(digest)
        if len(peers) < MAX_SHOWN_BY:
            peers[peer] = None
        while len(self._peers) > MAX_SHOWN:
            oldest, _ = self._peers.popitem(last=False)
            del self._first_s[oldest]

    def age_s(self, digest: Digest) -> float:
        """Seconds since a message first named the blob."""
        return self._clock() - self._first_s.get(digest, self._clock())

    def by(self, digest: Digest) -> tuple[PeerId, ...]:
        """The peers whose messages named a blob, in order of their first such message."""
        return tuple(self._peers.get(digest, ()))


class Inbound:
    """Receives control messages and delivers the valid ones as events."""

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
            transfers: fetches blobs named by members, and separately blobs named by strangers.
            ledger: knows the members, and limits the cost of each sender.
            run: the id of the run, which is part of all that is signed.
            deliver: takes each valid message.
            foothold: returns the state that this peer trusts, from which strangers may prove newer
                states.
            judge: runs the machine's slow checks of a message in advance, in another thread if the
                message has many signatures.
            me: this peer's id, which may be among the relays of a proposal.
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
        """Takes one message, in the node's loop; a faulty message is counted and dropped."""
        now_s = time.monotonic()
        try:
            self._ledger.take(source, Cost.SECONDS, 0, now_s)
            held = self._ledger.take(source, Cost.PENDING, 1, now_s)
        except TooCostly as error:
            self.refused[error.reason] += 1
            return
        self._tasks.spawn(self._receive(source, payload, held))

    async def stop(self) -> None:
        """Drops messages in progress."""
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
            level = logging.WARNING if is_member else logging.DEBUG  # strangers must not fill logs
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
        """Opens a message of a stranger; its blobs never enter the peer's store.

        Raises:
            HostileInput: a stranger may not send this message, it costs too much, or its proof is
                wrong.
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
    """The claim of a message; raises BadMessage if its sender may not send this kind."""
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
    """Fetches the blobs of a message, and blobs that these name, then decodes the message.

    The sender is asked first, then peers that have the blob according to the message, or whose
    messages named it (`shown`). So one uplink need not carry a manifest to all peers. The offers of
    a large roster are requested from their makers first, since the convener alone would have to
    send 2 GB to 256 peers. If a proposal names relays, all peers but the relays request its blobs
    only from the relays for `RELAYED_S` (blob relays).

    Raises:
        BadMessage: the message does not fit the schema.
        TooCostly: the sender has caused too many fetches already; without `costs` there is no
            limit.
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
        # Not copied, since 255 waiting messages may name one manifest.
        blobs.update({digest: store.get(digest) or b"" for digest, _ in wanted})

    await bring(bare.attachments)
    await bring(await costs.parsing(partial(bare.attachments_within, blobs)))
    size = sum(map(len, blobs.values()))
    return await costs.parsing(partial(decode, payload, blobs), off_loop=size > LARGE_BYTES)


def _is_much(message: messages.Message) -> bool:
    """Whether to check a message in another thread, since it has signatures of many peers."""
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
    """The missing blobs as wants, each with its sources."""
    wants = []
    for digest, size in absent:
        named = holders.get(digest, ())[:MAX_SHOWN_BY]
        sources = [source, *shown.by(digest), *named]
        if len(absent) > MANY:
            sources = [*named, *sources]
        wants.append(Want(digest, size, tuple(dict.fromkeys(sources))))
    return wants


def _relayed(want: Want, relays: Sequence[PeerId], shown: Shown) -> Want:
    """The same want, with relays as its only sources; after `RELAYED_S`, with the others too."""
    others = want.sources if shown.age_s(want.digest) >= RELAYED_S else ()
    return replace(want, sources=tuple(dict.fromkeys([*relays, *others])))


def _log_failure(digest: str, peer: str, reason: str) -> None:
    logger.debug("attachment %s from=%s: %s", digest[:12], peer[-6:], reason)


def verified(
    header: messages.Header, message: messages.Message, source: PeerId, run: str
) -> messages.Message:
    """The message with its valid signatures only; see `swarm.protocol.messages.signatures`."""
    return signatures.verified(header, message, source, run, verify)
