"""The resources of this machine: memory, disk, cores, and its speed of multiplication."""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from math import inf
from pathlib import Path

import torch

from swarm.config import ComputeSection, RunConfig
from swarm.config.amounts import size_in_bytes
from swarm.errors import ConfigError
from swarm.model.cost import owned_per_peer
from swarm.peer.machine import worker_processes
from swarm.peer.machine.cpu_threads import ThreadedEngine, is_exact, usable_cores
from swarm.peer.machine.gpu_bus import bus_here
from swarm.protocol.values.manifest import ALL_EXPERTS
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.hardware import Machine, Processor
from swarm.train.fallback_engine import SteppingEngine
from swarm.train.planning.ladder import EnginePlan, Wishes, fits_here, most_with, plan_engine, rungs
from swarm.train.workers.parallel_engine import ParallelEngine

logger = logging.getLogger(__name__)

LEAST_BYTES = 64e6
"""Every machine for which this program plans has more, so a smaller size has a wrong unit."""
_DEVICES = Path("/dev")
_CGROUP = Path("/sys/fs/cgroup/memory.max")
_UPDATES_PER_CORE = 0.15e9
"""Parameters that fused AdamW updates per second and core: 30 bytes of memory traffic each."""


def machine_size(flag: str, text: str) -> float:
    """Bytes of a described machine's resource, by `size_in_bytes`; `--gpu 0` means no GPU.

    Raises:
        ConfigError: the size is invalid, or smaller than that of any machine.
    """
    try:
        size = size_in_bytes(text)
    except ConfigError as error:
        raise ConfigError(f"--{flag} {error}") from error
    if size < LEAST_BYTES and not (flag == "gpu" and size == 0):
        hint = f"at least {LEAST_BYTES / 1e6:.0f}MB, for example 24GB"
        raise ConfigError(f"--{flag} {text!r} is too small", hint=hint)
    return size


def device_of(asked: str) -> str:
    """The device on this machine for "auto", "cpu" or "cuda".

    Raises:
        ConfigError: "cuda" was asked for, and PyTorch finds no GPU.
    """
    has_gpu = torch.cuda.is_available()
    if asked == "auto":
        return "cuda" if has_gpu else "cpu"
    if asked == "cuda" and not has_gpu:
        why = "finds no GPU" if torch.version.cuda else "is built without CUDA"
        raise ConfigError(
            f"compute.device (--device) = cuda: PyTorch {torch.__version__} {why} on this machine",
            hint="use --device cpu, or install a driver and a PyTorch with CUDA",
        )
    return asked


def processor() -> Processor:
    """The processor that computes here, with a remedy if that is the CPU in spite of a GPU."""
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        return Processor(f"GPU {name}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free")
    has_cuda = torch.version.cuda is not None
    why = f"PyTorch {torch.__version__} {'finds no GPU' if has_cuda else 'is built without CUDA'}"
    cores, unused = f"{usable_cores()} CPU cores", _unused_gpu()
    if unused is None:
        return Processor(f"no GPU, {cores}: {why}")
    remedy = (
        "reinstall its driver, or the one that this PyTorch asks for; nvidia-smi must show it"
        if has_cuda
        else "install a PyTorch with CUDA: pip install torch, from PyPI, with no other index"
    )
    return Processor(f"{cores}, not the GPU of {unused}: {why}", remedy)


