"""Worker processes of this peer: their number, each one's share of the machine, their engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from itertools import product
from math import inf, lcm
from pathlib import Path

import torch

from swarm.config import ComputeSection, RunConfig
from swarm.errors import ConfigError
from swarm.peer.machine.cpu_threads import is_exact
from swarm.peer.machine.state_directory import RunDirectory
from swarm.train.engine.hardware import Machine
from swarm.train.engine.mesh import Bus, Fabric, Mesh
from swarm.train.parallel.tensor_parallel import why_not_cut
from swarm.train.planning.ladder import EnginePlan, Wishes
from swarm.train.workers.command_history import Saved
from swarm.train.workers.controller_wire import key_at
from swarm.train.workers.crew import Crew, Place
from swarm.train.workers.nodes import Nodes, listen
from swarm.train.workers.parallel_engine import ParallelEngine
from swarm.train.workers.roster import Wanted, address_of

logger = logging.getLogger(__name__)


def num_workers(compute: ComputeSection, device: str) -> int:
    """Worker processes wanted on this machine; 0 for the peer's own process alone.

    Args:
        compute: the person's decisions.
        device: "cuda" or "cpu", on which this peer computes.

    Raises:
        ConfigError: there are fewer GPUs than wanted, or none for the engine; or settings of
            workers on other machines are wrong.
    """
    num_elsewhere(compute)  # refuses wrong settings of workers on other machines
    asked = compute.parallel
    if asked == "off":
        return 0
    if device == "cpu":
        if compute.device == "cpu" and asked != "all":
            return asked
        raise ConfigError(
            f"compute.parallel (--gpus) = {asked}: there is no GPU here to compute on",
            hint="leave it out; with --device cpu a number of processes computes on the CPU",
        )
    there = torch.cuda.device_count()
    number = there if asked == "all" else asked
    if number > there:
        raise ConfigError(
            f"compute.parallel (--gpus) = {asked}: PyTorch finds {there} on this machine",
            hint="ask for fewer, or for all",
        )
    return number


def num_elsewhere(compute: ComputeSection) -> int:
    """The number of workers on other machines; 0 for none.

    Raises:
        ConfigError: their address is not given, or this machine has no workers itself.
    """
    asked = compute.remote_workers
    if bool(asked) != bool(compute.workers_from):
        given, missing = ("compute.remote_workers (--remote-workers)", "--workers-from HOST:PORT")
        if compute.workers_from:
            given, missing = ("compute.workers_from (--workers-from)", "--remote-workers N")
        raise ConfigError(f"{given} is given alone", hint=f"give {missing} too, or neither")
    if asked and compute.parallel == "off":
        raise ConfigError(
            f"compute.remote_workers (--remote-workers) = {asked}: this machine has no workers",
            hint="give --gpus too: at least one worker is the peer's own",
        )
    if asked:
        _listening_at(compute)
        _refuse_far_streaming(compute)
    return asked


def _refuse_far_streaming(compute: ComputeSection) -> None:
    if compute.engine == "streaming":
        raise ConfigError(
            f"compute.remote_workers (--remote-workers) = {compute.remote_workers}: "
            "streaming workers share one copy of the weights in the memory of one machine",
            hint="leave out one of --remote-workers and --engine streaming",
        )


def meshes_of(
    compute: ComputeSection, workers: int, run: RunConfig, *, per_node: int = 0
) -> tuple[Mesh, ...]:
    """All ways to hold the model on a peer's workers; the planner takes the fastest.

    Args:
        compute: the person's decisions.
        workers: computing processes on all machines; 0 for the peer's own process alone.
        run: its model gives the numbers of experts, heads and layers.
        per_node: workers of one machine; 0 for all of them.

    Raises:
        ConfigError: the workers cannot be split as configured.
    """
    tensors = _tensors(compute, workers, run, per_node)
    if compute.tensor_parallel > 1:
        compute = compute.model_copy(update={"expert_parallel": compute.tensor_parallel})
    asked = compute.pipeline, compute.expert_parallel
    if min(asked) > 1 and workers % (asked[0] * asked[1]):
        name = "tensor_parallel" if compute.tensor_parallel > 1 else "expert_parallel"
        raise ConfigError(
            f"the {workers} workers (--gpus) cannot be divided by {asked[0] * asked[1]}, the "
            f"product of compute.pipeline = {asked[0]} and compute.{name} = {asked[1]}",
            hint="leave one of the two out",
        )
    dealt = _dealings(compute, workers, run.model.num_experts)
    cut = _stagings(compute, workers, run.model.num_hidden_layers)
    size = max(workers, 1)
    # Experts and layers are both split only if both splits are configured.
    pairs = [(ep, pp) for ep, pp in product(dealt, cut) if 1 in {ep, pp} or min(asked) > 1]
    found = [Mesh(size, ep, pp) for ep, pp in pairs if 1 in tensors]
    return *found, *(Mesh(size, ep, pp, ep) for ep, pp in pairs if 1 < ep in tensors)


def _tensors(
    compute: ComputeSection, workers: int, run: RunConfig, per_node: int
) -> tuple[int, ...]:
    """Possible numbers of workers over which heads are split; raises as `meshes_of`."""
    asked, here = compute.tensor_parallel, per_node or workers
    other = {
        "compute.expert_parallel": compute.expert_parallel not in {0, asked},
        'compute.shard = "state"': compute.shard == "state",
        'compute.moments = "int8"': compute.moments == "int8",
    }
    if asked < 2:
        is_free = asked == 0 and not any(other.values()) and compute.pipeline < 2
        ways = _divisors(here, run.model.num_experts) if is_free and workers else (1,)
        return tuple(n for n in ways if not why_not_cut(run, n))
    name = f"compute.tensor_parallel = {asked}"
    for setting in [each for each in other if other[each]]:
        raise ConfigError(
            f"{name} and {setting} cannot be combined",
            hint="leave one of the two out",
        )
    if workers == 0 or here % asked or workers % asked:
        raise ConfigError(
            f"{name}: it has to divide the {here or 'missing'} workers of a machine (--gpus)",
            hint="leave it out: heads are cut where that is fastest",
        )
    if reason := why_not_cut(run, asked):
        raise ConfigError(f"{name}: {reason}", hint="choose a smaller number, or leave it out")
    return (asked,)


def _dealings(compute: ComputeSection, workers: int, num_experts: int) -> tuple[int, ...]:
    """Possible numbers of workers over which experts are dealt; raises errors like `meshes_of`."""
    asked = compute.expert_parallel or int(compute.pipeline > 1)
    if asked > 1 and (workers == 0 or workers % asked or asked > num_experts):
        raise ConfigError(
            f"compute.expert_parallel = {asked}: it has to divide the {workers or 'missing'} "
            f"workers (--gpus), and not to exceed the {num_experts} experts",
            hint="leave it out: the experts are dealt out where that is fastest",
        )
    return (asked,) if asked else _divisors(workers, num_experts)


def _stagings(compute: ComputeSection, workers: int, num_layers: int) -> tuple[int, ...]:
    """Possible numbers of pipeline stages, 1 for no pipeline; raises as `meshes_of`."""
    asked = compute.pipeline or int(compute.expert_parallel > 1)
    if asked > 1 and (workers == 0 or workers % asked or asked > num_layers):
        raise ConfigError(
            f"compute.pipeline = {asked}: it has to divide the {workers or 'missing'} workers "
            f"(--gpus), and not to exceed the {num_layers} layers",
            hint="leave it out: the layers are cut where that is fastest",
        )
    return (asked,) if asked else _divisors(workers, num_layers)


def _divisors(workers: int, most: int) -> tuple[int, ...]:
    workers = max(workers, 1)
    return tuple(n for n in range(1, min(workers, most) + 1) if workers % n == 0)


def for_workers(
    run: RunConfig, compute: ComputeSection, machine: Machine, wishes: Wishes, workers: Fabric
) -> tuple[Machine, Wishes]:
    """The share of each of a peer's workers, and the possible ways to hold the model on them.

    Args:
        run: the model.
        compute: the person's decisions.
        machine: the peer's; the others are assumed to be equal.
        wishes: wishes of a single engine.
        workers: the workers of all machines.

    Raises:
        ConfigError: as `meshes_of`; or the workers are configured to stream and cannot.
    """
    meshes = meshes_of(compute, workers.size, run, per_node=workers.per_node)
    cut = {
        "compute.expert_parallel": compute.expert_parallel > 1,
        "compute.pipeline": compute.pipeline > 1,
        "compute.tensor_parallel": compute.tensor_parallel > 1,
        'compute.shard = "state"': compute.shard == "state",
    }
    if workers.nodes > 1:
        _refuse_far_streaming(compute)
    if compute.engine == "streaming" and any(cut.values()):
        asked = " and ".join(name for name, is_asked in cut.items() if is_asked)
        raise ConfigError(
            f"{asked}: the streaming engine has one copy of the weights and cuts nothing",
            hint="leave it out, or --engine streaming",
        )
    wishes = replace(
        wishes,
        engine="resident" if workers.nodes > 1 or any(cut.values()) else wishes.engine,
        folder=None,  # workers do not map frozen experts from disk
        meshes=meshes,
        schedule=compute.pipeline_schedule,
        chunks=compute.pipeline_chunks,
        shard=compute.shard,
    )
    return replace(share_of(machine, workers.per_node), fabric=workers), wishes


def fabric_of(compute: ComputeSection, here: int, bus: Bus) -> Fabric:
    """The workers of a peer, `here` of them on its own machine."""
    between_gb_s = compute.between_gbit / 8
    return Fabric(here + compute.remote_workers, here, bus, between_gb_s)


def share_of(machine: Machine, workers: int) -> Machine:
    """The share of each of these workers: a GPU, and its part of the host."""
    return replace(
        machine,
        host_bytes=machine.host_bytes / workers,
        cores=max(1, machine.cores // workers),
        updates_g_s=machine.updates_g_s / workers,
    )


def place_of(run: RunConfig, compute: ComputeSection, share: Machine, workers: int) -> Place:
    """The place where workers compute, each with this share of the machine."""
    threads = compute.threads or (1 if is_exact(run) else share.cores)
    backend = "nccl" if share.device == "cuda" else "gloo"
    return Place(workers, share.device, threads, backend)


def ready_for_nodes(compute: ComputeSection, state_folder: Path) -> None:
    """Makes the key for other machines and logs its path, if this peer wants their workers.

    Call this before a text is read or a model is fetched, which may take hours. Then workers can be
    ready when this peer begins to wait for them.

    Raises:
        ConfigError: this peer cannot listen at the address.
        StateError: the key cannot be read or made.
    """
    if not num_elsewhere(compute):
        return
    path = _key_path(compute, state_folder)
    key_at(path, may_make=True)
    host, port = _listening_at(compute)
    listen(host, port).close()
    if port:  # else logged once this peer listens
        _say_how_to_bring_workers(host, port, path)


def _say_how_to_bring_workers(host: str, port: int, path: Path) -> None:
    logger.info(
        "workers of other machines: swarm-worker --controller %s:%d --key COPY_OF_THIS (%s)",
        host,
        port,
        path,
    )


def _key_path(compute: ComputeSection, state_folder: Path) -> Path:
    return Path(compute.workers_key or state_folder / "workers.key").expanduser().absolute()


def _listening_at(compute: ComputeSection) -> tuple[str, int]:
    return address_of(compute.workers_from, "compute.workers_from (--workers-from)")


def nodes_of(
    compute: ComputeSection,
    plan: EnginePlan,
    folder: Path,
    place: Place,
    remaining_s: Callable[[], float] = lambda: inf,
) -> Nodes | None:
    """Listens for machines that bring workers; None if this peer wants none.

    Args:
        compute: the person's decisions.
        plan: plan of the engine of each worker.
        folder: folder of the run, in the state directory.
        place: where the workers of this machine compute.
        remaining_s: longest wait for these machines in seconds, from now on.

    Raises:
        ConfigError: this peer cannot listen at the address.
        StateError: the key cannot be read or made.
    """
    elsewhere = num_elsewhere(compute)
    if not elsewhere:
        return None
    path = _key_path(compute, folder.parents[1])
    key, address = key_at(path, may_make=True), _listening_at(compute)
    unit = lcm(*(each.ep * each.pp for each in (plan.options, *plan.below)))
    wanted = Wanted(place.size, elsewhere, unit)
    nodes = Nodes(
        address,
        key,
        wanted,
        device=place.device,
        wait_s=compute.workers_wait_s,
        remaining_s=remaining_s,
    )
    _say_how_to_bring_workers(address[0], nodes.port, path)
    return nodes


def parallel_engine(
    run: RunConfig,
    plan: EnginePlan,
    folder: Path,
    place: Place,
    nodes: Nodes | None,
    *,
    remaining_s: Callable[[], float] = lambda: inf,
) -> ParallelEngine:
    """Starts workers by a plan for each of them.

    Args:
        run: what is trained.
        plan: plan of the engine of each worker.
        folder: folder of the run, with the private state.
        place: where the workers of this machine compute.
        nodes: accepts workers of other machines; None for none. Closed with the engine.
        remaining_s: longest time in seconds for starting workers, from now on.
    """
    logger.info("workers: %d, %d threads each, over %s", place.size, place.threads, place.backend)
    with ExitStack() as undo:
        if nodes:
            undo.callback(nodes.close)
        engine = ParallelEngine(
            run,
            [plan.options, *plan.below],
            lambda: Crew(place, nodes, remaining_s),
            folder=folder,
            saved=Saved.at(RunDirectory(folder).private_path),
            ending=nodes.close if nodes else lambda: None,
        )
        undo.pop_all()
    return engine
