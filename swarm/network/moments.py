"""Moments of experts between peers: announced, asked for, fetched, confirmed. Nobody waits for it.

Who has moments that another may want posts a question with `news`; the other asks back what there
is, fetches what it wants, and confirms what it holds with `settled`. So a message that is lost is
repeated by whoever still waits for a confirmation, and everything fetched was announced by a peer
whose identity libp2p has proved.
"""

from __future__ import annotations

import asyncio
import logging
import queue
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

from swarm.codecs import Content
from swarm.errors import StateError
from swarm.experts import expert_unit
from swarm.network.contents import write
from swarm.network.fetch import Downloads
from swarm.network.moments_client import MomentsClient
from swarm.network.node import Node
from swarm.network.shelf import Shelf
from swarm.network.tasks import Tasks
from swarm.protocol.layout import Layout
from swarm.protocol.manifest import Digest, Manifest, PeerId
from swarm.protocol.moments import (
    Moments,
    Question,
    Search,
    counts_twice,
    decode_question,
    encode_answer,
    is_outdated,
    is_wanted,
    may_come,
    newest,
    whom_to_ask,
)

logger = logging.getLogger(__name__)

RETRY_S = 2.0
MAX_UNANSWERED = 5
"""A peer that does not answer so often in a row is gone: nothing is announced to it any more."""
HANDOVER_S = 10.0
"""How long a new owner waits for the newest moments of an owner before it that still answers."""


@dataclass(frozen=True)
class Arrival:
    """What came of looking for the moments of an expert that this peer took up."""

    expert: int
    moments: Moments | None
    """None: nobody had any, or they did not come. Their blob is pinned until `taken`."""
    reason: str


