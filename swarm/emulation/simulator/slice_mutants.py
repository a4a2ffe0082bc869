"""Rounds with slices of the units, with one rule removed; see `mutants.py`."""

# What a method here does is what the rule's method would do without the rule.
# ruff: noqa: ARG002

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from swarm.emulation.simulator.mutants import Mutant
from swarm.emulation.simulator.taking_part import under
from swarm.protocol.adoption import Adoption
from swarm.protocol.manifest import Digest, Manifest, Unit
from swarm.protocol.rounds import Rules
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


def _own_rules(me: str, rules: Rules) -> Rules:
    own = replace(rules)
    vars(own)["schedule"] = _by_peer(me, rules.schedule)
    return own


SLICE_MUTANTS: Mapping[str, Mutant] = {
    "overdue_forgotten": Mutant(
        "U3: what was missed is due until it is renewed", training=_OverdueForgotten
    ),
    "units_not_due": Mutant(
        "U3: only units that are due are offered", rules=under(_Unscheduled), training=_AllOffered
    ),
    "stagger_by_peer": Mutant(
        "U2: all peers have the same schedule", rules=_own_rules, training=_OwnStagger
    ),
    "renewed_parts_kept": Mutant(
        "S1: a renewed part restarts from its mean", training=_RenewedPartsKept
    ),
    "parts_dropped": Mutant("S1: a part that was not due goes on", training=_PartsDropped),
    "offer_forgotten": Mutant(
        "P6: an offer is made once, also after a crash", training=_OfferForgotten
    ),
    "steps_taken_for_known": Mutant(
        "P6: the steps behind an older offer are not in the model", training=_StepsTakenForKnown
    ),
}
