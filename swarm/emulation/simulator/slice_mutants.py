"""Rounds with slices of the units, with one rule removed; see `mutants.py`."""

# What a method here does is what the rule's method would do without the rule.
# ruff: noqa: ARG002

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from swarm.emulation.simulator.mutants import Mutant
from swarm.emulation.simulator.taking_part import UnderTest, tested_under
from swarm.protocol.adoption import Adoption
from swarm.protocol.manifest import Digest, Manifest, Unit
from swarm.protocol.rounds import RoundMachine, Rules
from swarm.protocol.schedule import Schedule
from swarm.protocol.training import Training


class _InSlotOnly(Schedule):
    def _is_overdue(self, tip: Manifest, unit: Unit) -> bool:
        return False


class _OverdueForgotten(Training):
    def due(self) -> Sequence[Unit]:
        return _InSlotOnly(**vars(self.rules.schedule)).due_of(self.me, self.tip)


class _Unscheduled(Rules):
    schedule = Schedule()


class _AllOffered(Training):
    def due(self) -> Sequence[Unit]:
        return Schedule().due_of(self.me, self.tip)


class _RenewedPartsKept(Training):
    def decide(self, manifest: Manifest, previous: Digest) -> Adoption:
        return replace(super().decide(manifest, previous), kept_parts=frozenset(self.part_bases))


class _PartsDropped(Training):
    def decide(self, manifest: Manifest, previous: Digest) -> Adoption:
        return replace(super().decide(manifest, previous), kept_parts=frozenset())


class _OfferForgotten(Training):
    def _find_offer(self) -> None:
        pass


class _StepsTakenForKnown(Training):
    def decide(self, manifest: Manifest, previous: Digest) -> Adoption:
        self.offers += [self.again] if self.again else []
        return super().decide(manifest, previous)


def _by_peer(me: str, schedule: Schedule) -> Schedule:
    class Own(Schedule):
        def due(self, tip: Manifest) -> frozenset[Unit]:
            return frozenset(super().due(replace(tip, round=tip.round + sum(me.encode()))))

    return Own(**vars(schedule))


class _OwnStagger(Training):
    def due(self) -> Sequence[Unit]:
        return _by_peer(self.me, self.rules.schedule).due_of(self.me, self.tip)


class _OwnRules(RoundMachine):
    def __init__(self, me: str, capacity: float, rules: Rules, *rest: Any, **options: Any) -> None:
        own = replace(rules)
        vars(own)["schedule"] = _by_peer(me, rules.schedule)
        super().__init__(me, capacity, own, *rest, **options)


SLICE_MUTANTS: Mapping[str, Mutant] = {
    "overdue_forgotten": Mutant(
        "U3: what was missed is due until it is renewed", UnderTest(training=_OverdueForgotten)
    ),
    "units_not_due": Mutant(
        "U3: only units that are due are offered",
        replace(tested_under(_Unscheduled), training=_AllOffered),
    ),
    "stagger_by_peer": Mutant(
        "U2: all peers have the same schedule", UnderTest(machine=_OwnRules, training=_OwnStagger)
    ),
    "renewed_parts_kept": Mutant(
        "S1: a renewed part restarts from its mean", UnderTest(training=_RenewedPartsKept)
    ),
    "parts_dropped": Mutant(
        "S1: a part that was not due goes on", UnderTest(training=_PartsDropped)
    ),
    "offer_forgotten": Mutant(
        "P6: an offer is made once, also after a crash", UnderTest(training=_OfferForgotten)
    ),
    "steps_taken_for_known": Mutant(
        "P6: the steps behind an older offer are not in the model",
        UnderTest(training=_StepsTakenForKnown),
    ),
}
