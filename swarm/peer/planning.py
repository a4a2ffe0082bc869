"""What a run costs a peer, and which engine runs it on a machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from swarm.config import PeerConfig, RunConfig
from swarm.model.cost import Cost, cost_of, owned_per_peer
from swarm.peer.fitting import Shortfall, shortfalls
from swarm.peer.machine import described_machine, this_machine, wishes_of
from swarm.train.ladder import EnginePlan, Machine, most_experts, plan_engine

AS_IT_IS: Mapping[str, str | None] = MappingProxyType({})


@dataclass(frozen=True)
class RunPlan:
    """What a run costs one peer of it.

    Attributes:
        cost: parameters, and bytes of state, disk and traffic, by formula.
        machine: what it is planned for.
        engine: the engine chosen for it, with its peaks of memory and predicted seconds of a step.
        owned_experts: that the peer trains.
        experts_that_fit: that it could train with some engine; None if not even the shared tensors.
        shortfalls: of what the machine has too little, and what would help.
    """

    cost: Cost
    machine: Machine
    engine: EnginePlan
    owned_experts: int
    experts_that_fit: int | None
    shortfalls: tuple[Shortfall, ...]

    @property
    def fits(self) -> bool:
        """Whether the machine has enough of everything."""
        return not self.shortfalls


def plan_run(
    run: RunConfig,
    config: PeerConfig | None = None,
    folder: Path | str = "~/.swarm/default",
    sizes: Mapping[str, str | None] = AS_IT_IS,
) -> RunPlan:
    """Plans a run for this machine, or for one that is described.

    Multiplies matrices for a moment, to know how fast this machine is.

    Args:
        run: what is to be trained, by `run.run.peers` peers with equal shares.
        config: of the machine: device, engine, memory that may be used.
        folder: on the disk that would hold the state directory; need not exist.
        sizes: "gpu", "host" and "disk" of a described machine, such as "24GB".

    Raises:
        ConfigError: a size is none, or a GPU is asked for that is not there.
    """
    compute, folder = (config or PeerConfig()).compute, Path(folder).expanduser()
    cost, owned = cost_of(run, run.run.peers), owned_per_peer(run, run.run.peers)
    machine = described_machine(this_machine(compute, folder), sizes)
    wishes = wishes_of(compute, folder)
    # What an engine maps from disk lies beside the state directory.
    beside = replace(machine, disk_bytes=max(machine.disk_bytes - cost.disk_bytes, 0.0))
    engine, most = plan_engine(run, owned, beside, wishes), most_experts(run, beside, wishes)
    short = shortfalls(engine.need, engine.peaks, cost.disk_bytes, machine, most)
    return RunPlan(cost, machine, engine, owned, most, tuple(short))
