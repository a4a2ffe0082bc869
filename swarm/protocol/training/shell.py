"""The interface through which the main loop of a peer acts.

The loop knows no engine, disk, network or clock: its shell carries out the loop's decisions. Work
that takes time is awaited: a real shell blocks its thread, a simulated one lets virtual time pass.
"""

# Methods that a shell need not implement ignore their arguments.
# ruff: noqa: ARG002

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from swarm.protocol.messages.messages import Offer, OfferedUnit
from swarm.protocol.records.records import PeerState
from swarm.protocol.timing.deadlines import LocalWork
from swarm.protocol.training.adoption import Adoption
from swarm.protocol.values.manifest import Digest, Manifest, PeerId, Unit
from swarm.protocol.values.work import Stretches

T = TypeVar("T")
WhyPaused = Callable[[Mapping[PeerId, int]], str | None]
"""Why training pauses, given how many experts fit the machine of each peer that is present."""


@dataclass(frozen=True)
class Applied:
    """A tip that this peer moved to: its time by the shell's clock, reason and known parent."""

    manifest: Manifest
    at_s: float
    reason: str = ""
    parent: Manifest | None = None


class Work(Protocol):
    """The amount of local steps on a tip."""

    @property
    def steps(self) -> int:
        """Local steps, skipped ones included."""

    @property
    def tokens(self) -> int:
        """Tokens that they were trained on."""

    @property
    def seconds(self) -> float:
        """How long they took."""

    @property
    def completed(self) -> bool:
        """False if the tip moved before all of them were done."""


@dataclass(frozen=True)
class Assignment:
    """The samples that local steps read, and their place in the run."""

    dealt: Stretches
    """Samples that were not read yet, in reading order."""
    began_s: float
    """When the round began, by the shell's clock."""
    step: int
    """Steps that the model has beyond the tip (overlap accounting)."""
    is_offered: bool = False
    """Whether nobody waits for these steps: an offer is in the round, or a merge comes first."""


@dataclass(frozen=True)
class SavedWork:
    """Local steps as a private state names them [P6]; see `swarm.train.saving.checkpoint`."""

    run_id: str
    base_tip: Digest
    round: int
    steps: int
    tokens: int
    seconds: float
    data_position: int
    expert_bases: Mapping[int, Digest]
    offered: Mapping[Unit, Digest]
    """Empty before the save: its values are not stored yet."""
    carried: frozenset[Unit] = frozenset()
    """Units that the round before left out, see `adopt`."""
    deltas: Mapping[Unit, Digest] = field(default_factory=dict)
    """Deltas that make the offered values of verbatim units (delta means); empty like `offered`."""
    part_bases: Mapping[Unit, Digest] = field(default_factory=dict)
    """See `Training.part_bases`."""
    is_offered: bool = True
    """False: written at rest, as this peer was asked to stop; its steps are in no offer yet."""

    @property
    def completed(self) -> bool:
        """Only finished work is saved."""
        return True

    @property
    def blobs(self) -> set[Digest]:
        """Blobs of the offer that others fetch."""
        return {*self.offered.values(), *self.deltas.values()}

    def with_values(self, units: Mapping[Unit, OfferedUnit]) -> SavedWork:
        """The same work with the digests of its stored values."""
        return replace(
            self,
            offered={unit: value.digest for unit, value in units.items()},
            deltas={unit: value.delta for unit, value in units.items() if value.delta},
        )


