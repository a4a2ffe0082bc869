"""Which units the next round exchanges (slice schedule), and when a merge is due. Pure.

Policy: merge schedule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from functools import lru_cache

from swarm.config import MergingConfig
from swarm.experts import expert_of_unit
from swarm.protocol.values.manifest import Manifest, PeerId, Unit


def alpha_at(step: int, merging: MergingConfig) -> float:
    """Weight of the donors at a cumulative step: alpha0 (1 - min(step / decay_steps, 1))."""
    return merging.alpha * (1.0 - min(step / merging.decay_steps, 1.0))


def merged_until(step: int, merging: MergingConfig) -> int:
    """Number of merge intervals completed by this step; a merge sets `merged` to it."""
    return step // merging.interval_steps


def merge_due(manifest: Manifest, merging: MergingConfig) -> bool:
    """Whether the next manifest must be a merge (merge schedule).

    The answer depends on `step` and `merged` alone, never on the manifest's kind or a peer's own
    count. So it is the same at all peers, and a merge is due after a reform of a due manifest too.
    """
    return (
        alpha_at(manifest.step, merging) > 0.0
        and merged_until(manifest.step, merging) > manifest.merged
    )


@dataclass(frozen=True)
class Schedule:
    """When units are due; see `RoundConfig` for the settings.

    Attributes:
        experts_every: period of an expert, in training rounds.
        shared_every: period of a part of the shared tensors; above 1 only with `stagger`.
        stagger: whether units of one kind have different slots. An expert that missed its slot is
            then exchanged in a later round. Otherwise all experts are due in the rounds that are
            multiples of their period.
        rounds: training rounds of the run. The last one exchanges all units, not a slice.
    """

    experts_every: int = 1
    shared_every: int = 1
    stagger: bool = False
    rounds: int | None = None

    @property
    def cycle(self) -> int:
        """P: the rounds in which every unit is due once, if rounds are slices; otherwise 1.

        Limits that count rounds, such as those on silence, are multiplied by P (member removal,
        expert ownership).
        """
        return max(self.shared_every, self.experts_every) if self.stagger else 1

    def due(self, tip: Manifest) -> Set[Unit]:
        """Units that the training round after `tip` exchanges, without ownerless experts.

        Policy: due units.
        """
        number = tip.round + 1
        if not self.stagger:
            if number % self.experts_every == 0:
                return _with_owners(tip)
            return frozenset(unit for unit in tip.entries if expert_of_unit(unit) is None)
        if self.rounds is not None and number >= self.rounds:
            return _with_owners(tip)
        return _slice_after(_Case(self, tip))

    def due_of(self, peer: PeerId, tip: Manifest) -> tuple[Unit, ...]:
        """The due units that a peer offers: the shared parts, and the experts that it owns."""
        mine = {expert for expert, owners in tip.owners.items() if peer in owners}
        of_peer = ((unit, expert_of_unit(unit)) for unit in self.due(tip))
        return tuple(sorted(unit for unit, expert in of_peer if expert is None or expert in mine))

    def slice_after(self, tip: Manifest) -> frozenset[Unit]:
        """The due units if rounds are slices."""
        return self._parts_due(tip, tip.round + 1) | self._experts_due(tip, tip.round + 1)

    def _parts_due(self, tip: Manifest, number: int) -> frozenset[Unit]:
        every = self.shared_every
        if every == 1:
            return frozenset(unit for unit in tip.entries if expert_of_unit(unit) is None)
        codecs = {u: each.codec for u, each in tip.entries.items() if expert_of_unit(u) is None}
        slots = part_slots(codecs, every)
        return frozenset(unit for unit, slot in slots.items() if (number - slot) % every == 0)

    def _experts_due(self, tip: Manifest, number: int) -> frozenset[Unit]:
        every, slots = self.experts_every, expert_slots(tip, self.experts_every)
        numbered = ((unit, expert_of_unit(unit)) for unit in tip.entries)
        return frozenset(
            unit
            for unit, expert in numbered
            if expert is not None
            and unit not in tip.ownerless
            and ((number - slots[expert]) % every == 0 or self._is_overdue(tip, unit))
        )

    def _is_overdue(self, tip: Manifest, unit: Unit) -> bool:
        """Whether an expert was not renewed in its last slot."""
        return tip.round + 1 - tip.entries[unit].version > self.experts_every


def _with_owners(tip: Manifest) -> Set[Unit]:
    """All parts of the shared tensors, and the experts that have an owner."""
    units = tip.entries.keys()
    return units - tip.ownerless if tip.ownerless else units


@dataclass(frozen=True)
class _Case:
    """A cache key that compares manifests by identity; each offer needs the same slice."""

    schedule: Schedule
    name: int = field(init=False)
    tip: Manifest = field(compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", id(self.tip))


@lru_cache(maxsize=8)
def _slice_after(case: _Case) -> frozenset[Unit]:
    return case.schedule.slice_after(case.tip)


def part_slots(codecs: Mapping[Unit, str], every: int) -> dict[Unit, int]:
    """Slots of the parts of the shared tensors: neighbors have the same slot, or the next.

    Policy: slice schedule.

    The k-th of the n parts of one codec, which are equally large, has slot floor(k every / n),
    where `every` is the period.
    """
    slots: dict[Unit, int] = {}
    for codec in set(codecs.values()):
        parts = sorted((unit for unit, own in codecs.items() if own == codec), key=_in_order)
        slots |= {unit: place * every // len(parts) for place, unit in enumerate(parts)}
    return slots


def expert_slots(tip: Manifest, every: int) -> dict[int, int]:
    """Slots of experts: consecutive for one owner's experts, and for the owners' first experts.

    Policy: slice schedule.

    So an owner of `every` experts, or of a multiple, sends equally much in each round. If owners
    have fewer experts, all owners together do. If an expert moves, the experts of its old and its
    new owner get other slots. Experts of other owners get other slots only if the old or the new
    owner has no other expert.
    """
    owners = {expert: owners[0] for expert, owners in tip.owners.items() if owners}
    ranks = {peer: rank for rank, peer in enumerate(sorted(set(owners.values())))}
    taken: Counter[PeerId] = Counter()
    slots = dict.fromkeys(tip.owners, 0)
    for expert in sorted(owners):
        owner = owners[expert]
        slots[expert] = (taken[owner] + ranks[owner]) % every
        taken[owner] += 1
    return slots


def _in_order(unit: Unit) -> tuple[int, Unit]:
    """Sort key with numbers as numbers: shared.2 comes before shared.10."""
    return len(unit), unit
