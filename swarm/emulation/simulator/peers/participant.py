"""A peer of a schedule: its properties, its code, and the places where it may crash."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from math import inf
from operator import attrgetter
from typing import NamedTuple

from swarm.emulation.simulator.peers.symbol_trainer import Trainer
from swarm.emulation.simulator.symbols.signing import Door
from swarm.emulation.simulator.symbols.trained_symbols import Averaging
from swarm.emulation.simulator.symbols.values import Tag
from swarm.protocol.chain import chain_record
from swarm.protocol.exchange.deltas import Remainders
from swarm.protocol.exchange.handover import Giving, Taking
from swarm.protocol.messages.events import Apply, Effect, Persist, Record, Send
from swarm.protocol.messages.messages import Accept, Commit, Link, Prepare, Propose, Ready
from swarm.protocol.rounds import Parts, Rules
from swarm.protocol.timing.deadlines import Measured, Timers, production_timers
from swarm.protocol.training import Training
from swarm.protocol.values.invitation import Credential
from swarm.protocol.values.manifest import ALL_EXPERTS, Kind, PeerId


@dataclass(frozen=True)
class Character:
    """The properties of one peer. A slow peer has larger times."""

    capacity: float = 1.0
    local_steps_s: float = 3.0
    step_s: float = 1.0
    """Seconds of one local step, where rounds last a given time."""
    sync_s: float = 0.1
    failing_syncs: float = 0.0
    """Chance of a lasting disk failure when a manifest's blobs are to be made durable."""
    reduce_s: float = 0.1
    merge_s: float = 0.3
    rebuild_s: float = 0.05
    """Time to make a value from a delta."""
    arithmetic: int = 0
    """Peers with the same number compute the same bits. Negative: other bits each time."""
    up_bytes_per_s: float = inf
    down_bytes_per_s: float = inf
    clock_s: float = 0.0
    """The peer's monotonic clock at the beginning of the schedule."""
    rooms: tuple[int, ...] = (ALL_EXPERTS,)
    """Numbers of experts that fit the machine, one per start. The last number also holds later."""
    network: str | None = None
    """Public network of the peer's address, as others see it. None: others do not know it."""

    @property
    def uplink(self) -> int:
        """The uplink that the peer states, in Mbit/s. 0: unknown."""
        mbit = self.up_bytes_per_s * 8e-6
        return max(1, round(mbit)) if mbit < inf else 0


@dataclass(frozen=True)
class Setup:
    """A swarm before anything happens."""

    founders: tuple[PeerId, ...]
    rules: Rules
    timers: Timers
    characters: Mapping[PeerId, Character]
    """The characters of all peers of the schedule, even future ones."""
    has_slow_links: bool = False
    """Whether transfers of bytes take time."""
    has_adapted_timers: bool = False
    """Whether each peer adapts its timers to measured sizes and rates."""
    liar: PeerId | None = None
    lies: frozenset[str] = frozenset()
    """Subjects of the liar's lies, see `faults.liar`."""
    copy_s: float | None = None
    """How long an owner takes to offer moments. None: moments are not modeled."""
    known: frozenset[PeerId] = frozenset()
    """Founders that no anchor vouches for. They lack one round for a vote."""
    credentials: Mapping[PeerId, Credential] = field(default_factory=dict)
    """Credentials with which peers join."""

    def network_of(self, peer: PeerId) -> str | None:
        """The network from which a peer is connected, as far as others see it."""
        character = self.characters.get(peer)
        return character.network if character else None


class Times(NamedTuple):
    """A machine's clocks: passed time, passed time without sleep, wall time."""

    passed_s: float
    awake_s: float
    wall_s: float


def adapted(measured: Measured, base: Timers) -> Timers:
    """The timers that a real peer would adapt, in a run that fixes T_reform."""
    return production_timers(
        measured, roster_after_s=base.roster_s, reform_after_s=base.reform_s, base=base
    ).timers


def rules_of_the_run(_: PeerId, rules: Rules) -> Rules:
    """The same rules for every peer."""
    return rules


@dataclass(frozen=True, kw_only=True)
class UnderTest(Parts):
    """The code under test: the parts of the round machine, and other parts of a peer."""

    rules: Callable[[PeerId, Rules], Rules] = rules_of_the_run
    """The rules of the run, as a peer sees them."""
    training: type[Training] = Training
    trainer: type[Trainer] = Trainer
    giving: type[Giving] = Giving
    taking: type[Taking] = Taking
    door: type[Door] = Door
    arithmetic: type[Averaging] = Averaging
    remainders: type[Remainders[Mapping[Tag, int]]] = Remainders
    clock: Callable[[Times], float] = attrgetter("passed_s")
    """The time that a machine sees."""
    timers: Callable[[Measured, Timers], Timers] = adapted
    rolled_back: Callable[[Record], Record] = chain_record.rolled_back
    """Makes the record of a peer whose newest record is damaged [P5]."""
    without_record: Callable[[PeerId, Record, Sequence[Link]], Record] = chain_record.without_record
    """Makes the record of a peer that has lost its record and was shown a tip by others [P5]."""
    waits_on: bool = True
    """Whether a transfer may last as long as bytes keep coming."""


def under(changed: type[Rules]) -> Callable[[PeerId, Rules], Rules]:
    """Makes all machines follow changed rules."""
    return lambda _, rules: changed(**{f.name: getattr(rules, f.name) for f in fields(rules)})


Trap = Callable[[Effect], bool]


class Loss(Enum):
    """What a crash destroys."""

    RECORD = "record"  # the newest record: the previous record is read
    DISK = "disk"  # the whole state directory


@dataclass(frozen=True)
class PlannedCrash:
    """A crash that waits for an effect."""

    trap: Trap
    """Decides whether the process crashes right after an effect."""
    restart_s: float
    """Time after which the process starts again."""
    isolated: PeerId | None = None
    """A peer that is cut off from all others at the moment of the crash."""
    loss: Loss | None = None


def _sends(kind: type) -> Callable[[Effect], bool]:
    return lambda effect: isinstance(effect, Send) and isinstance(effect.message, kind)


def _promises(effect: Effect) -> bool:
    if not isinstance(effect, Send) or not isinstance(effect.message, Ready):
        return False
    return effect.message.ballot.attempt > 0


TRAPS: dict[str, Trap] = {
    "any": lambda _: True,
    "vote": _sends(Accept),
    "promise": _promises,
    "write": lambda effect: isinstance(effect, Persist),
    "vote_written": lambda effect: (
        isinstance(effect, Persist) and effect.record.accepted is not None
    ),
    "apply": lambda effect: isinstance(effect, Apply),
    "merge_voted": lambda effect: (
        isinstance(effect, Persist)
        and effect.record.accepted is not None
        and effect.record.accepted.manifest.kind is Kind.MERGE
    ),
    "campaign": _sends(Prepare),
    "propose": _sends(Propose),
    "commit": _sends(Commit),
}
"""Effects right after which a peer can be made to crash."""


class Countdown:
    """A trap that lets some effects pass."""

    def __init__(self, trap: Trap, skip: int) -> None:
        self._trap = trap
        self._left = skip

    def __call__(self, effect: Effect) -> bool:
        """Whether the crash follows this effect."""
        if not self._trap(effect):
            return False
        self._left -= 1
        return self._left < 0
