"""What a simulated peer computes: means of offers and merged experts, as symbols."""

from __future__ import annotations

from swarm.emulation.simulator.disk import Disk
from swarm.emulation.simulator.model import Task
from swarm.emulation.simulator.values import Merged, mean_of
from swarm.emulation.simulator.violation import Violation, short
from swarm.experts import expert_unit
from swarm.protocol.events import MergeComputed, Reduce, UnitReduced
from swarm.protocol.manifest import Digest, Manifest, PeerId
from swarm.protocol.messages import ReducedUnit


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