class TrainingShell(Protocol):
    """Engine, disk and rounds of one peer. Methods with a body here need not be implemented."""

    # ------------------------------------------------ when the peer starts

    def newest(self) -> Applied:
        """The newest tip; `at_s` is when its round began."""

    def load(self, tip: Manifest, problem: Callable[[SavedWork], str | None]) -> SavedWork | None:
        """Fills the engine from the private state.

        None: there is none, it is damaged or has a `problem`; the engine is as it was.
        """

    def adopt_frozen(self, tip: Manifest) -> bool:
        """Fills in values that are not trained here and were not loaded; returns like `adopt`."""

    def resumed(self, tip: Manifest, *, has_work: bool) -> None:
        """Notes that the model is at the tip; work that is still valid is offered again."""

    # ------------------------------------------------ a round

    def may_stop(self) -> None:
        """A point where a peer that was asked to stop may do so: nobody waits for its steps."""
        return

    async def train(
        self,
        tip: Manifest,
        task: Assignment,
        before: Work | None,
        left: Callable[[int, float, float], LocalWork],
    ) -> Work:
        """Takes local steps until none is left, or the tip has moved.

        A peer that was asked to stop takes only steps that other peers wait for.

        Args:
            tip: the tip that they start from.
            task: the samples to be read.
            before: steps since the last offer that were done already; the result contains these.
            left: asked before each step for the steps that are left. It is given all steps done,
                the mean seconds of a step and the seconds since the round began.
        """

    def store(
        self, tip: Manifest, bases: Mapping[Unit, Digest], tokens: int
    ) -> Mapping[Unit, OfferedUnit]:
        """Stores the values of units after so many tokens since the tip, for others to fetch.

        Their blobs stay until `release`. `bases`: the agreed value that each was trained from.
        """

    def save(
        self, tip: Manifest, bases: Mapping[Unit, Digest], work: SavedWork
    ) -> Coroutine[Any, Any, Mapping[Unit, OfferedUnit]]:
        """Like `store`; once awaited, the private state with the stored values is durable [P6]."""

    def save_offer(
        self, tip: Manifest, bases: Mapping[Unit, Digest], work: SavedWork
    ) -> Coroutine[Any, Any, Mapping[Unit, OfferedUnit]]:
        """Like `save`, but the private state stays as it was: blobs and `work` are durable [P6]."""

    async def beside(
        self, offered: Coroutine[Any, Any, Offer], *, saves_state: bool
    ) -> Callable[[], Awaitable[Offer]]:
        """Makes and submits an offer while steps continue, which do not change its values.

        `saves_state`: whether the offer calls `save`. The result waits for the offer.
        """
        offer = await offered

        async def made() -> Offer:
            return offer

        return made

    def load_offer(self) -> SavedWork | None:
        """The newest work of `save_offer`, if its blobs are here; these stay until `release`."""

    def submit(self, tip: Manifest, offer: Offer) -> None:
        """Puts an offer into the round after a tip."""

    async def pause(self, tip: Manifest, why: WhyPaused) -> Sequence[Applied]:
        """Waits for a newer tip, or until `why` gives None for the rooms of the peers present.

        Returns:
            Newer tips, oldest first; empty if there is none.
        """
        return ()

    async def wait(self, tip: Manifest, state: PeerState) -> Sequence[Applied]:
        """Waits for tips after this one; returns them, oldest first. `state` is for people."""

    # ------------------------------------------------ a newer tip

    def adopt(
        self, manifest: Manifest, decision: Adoption, before: Manifest, *, at_start: bool = False
    ) -> bool:
        """Moves the engine from one manifest to another as decided.

        False: blobs of it were collected, since a newer tip is here; the engine is as it was.
        """

    def lose(self, tokens: int, reason: str) -> None:
        """Notes that the result of local steps will be in no manifest."""
        return

    def report(self, applied: Applied, work: Work | None, *, counted: bool) -> None:
        """Notes what was adopted, this peer's steps on its parent, and whether these count."""
        return

    def release(self) -> None:
        """Releases the blobs of the offer, which was adopted or never will be."""

    def validate(self, manifest: Manifest) -> None:
        """Measures the held-out loss of the agreed state that was just adopted."""
        return


def at_once(routine: Coroutine[Any, Any, T]) -> T:
    """Runs a routine whose shell blocks its thread where it waits; returns its result."""
    try:
        routine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a shell that blocks never gives way")
