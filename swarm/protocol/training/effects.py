"""What the main loop of a peer has others do for it, and what it is told of the result.

An effect is awaited; what it gives is its type's argument: `steps = await Train(...)`. The loop
knows neither engine, disk, network nor clock: an interpreter carries out each effect it is handed
and sends the result in. A peer's interpreter is `swarm/peer/trainer.py`, that of simulated ones
`swarm/emulation/simulator/trainer.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from swarm.protocol.adoption import Adoption
from swarm.protocol.deadlines import LocalWork
from swarm.protocol.dealing import Stretches
from swarm.protocol.manifest import Digest, Manifest, Unit
from swarm.protocol.messages import Offer, OfferedUnit
from swarm.protocol.records import PeerState

T = TypeVar("T")


class Effect(Generic[T]):
    """Something to be done; awaiting it gives what came of it."""

    def __await__(self) -> Generator[Effect[Any], T, T]:
        """Hands this effect to the interpreter."""
        return (yield self)


# ---------------------------------------------------------------- what goes in and out


@dataclass(frozen=True)
class Applied:
    """One tip that this peer moved to."""

    manifest: Manifest
    at_s: float
    """When, by the clock of the interpreter."""
    reason: str = ""
    parent: Manifest | None = None
    """The manifest before it, if it is known."""


class Work(Protocol):
    """What local steps on a tip amount to."""

    @property
    def steps(self) -> int:
        """Local steps, skipped ones included."""

    @property
    def tokens(self) -> int:
        """Tokens that they were trained on."""

    @property
    def seconds(self) -> float:
        """How long they took."""


class Steps(Work, Protocol):
    """Local steps of which more may be to come."""

    @property
    def completed(self) -> bool:
        """False if the tip moved before all of them were done."""


@dataclass(frozen=True)
class SavedWork:
    """What a private state says of the local steps in it [P6]; itself a piece of `Work`."""

    run: str
    base_tip: Digest
    """Manifest that they started from."""
    round: int
    """Round that they were offered for."""
    steps: int
    tokens: int
    seconds: float
    position: int
    """Samples of a text of the peer's own that were read, these included."""
    bases: Mapping[int, Digest]
    """Owned expert -> agreed value that its progress extends."""
    offered: Mapping[Unit, Digest]
    """What was offered; empty in what is to be saved, as its values are not stored yet."""


# ---------------------------------------------------------------- when the peer starts


@dataclass(frozen=True)
class Newest(Effect[Applied]):
    """The newest tip, with its parent, and when its round began."""


@dataclass(frozen=True)
class Load(Effect[SavedWork | None]):
    """Fills the engine from the private state on the disk.

    None: there is none, or it is damaged, or has a `problem`; the engine is as it was.
    """

    tip: Manifest
    problem: Callable[[SavedWork], str | None]
    """What is wrong with it, in a sentence."""


@dataclass(frozen=True)
class AdoptFrozen(Effect[bool]):
    """Fills in what is not trained here beside what was loaded; the result is as of `Adopt`."""

    tip: Manifest


@dataclass(frozen=True)
class Resumed(Effect[None]):
    """Model and tip are one again."""

    tip: Manifest
    has_work: bool
    """Whether saved local steps are still good, and are offered again."""


# ---------------------------------------------------------------- a round


@dataclass(frozen=True)
class MayStop(Effect[None]):
    """Nothing is under way: a peer that was asked to stop may do it here."""


@dataclass(frozen=True)
class Train(Effect[Steps]):
    """Takes local steps until none is left, or the tip has moved."""

    tip: Manifest
    dealt: Stretches
    """Samples to be read."""
    before: Work | None
    """Steps on the same deal that were done before; the result contains them."""
    began_s: float
    """When the round began, see `Applied.at_s`."""
    left: Callable[[int, float, float], LocalWork]
    """Asked before each step, given all steps done, the mean seconds of one and those since the
    round began, how many more there are to be."""


@dataclass(frozen=True)
class Store(Effect[Mapping[Unit, OfferedUnit]]):
    """Puts the values of units into the store, so that others can fetch them."""

    tip: Manifest
    bases: Mapping[Unit, Digest]
    """Each unit, and the agreed value that its value was trained from."""
    tokens: int
    """Of the local steps since the tip."""


@dataclass(frozen=True)
class Save(Effect[Mapping[Unit, OfferedUnit]]):
    """As `Store`; and the private state, with what was stored, is durable in the end [P6]."""

    tip: Manifest
    bases: Mapping[Unit, Digest]
    work: SavedWork


@dataclass(frozen=True)
class Submit(Effect[None]):
    """Puts an offer into the round."""

    tip: Manifest
    offer: Offer


@dataclass(frozen=True)
class Wait(Effect[Sequence[Applied]]):
    """Waits for tips after this one: one at least, oldest first."""

    tip: Manifest
    state: PeerState
    """What it waits for, for people."""


# ---------------------------------------------------------------- a new tip


@dataclass(frozen=True)
class Adopt(Effect[bool]):
    """Moves the engine to a manifest's agreed values, as was decided for each.

    False: its blobs were collected, so a newer tip is here; the engine is as it was.
    """

    manifest: Manifest
    decision: Adoption
    before: Manifest
    """The manifest before it, or itself if that is not known."""
    at_start: bool = False


@dataclass(frozen=True)
class Lose(Effect[None]):
    """The result of local steps has entered no manifest and never will."""

    tokens: int
    reason: str


@dataclass(frozen=True)
class Report(Effect[None]):
    """Tells people of a manifest that was adopted."""

    applied: Applied
    work: Work | None
    """Local steps on its parent."""
    counted: bool
    """Whether they are in it."""


@dataclass(frozen=True)
class Release(Effect[None]):
    """What was offered has been adopted, or never will be: its blobs may go."""


@dataclass(frozen=True)
class Validate(Effect[None]):
    """Measures the held-out loss of an agreed state that was just adopted."""

    manifest: Manifest
