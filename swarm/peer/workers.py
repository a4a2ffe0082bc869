"""Worker processes of this peer: how many, with what of the machine each, and their engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from math import inf, lcm
from pathlib import Path

import torch

from swarm.config import ComputeSection, RunConfig
from swarm.errors import ConfigError
from swarm.peer.state_directory import RunDirectory
from swarm.peer.threads import is_exact
from swarm.train.ladder import EnginePlan, Machine
from swarm.train.parallel.crew import Crew, Place
from swarm.train.parallel.engine import ParallelEngine
from swarm.train.parallel.handshake import key_at
from swarm.train.parallel.history import Saved
from swarm.train.parallel.nodes import Nodes
from swarm.train.parallel.roster import Wanted, address_of

logger = logging.getLogger(__name__)


def num_workers(compute: ComputeSection, device: str) -> int:
    """Worker processes that a person asks for on this machine; 0 for none beside the peer's own.

    Args:
        compute: what the person decided.
        device: "cuda" or "cpu", on which this peer computes.

    Raises:
        ConfigError: there are not so many GPUs, or their engine cannot be had; or workers of other
            machines are asked for in a wrong way.
    """
    num_elsewhere(compute)  # says what is wrong with those
    asked = compute.parallel
    if asked == "off":
        return 0
    if compute.engine == "streaming":
        raise ConfigError(
            f"compute.parallel (--gpus) = {asked}: the streaming engine computes on one GPU",
            hint="leave out one of --gpus and --engine",
        )
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
    """Workers that other machines are to bring; 0 for none.

    Raises:
        ConfigError: it is not said where they come from, or this machine has none itself.
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
        address_of(compute.workers_from, "compute.workers_from (--workers-from)")
    return asked


def dealings(compute: ComputeSection, workers: int, num_experts: int) -> tuple[int, ...]:
    """Over how many of a peer's workers its experts may be dealt out, the fastest first.

    Tokens of fewer workers travel less, so the least number that fits is taken. In a pipeline the
    experts of a stage are dealt out only if that is asked for.

    Args:
        compute: what the person decided.
        workers: processes that compute, on all machines; 0 for none beside the peer's own.
        num_experts: of a layer.

    Raises:
        ConfigError: the workers cannot be split so.
    """
    stages = max(compute.pipeline, 1)
    asked = compute.expert_parallel or int(stages > 1)
    if asked > 1 and (workers == 0 or workers % (asked * stages) or asked > num_experts):
        times = f"times compute.pipeline = {stages} " if stages > 1 else ""
        raise ConfigError(
            f"compute.expert_parallel = {asked}: {times}it has to divide the "
            f"{workers or 'missing'} workers (--gpus), and not to exceed the {num_experts} experts",
            hint="leave it out: the experts are dealt out where they do not fit otherwise"
            if stages == 1
            else "leave it out: each worker of a stage has all experts of its layers",
        )
    if asked:
        return (asked,)
    most = min(max(workers, 1), num_experts)
    return tuple(ep for ep in range(1, most + 1) if max(workers, 1) % ep == 0)


def num_stages(compute: ComputeSection, workers: int, num_layers: int) -> int:
    """Over how many of a peer's workers its layers are cut; 1 for no pipeline.

    Args:
        compute: what the person decided.
        workers: processes that compute; 0 for none beside the peer's own.
        num_layers: of the model.

    Raises:
        ConfigError: the workers or the layers cannot be cut so.
    """
    asked = max(compute.pipeline, 1)
    if asked == 1:
        return 1
    if workers == 0 or workers % asked or asked > num_layers:
        raise ConfigError(
            f"compute.pipeline = {asked}: it has to divide the {workers or 'missing'} workers "
            f"(--gpus), and not to exceed the {num_layers} layers",
            hint="leave it out: then each worker takes its share of the micro-batches",
        )
    return asked


def share_of(machine: Machine, workers: int) -> Machine:
    """What each of so many workers has: a GPU, and its part of the host."""
    return replace(
        machine,
        host_bytes=machine.host_bytes / workers,
        cores=max(1, machine.cores // workers),
        updates_g_s=machine.updates_g_s / workers,
    )


def place_of(run: RunConfig, compute: ComputeSection, share: Machine, workers: int) -> Place:
    """Where workers compute, each with this share of the machine."""
    threads = compute.threads or (1 if is_exact(run) else share.cores)
    backend = "nccl" if share.device == "cuda" else "gloo"
    return Place(workers, share.device, threads, backend)


def nodes_of(
    compute: ComputeSection,
    plan: EnginePlan,
    folder: Path,
    place: Place,
    remaining_s: Callable[[], float] = lambda: inf,
) -> Nodes | None:
    """Listens for the machines that bring workers; None if this peer wants none.

    Args:
        compute: what the person decided.
        plan: of the engine of each worker.
        folder: the run's, in the state directory.
        place: where the workers of this machine compute.
        remaining_s: seconds that they are waited for at most from now on.

    Raises:
        ConfigError: nobody can listen there.
        StateError: the key cannot be read or made.
    """
    elsewhere = num_elsewhere(compute)
    if not elsewhere:
        return None
    path = Path(compute.workers_key or folder.parents[1] / "workers.key").expanduser().absolute()
    key = key_at(path, may_make=True)
    address = address_of(compute.workers_from, "compute.workers_from (--workers-from)")
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
    logger.info(
        "workers of other machines: swarm-worker --controller %s:%d --key COPY_OF_THIS (%s)",
        address[0],
        nodes.port,
        path,
    )
    return nodes


def parallel_engine(
    run: RunConfig, plan: EnginePlan, folder: Path, place: Place, nodes: Nodes | None
) -> ParallelEngine:
    """Starts workers for a plan that is made for each of them.

    Args:
        run: what is trained.
        plan: of the engine of each worker.
        folder: the run's; the private state lies there.
        place: where those of this machine compute.
        nodes: where other machines bring some; None for none. Closed with the engine.
    """
    logger.info("workers: %d, %d threads each, over %s", place.size, place.threads, place.backend)
    with ExitStack() as undo:
        if nodes:
            undo.callback(nodes.close)
        engine = ParallelEngine(
            run,
            [plan.options, *plan.below],
            lambda: Crew(place, nodes),
            folder=folder,
            saved=Saved.at(RunDirectory(folder).private_path),
            ending=nodes.close if nodes else lambda: None,
        )
        undo.pop_all()
    return engine
