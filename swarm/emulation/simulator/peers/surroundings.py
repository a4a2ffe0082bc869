"""The parts of the simulation that a simulated peer, its fetcher and its trainer see."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from random import Random
from typing import NamedTuple, Protocol

from swarm.emulation.simulator.peers import participant
from swarm.emulation.simulator.peers.bulk_transfers import Data, Get, StreamingShell
from swarm.emulation.simulator.peers.invariants import Invariants
from swarm.emulation.simulator.peers.moments import Exchange, ExchangeShell
from swarm.emulation.simulator.peers.symbol_trainer import Trainer
from swarm.emulation.simulator.symbols.crash_disk import Disk
from swarm.emulation.simulator.symbols.trained_symbols import Task
from swarm.protocol.messages.messages import Header, Message
from swarm.protocol.rounds import RoundMachine
from swarm.protocol.timing.deadlines import Measured, Timers
from swarm.protocol.timing.pace import Pace
from swarm.protocol.values.invitation import Credential
from swarm.protocol.values.manifest import Manifest, PeerId


class Packet(NamedTuple):
    """A control message under way."""

    header: Header
    message: Message


Payload = Packet | Get | Data


class Peer(StreamingShell, ExchangeShell, Protocol):
    """Another peer, as a peer, fetcher or trainer sees it."""

    machine: RoundMachine


class World(Protocol):
    """The part of the simulation that a node sees."""

    now: float
    random: Random
    task: Task
    timers: Timers
    tested: participant.UnderTest
    invariants: Invariants
    trace: Callable[[str], None] | None
    setup: participant.Setup

    def reachable(self, source: PeerId, destination: PeerId) -> Peer | None:
        """The destination, if it runs and its links with the source work in both directions."""

    @property
    def disks(self) -> Mapping[PeerId, Disk]:
        """Every peer's disk."""

    @property
    def credentials(self) -> Mapping[PeerId, Credential]:
        """Credentials with which peers start."""

    def at(self, delay_s: float, method: Callable[..., None], *arguments: object) -> None:
        """Calls a function later."""

    def post(self, source: PeerId, destination: PeerId, payload: Payload) -> None:
        """Hands a message to the network."""

    def applied(self, me: PeerId) -> None:
        """Notes that a peer has a new tip."""

    def fell(self, me: PeerId, planned: participant.PlannedCrash) -> None:
        """Notes that a peer has had a planned crash."""


class Ports:
    """The half of a node that its parts use."""

    world: World
    me: PeerId
    character: participant.Character
    machine: RoundMachine
    trainer: Trainer
    exchange: Exchange
    is_up: bool
    is_paused: bool
    has_moments: bool
    lingers_until: float
    slept_s: float
    wall_ahead_s: float
    _pace: Pace

    def post(self, destination: PeerId, payload: Payload) -> None:
        """Sends a question or an answer, which may be lost."""
        self.world.post(self.me, destination, payload)

    def is_there(self) -> bool:
        """Whether the process runs and is not paused. After leaving it still serves for a while."""
        return (self.is_up and not self.is_paused) or self.world.now < self.lingers_until

    def peer(self, name: PeerId) -> Peer | None:
        """Another peer, if it runs and the links in both directions work."""
        return self.world.reachable(self.me, name)

    def exchange_of(self, name: PeerId) -> Exchange | None:
        """Another peer's exchange, if the peer runs and the links work."""
        peer = self.peer(name)
        return peer.exchange if peer else None

    def machine_of(self, name: PeerId) -> RoundMachine | None:
        """Another peer's machine, if the peer runs and the links work."""
        peer = self.peer(name)
        return peer.machine if peer else None

    def now_s(self) -> float:
        """The time."""
        return self.world.now

    def own_experts(self) -> Collection[int]:
        """Experts that this peer trains."""
        return self.trainer.model.progress.keys()

    def took(self, expert: int, round_: int | None) -> None:
        """Notes that an adopted expert got moments of this round, or none."""
        self._note(f"expert {expert} continues with moments of round {round_}")

    def adopting(self, before: Manifest, manifest: Manifest) -> None:
        """Notes that the model is about to adopt a manifest."""
        if self.has_moments:
            self.exchange.before_adopt(before, manifest)

    def adopted(self, taken: Sequence[int], before: Manifest, manifest: Manifest) -> None:
        """Notes that the model has adopted a manifest, and that these experts were taken over."""
        if self.has_moments:
            self.exchange.adopted(taken, before, manifest)

    def clock_s(self) -> float:
        """The time, as this peer's machine sees it."""
        passed_s = self.character.clock_s + self.world.now
        wall_s = self.world.now + self.wall_ahead_s
        return self.world.tested.clock(participant.Times(passed_s, passed_s - self.slept_s, wall_s))

    def rates(self) -> tuple[float, float]:
        """Limits of the bytes per second that this peer sends and receives."""
        return self.character.up_bytes_per_s, self.character.down_bytes_per_s

    def waits_on(self, *, is_flowing: bool) -> bool:
        """Whether to keep waiting for bytes that have not come yet."""
        return is_flowing and self.world.tested.waits_on

    def fetched(self, num_bytes: int, seconds: float) -> None:
        """Notes a complete transfer, and for how long its bytes flowed."""
        self._pace.fetched(num_bytes, seconds, self.clock_s())

    def measured(self) -> Measured:
        """The figures from which its timers are adapted."""
        return self._pace.measured(
            self.machine.rules.may_be_renewed(self.machine.tip), self.clock_s()
        )

    def merge_is_due(self, tip: Manifest) -> bool:
        """Whether the next manifest must be a merge, by the rule of the code under test."""
        return self.machine.merge_is_due(tip)

    def local_steps_s(self) -> float:
        """How long the next local steps take."""
        return self._duration(self.character.local_steps_s)

    def step_s(self) -> float:
        """How long each of the next local steps takes, where rounds last a given time."""
        return self._duration(self.character.step_s)

    def _duration(self, usual_s: float) -> float:
        return usual_s * (0.7 + 0.6 * self.world.random.random())

    def _note(self, text: str) -> None:
        if self.world.trace:
            self.world.trace(f"{self.world.now:8.2f} {self.me:>3} {text}")
