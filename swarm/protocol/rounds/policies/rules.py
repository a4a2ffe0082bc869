"""The fixed inputs of a round machine: the run's rules, and its source of randomness."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol, TypeVar

from swarm.codings import coded_bytes
from swarm.config import MergingConfig, RunConfig
from swarm.experts import expert_of_unit
from swarm.protocol.membership.membership import Electorate, Guests, Members, with_voters
from swarm.protocol.values.invitation import Credential
from swarm.protocol.values.layout import Layout
from swarm.protocol.values.manifest import UNCODED, Manifest, Member, PeerId, Unit
from swarm.protocol.values.schedule import Schedule, merge_due
from swarm.protocol.values.updates import StepBound
from swarm.protocol.values.work import Book, Counts, next_book, reformed_book, trained, weights

T = TypeVar("T")

MARGIN = 1.25
"""A peer is dealt this many times the work that it does in a round's time, since it may get
faster."""
GROWTH = 2
"""In one round, the pace of a member, and so its deal, at most doubles or halves."""
MOST = 4
"""A member is dealt at most this many times the work of the median voter in a round's time. The
limit is there because members report their own work, and more work allows their values to move
further (update bounds)."""


class Randomness(Protocol):
    """The part of `random.Random` that chooses peers to greet, and nonces of reforms."""

    def sample(self, population: Sequence[T], k: int) -> list[T]:
        """`k` different elements."""

    def getrandbits(self, k: int, /) -> int:
        """`k` random bits."""


@dataclass(frozen=True)
class Rules:
    """The settings on which all peers of a run agree, as far as rounds need them."""

    run: str
    """Run id."""
    num_experts: int
    owners_per_expert: int
    """R: the number of peers that train one expert."""
    merging: MergingConfig
    unit_bytes: Mapping[Unit, int]
    """Size of every unit's blob on the wire."""
    unit_codec: Mapping[Unit, str]
    experts_every: int
    """Period of an expert, in training rounds."""
    local_steps_at: Callable[[int], int]
    """Steps that each peer takes, by the run's tokens so far; see `step_after`."""
    batch_tokens_at: Callable[[int], int]
    """Tokens of each of these steps: whole samples."""
    sequence_length: int
    """T: tokens of a sample."""
    planned_peers: int = 1
    """Peers that the run is planned for."""
    round_seconds: float | None = None
    """Time in which a peer takes as many local steps as fit; None: the exact mode, with
    `local_steps_at`."""
    shared_every: int = 1
    """Period of each part of the shared tensors, in training rounds."""
    stagger: bool = False
    """Whether each round exchanges its slice of the units, see `Schedule`."""
    rounds: int | None = None
    """Training rounds of the run; None: without end."""
    overlaps: bool = False
    """Whether a peer begins its next local steps before the round ends (overlapped rounds)."""
    is_dealt: bool = False
    """Whether the members are dealt one common text."""
    silent_limit: int = 3
    """K: the number of cycles for which a member may be silent (member removal), and of periods for
    which an expert may stay without a new value (expert ownership)."""
    owner_silent_limit: int = 1
    """The number of silent cycles through which a member keeps its experts; it keeps its vote
    through K (expert ownership)."""
    min_owned_share: float = 0.0
    """Local steps pause if a smaller share of the experts has owners, unless the peers present have
    room for this share (ownership pause)."""
    step_bound: StepBound | None = None
    """Largest move of an element in a local step (update bounds); None: values are not checked."""
    is_open: bool = True
    """Whether strangers may join without an invitation [R8]."""
    certificates: bool = True
    """Whether a decided manifest needs the signed votes of a quorum."""
    unit_coding: Mapping[Unit, str] = field(default_factory=dict)
    """Coding of the deltas, for units that move by deltas."""
    delta_bytes: Mapping[Unit, int] = field(default_factory=dict)
    """Size of the deltas of these units."""

    @classmethod
    def of(cls, run_id: str, run: RunConfig, layout: Layout) -> Rules:
        """The rules that follow from a run's configuration."""
        return cls(
            run=run_id,
            num_experts=run.model.num_experts,
            owners_per_expert=run.ownership.owners_per_expert,
            merging=run.merging,
            unit_bytes={unit.unit: unit.num_bytes for unit in layout.units},
            unit_codec={unit.unit: unit.codec for unit in layout.units},
            unit_coding={u.unit: u.coding for u in layout.units if u.coding != UNCODED},
            delta_bytes={u.unit: coded_bytes(u) for u in layout.units if u.coding != UNCODED},
            experts_every=run.round.experts_every,
            shared_every=run.round.shared_every,
            stagger=run.round.stagger,
            rounds=run.run.rounds,
            overlaps=run.round.overlap == "round",
            local_steps_at=lambda tokens: run.phase_at(tokens).local_steps,
            batch_tokens_at=lambda tokens: run.phase_at(tokens).batch_tokens,
            sequence_length=run.data.sequence_length,
            planned_peers=run.run.peers,
            round_seconds=run.round.seconds,
            is_dealt=run.data.mode == "common",
            min_owned_share=run.ownership.min_owned_share,
            step_bound=StepBound.of(run),
            is_open=run.run.admission == "open",
        )

    def next_book(self, book: Book, counted: Counts, quotas: Counts) -> Book:
        """The book after a round (text deals)."""
        return next_book(book, counted, quotas, keeps_rest=self.overlaps)

    def reformed_book(self, book: Book, quotas: Counts) -> Book:
        """The book of a reform (text deals)."""
        return reformed_book(book, quotas)

    def rooms_of(self, members: Members) -> dict[PeerId, int]:
        """How many experts fit the machine of each member (expert ownership)."""
        return {peer: member.room for peer, member in members.items()}

    def guests(self, parent: Manifest, shown: Mapping[PeerId, Credential]) -> Guests:
        """Decides who may join after a manifest, and for whom anchors vouch [R8]."""
        return Guests.of(parent, shown, run=self.run, is_open=self.is_open)

    def with_voters(
        self, members: Members, contributors: Collection[PeerId], seed: str
    ) -> Electorate:
        """The members after a round, with or without a vote [R7]."""
        return with_voters(members, contributors, seed)

    def tokens_after(self, parent: Manifest, work: Mapping[PeerId, int]) -> int:
        """Cumulative tokens after a round with this work (claimed work)."""
        is_timed = self.round_seconds is not None
        return parent.tokens + (trained(work, parent.trusted) if is_timed else sum(work.values()))

    def pace_after(self, known: float, tokens: int, seconds: float) -> float:
        """The pace of a member after an offer of `tokens` in `seconds`.

        Policy: counted work.

        With `round.seconds`, the claimed time counts as at least 1.25 / 2 of a round. So the next
        deal, of 1.25 times the samples that fit, has at most twice these tokens. A known pace
        changes by a factor of at most 2.
        """
        if self.round_seconds is None:
            return tokens / seconds if seconds > 0 else known
        pace = tokens / max(seconds, MARGIN / GROWTH * self.round_seconds)
        return min(max(pace, known / GROWTH), known * GROWTH) if known else pace

    def most_of_median(self, member: Member) -> float:
        """Limit of a member's deal, in multiples of the median voter's work (deal sizes)."""
        return MOST if member.weight == 1 else max(MOST, MARGIN * member.weight)

    def weights(
        self, work: Mapping[PeerId, int], peers: Sequence[PeerId], parent: Manifest
    ) -> tuple[int, ...] | None:
        """Weights of the values of a unit in the round after a manifest (mean weights)."""
        return weights(work, peers, parent.trusted)

    def step_after(self, parent: Manifest, tokens: int) -> int:
        """Cumulative steps after a round that raises the run's tokens to `tokens` (step count).

        In the exact mode, the steps that every peer takes are added. With `round.seconds`, steps
        are counted in tokens: a step is one batch of each peer for which the run is planned.
        """
        if self.round_seconds is None:
            return parent.step + self.local_steps_at(parent.tokens)
        return self.steps_of(tokens, parent)

    def steps_of(self, tokens: int, parent: Manifest) -> int:
        """Steps of the run for a number of tokens of all peers, if `round.seconds` is set."""
        return tokens // (self.batch_tokens_at(parent.tokens) * self.planned_peers)

    def is_verbatim(self, unit: Unit) -> bool:
        """Whether a unit moves by its single owner's delta, so that the owner's value is agreed."""
        return (
            self.owners_per_expert == 1 and unit in self.unit_coding and unit in self.expert_units
        )

    @cached_property
    def averaged_deltas(self) -> frozenset[Unit]:
        """Units that move by the mean of offered deltas, even if only one delta is offered."""
        return frozenset(unit for unit in self.unit_coding if not self.is_verbatim(unit))

    @cached_property
    def offered_bytes(self) -> Mapping[Unit, int]:
        """Size of each unit's offer: of its value, or of a delta to be averaged."""
        return {**self.unit_bytes, **{u: self.delta_bytes[u] for u in self.averaged_deltas}}

    @cached_property
    def moved_bytes(self) -> Mapping[Unit, int]:
        """Bytes of the next value of each unit for a peer that has the present value."""
        return {**self.unit_bytes, **self.delta_bytes}

    def saves_state(self, tip: Manifest) -> bool:
        """Whether a peer's whole private state is durable before its offer on a tip [P6].

        The private state has 12 bytes for each trained parameter, so writing it in each round of a
        cycle would wear a disk out. With coded deltas it is saved once a cycle, and the other
        rounds save only the offer. Without codings a run continues with the same bits after any
        crash, so each round saves the whole state.
        """
        return not self.unit_coding or tip.round % self.schedule.cycle == 0

    @cached_property
    def schedule(self) -> Schedule:
        """Which units are due when."""
        return Schedule(self.experts_every, self.shared_every, self.stagger, self.rounds)

    @property
    def silent_rounds(self) -> int:
        """Silent rounds that a member survives (member removal)."""
        return self.silent_limit * self.schedule.cycle

    @property
    def owner_silent_rounds(self) -> int:
        """Silent rounds through which a member keeps its experts (expert ownership)."""
        return self.owner_silent_limit * self.schedule.cycle

    def may_be_renewed(self, tip: Manifest) -> Mapping[Unit, int]:
        """Units that the next manifest may renew, with their bytes for a peer that has the tip.

        Timeouts have to allow for these bytes. If a round exchanges no slice, all units count. A
        merge has no deltas.
        """
        is_merge = merge_due(tip, self.merging)
        sizes = self.unit_bytes if is_merge else self.moved_bytes
        if not self.stagger:
            return sizes
        due = self.expert_units.keys() if is_merge else self.schedule.due(tip)
        return {unit: sizes[unit] for unit in due}

    @cached_property
    def shared_units(self) -> tuple[Unit, ...]:
        """The parts of the shared tensors, sorted."""
        return tuple(unit for unit in sorted(self.unit_bytes) if expert_of_unit(unit) is None)

    @cached_property
    def expert_units(self) -> Mapping[Unit, int]:
        """The expert of each expert unit, sorted by unit."""
        numbered = ((unit, expert_of_unit(unit)) for unit in sorted(self.unit_bytes))
        return {unit: expert for unit, expert in numbered if expert is not None}
