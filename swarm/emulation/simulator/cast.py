"""Who takes part: what is particular about a peer, how it may crash, and the code it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from math import inf

from swarm.emulation.simulator.conduct import Conduct
from swarm.emulation.simulator.signing import Door
from swarm.emulation.simulator.trainer import Trainer
from swarm.protocol.deadlines import Timers
from swarm.protocol.events import Effect
from swarm.protocol.handover import Giving, Taking
from swarm.protocol.manifest import PeerId
from swarm.protocol.rounds import RoundMachine, Rules


@dataclass(frozen=True)
class Character:
    """What is particular about one peer; a slow peer has larger numbers."""

    capacity: float = 1.0
    local_steps_s: float = 3.0
    step_s: float = 1.0
    """Of one local step, where rounds last a given time."""
    sync_s: float = 0.1
    failing_syncs: float = 0.0
    """Chance that its disk fails for good to make the blobs of a manifest durable."""
    reduce_s: float = 0.1
    merge_s: float = 0.3
    arithmetic: int = 0
    """Peers of the same number compute the same bits; negative: other bits each time."""
    up_bytes_per_s: float = inf
    down_bytes_per_s: float = inf
    clock_s: float = 0.0
    """What its monotonic clock shows when everything begins."""


@dataclass(frozen=True)
class Setup:
    """A swarm before anything happens."""

    founders: tuple[PeerId, ...]
    rules: Rules
    timers: Timers
    characters: Mapping[PeerId, Character]
    """Of every peer that will ever be there."""
    has_slow_links: bool = False
    """Whether bytes take time."""
    has_adapted_timers: bool = False
    """Whether each peer adapts its timers to what it sees."""
    liar: PeerId | None = None
    lies: frozenset[str] = frozenset()
    """What it lies about, see `lying`."""
    asks_for_heads: bool = False
    """Whether peers fill the gaps of their chains."""
    copy_s: float | None = None
    """How long an owner takes to put moments out; None: moments are not modelled."""


@dataclass(frozen=True)
class Cast:
    """The code under test; mutants replace it."""

    machine: type[RoundMachine] = RoundMachine
    trainer: type[Trainer] = Trainer
    conduct: type[Conduct] = Conduct
    giving: type[Giving] = Giving
    taking: type[Taking] = Taking
    door: type[Door] = Door


Trap = Callable[[Effect], bool]


class Loss(Enum):
    """What a crash destroys."""

    RECORD = "record"  # the newest record; the one before is read
    DISK = "disk"  # the whole state directory


@dataclass(frozen=True)
class Snare:
    """A crash that waits for an effect."""

    trap: Trap
    """Says of every effect whether the process crashes right after it."""
    restart_s: float
    """Time after which the process starts again."""
    isolated: PeerId | None = None
    """A peer that is cut off from all others at that very moment."""
    loss: Loss | None = None
