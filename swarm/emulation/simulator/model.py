"""The model that a simulated peer trains: values are symbols, which say how they came about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarm.emulation.simulator.deltas import Deltas, Step
from swarm.emulation.simulator.disk import Disk, PrivateState, Progress
from swarm.emulation.simulator.restarts import Past
from swarm.emulation.simulator.values import Trained, Values
from swarm.emulation.simulator.violation import Violation
from swarm.experts import expert_of_unit, expert_unit
from swarm.protocol.adoption import Action, Adoption, ExpertDecision
from swarm.protocol.dealing import Stretches
from swarm.protocol.manifest import Digest, Entry, Manifest, PeerId, Unit
from swarm.protocol.messages import OfferedUnit
from swarm.protocol.rounds import Rules


@dataclass(frozen=True)
class Task:
    """What all trainers of a schedule share."""

    rules: Rules
    values: Values


class Model:
    """What `swarm.peer.live_model` is in a real peer: moves values as it is told."""

    deltas_type = Deltas

    def __init__(self, me: PeerId, disk: Disk, task: Task) -> None:
        self.me, self.disk, self.task = me, disk, task
        self.progress: dict[int, Progress] = {}
        self.shared: dict[Unit, Digest] = {}
        """Values of the shared tensors after the finished local steps."""
        self.started: dict[Unit, Digest] = {}
        """Agreed values that parts which were not due really were trained from."""
        self.offered: set[Digest] = set()
        """Values of experts that were offered, and are kept until they have been adopted."""
        self.again: set[Digest] = set()
        """Blobs of an offer that was out when the peer stopped."""
        self.deltas = self.deltas_type(me, disk, task.rules, task.values)
        self.past = Past(me)

    def load(self, private: PrivateState) -> None:
        """Goes on from the private state."""
        self.progress, offered = dict(private.progress), private.work.offered
        self.shared = {u: d for u, d in offered.items() if expert_of_unit(u) is None}
        self.started = dict(private.started)
        self.offered = set(offered.values())
        self.deltas.load(private)
        self.past = Past(self.me, set(offered.values()), private.missed)

    def decided(self) -> None:
        """What was offered is in the tip, or never will be."""
        self.offered.clear()
        self.past.offered.clear()

    @property
    def pinned(self) -> set[Digest]:
        """Blobs that the disk keeps for the trainer."""
        return self.offered | self.again | self.deltas.pinned

    # ------------------------------------------------------------ training and offering

    def begin(self, tip: Manifest) -> None:
        """Local steps on a tip begin, maybe the first of this peer."""
        for unit in self.deltas.shared:
            if unit not in self.deltas.live:
                self.deltas.begin(unit, tip.entries[unit].digest)

    def advance(self) -> None:
        """Trains every owned expert, and the shared tensors, a bit further."""
        self.shared = {}
        for unit in self.deltas.live:
            self.deltas.train(unit)
        for expert, (base, value) in sorted(self.progress.items()):
            if expert_unit(expert) in self.deltas.live:
                continue
            trained = self._trained(expert_unit(expert), self._origin(base, value))
            self.progress[expert] = Progress(base, trained)

    def _origin(self, base: Digest, value: Digest) -> Digest:
        """The agreed value that a value really was trained from, whatever its base says."""
        made = self.task.values[value]
        return made.base if value != base and isinstance(made, Trained) else base

    def _trained(self, unit: Unit, base: Digest) -> Digest:
        return self.task.values.trained(unit, base, self.me)

    def values(self, bases: Mapping[Unit, Digest], read: Stretches) -> dict[Unit, OfferedUnit]:
        """Values of units as they are now; shared ones were trained on what was read."""
        units = self._values(bases, read)
        self.past.offered.update(offered.digest for offered in units.values())
        return units

    def _values(self, bases: Mapping[Unit, Digest], read: Stretches) -> dict[Unit, OfferedUnit]:
        units = {}
        for unit, base in bases.items():
            expert = expert_of_unit(unit)
            if unit in self.deltas.live:
                units[unit] = self.deltas.offer(unit, base)
                self.task.values.reads.setdefault(units[unit].digest, read)
                continue
            if expert is not None:
                value = self.progress[expert].value
                self.offered.add(value)
            elif unit in self.shared:
                value = self.shared[unit]
            else:
                value = self.shared[unit] = self._trained(unit, self.started.get(unit, base))
                self.task.values.reads[value] = read
            units[unit] = OfferedUnit(value, self.task.rules.unit_bytes[unit], base)
        return units

    # ------------------------------------------------------------ adopting

    def adopt(self, manifest: Manifest, decision: Adoption, *, follows: bool) -> list[int]:
        """Moves to an agreed state; returns experts taken up that others have trained.

        `follows`: whether the manifest's parent is what the model is at.
        """
        bases = {unit: live.base for unit, live in self.deltas.live.items()}
        self.past.adopt(manifest, decision, bases, follows=follows)
        if decision.shared is not Action.KEEP:
            self._restart(manifest, decision.kept_parts)
        for unit in self.deltas.shared:
            action = Action.KEEP if unit in decision.kept_parts else decision.shared
            step = Step(action, manifest.entries[unit], decision.shared_from.get(unit))
            self.deltas.adopt(unit, step)
        for expert, choice in decision.experts.items():
            self._follow(expert, choice, manifest)
        owned = {expert for expert, owners in manifest.owners.items() if self.me in owners}
        if self.progress.keys() != owned:
            raise Violation("N3", f"{self.me} trains {sorted(self.progress)} of {owned}")
        return [
            expert
            for expert, choice in decision.experts.items()
            if choice.action is Action.TAKE_UP and manifest.entries[expert_unit(expert)].version > 0
        ]

    def _restart(self, manifest: Manifest, kept: frozenset[Unit]) -> None:
        self.shared = {}
        if self.task.rules.shared_every > 1:
            for unit in self.task.rules.shared_units:
                agreed = manifest.entries[unit].digest
                if unit in kept and unit in self.started:
                    continue
                if self.started.get(unit) == agreed and unit not in manifest.sources:
                    raise Violation("S1", f"{self.me} drops its progress on {unit}")
                self.started[unit] = agreed

    def _follow(self, expert: int, choice: ExpertDecision, manifest: Manifest) -> None:
        unit = expert_unit(expert)
        if unit in self.task.rules.unit_coding:
            self._follow_by_delta(expert, choice, manifest.entries[unit])
        elif choice.base is None:
            del self.progress[expert]
        elif choice.action in (Action.REBASE, Action.AVERAGED):
            self._rebase(expert, choice)
        elif choice.action is Action.PUBLISHED and self.progress[expert].value != choice.base:
            # It was trained on after that was offered, so what it is now extends the agreed value.
            now = self._trained(expert_unit(expert), choice.base)
            self.progress[expert] = Progress(choice.base, now)
        elif choice.action is Action.KEEP:
            self.progress[expert] = Progress(choice.base, self.progress[expert].value)
        else:
            self.progress[expert] = Progress(choice.base, self._agreed(manifest, expert))

    def _follow_by_delta(self, expert: int, choice: ExpertDecision, entry: Entry) -> None:
        if choice.base is None:
            del self.progress[expert]
            self.deltas.drop(expert_unit(expert))
            return
        self.progress[expert] = Progress(choice.base, choice.base)
        self.deltas.adopt(expert_unit(expert), Step(choice.action, entry, choice.rebase_from))

    def _agreed(self, manifest: Manifest, expert: int) -> Digest:
        return manifest.entries[expert_unit(expert)].digest

    def _rebase(self, expert: int, choice: ExpertDecision) -> None:
        assert choice.base is not None and choice.rebase_from is not None
        base, value = self.progress[expert]
        # The difference is nothing if my offer was merged, and unknown if the merge is so far back
        # that the value before it need not be kept any more.
        if value == choice.rebase_from or not self._has_before(expert, choice.rebase_from):
            self.progress[expert] = Progress(choice.base, choice.base)
            return
        # Only a difference to the very value it was trained from makes it extend the merged one.
        extends = choice.base if choice.rebase_from in (base, *self.offered) else base
        self.progress[expert] = Progress(choice.base, self._trained(expert_unit(expert), extends))

    def _has_before(self, expert: int, before: Digest) -> bool:
        """Whether an expert's value before a merge is here [GC, M10].

        That of the tip before has to be, unless this peer came from elsewhere.
        """
        if before in self.disk:
            return True
        parent = self.disk.record.parent
        is_known = parent and parent.digest == self.disk.came_from
        if parent and is_known and parent.entries[expert_unit(expert)].digest == before:
            raise Violation("M10", f"{self.me} cannot rebase: {before} is gone")
        return False