class MomentsExchange:
    """One peer's side of it; coroutines run in the node's loop, the rest is for the trainer."""

    def __init__(
        self,
        node: Node,
        shelf: Shelf,
        downloads: Downloads,
        layout: Layout,
        *,
        run: str,
        tip: Callable[[], Manifest],
    ) -> None:
        self.shelf = shelf
        self.arrivals: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        """Of taken-up experts, for the trainer."""
        self._node, self._tip = node, tip
        self._client = MomentsClient(node, downloads, shelf.store, layout, run)
        self._settled: dict[Digest, set[PeerId]] = {}
        """Of blobs that are being announced: who holds them by now."""
        self._taken_up: set[int] = set()
        """Experts of mine for which no more moments are looked for."""
        self._looking: set[PeerId] = set()
        self._confirmed, self._offered = asyncio.Event(), asyncio.Event()
        """Somebody confirmed a blob of mine; somebody has news for me."""
        self._tasks = Tasks("the moments exchange")

    # ------------------------------------------------ the trainer's side (any thread)

    def keep(self, expert: int, number: int, content: Content) -> Moments:
        """Puts this peer's moments of an expert, as of a round, where others can fetch them.

        Holds a piece of them at a time.
        """
        store = self.shelf.store
        digest = write(store.draft(content.num_bytes), content)
        moments = Moments(expert, number, digest, content.num_bytes)
        try:
            self.shelf.put(moments)
        finally:
            store.unpin([moments.digest])
        return moments

    def taken(self, arrival: Arrival) -> None:
        """The blob of an arrival is not needed any more."""
        if arrival.moments:
            self.shelf.store.unpin([arrival.moments.digest])

    def announce(
        self, wanted_by: Mapping[Moments, Sequence[PeerId]], deadline_s: float
    ) -> Future[tuple[Moments, ...]]:
        """Tells peers of moments here until all of them hold them, or `deadline_s` is over.

        Returns:
            A future of those that were confirmed by every peer they are for.
        """
        announcing = self._announce(wanted_by, deadline_s)
        return asyncio.run_coroutine_threadsafe(announcing, self._node.loop)

    def take_up(self, search: Search) -> None:
        """Looks for the moments of experts that this peer took up.

        An `Arrival` comes for each, at the latest after `HANDOVER_S` and one
        `transfer_limit_s` for each blob that somebody has. What is fetched stays here, so that a
        restart need not fetch it.
        """
        self._node.loop.call_soon_threadsafe(self._tasks.spawn, self._take_up(search))

    def expire(self, manifest: Manifest, every: int) -> None:
        """Drops copies that newer values have made useless."""
        for moments in self.shelf.all():
            entry = manifest.entries.get(expert_unit(moments.expert))
            if entry is None or is_outdated(moments, entry.version, every):
                try:
                    self.shelf.drop(moments)
                except StateError as error:
                    logger.error("moments that are outdated stay: %s", error)

    # ------------------------------------------------ answering

    async def answer(self, source: PeerId, payload: bytes) -> bytes | None:
        """The answer to a question of another peer; None if it is no question about moments.

        Raises:
            BadMessage: it is one, but not of the schema.
        """
        if not payload.startswith(self._client.prefix):
            return None
        question = decode_question(payload.removeprefix(self._client.prefix))
        for digest in question.settled:
            if digest in self._settled:
                self._settled[digest].add(source)
                self._confirmed.set()
        if question.news and source not in self._looking:
            self._looking.add(source)
            self._tasks.spawn(self._look(source))
        return encode_answer(self.shelf.all())

    async def _look(self, source: PeerId) -> None:
        """Another peer has moments: fetches what this one is to keep as its backup."""
        try:
            self._offered.set()
            before = self.shelf.all()
            offered = await self._client.ask(source, Question()) or ()
            settled = [m for m in offered if await self._is_settled(source, m)]
            if settled:
                await self._client.ask(source, Question(settled=tuple(m.digest for m in settled)))
            new = [m for m in self.shelf.all() if m in offered and m not in before]
            if new:
                logger.info(
                    "backup of=%s round=%d experts=%s bytes=%d kept here", source[-6:],
                    max(m.round for m in new), ",".join(str(m.expert) for m in new),
                    sum(m.num_bytes for m in new),
                )  # fmt: skip
        finally:
            self._looking.discard(source)

    async def _is_settled(self, source: PeerId, offered: Moments) -> bool:
        """Whether the source need not offer these any more; brings a backup here."""
        me, tip, kept = self._node.peer_id, self._tip(), self.shelf.get(offered.expert)
        if not is_wanted(me, source, offered.expert, tip):
            return False
        if me in tip.owners[offered.expert]:
            return offered.expert in self._taken_up
        if kept and (kept.digest == offered.digest or kept.round > offered.round):
            return True
        if not await self._client.fetch(offered, [source]):
            return False
        return await self._shelve(offered)

    async def _shelve(self, fetched: Moments) -> bool:
        """Makes a blob that was fetched durable; returns whether the disk took it."""
        try:
            await self._in_thread(self.shelf.store.sync, [fetched.digest])
            kept = self.shelf.get(fetched.expert)
            if kept is None or kept.round <= fetched.round:
                await self._in_thread(self.shelf.put, fetched)
        except StateError as error:
            logger.error("moments of expert %d were not kept: %s", fetched.expert, error)
            return False
        finally:
            self.shelf.store.unpin([fetched.digest])
        return True

    # ------------------------------------------------ announcing

    async def _announce(
        self, wanted_by: Mapping[Moments, Sequence[PeerId]], deadline_s: float
    ) -> tuple[Moments, ...]:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        end_s = loop.time() + deadline_s
        self._settled = {d: s for d, s in self._settled.items() if self.shelf.holds(d)}
        for moments in wanted_by:
            self._settled.setdefault(moments.digest, set())
        unanswered: Counter[PeerId] = Counter()
        while loop.time() < end_s:
            waits_for = {
                peer
                for moments, peers in wanted_by.items()
                if self.shelf.holds(moments.digest)  # else newer ones have taken its place
                for peer in peers
                if peer not in self._holders(moments) and unanswered[peer] < MAX_UNANSWERED
            }
            if not waits_for:
                break
            self._confirmed.clear()
            answers = await self._client.ask_all(sorted(waits_for), Question(news=True))
            for peer in sorted(waits_for):
                unanswered[peer] = 0 if peer in answers else unanswered[peer] + 1
            await _wait_for(self._confirmed)
        return tuple(m for m, peers in wanted_by.items() if self._holders(m).issuperset(peers))

    def _holders(self, moments: Moments) -> set[PeerId]:
        """Peers that have confirmed that they hold a blob of this one's."""
        return self._settled.get(moments.digest, set())

    # ------------------------------------------------ taking up

    async def _take_up(self, search: Search) -> None:
        me, loop = self._node.peer_id, asyncio.get_running_loop()
        previous, manifest = search.previous, search.manifest
        end_s = loop.time() + HANDOVER_S
        self._taken_up -= set(search.experts)
        pending = list(search.experts)
        while pending:
            asked = {expert: whom_to_ask(me, expert, previous, manifest) for expert in pending}
            peers = dict.fromkeys(peer for several in asked.values() for peer in several)
            self._offered.clear()
            answers = await self._client.ask_all(list(peers), Question())
            for expert in list(pending):
                found = [f for f in self._found(expert, answers) if not counts_twice(search, f[1])]
                if loop.time() < end_s and may_come(expert, previous, manifest, answers, found):
                    continue
                pending.remove(expert)
                self._tasks.spawn(self._bring(expert, found, previous, len(asked[expert])))
            if pending:
                await _wait_for(self._offered)

    def _found(
        self, expert: int, answers: Mapping[PeerId, Sequence[Moments]]
    ) -> list[tuple[PeerId, Moments]]:
        """Who has which moments of an expert; this peer's own backup among them."""
        found = [
            (peer, moments)
            for peer, several in sorted(answers.items())
            for moments in several
            if moments.expert == expert
        ]
        kept = self.shelf.get(expert)
        return [*found, (self._node.peer_id, kept)] if kept else found

    async def _bring(
        self,
        expert: int,
        found: Sequence[tuple[PeerId, Moments]],
        previous: Manifest,
        num_asked: int,
    ) -> None:
        """Delivers the newest moments that can be had, or the reason why there are none."""
        left, arrival = list(found), None
        while arrival is None and (best := newest(left)):
            peer, moments = best
            left = [(p, m) for p, m in left if m.digest != moments.digest]
            if await self._bring_here(moments, [p for p, m in found if m == moments]):
                reason = _where_from(self._node.peer_id, peer, moments, previous)
                arrival = Arrival(expert, moments, reason)
        why = "could not be fetched" if found else f"none of {num_asked} peers has any"
        self.arrivals.put(arrival or Arrival(expert, None, f"zero moments: {why}"))
        self._taken_up.add(expert)
        for source in sorted({p for p, _ in found} - {self._node.peer_id}):
            digests = tuple(m.digest for p, m in found if p == source)
            await self._client.ask(source, Question(settled=digests))

    async def _bring_here(self, moments: Moments, sources: Sequence[PeerId]) -> bool:
        """Whether a blob is here, in order and pinned once."""
        store = self.shelf.store
        if self._node.peer_id in sources:
            store.pin([moments.digest])
            if await self._in_thread(store.verify, [moments.digest]):
                store.unpin([moments.digest])
                return False
            return True
        if not await self._client.fetch(moments, sources):
            return False
        store.pin([moments.digest])  # the other pin is taken back
        await self._shelve(moments)
        return True

    # ------------------------------------------------ plumbing

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await self._node.loop.run_in_executor(None, partial(function, *arguments))

    async def stop(self) -> None:
        """Ends all work; runs in the node's loop."""
        await self._tasks.stop()


async def _wait_for(event: asyncio.Event) -> None:
    """Waits for something that is looked for again after `RETRY_S` at the latest."""
    try:
        async with asyncio.timeout(RETRY_S):
            await event.wait()
    except TimeoutError:
        return


def _where_from(me: PeerId, peer: PeerId, moments: Moments, previous: Manifest) -> str:
    if peer in previous.owners.get(moments.expert, ()):
        return f"moments of round {moments.round} handed over by {peer}"
    where = "here" if peer == me else f"at {peer}"
    age = previous.entries[expert_unit(moments.expert)].version - moments.round
    older = f", {age} rounds older than the weights" if age > 0 else ""
    return f"moments of round {moments.round} from the backup {where}{older}"