def _unused_gpu() -> Path | None:
    """The device file of a GPU that PyTorch does not find, unless GPUs are hidden on purpose."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return None
    return min(_DEVICES.glob("nvidia[0-9]*"), default=None)


def this_machine(compute: ComputeSection, folder: Path) -> Machine:
    """The resources of this machine for an engine, or the part that a person allows.

    Multiplies matrices for a moment to measure the speed.

    Args:
        compute: device and the memory that may be used.
        folder: a folder on the disk of the state directory; it may not exist yet.
    """
    device = device_of(compute.device)
    while not os.path.exists(folder):  # also where access is denied
        folder = folder.parent
    cores = compute.threads or usable_cores()
    on_gpu = torch.cuda.mem_get_info()[0] if device == "cuda" else 0
    return Machine(
        device=device,
        device_bytes=compute.device_memory_gb * 1e9 or on_gpu,
        host_bytes=compute.host_memory_gb * 1e9 or _host_bytes(),
        disk_bytes=shutil.disk_usage(folder).free,
        cores=cores,
        tflops=_measured_tflops(device),
        updates_g_s=cores * _UPDATES_PER_CORE / 1e9,
    )


def described_machine(machine: Machine, sizes: Mapping[str, str | None]) -> Machine:
    """A machine with other sizes of "gpu", "host" and "disk", as a person wrote them.

    A described GPU is assumed to have 100 TFLOP/s and a bus of 20 GB/s. A described machine without
    a GPU is assumed to compute as fast as this machine's cores, which are measured.

    Raises:
        ConfigError: a size is invalid, has no unit, or is absurd.
    """
    if sizes.get("gpu") is not None:
        gpu = machine_size("gpu", str(sizes["gpu"]))
        if gpu:
            machine = replace(machine, tflops=Machine.tflops, updates_g_s=Machine.updates_g_s)
        elif machine.device == "cuda":
            machine = replace(machine, tflops=_measured_tflops("cpu"))
        machine = replace(machine, device="cuda" if gpu else "cpu", device_bytes=gpu)
    if sizes.get("host") is not None:
        machine = replace(machine, host_bytes=machine_size("host", str(sizes["host"])))
    if sizes.get("disk") is not None:
        machine = replace(machine, disk_bytes=machine_size("disk", str(sizes["disk"])))
    return machine


def wishes_of(compute: ComputeSection, folder: Path | None) -> Wishes:
    """A person's decisions; `folder` would hold the frozen experts that are mapped from disk."""
    return Wishes(
        engine=compute.engine,
        precision=compute.precision,
        frozen=compute.frozen,
        moments=compute.moments,
        recompute=compute.recompute,
        activation_checkpoints=compute.activation_checkpoints,
        folder=folder if compute.map_frozen else None,
    )


def plan_here(
    run: RunConfig, owned: int, compute: ComputeSection, folder: Path
) -> tuple[Machine, EnginePlan]:
    """The engine for this machine, and for its workers if there are any.

    Args:
        run: the run.
        owned: experts of this peer.
        compute: the person's decisions.
        folder: folder for frozen experts that are mapped from disk.

    Returns:
        The resources of the engine, or of each worker; and the plan.

    Raises:
        ConfigError: a wanted resource is missing, or two decisions exclude each other.
    """
    machine, wishes = _with_wishes(run, compute, folder)
    return machine, plan_engine(run, owned, machine, wishes)


class Room:
    """Tells how many experts fit this machine's memory in every phase of a round.

    May be called at any time. The disk does not count, since a peer waits while a disk is full.

    Attributes:
        engine: the engine, once there is one. Until then, all levels that the person allows count;
            then only the engine's present level and the levels below. An engine takes memory, so
            call this object once before the engine exists.
    """

    def __init__(self, run: RunConfig, compute: ComputeSection, folder: Path) -> None:
        """Examines nothing yet; arguments as of `engine_for`."""
        self.engine: SteppingEngine | ParallelEngine | None = None
        self._place = run, compute, folder / "frozen"
        self._found: tuple[Machine, Wishes] | None = None
        self._known: dict[int, int] = {}

    def __call__(self) -> int:
        """`ALL_EXPERTS` if all experts of the run fit; fewer once the engine stepped down.

        Raises:
            ConfigError: a wanted resource is missing, or two decisions exclude each other.
        """
        if self._found is None:
            self._found = _with_wishes(*self._place)
        (machine, wishes), run = self._found, self._place[0]
        levels = self.engine.levels if self.engine else rungs(run, machine, wishes)
        if len(levels) not in self._known:
            most = most_with(run, machine, levels) or 0
            experts = run.model.num_experts
            logger.info("room: %d of %d experts fit this machine", most, experts)
            self._known[len(levels)] = most if most < experts else ALL_EXPERTS
        return self._known[len(levels)]


