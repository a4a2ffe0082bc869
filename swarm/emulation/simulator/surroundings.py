"""What a simulated peer sees of the simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import NamedTuple, Protocol

from swarm.emulation.simulator.disk import Disk
from swarm.emulation.simulator.exchange import ExchangeShell
from swarm.emulation.simulator.fetching import Data, Get
from swarm.emulation.simulator.invariants import Invariants
from swarm.emulation.simulator.model import Task
from swarm.emulation.simulator.streaming import StreamingShell
from swarm.emulation.simulator.taking_part import PlannedCrash, Setup, UnderTest
from swarm.protocol.deadlines import Timers
from swarm.protocol.invitation import Credential
from swarm.protocol.manifest import PeerId
from swarm.protocol.messages import Header, Message
from swarm.protocol.rounds import RoundMachine


class Packet(NamedTuple):
    """A control message under way."""

    header: Header
    message: Message


Payload = Packet | Get | Data


class Peer(StreamingShell, ExchangeShell, Protocol):
    """Another peer, as far as one sees it."""

    machine: RoundMachine


class World(Protocol):
    """What a node sees of the simulation."""

    now: float
    random: Random
    task: Task
    timers: Timers
    tested: UnderTest
    invariants: Invariants
    trace: Callable[[str], None] | None
    setup: Setup

    def reachable(self, source: PeerId, destination: PeerId) -> Peer | None:
        """A peer that runs and whose links with another work in both directions."""

    @property
    def disks(self) -> Mapping[PeerId, Disk]:
        """Every peer's disk."""

    @property
    def credentials(self) -> Mapping[PeerId, Credential]:
        """With which peers start."""

    def at(self, delay_s: float, method: Callable[..., None], *arguments: object) -> None:
        """Calls a function later."""

    def post(self, source: PeerId, destination: PeerId, payload: Payload) -> None:
        """Hands a message to the network."""

    def applied(self, me: PeerId) -> None:
        """Hears that a peer has a new tip."""

    def fell(self, me: PeerId, planned: PlannedCrash) -> None:
        """Hears that a peer has crashed by planned."""
