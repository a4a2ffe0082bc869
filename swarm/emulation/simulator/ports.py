"""What fetcher, exchange and trainer of a simulated peer see of it and of the others."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from swarm.emulation.simulator.exchange import Exchange
from swarm.emulation.simulator.surroundings import Payload, Peer, World
from swarm.emulation.simulator.taking_part import Character, Times
from swarm.emulation.simulator.trainer import Trainer
from swarm.protocol.deadlines import Measured
from swarm.protocol.manifest import Manifest, PeerId
from swarm.protocol.pace import Pace
from swarm.protocol.rounds import RoundMachine


class Ports:
    """The half of a node that its parts use."""

    world: World
    me: PeerId
    character: Character
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
        """Sends it; it may be lost."""
        self.world.post(self.me, destination, payload)

    def is_there(self) -> bool:
        """Whether the process runs, and is not paused; it serves a while after it has left."""
        return (self.is_up and not self.is_paused) or self.world.now < self.lingers_until

    def peer(self, name: PeerId) -> Peer | None:
        """Another peer whose links to and from this one work, if it runs."""
        return self.world.reachable(self.me, name)

    def exchange_of(self, name: PeerId) -> Exchange | None:
        """Another peer's exchange, if the links work and it runs."""
        peer = self.peer(name)
        return peer.exchange if peer else None

    def machine_of(self, name: PeerId) -> RoundMachine | None:
        """Another peer's machine, if the links work and it runs."""
        peer = self.peer(name)
        return peer.machine if peer else None

    def now_s(self) -> float:
        """The time."""
        return self.world.now

    def own_experts(self) -> Collection[int]:
        """Experts that this peer trains."""
        return self.trainer.model.progress.keys()

    def took(self, expert: int, round_: int | None) -> None:
        """An expert that was taken up got moments of this round, or none."""
        self._note(f"expert {expert} goes on with moments of round {round_}")

    def adopting(self, before: Manifest, manifest: Manifest) -> None:
        """Its model is about to move."""
        if self.has_moments:
            self.exchange.before_adopt(before, manifest)

    def adopted(self, taken: Sequence[int], before: Manifest, manifest: Manifest) -> None:
        """Its model has moved, and these experts were taken up."""
        if self.has_moments:
            self.exchange.adopted(taken, before, manifest)

    def clock_s(self) -> float:
        """What this peer's machine takes for the time."""
        passed_s = self.character.clock_s + self.world.now
        wall_s = self.world.now + self.wall_ahead_s
        return self.world.tested.clock(Times(passed_s, passed_s - self.slept_s, wall_s))

    def rates(self) -> tuple[float, float]:
        """Bytes per second that this peer sends and receives at most."""
        return self.character.up_bytes_per_s, self.character.down_bytes_per_s

    def waits_on(self, *, is_flowing: bool) -> bool:
        """Whether to wait on for bytes that have not come yet."""
        return is_flowing and self.world.tested.waits_on

    def fetched(self, num_bytes: int, seconds: float) -> None:
        """A whole transfer is done, whose bytes flowed for so long."""
        self._pace.fetched(num_bytes, seconds, self.clock_s())

    def measured(self) -> Measured:
        """What its timers are adapted from."""
        return self._pace.measured(
            self.machine.rules.may_be_renewed(self.machine.tip), self.clock_s()
        )

    def merge_is_due(self, tip: Manifest) -> bool:
        """Whether the next manifest must be a merge, by the machine's rule, mutated or not."""
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
