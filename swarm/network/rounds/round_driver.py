"""Runs the round machine: a thin shell that carries out the effects on node, store and disk."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any

from swarm.background import Tasks
from swarm.codecs import Content
from swarm.config import RoundConfig
from swarm.errors import NetworkDown, NoRoute, OutOfMemory, StateError, Unreachable
from swarm.network.blobs.blob_store import BlobStore, Draft, write
from swarm.network.blobs.disk_retry import raise_typed
from swarm.network.node.node import Node
from swarm.network.rounds import disk_work
from swarm.network.rounds.chain_gaps import ChainGaps
from swarm.network.rounds.inbound import Inbound
from swarm.network.rounds.outbound import Outbound
from swarm.network.rounds.record_file import RecordFile
from swarm.network.rounds.reductions import LeftOver, Merger, Reductions
from swarm.network.rounds.transfers import Transfers
from swarm.network.wire.steady_clock import passed_s
from swarm.protocol.messages import events
from swarm.protocol.messages.messages import Offer, ReducedUnit
from swarm.protocol.messages.signatures import who_takes_part
from swarm.protocol.rounds import RoundMachine
from swarm.protocol.timing.deadlines import production_timers
from swarm.protocol.training import Applied
from swarm.protocol.values.layout import Layout
from swarm.protocol.values.manifest import Digest, Manifest, PeerId

logger = logging.getLogger(__name__)


CarryOut = Callable[[events.Effect], Awaitable[None]]


class RoundObserver:
    """Callbacks of the driver of rounds; a subclass overrides those that it needs.

    The driver waits for each method, so a slow method delays the peer.
    """

    def on_rounds(self, machine: RoundMachine, record_file: RecordFile) -> None:
        """Called when rounds begin, with their round machine and record file."""

    def before_event(self, event: events.Event) -> None:
        """Called in the node's loop just before the machine handles an event."""

    async def carry_out(self, effect: events.Effect, act: CarryOut) -> None:
        """Carries out an effect by a call of `act`, in the node's loop; may wait first.

        `act` takes any effect, so a delayed effect may be passed to it later.
        """
        await act(effect)

    def before_offer(self) -> None:
        """Called in the trainer's thread: the private state is durable, its offer not sent yet."""

    def before_leave(self) -> None:
        """Called in the trainer's thread: this peer was asked to leave; no other knows it yet."""


UNWATCHED = RoundObserver()


POST_DEADLINE_S = 5.0
EXPECT_EVERY_S = 0.5
SAID_ALOUD = (events.Topic.TAKEOVER, events.Topic.FORK, events.Topic.ADMISSION)
"""Rare topics, logged at a higher level because they explain a long round to people."""


