"""What a simulated peer computes: means of offers and merged experts, as symbols."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from swarm.emulation.simulator.disk import Disk
from swarm.emulation.simulator.model import Task
from swarm.emulation.simulator.values import Merged, Tag, mean_of
from swarm.emulation.simulator.violation import Violation, short
from swarm.experts import expert_unit
from swarm.protocol.events import MergeComputed, NotMade, Rebuild, Reduce, Stored, UnitReduced
from swarm.protocol.manifest import Digest, Manifest, PeerId, Unit
from swarm.protocol.messages import ReducedUnit
from swarm.protocol.remainders import Remainders


def average(
    me: PeerId, disk: Disk, task: Task, effect: Reduce, asked_at: Digest
) -> UnitReduced | None:
    """Averages and stores a unit; None if the round is over and its offers were dropped."""
    missing = [digest for _, digest in effect.inputs if digest not in disk]
    if missing:
        if disk.record.tip.digest != asked_at:
            return None
        raise Violation("I8", f"{me} cannot average {effect.unit}: {missing} not here")
    mean = mean_of(effect.unit, [digest for _, digest in effect.inputs], effect.weights)
    digest = task.values.digest_of(mean)
    disk.write(digest)
    size = task.rules.unit_bytes[effect.unit]
    return UnitReduced(effect.roster_id, effect.unit, ReducedUnit(digest, size))


@dataclass(frozen=True)
class Averaging:
    """Makes means of deltas, each a delta again."""

    remainders: Remainders[Mapping[Tag, int]]

    def __call__(
        self, me: PeerId, disk: Disk, task: Task, effect: Reduce, asked_at: Digest
    ) -> UnitReduced | None:
        """As `average`, of deltas and what earlier means left over [W5]."""
        assert effect.base is not None
        unit, values = effect.unit, task.values
        missing = [d for d in (effect.base, *(d for _, d in effect.inputs)) if d not in disk]
        if missing:
            if disk.record.tip.digest != asked_at:
                return None
            raise Violation("I8", f"{me} cannot average {unit}: {missing} not here")
        total = Counter(self.remainders.of(unit) or {})
        for _, digest in effect.inputs:
            total.update(values.moves[digest])
        delta = effect.inputs[0][1]
        if len(effect.inputs) > 1 or self.remainders.of(unit):
            delta = values.encoded(unit, effect.base, me, total)
        total.subtract(values.moves[delta])
        left = {tag: count for tag, count in total.items() if count}
        self.found(asked_at, unit, delta, left)
        value = task.values.moved(unit, effect.base, delta)
        self.store(disk, (value, delta))
        size = task.rules.unit_bytes[unit]
        return UnitReduced(effect.roster_id, unit, ReducedUnit(value, size, delta))

    def found(self, tip: Digest, unit: Unit, delta: Digest, left: Mapping[Tag, int]) -> None:
        """Remembers what is left over if this delta becomes agreed."""
        self.remainders.found(tip, unit, delta, left)

    def store(self, disk: Disk, digests: Collection[Digest]) -> None:
        """Both are durable before anybody hears of them."""
        for digest in digests:
            disk.write(digest)
        disk.sync(digests)


def rebuild(disk: Disk, task: Task, effect: Rebuild, *, is_odd: bool) -> Stored | NotMade:
    """Makes a value of a delta and stores it; a peer with odd arithmetic gets other bits [W6]."""
    made = task.values.moved(effect.unit, effect.base, effect.delta)
    if is_odd or made != effect.digest or effect.base not in disk or effect.delta not in disk:
        return NotMade(effect.digest, "other bits")
    disk.write(made)
    return Stored(made)


def merge(me: PeerId, disk: Disk, task: Task, tip: Manifest, variant: int) -> MergeComputed | None:
    """Merges and stores the experts of a tip; None if it moved on and its values were dropped."""
    units = [expert_unit(expert) for expert in range(task.rules.num_experts)]
    inputs = tuple(tip.entries[unit].digest for unit in units)
    if any(digest not in disk for digest in inputs):
        if disk.record.tip.digest != tip.digest:
            return None
        raise Violation("M3", f"{me} lacks values of its tip {short(tip)}")
    results = {}
    for expert, unit in enumerate(units):
        digest = task.values.digest_of(Merged(inputs, expert, variant))
        disk.write(digest)
        results[unit] = ReducedUnit(digest, task.rules.unit_bytes[unit])
    return MergeComputed(tip.digest, results)
