"""One simulated peer: a real round machine between a simulated disk, network and trainer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from random import Random
from typing import Any

from swarm.emulation.simulator.peers import bulk_transfers
from swarm.emulation.simulator.peers.moments import Exchange
from swarm.emulation.simulator.peers.participant import Character, PlannedCrash
from swarm.emulation.simulator.peers.surroundings import Packet, Payload, Ports, World
from swarm.emulation.simulator.peers.symbol_trainer import Trainer
from swarm.emulation.simulator.symbols.crash_disk import Disk
from swarm.emulation.simulator.symbols.signing import is_refused, sign
from swarm.emulation.simulator.symbols.trained_symbols import average, merge, rebuild
from swarm.emulation.simulator.symbols.values import Tag, Violation, short
from swarm.protocol.chain.chain_record import abstains
from swarm.protocol.chain.trust import Chain
from swarm.protocol.exchange.deltas import Remainders
from swarm.protocol.messages import events
from swarm.protocol.messages.messages import Message, Reduced
from swarm.protocol.rounds import LocalPeer, RoundMachine
from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.timing.pace import Pace
from swarm.protocol.values.manifest import Digest, Manifest, PeerId


class Turns:
    """Runs one call after the other. A call made during another call waits for its end.

    A real peer does the same: `swarm.network.rounds.round_driver` takes events from a queue, and
    carries out all effects of an event before it takes the next event. So an offer that a trainer
    makes at once on a new tip comes after the `Keep` that belongs to this tip's `Apply`. Otherwise
    blobs for the offer's round would be found on the disk and then be collected.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_busy = False

    def __call__(self, do: Callable[[], None]) -> None:
        """Runs the call now, or in its turn."""
        self._waiting.append(do)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._waiting:
                self._waiting.popleft()()
        finally:
            self._is_busy = False


def describe(thing: events.Effect | Message) -> str:
    """An effect or a message on one line. Empty if it is not shown in traces."""
    match thing:
        case events.Send(destination, _, message):
            return f"-> {destination} {describe(message)}"
        case events.Persist(record):
            accepted = record.accepted
            voted = f" accepted {accepted.ballot} {short(accepted.manifest)}" if accepted else ""
            return f"PERSIST tip {short(record.tip)} promised {record.promised}{voted}"
        case events.Apply(manifest, _):
            return f"APPLY {short(manifest)} members {sorted(manifest.members)}"
        case events.Sync(manifest):
            return f"sync {short(manifest)}"
        case events.Reason(topic, text):
            return f"# {topic.value}: {text}"
        case events.Fetch(purpose, wants):
            return f"fetch {purpose.value}: {[(w.unit, w.digest, w.sources) for w in wants]}"
        case events.Keep():
            return ""
    fields = []
    for name in ("ballot", "ask", "digest", "manifest", "missing", "leave", "accepted", "offer"):
        value = getattr(thing, name, None)
        if isinstance(value, Manifest):
            value = short(value)
        elif name == "accepted" and value is not None:
            value = f"({value.ballot} {short(value.manifest)})"
        elif name == "ballot" and value is not None:
            value = f"{value.attempt}/{value.convener}"
        elif name == "offer" and value is not None:
            value = "yes"
        if value:
            fields.append(f"{name}={value}")
    return f"{type(thing).__name__.upper()} {' '.join(fields)}".rstrip()


CLOCKS_DIFFER_S = 1e-6
"""Tolerance between clocks: a peer's clock begins at another number, so sums round differently."""
LINGER_S = 10.0
"""Seconds for which a peer that has left still hands over."""


