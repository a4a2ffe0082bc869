"""Exchanges moments of experts: offers, asks, fetches, checks and confirms."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from swarm.background import Tasks
from swarm.codecs import Content, check_moments
from swarm.errors import BadBlob, HostileInput, NetworkDown, Unreachable
from swarm.experts import UnitLayout
from swarm.network.blobs.blob_store import BlobStore, content_of, write
from swarm.network.fetch.fetcher import Downloads, Want
from swarm.network.node.node import Node
from swarm.protocol.exchange import handover
from swarm.protocol.values.layout import Layout
from swarm.protocol.values.manifest import Digest, Manifest, PeerId

logger = logging.getLogger(__name__)

MOMENTS_QUESTION = b"moments "
ASK_S = 3.0
MAX_FAILURES = 3
"""After this many failed fetches of a blob, the giver is given up."""


class MomentsClient:
    """Asks other peers for moments and fetches them; runs in the node's loop."""

    def __init__(
        self, node: Node, downloads: Downloads, store: BlobStore, layout: Layout, run: str
    ) -> None:
        self.prefix = MOMENTS_QUESTION + run.encode() + b" "
        self._node, self._downloads, self._store, self._layout = node, downloads, store, layout

    async def fetch(self, moments: handover.Moments, giver: PeerId) -> bool:
        """Fetches, checks and pins a blob of moments; returns whether it is here."""
        layout = handover.layout_of_size(self._layout, moments.expert, moments.num_bytes)
        if layout is None:
            self._node.traffic.refuse("moments_size")
            return False
        store = self._store
        store.pin([moments.digest])
        if store.has(moments.digest) and not _is_sound(layout, content_of(store, moments.digest)):
            self._node.traffic.refuse("moments_values")
        elif await self._download(moments, layout, giver):
            self._node.traffic.moments_bytes_received += moments.num_bytes
            return True
        store.unpin([moments.digest])
        logger.info("moments of expert %d did not come", moments.expert)
        return False

    async def _download(self, moments: handover.Moments, layout: UnitLayout, giver: PeerId) -> bool:
        """Fetches a blob; gives up if it is refused or late, or after three failed attempts."""
        loop = asyncio.get_running_loop()
        is_hopeless = asyncio.Event()
        failures = 0

        def check(_: Digest, content: Content) -> None:
            try:
                check_moments(layout, content)
            except BadBlob:
                loop.call_soon_threadsafe(is_hopeless.set)
                raise

        def failed(_: Digest, __: PeerId, ___: str) -> None:
            nonlocal failures
            failures += 1
            if failures >= MAX_FAILURES:
                is_hopeless.set()

        want = Want(moments.digest, moments.num_bytes, (giver,))
        fetching = loop.create_task(
            self._downloads.fetch([want], check=check, on_blob=_ignore, on_failure=failed)
        )
        gives_up = loop.create_task(is_hopeless.wait())
        limit_s = handover.transfer_limit_s(moments.num_bytes)
        try:
            await asyncio.wait(
                [fetching, gives_up], timeout=limit_s, return_when=asyncio.FIRST_COMPLETED
            )
            return fetching.done() and fetching.exception() is None
        finally:
            for task in (fetching, gives_up):
                task.cancel()
            await asyncio.gather(fetching, gives_up, return_exceptions=True)

    async def ask_all(self, peers: Iterable[PeerId]) -> dict[PeerId, tuple[handover.Moments, ...]]:
        """The answers of all peers that answer."""
        asked = list(peers)
        answers = await asyncio.gather(*(self.ask(peer) for peer in asked))
        return {p: a for p, a in zip(asked, answers, strict=True) if a is not None}

    async def ask(
        self, peer: PeerId, settled: Collection[Digest] = ()
    ) -> tuple[handover.Moments, ...] | None:
        """The moments that a peer hands over to this peer. None without a valid answer in time.

        Args:
            peer: an earlier owner.
            settled: blobs of that owner that have arrived, or are no longer needed.
        """
        payload = self.prefix + handover.encode_question(settled)
        try:
            answer = await self._node.request(peer, payload, ASK_S)
            return handover.decode_answer(answer) if answer else None
        except (Unreachable, NetworkDown) as error:
            logger.debug("peer=%s not asked for moments: %s", peer[-6:], error)
        except HostileInput as error:
            self._node.traffic.refuse(error.reason)
        return None


def _is_sound(layout: UnitLayout, content: Content) -> bool:
    """Whether a blob that is already here is acceptable as moments."""
    try:
        check_moments(layout, content)
    except BadBlob:
        return False
    return True


def _ignore(_: Digest) -> None:
    """A callback that does nothing, since the caller waits for a single blob."""


RETRY_S = 2.0


@dataclass(frozen=True)
class Arrival:
    """The result of a search for the moments of an expert that this peer took up."""

    expert: int
    moments: handover.Moments | None
    """None if there are no moments, or they did not arrive. Their blob is pinned until `taken`."""
    reason: str


