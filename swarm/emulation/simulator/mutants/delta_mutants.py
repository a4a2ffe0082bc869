"""Rules of units that move by deltas, removed one at a time. Class deltas shows each removal."""

# A method without its rule ignores the rule's inputs.
# ruff: noqa: ARG002

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from swarm.emulation.simulator.faults.extended import EXTENDED
from swarm.emulation.simulator.mutants.mutants import Mutant
from swarm.emulation.simulator.peers.symbol_trainer import Trainer
from swarm.emulation.simulator.symbols.crash_disk import Disk, Live, PrivateState
from swarm.emulation.simulator.symbols.trained_symbols import Averaging, Deltas, Model, Step
from swarm.emulation.simulator.symbols.values import Tag
from swarm.experts import expert_of_unit, expert_unit
from swarm.protocol.exchange.deltas import Remainders
from swarm.protocol.rounds.adopter import Adopter
from swarm.protocol.rounds.blobs import Blobs
from swarm.protocol.training import Applied, Training
from swarm.protocol.training.adoption import Action, Adoption
from swarm.protocol.values.manifest import Digest, Manifest, Unit


class _OwnDeltaStays(Training):
    def decide(self, manifest: Manifest, previous: Digest) -> Adoption:
        return _changed(super().decide(manifest, previous), Action.CORRECTED, Action.CARRIED)


class _KnownDeltaBeginsAnew(Training):
    def decide(self, manifest: Manifest, previous: Digest) -> Adoption:
        return _changed(super().decide(manifest, previous), Action.CORRECTED, Action.RESTART)


class _MissBeginsAnew(Training):
    def decide(self, manifest: Manifest, previous: Digest) -> Adoption:
        return _changed(super().decide(manifest, previous), Action.CARRIED, Action.RESTART)


class _AnyBase(Training):
    def decide(self, manifest: Manifest, previous: Digest) -> Adoption:
        adoption = super().decide(manifest, previous)
        return _changed(adoption, Action.RESTART, Action.CARRIED) if manifest.deltas else adoption


def _changed(adoption: Adoption, action: Action, into: Action) -> Adoption:
    experts = {
        expert: replace(choice, action=into) if choice.action is action else choice
        for expert, choice in adoption.experts.items()
    }
    shared = into if adoption.shared is action else adoption.shared
    return replace(adoption, shared=shared, experts=experts)


class _UnknownDeltaTaken(Training):
    def decide(self, manifest: Manifest, previous: Digest) -> Adoption:
        adoption = super().decide(manifest, previous)
        experts = dict(adoption.experts)
        for expert, choice in adoption.experts.items():
            unit = expert_unit(expert)
            mine = dict(manifest.sources.get(unit, ())).get(self.me)
            if choice.action is Action.RESTART and unit in self.rules.averaged_deltas and mine:
                experts[expert] = replace(choice, action=Action.CORRECTED, rebase_from=mine)
        return replace(adoption, experts=experts)


class _TokensCarried(Training):
    async def adopt(self, newer: Sequence[Applied]) -> None:
        work = self.work
        await super().adopt(newer)
        is_shared = any(expert_of_unit(unit) is None for unit in self.carried)
        if is_shared and work and work.completed:
            self.work = work


class _Twice(Deltas):
    def followed(self, live: Live, step: Step) -> Counter[Tag]:
        extra = super().followed(live, step)
        if step.action is Action.CORRECTED and step.taken is not None:
            extra.subtract(self.values.moves[step.taken])
        return extra


class _EncodedAnew(Deltas):
    def load(self, private: PrivateState) -> None:
        super().load(replace(private, named={}))


def _trainer_of(deltas: type[Deltas]) -> type[Trainer]:
    class Changed(Model):
        deltas_type = deltas

    class Changing(Trainer):
        model_type = Changed

    return Changing


class _ReportedAtOnce(Averaging):
    def store(self, disk: Disk, digests: Collection[Digest]) -> None:
        for digest in digests:
            disk.write(digest)


class _LeftAtOnce(Remainders[Mapping[Tag, int]]):
    def found(self, tip: Digest, unit: Unit, delta: Digest, left: Mapping[Tag, int]) -> None:
        self._left[unit] = (2**31, left)


class _LeftAfterJump(Remainders[Mapping[Tag, int]]):
    def _passed_some_over(self, manifest: Manifest, before: Manifest) -> bool:
        return False


class _DeltasCollected(Adopter):
    def _kept_of(self, manifests: Iterable[Manifest]) -> Iterator[Digest]:
        return super()._kept_of(replace(manifest, sources={}) for manifest in manifests)


class _VotesWithoutDeltas(Blobs):
    def lacking(self, manifest: Manifest) -> dict[Digest, Unit]:
        return self.missing(manifest)


APART = replace(
    EXTENDED["R"],
    kinds={"split": 3.0, "isolate": 3.0, "pause": 3.0, "cut": 2.0},
    haste=(0.15, 0.5),
    hasty_reform=True,
    merging=0.0,
    small=0.0,
)
"""Peers miss rounds, and continue without the others."""

DELTA_MUTANTS: Mapping[str, Mutant] = {
    "own_delta_stays": Mutant(
        "carried steps: the counted delta is subtracted", training=_OwnDeltaStays
    ),
    "own_delta_twice": Mutant("carried steps: it is subtracted once", trainer=_trainer_of(_Twice)),
    "known_delta_begins_anew": Mutant(
        "carried steps: the counted delta is subtracted, and the rest stays",
        training=_KnownDeltaBeginsAnew,
    ),
    "miss_begins_anew": Mutant(
        "carried steps: steps that one round has left out stay", training=_MissBeginsAnew
    ),
    "any_base_goes_on": Mutant(
        "carried steps: only the base's successor moves it", training=_AnyBase
    ),
    "tokens_carried": Mutant(
        "carried steps: carried samples are dealt to others", training=_TokensCarried
    ),
    "encoded_anew": Mutant(
        "carried steps: a delta is made once", trainer=_trainer_of(_EncodedAnew)
    ),
    "reported_before_durable": Mutant(
        "delta means: means are durable before they are reported", arithmetic=_ReportedAtOnce
    ),
    "left_over_at_once": Mutant(
        "delta means: a remainder waits for the manifest", remainders=_LeftAtOnce
    ),
    "left_over_after_jump": Mutant(
        "delta means: a peer that passed manifests over drops it",
        remainders=_LeftAfterJump,
        mix=APART,
    ),
    "unknown_delta_taken": Mutant(
        "carried steps: only a delta known to be in x is subtracted", training=_UnknownDeltaTaken
    ),
    "deltas_collected": Mutant("GC: the deltas of the tip are kept", adopter=_DeltasCollected),
    "votes_without_deltas": Mutant("W6: voters can serve the deltas", blobs=_VotesWithoutDeltas),
}
