"""The cost of a run for a peer, the engine for it on a machine, and the machine's shortfalls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from swarm import durable
from swarm.config import ComputeSection, PeerConfig, RunConfig
from swarm.errors import ConfigError
from swarm.model.cost import Cost, cost_of, owned_per_peer
from swarm.peer.machine.gpu_bus import bus_here
from swarm.peer.machine.machine_survey import described_machine, this_machine, wishes_of
from swarm.peer.machine.worker_processes import fabric_of, for_workers, num_workers
from swarm.protocol.membership.ownership import losses_survived
from swarm.train.engine.hardware import Machine
from swarm.train.engine.mesh import Bus
from swarm.train.engine.sizes import Need
from swarm.train.planning.ladder import EnginePlan, most_experts, plan_engine
from swarm.train.planning.memory import HostPeaks


@dataclass(frozen=True)
class Shortfall:
    """One resource of which a machine has less than a plan needs.

    Attributes:
        what: the resource, in words.
        needed: bytes.
        there: usable bytes.
        remedy: what a person can do about it.
    """

    what: str
    needed: float
    there: float
    remedy: str

    def __str__(self) -> str:
        needs = f"{self.needed / 1e9:,.1f} GB of {self.what} needed, {self.there / 1e9:,.1f} GB"
        return f"{needs} usable: {self.remedy}"


def shortfalls(
    need: Need, peaks: HostPeaks, state_bytes: float, machine: Machine, most: int | None
) -> list[Shortfall]:
    """The resources that a machine lacks.

    Args:
        need: need of the engine.
        peaks: peaks of the process in host memory.
        state_bytes: bytes of the state directory.
        machine: resources of the machine.
        most: experts that fit with some engine; None if not even the shared tensors fit.
    """
    fewer = "rent a machine with more, or take smaller micro-batches or a smaller model"
    if most is not None:
        fewer = f"own at most {most} experts (more --peers, or a lower --capacity)"
    bounds = [
        ("disk", state_bytes + need.disk, machine.disk_bytes, "free some, or take a larger one"),
    ]
    if machine.device != "cpu":
        bounds.append(("GPU memory", need.crowded, machine.usable_device, fewer))
    bounds.append(("host memory", peaks.highest, machine.usable_host, fewer))
    return [Shortfall(*bound) for bound in bounds if bound[1] > max(bound[2], 0.0)]


AS_IT_IS: Mapping[str, str | None] = MappingProxyType({})


@dataclass(frozen=True)
class RunPlan:
    """The cost of a run for one of its peers.

    Attributes:
        cost: parameters, and bytes of state, disk and traffic, by formula.
        machine: the planned machine, or the share of one worker if it has workers (`fabric`).
        engine: the engine chosen for it, with its peaks of memory and predicted seconds of a step.
        owned_experts: experts that the peer trains.
        experts_that_fit: experts that it could train with some engine; None if not even the shared
            tensors fit.
        losses_survived: with such a machine for each peer of the run, how many may be lost before
            an expert waits for an owner; None if an expert waits already.
        losses_until_pause: how many may be lost before too few experts have an owner
            (`ownership.min_owned_share`).
        shortfalls: resources that the machine lacks, with remedies.
        is_beside: whether offers are made during steps where rounds overlap (background offers).
    """

    cost: Cost
    machine: Machine
    engine: EnginePlan
    owned_experts: int
    experts_that_fit: int | None
    losses_survived: int | None
    losses_until_pause: int | None
    shortfalls: tuple[Shortfall, ...]
    is_beside: bool

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
    """Plans a run for this machine, or for a described one.

    Multiplies matrices for a moment to measure the speed of this machine.

    Args:
        run: what is to be trained, by `run.run.peers` peers with equal shares.
        config: configuration of the machine: device, engine, memory that may be used.
        folder: the state directory; need not exist. Its files of the run count as free.
        sizes: "gpu", "host" and "disk" of a described machine, such as "24GB". "gpus" describes the
            workers: "8x80GB", "8" or "all". `compute.remote_workers` adds workers on equal
            machines.

    Raises:
        ConfigError: a size is invalid, a GPU is required and missing, or several GPUs are
            described without their bus.
    """
    compute, folder = (config or PeerConfig()).compute, Path(folder).expanduser()
    compute, sizes = _with_gpus(compute, sizes)
    cost, owned = cost_of(run, run.run.peers), owned_per_peer(run, run.run.peers)
    found = this_machine(compute, folder)
    found = replace(found, disk_bytes=found.disk_bytes + held_bytes(folder, run))
    machine = described_machine(found, sizes)
    wishes, here = wishes_of(compute, folder), _workers(compute, machine, sizes)
    if here:
        fabric = fabric_of(compute, here, _bus(compute, here, sizes))
        machine, wishes = for_workers(run, compute, machine, wishes, fabric)
    # Files that an engine maps take disk in addition to the state directory.
    beside = replace(machine, disk_bytes=max(machine.disk_bytes - cost.disk_bytes, 0.0))
    engine, most = plan_engine(run, owned, beside, wishes), most_experts(run, beside, wishes)
    short = shortfalls(engine.need, engine.peaks, cost.disk_bytes, machine, most)
    is_beside = engine.options.is_read_beside(run)
    rooms, experts = [most or 0] * run.run.peers, run.model.num_experts
    return RunPlan(
        cost=cost,
        machine=machine,
        engine=engine,
        owned_experts=owned,
        experts_that_fit=most,
        losses_survived=losses_survived(experts, rooms),
        losses_until_pause=losses_survived(experts, rooms, run.ownership.min_owned_share),
        shortfalls=tuple(short),
        is_beside=is_beside,
    )


def held_bytes(folder: Path, run: RunConfig) -> int:
    """Bytes on disk that a state directory already holds for a run with this configuration.

    Args:
        folder: the state directory; a peer may be running with it.
        run: configuration of the run, as in the run file. If it was founded twice, only one of the
            runs counts.
    """
    configs = [path for path in folder.glob("runs/*/config.json") if path.is_file()]
    of_run = [path.parent for path in configs if _content(path) == run.canonical_json()]
    return max((durable.bytes_on_disk(path) for path in of_run), default=0)


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _with_gpus(
    compute: ComputeSection, sizes: Mapping[str, str | None]
) -> tuple[ComputeSection, Mapping[str, str | None]]:
    """Splits "8x80GB" into 8 workers and their GPU; "8" and "all" leave the GPU as it is.

    Raises:
        ConfigError: the text has none of these forms.
    """
    text = sizes.get("gpus")
    if text is None:
        return compute, sizes
    number, is_described, size = text.lower().replace(" ", "").partition("x")
    if is_described and sizes.get("gpu") is not None:
        raise ConfigError(
            f"--gpus {text} and --gpu {sizes['gpu']} both say what a GPU has", hint="give one"
        )
    if number != "all" and not (number.isascii() and number.isdigit() and 0 < int(number) <= 64):
        raise ConfigError(f"--gpus {text!r} is no number of GPUs", hint="write 8x80GB, 8 or all")
    parallel = "all" if number == "all" else int(number)
    compute = compute.model_copy(update={"parallel": parallel})
    return compute, {**sizes, "gpu": size} if is_described else sizes


def _workers(compute: ComputeSection, machine: Machine, sizes: Mapping[str, str | None]) -> int:
    """Workers of one machine, which may be a described one; 0 for none.

    Raises:
        ConfigError: there are fewer GPUs, or their number is not given.
    """
    asked = compute.parallel
    if compute.remote_workers and asked == "off":
        raise ConfigError(
            f"compute.remote_workers (--remote-workers) = {compute.remote_workers}: this machine "
            "has no workers",
            hint="give --gpus too: at least one worker is the peer's own",
        )
    if sizes.get("gpu") is None or asked == "off" or machine.device == "cpu":
        # A plan does not need the address at which a peer takes workers of other machines.
        without = {"remote_workers": 0, "workers_from": ""}
        return num_workers(compute.model_copy(update=without), machine.device)
    if asked == "all":
        raise ConfigError("--gpus all of a GPU that is only described", hint="write 8x80GB")
    return asked


def _bus(compute: ComputeSection, here: int, sizes: Mapping[str, str | None]) -> Bus:
    """The bus between GPUs.

    Raises:
        ConfigError: several GPUs are described without their bus.
    """
    if here > 1 and compute.bus == "auto" and sizes.get("gpu") is not None:
        raise ConfigError(
            f"{here} GPUs that are only described may have NVLink or not",
            hint="say --bus nvlink or --bus pcie",
        )
    return bus_here(compute.bus, here)