class MomentsExchange:
    """One peer's exchange of moments. Coroutines run in the node's loop, other methods anywhere."""

    def __init__(
        self, node: Node, store: BlobStore, downloads: Downloads, layout: Layout, *, run: str
    ) -> None:
        self.arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        """Arrivals for experts that this peer took up, read by the trainer."""
        self._node, self._store = node, store
        self._client = MomentsClient(node, downloads, store, layout, run)
        self._lock = threading.Lock()
        self._giving = handover.Giving()
        """Used under the lock, by the threads of the trainer and the loop."""
        self._taking = handover.Taking()
        """Used in the loop only."""
        self._is_looking = False
        self._tasks = Tasks("the moments exchange")

    # ------------------------------------------------ the trainer's side (any thread)

    def give(
        self, expert: int, number: int, content: Content, peers: Sequence[PeerId]
    ) -> handover.Moments:
        """Offers this peer's moments of an expert, as of round `number`, to these peers.

        Only a piece of the moments is in memory at a time.

        Raises:
            StateError: the disk is full or cannot be written.
        """
        digest = write(self._store.draft(content.num_bytes), content)
        moments = handover.Moments(expert, number, digest, content.num_bytes)
        with self._lock:
            self._giving.put(moments, peers, time.monotonic())
        keeping = partial(self._keep, moments)
        self._node.loop.call_soon_threadsafe(self._tasks.supervise, keeping)
        return moments

    def is_waited_for(self, moments: handover.Moments) -> bool:
        """Whether a new owner may still fetch these offered moments."""
        with self._lock:
            return bool(self._giving.waits_for(moments, time.monotonic()))

    @property
    def given(self) -> Collection[int]:
        """Experts whose moments have reached all new owners."""
        with self._lock:
            return frozenset(self._giving.taken)

    def holds(self, digest: Digest) -> bool:
        """Whether a blob is moments that this peer offers."""
        with self._lock:
            return self._giving.holds(digest)

    def take_up(self, experts: Iterable[int], previous: Manifest, manifest: Manifest) -> None:
        """Searches for the moments of experts that this peer owns from `manifest` on.

        An `Arrival` follows for each expert that this peer still owns. It comes after at most
        `PATIENCE_S` without an offer from an earlier owner, plus `transfer_limit_s` for each
        fetched blob.
        """
        self._node.loop.call_soon_threadsafe(self._take_up, tuple(experts), previous, manifest)

    def keep_only(self, experts: Collection[int]) -> None:
        """Ends the searches for moments of other experts."""
        self._node.loop.call_soon_threadsafe(self._taking.keep_only, frozenset(experts))

    def taken(self, arrival: Arrival) -> None:
        """Releases the blob of an arrival."""
        if arrival.moments:
            self._store.unpin([arrival.moments.digest])

    # ------------------------------------------------ giving

    async def answer(self, source: PeerId, payload: bytes) -> bytes | None:
        """The answer to another peer's question; None if the question is not about moments.

        Raises:
            BadMessage: the question is about moments, but does not fit the schema.
        """
        if not payload.startswith(self._client.prefix):
            return None
        settled = handover.decode_question(payload.removeprefix(self._client.prefix))
        with self._lock:
            return handover.encode_answer(self._giving.asked(source, settled, time.monotonic()))

    async def _keep(self, moments: handover.Moments) -> None:
        """Keeps a blob until no new owner can still fetch it, or this peer ends."""
        while self.is_waited_for(moments):
            await asyncio.sleep(RETRY_S)
        with self._lock:
            self._giving.end(moments)
        self._store.unpin([moments.digest])

    # ------------------------------------------------ taking

    def _take_up(self, experts: Sequence[int], previous: Manifest, manifest: Manifest) -> None:
        me = self._node.peer_id
        self._taking.take_up(me, experts, previous, manifest, time.monotonic())
        if not self._is_looking:
            self._tasks.supervise(self._look)
            self._is_looking = True

    async def _look(self) -> None:
        """Asks the earlier owners repeatedly while any search is open."""
        while self._taking.is_looking:
            answers = await self._client.ask_all(self._taking.whom_to_ask())
            for choice in self._taking.choose(answers, time.monotonic()):
                self._tasks.spawn(self._bring(choice))
            await asyncio.sleep(RETRY_S)
        self._is_looking = False

    async def _bring(self, choice: handover.Choice) -> None:
        """Delivers the chosen moments, or the reason why there are none."""
        expert = choice.search.expert
        if choice.found is None:
            self.arrivals.put(Arrival(expert, None, _why_none(choice)))
            return
        giver, moments = choice.found
        try:
            is_here = await self._client.fetch(moments, giver)
        except Exception:  # the search continues without this giver
            logger.exception("the moments of expert %d were not fetched", expert)
            is_here = False
        if self._taking.fetched(choice, time.monotonic(), is_here=is_here):
            reason = f"moments of round {moments.round} handed over by {giver}"
            self.arrivals.put(Arrival(expert, moments, reason))
        elif is_here:
            self._store.unpin([moments.digest])
        await self._client.ask(giver, [moments.digest])

    async def stop(self) -> None:
        """Ends all work; runs in the node's loop."""
        await self._tasks.stop()


def _why_none(choice: handover.Choice) -> str:
    owners = ", ".join(choice.search.owners)
    return f"zero moments: {'nothing came from ' + owners if owners else 'nobody else owned it'}"