class Node(Ports):
    """A peer's process and disk. The process may crash between any two effects."""

    def __init__(self, world: World, me: PeerId, character: Character, disk: Disk) -> None:
        self.world = world
        self.me = me
        self.character = character
        self.disk = disk
        self.planned: PlannedCrash | None = None
        self.fell_s = -1.0
        """Time of a crash that also lost what had just been posted."""
        self.is_up = False
        self.has_left = False
        self.is_paused = False
        self.is_deaf = False
        """Whether the whole machine sleeps, so that messages to it are lost."""
        self.lingers_until = 0.0
        """Until when it still serves others after it has left."""
        self.slept_s = 0.0
        """How long it has slept so far."""
        self.wall_ahead_s = 0.0
        """How wrong its wall clock is."""
        self.machine: RoundMachine
        self.trainer: Trainer
        self.fetcher: bulk_transfers.Fetcher
        self.exchange: Exchange
        self.remainders: Remainders[Mapping[Tag, int]] = Remainders("", 0)
        self.has_moments = world.setup.copy_s is not None
        self._adapts_timers = world.setup.has_adapted_timers
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self._boots = 0
        self._heard: dict[PeerId, float] = {}
        self._is_listening = False
        self._last_tick = 0.0
        self._event_s = 0.0
        self._catch_up = bulk_transfers.CatchUp()
        self._perform: dict[type, Callable[[Any], None]] = {
            events.Persist: self._persist,
            events.Send: self._send,
            events.Fetch: self._fetch,
            events.CancelFetch: self._cancel_fetch,
            events.Sync: lambda effect: self.after(
                self._duration(self.character.sync_s), self._synced, effect.manifest
            ),
            events.Reduce: lambda effect: self.after(
                self._duration(self.character.reduce_s),
                self._reduced,
                effect,
                self.disk.record.tip.digest,
            ),
            events.ComputeMerge: lambda effect: self.after(
                self._duration(self.character.merge_s), self._merged, effect.tip
            ),
            events.Apply: self._apply,
            events.RewriteChain: lambda effect: self.disk.rewrite(effect.links),
            events.Keep: self._keep,
            events.Rebuild: self._rebuild,
            events.Left: self._leave,
            events.Reason: lambda _: None,
        }

    # ------------------------------------------------------------ life

    @property
    def room(self) -> int:
        """Number of experts that fit the machine, since its last start."""
        rooms = self.character.rooms
        return rooms[min(self._boots, len(rooms)) - 1]

    def boot(self) -> None:
        """Starts the process from the disk."""
        assert not self.is_up and not self.has_left
        world = self.world
        self._boots += 1
        self.is_up, self.is_paused, self.is_deaf = True, False, False
        self._backlog.clear()
        self._heard.clear()
        self._catch_up = bulk_transfers.CatchUp()
        self._last_tick = self._event_s = world.now
        self._is_listening = True
        self.fetcher = (
            bulk_transfers.StreamingFetcher(self)
            if world.setup.has_slow_links
            else bulk_transfers.Fetcher(self)
        )
        self._pace = Pace(world.task.rules.unit_bytes)
        giving, taking = world.tested.giving(), world.tested.taking()
        self.exchange = Exchange(self, giving, taking, world.setup.copy_s or 0.0)
        peer = LocalPeer(
            self.me,
            self.character.capacity,
            world.tested.rules(self.me, world.task.rules),
            world.timers,
            now=self.clock_s(),
            random=Random(world.random.getrandbits(32)),
            sign=partial(sign, self.me),
            uplink_of=lambda: self.character.uplink,
            room_of=lambda: self.room,
            fetches_ahead=True,
            network_of=world.setup.network_of,
            credential=world.credentials.get(self.me),
        )
        self.machine = RoundMachine(
            peer,
            self.disk.record,
            stored=self.disk.readable(),
            chain=Chain.of(self.disk.record, self.disk.links),
            parts=world.tested,
        )
        self.use(world.timers)
        for _, left in self.remainders.items():
            world.task.values.dropped.update(left)
        rounds = world.task.rules.silent_rounds
        self.remainders = world.tested.remainders(self.disk.record.tip.digest, rounds)
        self.trainer = world.tested.trainer(self, world.task, world.tested.training)
        self._note("boots")
        self._in_turn = Turns()
        self._in_turn(lambda: self._execute(self.machine.start(self.clock_s())))
        if self.is_up:
            self.trainer.start()
            bulk_transfers.HeadSearch(self)
            self.after(world.random.random() * world.timers.tick_s, self._tick)

    def use(self, timers: Timers) -> None:
        """Gives the machine these timers, or timers adapted from them."""
        if self._adapts_timers:
            timers = self.world.tested.timers(self.measured(), timers)
        self.machine.timers = timers

    def crash(self) -> None:
        """Kills the process. The disk stays."""
        self._note("crashes")
        self.is_up = False
        self.planned = None
        self.disk.crash(self.world.random)

    def pause(self) -> None:
        """Stops the process (SIGSTOP). Arriving messages wait."""
        self._note("is paused")
        self.is_paused = True

    def resume(self) -> None:
        """Lets a paused process continue, with all messages that waited."""
        self._note("continues")
        self.is_paused = self.is_deaf = False
        backlog, self._backlog = self._backlog, []
        boots = self._boots
        for method, arguments in backlog:
            if self.is_up and self._boots == boots:
                method(*arguments)

    def discover(self, peers: tuple[PeerId, ...]) -> None:
        """Tells the machine the peers that the DHT lists."""
        if self.is_up and not self.is_paused:
            self.tell(events.Discovered(peers))

    def ask_to_leave(self) -> None:
        """The person presses Ctrl+C."""
        if self.is_up and not self.has_left:
            self.tell(events.LeaveAsked())

    # ------------------------------------------------------------ used by fetcher and trainer

    def tell(self, event: events.Event) -> None:
        """Hands an event to the machine and carries out its effects, in its turn."""
        self._in_turn(partial(self._take, event))

    def _take(self, event: events.Event) -> None:
        if self.is_up:
            # Read before the event, since applying a manifest ends the listening [B1].
            self._is_listening = self.machine.is_listening
            if isinstance(event, events.Offered):
                self.world.invariants.offered(self.me, event.offer)
            self._execute(self._handle(event))

    def _handle(self, event: events.Event) -> list[events.Effect]:
        """Requires that the machine listens again after a stand-still, and only then [B2]."""
        machine, now = self.machine, self.world.now
        before, pause_s = machine.listened_at, machine.timers.pause_s
        gap_s = now - self._event_s
        self._event_s = now
        effects = machine.handle(event, self.clock_s())
        if (machine.listened_at != before) != (gap_s > pause_s):
            why = f"{self.me} after {gap_s:.3f} s without an event (limit {pause_s:.1f})"
            raise Violation("I22", f"{why}: listens {machine.listened_at != before}")
        return effects

    def after(self, delay_s: float, method: Callable[..., None], *arguments: object) -> None:
        """Calls the method later, unless the process crashes first. A pause defers the call."""
        self.world.at(delay_s, self._later, self._boots, method, arguments)

    # ------------------------------------------------------------ events

    def receive(self, source: PeerId, payload: Payload) -> None:
        """Takes a message that has arrived."""
        if not self.is_up or self.is_deaf:
            return
        if self.is_paused:
            self._backlog.append((self.receive, (source, payload)))
        elif isinstance(payload, Packet):
            header, message = payload
            if is_refused(source, message, self.disk.record):
                return
            if header.generation == self.disk.record.tip.generation:
                self._heard[source] = self.world.now
            if self.world.trace:
                self._note(f"<- {source} {describe(message)}")
            self.tell(events.Received(source, header, message))
        elif isinstance(payload, bulk_transfers.Get):
            self.fetcher.serve(source, payload)
        else:
            self.fetcher.take(source, payload)

    def _later(
        self, boots: int, method: Callable[..., None], arguments: tuple[object, ...]
    ) -> None:
        if not self.is_up or self._boots != boots:
            return
        if self.is_paused:
            self._backlog.append((method, arguments))
        else:
            method(*arguments)

    def _tick(self) -> None:
        now, timers = self.world.now, self.world.timers
        if now - self._last_tick > timers.pause_s:  # [B2]
            self._heard.clear()
        self._last_tick = now
        self.after(timers.tick_s, self._tick)
        self.tell(events.Tick())

    # ------------------------------------------------------------ effects

    def _execute(self, effects: list[events.Effect]) -> None:
        trace = self.world.trace
        self._catch_up.event += 1
        for effect in effects:
            if trace:
                text = describe(effect)
                if text:
                    self._note(text)
            self._perform[type(effect)](effect)
            planned = self.planned
            if planned is not None and planned.trap(effect):
                self.crash()
                self.world.fell(self.me, planned)
            if not self.is_up:
                return

    def _persist(self, effect: events.Persist) -> None:
        before, self.disk.record = self.disk.record, effect.record
        self.disk.links += effect.links
        self.disk.earlier = before
        if before.tip.digest != effect.record.tip.digest:
            self.disk.tip_s, self.disk.came_from = self.world.now, before.tip.digest
        world = self.world
        new = effect.record.tip
        world.invariants.persisted(self.me, before, world.disks, world.now)
        may_vote = not abstains(before)
        if new.generation != before.tip.generation and may_vote and not self._is_listening:
            since = world.now - world.timers.reform_s + CLOCKS_DIFFER_S
            heard = [peer for peer, time_s in self._heard.items() if time_s > since]
            world.invariants.reformed(self.me, before.tip, new, heard)

    def _send(self, effect: events.Send) -> None:
        if isinstance(effect.message, Reduced):
            self.world.invariants.deltas.reduced(self.me, self.disk, effect.message)
        self.world.post(self.me, effect.destination, Packet(effect.header, effect.message))

    def _fetch(self, effect: events.Fetch) -> None:
        pursued = self.machine.pursued
        if effect.purpose is events.Purpose.CATCH_UP and pursued is not None:
            if not self._catch_up.may_begin(pursued.digest):
                raise Violation("I26", f"{self.me} starts to fetch {pursued.digest[:12]} again")
            self._catch_up.begin(pursued.digest)
        self.fetcher.start(effect)

    def _cancel_fetch(self, effect: events.CancelFetch) -> None:
        if effect.purpose is events.Purpose.CATCH_UP:
            self._catch_up.end()
        self.fetcher.cancel(effect.purpose)

    def _synced(self, manifest: Manifest) -> None:
        digests = {entry.digest for entry in manifest.entries.values()}
        self.disk.sync(manifest.deltas)
        lost = [digest for digest in sorted(digests) if digest not in self.disk]
        if lost or (
            self.character.failing_syncs
            and self.world.random.random() < self.character.failing_syncs
        ):
            for digest in lost:
                self.tell(events.Unobtainable(digest, self.me, "it is not on the disk"))
            self.tell(events.SyncFailed(manifest.digest, "the disk failed"))
            return
        self.disk.sync(digests)
        self.tell(events.Synced(manifest.digest))

    def _reduced(self, effect: events.Reduce, tip: Digest) -> None:
        reduce = average if effect.base is None else self.world.tested.arithmetic(self.remainders)
        result = reduce(self.me, self.disk, self.world.task, effect, tip)
        if result is not None:
            self.tell(result)

    def _rebuild(self, effect: events.Rebuild) -> None:
        is_odd = self.character.arithmetic < 0
        made = partial(rebuild, self.disk, self.world.task, effect, is_odd=is_odd)
        self.after(self._duration(self.character.rebuild_s), lambda: self.tell(made()))

    def _keep(self, effect: events.Keep) -> None:
        self.disk.keep({*effect.digests, *self.trainer.model.pinned})
        self.world.invariants.deltas.kept(self.me, self.disk)

    def _merged(self, tip: Manifest) -> None:
        variant = self.character.arithmetic
        if variant < 0:
            variant = self.world.random.getrandbits(30) + 100
        result = merge(self.me, self.disk, self.world.task, tip, variant)
        if result is not None:
            self.tell(result)

    def _apply(self, effect: events.Apply) -> None:
        record = self.disk.record
        if record.tip.digest != effect.manifest.digest:
            raise Violation("I24", f"{self.me} applies {short(effect.manifest)} before the record")
        missing = [
            unit for unit, entry in effect.manifest.entries.items() if entry.digest not in self.disk
        ]
        if missing:
            raise Violation("I6", f"{self.me} applies {short(effect.manifest)} without {missing}")
        self.use(self.world.timers)
        self._settle_remainders(effect)
        self.trainer.apply(effect.manifest, record.parent)
        if self.trainer.is_idle:
            why = f"neither trains nor offers after {short(effect.manifest)}"
            raise Violation("N1", f"{self.me} {why}")
        self.world.applied(self.me)

    def _settle_remainders(self, effect: events.Apply) -> None:
        world, before = self.world, self.world.invariants.manifests[effect.previous]
        for dropped in self.remainders.applied(effect.manifest, before):
            world.task.values.dropped.update(dropped)
        for unit, left in self.remainders.items():
            world.invariants.deltas.left_over(self.me, unit, left, effect.manifest)

    def _leave(self, effect: events.Left) -> None:
        self.lingers_until = self.world.now + LINGER_S
        self._note(f"has left: {effect.reason}")
        self.is_up = False
        self.has_left = True
