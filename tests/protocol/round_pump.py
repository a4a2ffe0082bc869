"""A tiny swarm in one thread: round machines, a fake clock, blobs that are only names.

Unlike the project's simulator, this pump has no faults, invariants or random schedules, so a test
can script every event.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from swarm.config import MergingConfig
from swarm.experts import expert_unit, shared_unit
from swarm.protocol.chain.trust import Chain
from swarm.protocol.messages import events
from swarm.protocol.messages.events import Effect, Event, Record, Topic
from swarm.protocol.messages.messages import Header, Link, Message, Offer, OfferedUnit, ReducedUnit
from swarm.protocol.rounds import LocalPeer, Parts, RoundMachine, Rules
from swarm.protocol.rounds.policies.deals import first_book
from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.values.digests import digest_of
from swarm.protocol.values.manifest import (
    ALL_EXPERTS,
    FOUNDING_GENERATION,
    Entry,
    Founding,
    Kind,
    Manifest,
    Member,
    PeerId,
)
from swarm.protocol.values.schedule import merge_due

LATENCY_S = 0.05
NO_MERGING = MergingConfig()


def name(*words: object) -> str:
    """A digest for the value described by the words."""
    return digest_of("/".join(map(str, words)).encode())


def make_rules(
    *,
    experts: int = 4,
    parts: int = 2,
    owners_per_expert: int = 1,
    experts_every: int = 1,
    shared_every: int = 1,
    stagger: bool = False,
    merging: MergingConfig = NO_MERGING,
    certificates: bool = True,
) -> Rules:
    units = [shared_unit(part) for part in range(parts)]
    units += [expert_unit(expert) for expert in range(experts)]
    return Rules(
        run="run-1",
        num_experts=experts,
        owners_per_expert=owners_per_expert,
        merging=merging,
        unit_bytes=dict.fromkeys(units, 100),
        unit_codec=dict.fromkeys(units, "fp32"),
        experts_every=experts_every,
        shared_every=shared_every,
        stagger=stagger,
        local_steps_at=lambda tokens: 10,
        batch_tokens_at=lambda tokens: 100,
        sequence_length=10,
        is_dealt=True,
        certificates=certificates,
    )


def found(rules: Rules, peers: list[PeerId], **changes: object) -> Manifest:
    """Manifest 0 with these members, and experts assigned in turn."""
    members = {peer: Member(0, 1.0) for peer in sorted(peers)}
    founding = Founding(peers[0], "nonce", name("config"), 1, name("validation"), 1)
    book = first_book(founding, members, rules)
    copies = min(rules.owners_per_expert, len(peers))
    fields: dict[str, object] = {
        "run": "",
        "generation": FOUNDING_GENERATION,
        "height": 0,
        "round": 0,
        "kind": Kind.FOUNDING,
        "parent": None,
        "founding": founding,
        "step": 0,
        "tokens": 0,
        "merged": 0,
        "members": members,
        **vars(book),
        "contributors": tuple(sorted(peers)),
        "sources": {},
        "owners": {
            expert: tuple(sorted(peers[(expert + k) % len(peers)] for k in range(copies)))
            for expert in range(rules.num_experts)
        },
        "entries": {
            unit: Entry(name("initial", unit), size, 0, peers[0], rules.unit_codec[unit])
            for unit, size in rules.unit_bytes.items()
        },
    }
    return Manifest(**{**fields, **changes})  # type: ignore[arg-type]


def header_of(tip: Manifest) -> Header:
    return Header(tip.code, tip.digest, tip.generation)


def make_offer(rules: Rules, peer: PeerId, tip: Manifest) -> Offer:
    """The offer of a peer that trained from this tip."""
    units = {
        unit: OfferedUnit(
            name("trained", peer, tip.digest, unit),
            rules.unit_bytes[unit],
            tip.entries[unit].digest,
        )
        for unit in rules.schedule.due_of(peer, tip)
    }
    return Offer(tip.digest, steps=10, tokens=1000, units=units)


@dataclass
class Node:
    """A peer: its machine, its disk, and its history."""

    machine: RoundMachine
    disk: set[str]
    record: Record
    links: tuple[Link, ...]
    train_s: float = 1.0
    is_up: bool = True
    life: int = 0
    applied: list[Manifest] = field(default_factory=list)
    reasons: list[events.Reason] = field(default_factory=list)
    left: str = ""
    sent: list[tuple[float, PeerId, Message]] = field(default_factory=list)
    fetches: dict[events.Purpose, int] = field(default_factory=dict)
    effects: list[Effect] = field(default_factory=list)

    def said(self, topic: Topic) -> str:
        """All log lines on a topic."""
        return "\n".join(reason.text for reason in self.reasons if reason.topic is topic)


Lose = Callable[[PeerId, PeerId, Message], bool]


class Pump:
    """Carries events and effects between machines, in the order of a fake clock."""

    parts: ClassVar[Parts] = Parts()
    """Rules of all machines."""

    def __init__(
        self,
        rules: Rules,
        *,
        timers: Timers | None = None,
        tick_s: float = 0.5,
        uplinks: Mapping[PeerId, int] | None = None,
        rooms: Mapping[PeerId, int] | None = None,
        fetches_ahead: bool = False,
    ) -> None:
        self.rules = rules
        self.fetches_ahead = fetches_ahead
        """Whether peers fetch ahead of proposals, as real ones do."""
        self.rooms = dict(rooms or {})
        """Number of experts that fit each machine, all by default. Peers declare it."""
        self.uplinks = uplinks or {}
        """Uplinks that peers declare, in Mbit/s. Bytes take no time nevertheless."""
        self.timers = timers or Timers()
        self.tick_s = tick_s
        self.now = 0.0
        self.nodes: dict[PeerId, Node] = {}
        self.lose: Lose = lambda source, destination, message: False
        self.dead_refuse = False
        """Whether the machine of a killed peer refuses messages at once."""
        self.fetches_hang: Callable[[PeerId], bool] = lambda source: False
        """Whether fetches from a peer bring neither bytes nor a refusal."""
        self.fail_syncs: set[PeerId] = set()
        self.endless_syncs: dict[PeerId, int] = {}
        """Peer -> how many of its next syncs never end."""
        self.refuse_fetch: Callable[[PeerId, PeerId, str], bool] = lambda peer, source, unit: False
        self.stall_inputs: Callable[[PeerId, PeerId], bool] = lambda peer, source: False
        """Whether a reducer waits forever for a peer's offered values."""
        self.fetch_s: Callable[[PeerId, events.Purpose], float] = lambda peer, purpose: 0.0
        """Additional seconds of a peer's fetches of a kind."""
        self.merge_result: Callable[[PeerId, str, str], str] = lambda peer, unit, old: name(
            "merged", unit, old
        )
        self.merge_s = 0.2
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._counter = itertools.count()

    # ------------------------------------------------------------ setting up

    def add(self, peer: PeerId, tip: Manifest) -> Node:
        disk = {entry.digest for entry in tip.entries.values()}
        record = Record(tip, None, None)
        links = Chain.of(record).links
        node = Node(self._machine(peer, record, disk), disk, record, links)
        self.nodes[peer] = node
        return node

    def _machine(
        self, peer: PeerId, record: Record, disk: set[str], links: tuple[Link, ...] = ()
    ) -> RoundMachine:
        local = LocalPeer(
            peer,
            1.0,
            self.rules,
            self.timers,
            now=self.now,
            random=random.Random(peer),
            uplink_of=lambda: self.uplinks.get(peer, 0),
            room_of=lambda: self.rooms.get(peer, ALL_EXPERTS),
            fetches_ahead=self.fetches_ahead,
        )
        chain = Chain.of(record, links)
        return RoundMachine(local, record, stored=disk, chain=chain, parts=self.parts)

    def boot(self, peer: PeerId) -> None:
        node = self.nodes[peer]
        life = node.life
        self._carry_out(peer, node.machine.start(self.now))
        self._train(peer, node.machine.tip)

        def tick() -> None:
            if node.life == life and node.is_up:
                self.give(peer, events.Tick())
                self.after(self.tick_s, tick)

        if self.tick_s:
            self.after(self.tick_s, tick)

    def kill(self, *peers: PeerId) -> None:
        for peer in peers:
            self.nodes[peer].is_up = False
            self.nodes[peer].life += 1

    def restart(self, *peers: PeerId) -> None:
        for peer in peers:
            node = self.nodes[peer]
            node.is_up = True
            node.life += 1
            node.machine = self._machine(peer, node.record, node.disk, node.links)
            self.boot(peer)

    # ------------------------------------------------------------ time

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._counter), action))

    def run(self, until: float, done: Callable[[], bool] = lambda: False) -> bool:
        """Runs to a time, or until a condition holds. Returns whether it does."""
        while not done() and self._queue and self._queue[0][0] <= until:
            self.now, _, action = heapq.heappop(self._queue)
            action()
        return done()

    def run_to_sync(self, peer: PeerId, *, within_s: float = 60.0) -> Manifest:
        """Runs until a peer begins to make a manifest durable, and returns it."""
        effects = self.nodes[peer].effects
        before = len(effects)
        is_there = self.run(
            self.now + within_s, lambda: any(isinstance(e, events.Sync) for e in effects[before:])
        )
        assert is_there
        return next(e.manifest for e in effects[before:] if isinstance(e, events.Sync))

    def run_to_height(self, height: int, peers: str = "", *, within_s: float = 100.0) -> float:
        """Runs until these peers (all, by default) have reached a height. Returns seconds."""
        began_s = self.now
        wanted = [self.nodes[peer] for peer in peers or self.nodes]
        reached = self.run(
            self.now + within_s, lambda: all(n.machine.tip.height >= height for n in wanted)
        )
        assert reached, {p: (n.machine.tip.height, n.machine.reason) for p, n in self.nodes.items()}
        return self.now - began_s

    def run_rounds(self, rounds: int, peers: str = "", *, within_s: float = 100.0) -> float:
        """Runs until these peers (all, by default) have seen so many rounds. Returns seconds."""
        began_s = self.now
        wanted = [self.nodes[peer] for peer in peers or self.nodes]
        reached = self.run(
            self.now + within_s, lambda: all(n.machine.tip.round >= rounds for n in wanted)
        )
        assert reached, {p: (n.machine.tip.round, n.machine.reason) for p, n in self.nodes.items()}
        return self.now - began_s

    def train_times(self, seconds: Mapping[PeerId, float] | float) -> None:
        """Sets how long the local steps of these (or of all) peers take from the next round on."""
        if not isinstance(seconds, Mapping):
            seconds = dict.fromkeys(self.nodes, seconds)
        for peer, value in seconds.items():
            self.nodes[peer].train_s = value

    # ------------------------------------------------------------ events and effects

    def give(self, peer: PeerId, event: Event) -> list[Effect]:
        """Hands one event to a machine and carries its effects out."""
        node = self.nodes[peer]
        if not node.is_up:
            return []
        effects = node.machine.handle(event, self.now)
        self._carry_out(peer, effects)
        return effects

    def _later(self, peer: PeerId, seconds: float, event: Event) -> None:
        life = self.nodes[peer].life

        def deliver() -> None:
            if self.nodes[peer].life == life:
                if isinstance(event, events.Stored):
                    self.nodes[peer].disk.add(event.digest)
                self.give(peer, event)

        self.after(seconds, deliver)

    def _carry_out(self, peer: PeerId, effects: list[Effect]) -> None:
        node = self.nodes[peer]
        for effect in effects:
            node.effects.append(effect)
            self._carry_out_one(peer, node, effect)

    def _carry_out_one(self, peer: PeerId, node: Node, effect: Effect) -> None:
        if isinstance(effect, events.Persist):
            node.record = effect.record
            node.links += effect.links
        elif isinstance(effect, events.Send):
            self._send(peer, node, effect)
        elif isinstance(effect, events.Fetch):
            number = node.fetches[effect.purpose] = node.fetches.get(effect.purpose, 0) + 1
            for want in effect.wants:
                self._fetch(peer, effect.purpose, number, want, 0)
        elif isinstance(effect, events.CancelFetch):
            node.fetches[effect.purpose] = node.fetches.get(effect.purpose, 0) + 1
        elif isinstance(effect, events.Sync):
            have = {entry.digest for entry in effect.manifest.entries.values()} <= node.disk
            assert have, "a manifest is synced only when all its blobs are here"
            digest = effect.manifest.digest
            if self.endless_syncs.get(peer, 0):
                self.endless_syncs[peer] -= 1
            elif peer in self.fail_syncs:
                self._later(peer, 0.01, events.SyncFailed(digest, "the disk is full"))
            else:
                self._later(peer, 0.01, events.Synced(digest))
        elif isinstance(effect, events.Reduce):
            digest = name("mean", *effect.inputs)
            assert {digest for _, digest in effect.inputs} <= node.disk
            node.disk.add(digest)
            result = ReducedUnit(digest, self.rules.unit_bytes[effect.unit])
            self._later(peer, 0.01, events.UnitReduced(effect.roster_id, effect.unit, result))
        elif isinstance(effect, events.ComputeMerge):
            self._merge(peer, node, effect.tip)
        elif isinstance(effect, events.Apply):
            assert node.record.tip == effect.manifest, "a tip is durable before it is applied"
            node.applied.append(effect.manifest)
            self._train(peer, effect.manifest)
        elif isinstance(effect, events.Keep):
            node.disk &= effect.digests
        elif isinstance(effect, events.Left):
            node.left = effect.reason
        elif isinstance(effect, events.Reason):
            node.reasons.append(effect)

    def _send(self, peer: PeerId, node: Node, effect: events.Send) -> None:
        node.sent.append((self.now, effect.destination, effect.message))
        lost = self.lose(peer, effect.destination, effect.message)
        if effect.destination in self.nodes and not lost:
            received = events.Received(peer, effect.header, effect.message)
            self._later(effect.destination, LATENCY_S, received)
            if self.dead_refuse and not self.nodes[effect.destination].is_up:
                self._later(peer, 2 * LATENCY_S, events.Undeliverable(effect.destination))

    def _fetch(
        self,
        peer: PeerId,
        purpose: events.Purpose,
        number: int,
        want: events.BlobWanted,
        turn: int,
    ) -> None:
        node, life = self.nodes[peer], self.nodes[peer].life

        def attempt() -> None:
            if node.life != life or node.fetches[purpose] != number:
                return
            source = want.sources[turn % len(want.sources)] if want.sources else peer
            if purpose is events.Purpose.REDUCE and self.stall_inputs(peer, source):
                return
            if self.fetches_hang(source):
                return
            holder = self.nodes.get(source)
            refused = self.refuse_fetch(peer, source, want.unit)
            if holder and holder.is_up and want.digest in holder.disk and not refused:
                self._later(peer, 0.0, events.Stored(want.digest))
                return
            self._later(peer, 0.0, events.Unobtainable(want.digest, source, "refused"))
            self._fetch(peer, purpose, number, want, turn + 1)

        takes_s = self.fetch_s(peer, purpose) if not turn else 0.2 * min(turn, 5)
        self.after(2 * LATENCY_S + takes_s, attempt)

    def _merge(self, peer: PeerId, node: Node, tip: Manifest) -> None:
        units = {}
        for unit, entry in tip.entries.items():
            if unit in self.rules.expert_units:
                assert entry.digest in node.disk, "merges read agreed values"
                digest = self.merge_result(peer, unit, entry.digest)
                units[unit] = ReducedUnit(digest, self.rules.unit_bytes[unit])
        life = node.life

        def finish() -> None:
            if node.life == life:
                node.disk.update(unit.digest for unit in units.values())
                self.give(peer, events.MergeComputed(tip.digest, units))

        self.after(self.merge_s, finish)

    def offer_of(self, peer: PeerId, tip: Manifest) -> Offer:
        """A peer's offer after its local steps."""
        return make_offer(self.rules, peer, tip)

    def _train(self, peer: PeerId, tip: Manifest) -> None:
        node = self.nodes[peer]
        life = node.life
        if peer not in tip.members or merge_due(tip, self.rules.merging):
            return

        def finish() -> None:
            if node.life == life and node.machine.tip.digest == tip.digest:
                offer = self.offer_of(peer, tip)
                node.disk.update(unit.digest for unit in offer.units.values())
                self.give(peer, events.Offered(offer))

        self.after(node.train_s, finish)

    # ------------------------------------------------------------ peers and checks

    @property
    def order(self) -> tuple[PeerId, ...]:
        """The voters by rank."""
        return next(iter(self.nodes.values())).machine.tip.order

    @property
    def first(self) -> PeerId:
        """The member of rank 0, which convenes."""
        return self.order[0]

    @property
    def last(self) -> PeerId:
        """The member of the highest rank, which will not convene soon."""
        return self.order[-1]

    def others(self, *but: PeerId) -> str:
        """All peers but these."""
        return "".join(peer for peer in self.nodes if peer not in but)

    @property
    def alive(self) -> str:
        """All peers that are up."""
        return "".join(peer for peer, node in self.nodes.items() if node.is_up)

    def tip_of(self, peer: PeerId) -> Manifest:
        return self.nodes[peer].machine.tip

    def digests_at(self, height: int, peers: str = "") -> set[str]:
        """Digests that these peers applied at a height."""
        return {
            manifest.digest
            for peer in peers or self.nodes
            for manifest in self.nodes[peer].applied
            if manifest.height == height
        }

    def said(self, topic: Topic, peers: str = "") -> str:
        """Log lines of these peers (all, by default) on a topic."""
        return "".join(self.nodes[peer].said(topic) for peer in peers or self.nodes)

    def count_sent(self, kind: type[Message]) -> int:  # type: ignore[valid-type]
        """The number of sent messages of a kind."""
        return sum(
            isinstance(message, kind) for node in self.nodes.values() for *_, message in node.sent
        )


def start_swarm(
    peers: str,
    rules: Rules | None = None,
    *,
    tip: Manifest | None = None,
    train_s: Mapping[PeerId, float] | float = 1.0,
    kind: type[Pump] = Pump,
    **options: object,
) -> Pump:
    """A swarm of these letters, in training from this tip, by default from manifest 0."""
    rules = rules or make_rules()
    pump = kind(rules, **options)  # type: ignore[arg-type]
    tip = tip or found(rules, list(peers))
    for peer in peers:
        pump.add(peer, tip)
    pump.train_times(train_s)
    for peer in peers:
        pump.boot(peer)
    return pump


def in_training(
    peers: str, rules: Rules | None = None, *, height: int = 2, **options: object
) -> Pump:
    """A swarm that trains for its next round after this height."""
    pump = start_swarm(peers, rules, **options)
    pump.run_to_height(height)
    return pump