class RoundDriver:
    """One peer's side of the rounds of one run."""

    def __init__(
        self,
        node: Node,
        store: BlobStore,
        machine: RoundMachine,
        *,
        record_file: RecordFile,
        layout: Layout,
        settings: RoundConfig,
        merger: Merger,
        observer: RoundObserver = UNWATCHED,
    ) -> None:
        self.node, self.store, self.machine, self.observer = node, store, machine, observer
        self.record_file, self.layout, self.merger = record_file, layout, merger
        self.settings, self.rules, self._expected_at = settings, machine.rules, 0.0
        self._inbox: asyncio.Queue[events.Event] = asyncio.Queue()
        self.transfers = Transfers(node, store, layout, self._inbox.put_nowait)
        self.downloads = self.transfers.downloads
        self.left_over = LeftOver(store, machine.tip, machine.rules)
        self.reducing = Reductions(store, layout, self.open_value, self._has)
        self._slowly, self._tidying = (
            disk_work.SlowWork(),
            disk_work.Tidying(store, self._work_failed),
        )
        self.inbound = Inbound(
            self.transfers, node.ledger, machine.rules.run, self._inbox.put_nowait,
            foothold=machine.foothold, judge=machine.foresee, me=node.peer_id,
        )  # fmt: skip
        node.ledger.admit(*who_takes_part(machine.record))
        self.refused, self.outbound = self.inbound.refused, Outbound(store)
        self.heads = ChainGaps(node, machine, self.outbound, self._inbox.put_nowait)
        self.reasons: deque[events.Reason] = deque(maxlen=64)
        self._actor = Tasks("the round driver", on_failure=self._fail)
        self._work = Tasks("the round driver's work", on_failure=self._work_failed)
        self._tip_changed, self._base_timers = threading.Condition(), machine.timers
        self._adapt_timers()
        self._parent = machine.record.parent  # of the recorded tip
        self._applied = [Applied(machine.tip, time.monotonic(), "start", self._parent)]
        self._left: str | None = None
        self._failure: BaseException | None = None
        store.on_lost = self._lost

    # ------------------------------------------------ the trainer's side (any thread)

    @property
    def tip(self) -> Manifest:
        """The newest manifest that this peer has applied."""
        return self.newest.manifest

    @property
    def newest(self) -> Applied:
        """The newest tip, its parent, and the time of its adoption by `time.monotonic`."""
        return self._applied[-1]

    @property
    def last_reason(self) -> str:
        """Reason of the protocol's last action, in a sentence."""
        return self.reasons[-1].text if self.reasons else ""

    @property
    def left(self) -> str | None:
        """Why this peer is no longer a member, once it has left."""
        return self._left

    def store_value(self, value: Content) -> tuple[Digest, int]:
        """Stores a value of this peer and reports it to the machine; returns digest and size."""
        return write(self.open_value(value.num_bytes), value), value.num_bytes

    def _lost(self, digest: Digest, why: str) -> None:
        """Reports that a blob is lost; the machine fetches it again if it needs the blob."""
        self._send_in(events.Unobtainable(digest, self.node.peer_id, why))

    def open_value(self, num_bytes: int) -> Draft:
        """Opens a draft for a value in pieces; the machine is informed when it is finished."""
        return self.store.draft(num_bytes, self._has)

    def _has(self, digest: Digest) -> None:
        self._send_in(events.Stored(digest))

    def offer(self, offer: Offer) -> None:
        """Puts finished local steps into the round; private state must already be durable [P6]."""
        self.observer.before_offer()
        self.outbound.offered(offer)
        self._send_in(events.Offered(offer))

    def expect(self, tip: Digest, remaining_s: float) -> None:
        """Says when the local steps on a tip will end; at most two calls a second take effect.

        The convener waits for members whose work is worth the delay.
        """
        now = time.monotonic()
        if now - self._expected_at >= EXPECT_EVERY_S:
            self._expected_at = now
            self._send_in(events.Expected(tip, remaining_s))

    def discovered(self, peers: Sequence[PeerId]) -> None:
        """Reports the run's peers in the DHT, on any chain, to the machine."""
        self._send_in(events.Discovered(tuple(peers)))

    def leave(self) -> None:
        """Asks to leave the run; `left` is set once the others have agreed."""
        self.observer.before_leave()
        self._send_in(events.LeaveAsked())

    def wait_for_tip(self, after: Digest, timeout_s: float) -> list[Applied]:
        """Manifests applied since the one with digest `after`, oldest first.

        Waits up to `timeout_s` for the first; returns an empty list if there is none.

        Raises:
            SwarmError: the driver failed, or this peer's p2p process died.
        """
        deadline = time.monotonic() + timeout_s
        with self._tip_changed:
            while self._applied[-1].manifest.digest == after:
                self._raise_failure()
                remaining_s = deadline - time.monotonic()
                if remaining_s <= 0 or self._left:
                    return []
                self._tip_changed.wait(min(remaining_s, 1.0))
            position = [a.manifest.digest for a in self._applied].index
            try:
                return self._applied[position(after) + 1 :]
            except ValueError:
                return self._applied[-1:]

    def _raise_failure(self) -> None:
        if self._failure:
            raise_typed(self._failure, "the round driver")
        if not self.node.alive:
            raise NetworkDown(f"{self.node.failure}", hint="start this peer again")

    def _send_in(self, event: events.Event) -> None:
        self.node.loop.call_soon_threadsafe(self._inbox.put_nowait, event)

    # ------------------------------------------------ the actor

    def start(self) -> None:
        """Starts the actor in the node's loop; returns at once."""
        self.observer.on_rounds(self.machine, self.record_file)
        asyncio.run_coroutine_threadsafe(self._start(), self.node.loop)

    async def _start(self) -> None:
        """Starts the actor and its ticks. A failure, which may leave work unfinished, ends both."""
        try:
            self._actor.spawn(self._run())
            self._actor.spawn(self._tick())
            self._work.supervise(self.heads.complete)
        except BaseException as error:  # noqa: BLE001 - nobody waits for this coroutine
            self._fail(error)

    async def stop(self) -> None:
        """Ends all work of the driver; runs in the node's loop."""
        await self._actor.stop()
        await self._work.stop()
        await self.inbound.stop()
        await self.transfers.stop()
        await self._tidying.stop()
        self._slowly.stop()

    async def _run(self) -> None:
        await self._carry_out(self.machine.start(passed_s()))
        while True:
            event = await self._inbox.get()
            self.observer.before_event(event)
            effects = self.machine.handle(event, passed_s())
            if isinstance(event, events.Stored):
                # From now on the machine decides when the blob may be deleted.
                self.store.unpin([event.digest])
            await self._carry_out(effects)

    def _work_failed(self, error: BaseException) -> None:
        """Ends the driver if memory is short; any other failure costs at most a round."""
        if isinstance(error, OutOfMemory):
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """Stores a failure, which every caller in the trainer's thread then raises."""
        with self._tip_changed:
            self._failure = error
            self._tip_changed.notify_all()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.machine.timers.tick_s)
            if self._inbox.empty():
                self._inbox.put_nowait(events.Tick())

    async def _carry_out(self, effects: list[events.Effect]) -> None:
        for effect in effects:
            await self.observer.carry_out(effect, lambda it: self._actions[type(it)](self, it))

    async def _persist(self, effect: events.Persist) -> None:
        await self._slowly.record("record", self.record_file.write, effect.record, effect.links)
        self.node.ledger.admit(*who_takes_part(effect.record))
        self._parent = effect.record.parent

    async def _rewrite_chain(self, _: events.RewriteChain) -> None:
        """Runs in the background: no vote waits for it. Heads appended by its end are kept."""
        self._work.spawn(self._replace_chain())

    async def _replace_chain(self) -> None:
        rewrite = self.record_file.chain.rewrite
        await self._slowly.do("chain of heads", rewrite, lambda: self.machine.chain.links)

    async def _send(self, effect: events.Send) -> None:
        try:
            payload = self.outbound.encode(effect.header, effect.message)
        except StateError as error:  # treated as a message lost on the way
            logger.error("a message was not sent: %s", error)
            return
        self._work.spawn(self._post(effect.destination, payload))

    async def _post(self, destination: PeerId, payload: bytes) -> None:
        try:
            await self.node.post(destination, payload, timeout_s=POST_DEADLINE_S)
        except (Unreachable, NetworkDown) as error:  # the machine repeats important messages
            logger.debug("to=%s lost: %s", destination[-6:], error)
            if isinstance(error, NoRoute):
                self._inbox.put_nowait(events.Undeliverable(destination))

    async def _fetch(self, effect: events.Fetch) -> None:
        await self.transfers.start(effect)

    async def _cancel_fetch(self, effect: events.CancelFetch) -> None:
        await self.transfers.cancel(effect.purpose)

    async def _sync(self, effect: events.Sync) -> None:
        self._work.spawn(self._sync_blobs(effect.manifest))

    async def _sync_blobs(self, manifest: Manifest) -> None:
        try:
            await self._slowly.do("manifest", disk_work.sync_manifest, self.store, manifest)
        except StateError as error:
            logger.error("manifest %s is not durable: %s", manifest.digest[:12], error)
            for digest in disk_work.missing_of(error):
                self._lost(digest, "it is not in the store")
            self._send_in(events.SyncFailed(manifest.digest, str(error)))
        else:
            self._inbox.put_nowait(events.Synced(manifest.digest))

    async def _reduce(self, effect: events.Reduce) -> None:
        self._work.spawn(self._reduce_unit(effect, self.left_over.of(effect), self.tip))

    async def _reduce_unit(
        self, effect: events.Reduce, carried: Digest | None, tip: Manifest
    ) -> None:
        mean = await self._slowly.mean(self.reducing.mean, effect, carried)
        if mean:
            self.left_over.found(tip, effect.unit, mean)
            self._inbox.put_nowait(events.UnitReduced(effect.roster_id, effect.unit, mean.result))

    async def _rebuild(self, effect: events.Rebuild) -> None:
        self._work.spawn(self._rebuild_value(effect))

    async def _rebuild_value(self, effect: events.Rebuild) -> None:
        if problem := await self._slowly.do("value", self.reducing.rebuild, effect):
            logger.warning("%s is fetched whole: %s", effect.unit, problem)
            self.refused["other_bits"] += 1
            self._send_in(events.NotMade(effect.digest, problem))

    async def _compute_merge(self, effect: events.ComputeMerge) -> None:
        self._work.spawn(self._merge(effect.tip))

    async def _merge(self, tip: Manifest) -> None:
        merged = await self._slowly.do("merge", self.merger, tip)
        units = {
            unit: ReducedUnit(*await self._slowly.do("merged expert", self.store_value, value))
            for unit, value in merged.items()
        }
        self._inbox.put_nowait(events.MergeComputed(tip.digest, units))

    async def _apply(self, effect: events.Apply) -> None:
        self._adapt_timers()
        self.left_over.applied(effect.manifest)
        with self._tip_changed:
            applied = Applied(effect.manifest, time.monotonic(), self.last_reason, self._parent)
            self._applied = [*self._applied[-7:], applied]
            self._tip_changed.notify_all()

    def _adapt_timers(self) -> None:
        adapted = production_timers(
            self.transfers.measured(self.rules.may_be_renewed(self.machine.tip)),
            roster_after_s=self.settings.roster_after_s,
            reform_after_s=self.settings.reform_after_s,
            base=self._base_timers,
        )
        self.machine.timers = adapted.timers
        for reason in adapted.reasons:
            logger.debug("%s", reason)

    async def _keep(self, effect: events.Keep) -> None:
        self.store.forget(effect.digests, time.monotonic())
        self._tidying.ask()

    async def _leave(self, effect: events.Left) -> None:
        with self._tip_changed:
            self._left = effect.reason
            self._tip_changed.notify_all()

    async def _reason(self, effect: events.Reason) -> None:
        self.reasons.append(effect)
        if effect.topic is events.Topic.REFUSED:
            self.refused[f"bad_{effect.refused.lower()}"] += 1
        level = logging.INFO if effect.topic in SAID_ALOUD else logging.DEBUG
        logger.log(level, "topic=%s %s", effect.topic.value, effect.text)

    _actions: Mapping[type[Any], Callable[[RoundDriver, Any], Coroutine[Any, Any, None]]] = {
        events.Persist: _persist,
        events.RewriteChain: _rewrite_chain,
        events.Send: _send,
        events.Fetch: _fetch,
        events.CancelFetch: _cancel_fetch,
        events.Sync: _sync,
        events.Rebuild: _rebuild,
        events.Reduce: _reduce,
        events.ComputeMerge: _compute_merge,
        events.Apply: _apply,
        events.Keep: _keep,
        events.Left: _leave,
        events.Reason: _reason,
    }

    def asked_for(self, peer: PeerId, digest: Digest) -> None:
        """Called when a peer asks for a blob; leases a manifest's blobs to a stranger [GC]."""
        disk_work.lease_to_stranger(self.store, self.machine.record, peer, digest, time.monotonic())