def _with_wishes(run: RunConfig, compute: ComputeSection, folder: Path) -> tuple[Machine, Wishes]:
    """The resources of the engine, or of each worker; and the person's decisions.

    Raises:
        ConfigError: a wanted resource is missing, or two decisions exclude each other.
    """
    machine, wishes = this_machine(compute, folder), wishes_of(compute, folder)
    here = worker_processes.num_workers(compute, machine.device)
    if here:
        fabric = worker_processes.fabric_of(compute, here, bus_here(compute.bus, here))
        machine, wishes = worker_processes.for_workers(run, compute, machine, wishes, fabric)
    else:
        worker_processes.meshes_of(compute, 0, run)  # refuses settings that need workers
    return machine, wishes


def engine_for(
    run: RunConfig,
    compute: ComputeSection,
    folder: Path,
    remaining_s: Callable[[], float] = lambda: inf,
    owned: int = 0,
) -> SteppingEngine | ParallelEngine:
    """The fastest engine that fits this machine, with the levels below; logs the choice.

    The engine is planned for an equal share of the experts, or for the experts that this peer
    already owns if these are more. It steps down if this peer later owns more.

    Args:
        run: the run.
        compute: the person's decisions.
        folder: folder of the run. Frozen experts may be mapped from files in it.
        remaining_s: seconds until this peer has to leave, even if workers are still missing or
            starting.
        owned: experts of this peer in the newest manifest that it knows.
    """
    owned = max(owned, owned_per_peer(run, run.run.peers))
    machine, plan = plan_here(run, owned, compute, folder / "frozen")
    logger.log(
        logging.INFO if plan.fits else logging.WARNING,
        "engine: %s (on %s; predicted: device %.1f GB; the whole process: %.1f GB; disk %.1f GB)",
        plan.reason,
        machine.device,
        plan.need.crowded / 1e9,
        plan.peaks.highest / 1e9,
        plan.need.disk / 1e9,
    )
    if compute.device == "auto" and (remedy := (found := processor()).remedy):
        logger.warning("computing with %s (%s)", found.text, remedy)
    workers = worker_processes.num_workers(compute, machine.device)
    if workers:
        place = worker_processes.place_of(run, compute, machine, workers)
        nodes = worker_processes.nodes_of(compute, plan, folder, place, remaining_s)
        return worker_processes.parallel_engine(
            run, plan, folder, place, nodes, remaining_s=remaining_s
        )
    return _with_threads(run, plan, machine, compute, folder)


def _with_threads(
    run: RunConfig, plan: EnginePlan, machine: Machine, compute: ComputeSection, folder: Path
) -> SteppingEngine:
    """The planned engine, with the configured number of threads or the measured best one."""

    def fits(options: EngineOptions, num_owned: int) -> bool:
        return fits_here(run, num_owned, options, machine)

    if compute.threads:
        reason = "as asked for"
    elif plan.options.device != "cpu":
        reason = "a GPU computes"
    elif torch.get_num_threads() == 1:
        reason = "only one core may be used"
    elif is_exact(run):
        torch.set_num_threads(1)
        reason = "the run is exact, more would change the order of sums; --threads sets another"
    else:
        return ThreadedEngine(run, plan, folder, fits, cores=torch.get_num_threads())
    logger.info("threads: %d (%s)", torch.get_num_threads(), reason)
    return SteppingEngine(run, plan.options, plan.below, folder, fits)


def _host_bytes() -> float:
    """Memory of the machine, or the container's limit if that is lower."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        limit = _CGROUP.read_text().strip()
    except OSError:
        return whole
    return min(whole, int(limit)) if limit.isdigit() else whole


@cache
def _measured_tflops(device: str) -> float:
    """Rate of a large matrix product; takes tenths of a second on a CPU."""
    on_gpu = device == "cuda"
    size = 4096 if on_gpu else 512
    dtype = torch.bfloat16 if on_gpu else torch.float32
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    best_s = float("inf")
    for _ in range(4):
        begin_s = time.perf_counter()
        (matrix @ matrix)[0, 0].item()
        best_s = min(best_s, time.perf_counter() - begin_s)
    return 2 * size**3 / best_s / 1e12
