"""Moments of experts between peers: put out, asked for, fetched, confirmed. Nobody waits for it.

New owners ask the owners before them, who answer with what is out for the one that asks. So
everything that is fetched comes from a peer whose identity libp2p has proved, and a message that is
lost is repeated by the peer that wants something. `Giving` and `Taking` decide.
"""

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
from swarm.codecs import Content
from swarm.network.blobs import BlobStore
from swarm.network.contents import write
from swarm.network.fetch import Downloads
from swarm.network.moments_client import MomentsClient
from swarm.network.node import Node
from swarm.protocol.handover import (
    Choice,
    Giving,
    Moments,
    Taking,
    decode_question,
    encode_answer,
)
from swarm.protocol.layout import Layout
from swarm.protocol.manifest import Digest, Manifest, PeerId

logger = logging.getLogger(__name__)

RETRY_S = 2.0


@dataclass(frozen=True)
class Arrival:
    """What came of looking for the moments of an expert that this peer took up."""

    expert: int
    moments: Moments | None
    """None: there are none, or they did not come. Their blob is pinned until `taken`."""
    reason: str


class MomentsExchange:
    """One peer's side of it; coroutines run in the node's loop, the rest is for the trainer."""

    def __init__(
        self, node: Node, store: BlobStore, downloads: Downloads, layout: Layout, *, run: str
    ) -> None:
        self.arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        """Of taken-up experts, for the trainer."""
        self._node, self._store = node, store
        self._client = MomentsClient(node, downloads, store, layout, run)
        self._lock = threading.Lock()
        self._giving = Giving()
        """Used under the lock, by the trainer's thread and the loop's."""
        self._taking = Taking()
        """Used in the loop only."""
        self._is_looking = False
        self._tasks = Tasks("the moments exchange")

    # ------------------------------------------------ the trainer's side (any thread)

    def give(self, expert: int, number: int, content: Content, peers: Sequence[PeerId]) -> Moments:
        """Puts this peer's moments of an expert, as of a round, where these peers can fetch them.

        Holds a piece of them at a time.

        Raises:
            StateError: the disk is full or cannot be written.
        """
        digest = write(self._store.draft(content.num_bytes), content)
        moments = Moments(expert, number, digest, content.num_bytes)
        with self._lock:
            self._giving.put(moments, peers, time.monotonic())
        keeping = partial(self._keep, moments)
        self._node.loop.call_soon_threadsafe(self._tasks.supervise, keeping)
        return moments

    def is_waited_for(self, moments: Moments) -> bool:
        """Whether a new owner may yet fetch moments that were put out."""
        with self._lock:
            return bool(self._giving.waits_for(moments, time.monotonic()))

    @property
    def given(self) -> Collection[int]:
        """Experts whose moments all their new owners have."""
        with self._lock:
            return frozenset(self._giving.taken)

    def holds(self, digest: Digest) -> bool:
        """Whether a blob is moments that are out."""
        with self._lock:
            return self._giving.holds(digest)

    def take_up(self, experts: Iterable[int], previous: Manifest, manifest: Manifest) -> None:
        """Looks for the moments of experts that are this peer's from `manifest` on.

        An `Arrival` comes for each that stays this peer's: at the latest when its owners before
        have given nothing for `PATIENCE_S`, and one `transfer_limit_s` for each blob that comes.
        """
        self._node.loop.call_soon_threadsafe(self._take_up, tuple(experts), previous, manifest)

    def keep_only(self, experts: Collection[int]) -> None:
        """Looks no longer for the moments of other experts."""
        self._node.loop.call_soon_threadsafe(self._taking.keep_only, frozenset(experts))

    def taken(self, arrival: Arrival) -> None:
        """The blob of an arrival is not needed any more."""
        if arrival.moments:
            self._store.unpin([arrival.moments.digest])

    # ------------------------------------------------ giving

    async def answer(self, source: PeerId, payload: bytes) -> bytes | None:
        """The answer to a question of another peer; None if it is no question about moments.

        Raises:
            BadMessage: it is one, but not of the schema.
        """
        if not payload.startswith(self._client.prefix):
            return None
        settled = decode_question(payload.removeprefix(self._client.prefix))
        with self._lock:
            return encode_answer(self._giving.asked(source, settled, time.monotonic()))

    async def _keep(self, moments: Moments) -> None:
        """Keeps a blob here until no new owner may fetch it any more, or this peer ends."""
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
        """Asks again and again while anything is looked for."""
        while self._taking.is_looking:
            answers = await self._client.ask_all(self._taking.whom_to_ask())
            for choice in self._taking.choose(answers, time.monotonic()):
                self._tasks.spawn(self._bring(choice))
            await asyncio.sleep(RETRY_S)
        self._is_looking = False

    async def _bring(self, choice: Choice) -> None:
        """Delivers what was chosen, or the reason why there is nothing."""
        expert = choice.search.expert
        if choice.found is None:
            self.arrivals.put(Arrival(expert, None, _why_none(choice)))
            return
        giver, moments = choice.found
        try:
            is_here = await self._client.fetch(moments, giver)
        except Exception:  # the search goes on without this giver
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


def _why_none(choice: Choice) -> str:
    owners = ", ".join(choice.search.owners)
    return f"zero moments: {'nothing came from ' + owners if owners else 'nobody else owned it'}"
