"""The interface through which a peer's main loop acts.

The loop has no engine, disk, network or clock: its shell carries out the decisions. The loop awaits
work that takes time. During such work a real shell blocks its thread, and a simulated shell lets
virtual time pass.
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
"""Tells why training pauses, given the room of each peer that is present."""


@dataclass(frozen=True)
class Applied:
    """A tip that this peer applied: time by the shell's clock, reason, and parent if known."""

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
        """Tokens of these steps."""

    @property
    def seconds(self) -> float:
        """How long these steps took."""

    @property
    def completed(self) -> bool:
        """False if a newer tip came before all steps were done."""


@dataclass(frozen=True)
class Assignment:
    """The samples that local steps read, and the steps' position in the run."""

    dealt: Stretches
    """Samples that were not read yet, in reading order."""
    began_s: float
    """When the round began, by the shell's clock."""
    step: int
    """Number of steps in the model that the tip does not contain (overlap accounting)."""
    is_offered: bool = False
    """Whether no peer waits for these steps, since an offer is in the round, or a merge comes
    first."""


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
    """Digests of the offered values; empty before the save, which stores them."""
    carried: frozenset[Unit] = frozenset()
    """Units that the previous round left out, see `adopt`."""
    deltas: Mapping[Unit, Digest] = field(default_factory=dict)
    """Deltas that make the offered values of verbatim units (delta means); empty like `offered`."""
    part_bases: Mapping[Unit, Digest] = field(default_factory=dict)
    """See `Training.part_bases`."""
    is_offered: bool = True
    """False: saved without an offer, because this peer was asked to stop."""

    @property
    def completed(self) -> bool:
        """Only finished work is saved."""
        return True

    @property
    def blobs(self) -> set[Digest]:
        """Blobs of the offer, which others fetch."""
        return {*self.offered.values(), *self.deltas.values()}

    def with_values(self, units: Mapping[Unit, OfferedUnit]) -> SavedWork:
        """The same work, with the digests of the stored values."""
        return replace(
            self,
            offered={unit: value.digest for unit, value in units.items()},
            deltas={unit: value.delta for unit, value in units.items() if value.delta},
        )


class TrainingShell(Protocol):
    """Engine, disk and rounds of one peer. A shell need not implement methods with a body here."""

    # ------------------------------------------------ when the peer starts

    def newest(self) -> Applied:
        """The newest tip; `at_s` is when its round began."""

    def load(self, tip: Manifest, problem: Callable[[SavedWork], str | None]) -> SavedWork | None:
        """Fills the engine from the private state.

        None: there is no state, or it is damaged or has a `problem`; the engine is unchanged.
        """

    def adopt_frozen(self, tip: Manifest) -> bool:
        """Fills in the frozen values, which no private state has; returns like `adopt`."""

    def resumed(self, tip: Manifest, *, has_work: bool) -> None:
        """Notes that the model is at the tip; `has_work`: valid work will be offered again."""

    # ------------------------------------------------ a round

    def may_stop(self) -> None:
        """A point where a peer that was asked to stop may stop: no peer waits for its steps."""
        return

    async def train(
        self,
        tip: Manifest,
        task: Assignment,
        before: Work | None,
        left: Callable[[int, float, float], LocalWork],
    ) -> Work:
        """Takes local steps until none is left, or there is a newer tip.

        A peer that was asked to stop takes only steps for which other peers wait.

        Args:
            tip: the tip from which the steps start.
            task: the samples to be read.
            before: earlier steps since the last offer; the result contains these.
            left: called before each step; returns the steps that are left. Its arguments are the
                steps done, the mean seconds of a step and the seconds since the round began.
        """

    def store(
        self, tip: Manifest, bases: Mapping[Unit, Digest], tokens: int
    ) -> Mapping[Unit, OfferedUnit]:
        """Stores the present values of units for others to fetch; `tokens`: trained since the tip.

        The blobs are kept until `release`. `bases`: the agreed value from which each was trained.
        """

    def save(
        self, tip: Manifest, bases: Mapping[Unit, Digest], work: SavedWork
    ) -> Coroutine[Any, Any, Mapping[Unit, OfferedUnit]]:
        """Like `store`; awaiting the result makes the private state and the values durable [P6]."""

    def save_offer(
        self, tip: Manifest, bases: Mapping[Unit, Digest], work: SavedWork
    ) -> Coroutine[Any, Any, Mapping[Unit, OfferedUnit]]:
        """Like `save`, but only the blobs and `work` become durable, not the private state [P6]."""

    async def beside(
        self, offered: Coroutine[Any, Any, Offer], *, saves_state: bool
    ) -> Callable[[], Awaitable[Offer]]:
        """Makes and submits an offer while further steps, which do not change its values, run.

        `saves_state`: whether making the offer calls `save`. The result waits for the offer.
        """
        offer = await offered

        async def made() -> Offer:
            return offer

        return made

    def load_offer(self) -> SavedWork | None:
        """The newest work of `save_offer`, if its blobs are here; they are kept until `release`."""

    def submit(self, tip: Manifest, offer: Offer) -> None:
        """Puts an offer into the round after a tip."""

    async def pause(self, tip: Manifest, why: WhyPaused) -> Sequence[Applied]:
        """Waits for a newer tip, or until `why` returns None for the rooms of the peers present.

        Returns:
            Newer tips, oldest first; empty if there are none.
        """
        return ()

    async def wait(self, tip: Manifest, state: PeerState) -> Sequence[Applied]:
        """Waits for tips after `tip`. Returns them, oldest first. `state` is shown to people."""

    # ------------------------------------------------ a newer tip

    def adopt(
        self, manifest: Manifest, decision: Adoption, before: Manifest, *, at_start: bool = False
    ) -> bool:
        """Moves the engine from one manifest to the next, as decided.

        False: some blobs were deleted because of a newer tip; the engine is unchanged.
        """

    def lose(self, tokens: int, reason: str) -> None:
        """Notes that the tokens of some local steps will be in no manifest."""
        return

    def report(self, applied: Applied, work: Work | None, *, counted: bool) -> None:
        """Notes an adopted tip, this peer's steps on its parent, and whether these count."""
        return

    def release(self) -> None:
        """Releases the blobs of the offer, once it is counted or lost."""

    def validate(self, manifest: Manifest) -> None:
        """Measures the held-out loss of the agreed state that was just adopted."""
        return


def at_once(routine: Coroutine[Any, Any, T]) -> T:
    """Runs a routine with a shell that blocks its thread to wait; returns the result."""
    try:
        routine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    raise AssertionError("a shell that blocks never gives way")
