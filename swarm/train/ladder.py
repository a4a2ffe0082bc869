"""Which engine fits a machine, from the fastest to the one that needs least. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from swarm.config import RunConfig
from swarm.model.cost import step_flops_with
from swarm.model.frozen import FrozenFormat
from swarm.model.transformer import DTYPES, ComputeType, Recompute
from swarm.train.adam_moments import MomentsFormat
from swarm.train.memory import Need, frozen_layer_bytes, need_of, pipeline_cut, sizes_of
from swarm.train.options import ActivationCheckpoints, EngineKind, EngineOptions, ScheduleName
from swarm.train.parallel.dispatch import crossing_bytes
from swarm.train.round_memory import HostPeaks, host_peaks

GIGABYTE = 10**9
RING = 3
"""Gradient buffers of layers where updates keep up with the backward pass."""
PASS_TOKENS = 32_768
"""Tokens that pass through the layers together, at most: enough products to hide the copies."""


@dataclass(frozen=True)
class Machine:
    """The memory of a machine, and how fast it is taken to be.

    Attributes:
        device: "cuda", or "cpu" for a machine without GPU, whose device memory is its host memory.
        device_bytes: memory of the GPU.
        host_bytes: memory of the machine.
        disk_bytes: free where the state directory lies.
        cores: of the CPU.
        tflops: matrix products in the compute type.
        bus_gb_s: each way, between pinned memory and GPU.
        updates_g_s: 10^9 parameters that all cores together update in a second.
    """

    device: str
    device_bytes: float
    host_bytes: float
    disk_bytes: float
    cores: int = 8
    tflops: float = 100.0
    bus_gb_s: float = 20.0
    updates_g_s: float = 1.0

    @property
    def usable_device(self) -> float:
        """Without the context of CUDA and the gaps that an allocator leaves between pieces."""
        return 0.94 * self.device_bytes - 0.7 * GIGABYTE

    @property
    def usable_host(self) -> float:
        """Without the system and other programs on the machine."""
        return self.host_bytes - max(1.0 * GIGABYTE, 0.05 * self.host_bytes)


@dataclass(frozen=True)
class Wishes:
    """Choices of the person, of which "auto" and "run" are left to the planner.

    Attributes:
        folder: where frozen experts may be mapped from disk; None forbids it.
        ep: over how many workers the resident engine's experts may be dealt out, the fastest first.
        pp: over how many workers its layers are cut, as the stages of a pipeline.
        schedule: of the pipeline.
        workers: in all.
        shard: whether masters and moments may be cut over workers that hold a tensor alike: where
            it needs to be ("auto"), never or always.
    """

    engine: Literal["auto", "resident", "streaming"] = "auto"
    precision: Literal["run"] | ComputeType = "run"
    frozen: Literal["run"] | FrozenFormat = "run"
    moments: Literal["auto"] | MomentsFormat = "auto"
    recompute: Literal["auto"] | Recompute = "auto"
    activation_checkpoints: Literal["auto", "device", "host", "host_bf16"] = "auto"
    folder: Path | None = None
    ep: tuple[int, ...] = (1,)
    pp: int = 1
    schedule: ScheduleName = "1f1b"
    workers: int = 1
    shard: Literal["auto", "none", "state"] = "auto"

    @property
    def shards(self) -> tuple[int, ...]:
        """Over how many workers the state may be cut, the fastest first."""
        if self.workers == 1 or self.pp > 1 or self.shard == "none":
            return (1,)
        return (self.workers,) if self.shard == "state" else (1, self.workers)


@dataclass(frozen=True)
class EnginePlan:
    """An engine for a machine.

    Attributes:
        options: the choice.
        below: engines to step down to, in this order, should memory run out all the same.
        need: its predicted need for a step.
        peaks: predicted host memory of the whole process, phase by phase.
        fits: whether that is there.
        step_s: predicted seconds of a step.
        reason: why this one, in a sentence.
    """

    options: EngineOptions
    below: tuple[EngineOptions, ...]
    need: Need
    peaks: HostPeaks
    fits: bool
    step_s: float
    reason: str


def rungs(run: RunConfig, machine: Machine, wishes: Wishes) -> list[EngineOptions]:
    """All engines that a person's wishes allow, the fastest first."""
    base = EngineOptions.of(run, device=machine.device).but(
        compute=wishes.precision, frozen=wishes.frozen
    )
    base = replace(base, host_threads=max(1, machine.cores - 2))
    moments: Sequence[MomentsFormat] = ("fp32", "bf16", "int8")
    if wishes.moments != "auto":
        moments = (wishes.moments,)
    return [
        replace(options, moments=form)
        for form in moments
        for options in _rungs(base, run, machine, wishes)
    ]


def _rungs(
    base: EngineOptions, run: RunConfig, machine: Machine, wishes: Wishes
) -> Iterator[EngineOptions]:
    if wishes.engine != "streaming":
        ways: Sequence[Recompute] = ("none", "routing")
        if wishes.recompute != "auto":
            ways = (wishes.recompute,)
        dealt = replace(base, pp=wishes.pp, schedule=wishes.schedule)
        for ep, way, shards in itertools.product(wishes.ep, ways, wishes.shards):
            # State that is whole and layers that are computed again need more than the rung above.
            if shards == wishes.shards[-1] or way == ways[0]:
                yield replace(dealt, ep=ep, recompute=way, shards=shards)
    if wishes.engine == "resident":
        return
    micro_tokens = run.train.micro_batch_sequences * run.data.sequence_length
    together = max(1, PASS_TOKENS // micro_tokens)
    one_pass = run.train.batch_tokens <= together * micro_tokens
    base = replace(base, kind=EngineKind.STREAMING, pass_micro_batches=0 if one_pass else together)
    layers = run.model.num_hidden_layers
    places: list[tuple[ActivationCheckpoints, int]] = []
    if machine.device == "cuda":
        # Weights that stay need no bus; on a CPU a second copy of them would serve nothing.
        stay = [layers, layers * 3 // 4, layers // 2, layers // 4]
        places = [
            (ActivationCheckpoints.DEVICE, number) for number in dict.fromkeys(stay) if number
        ]
    places += [(ActivationCheckpoints.DEVICE, 0)]
    if machine.device == "cuda":
        places += [(ActivationCheckpoints.HOST, 0)]
    if wishes.activation_checkpoints != "auto":
        numbers = dict.fromkeys(number for _, number in places)
        places = [
            (ActivationCheckpoints(wishes.activation_checkpoints), number) for number in numbers
        ]
    last = base
    for where, number in places:
        ring = RING if run.optimizer.clip == "unit" and one_pass and number < layers else 0
        last = replace(
            base,
            activation_checkpoints=where,
            resident_layers=number,
            gradient_buffers=min(ring, layers),
        )
        yield last
    if wishes.folder is not None:
        # Agreed values of another type would have to be converted each time they are read.
        lent = run.wire.experts == last.frozen
        yield replace(last, frozen_folder=wishes.folder, frozen_lent=lent)


def fits(need: Need, peaks: HostPeaks, machine: Machine) -> bool:
    """Whether a machine can hold an engine and the rounds; a state directory comes besides."""
    on_gpu = machine.device != "cpu"
    if need.disk > machine.disk_bytes or peaks.highest > machine.usable_host:
        return False
    return not on_gpu or need.device <= machine.usable_device


def plan_engine(
    run: RunConfig, num_owned: int, machine: Machine, wishes: Wishes | None = None
) -> EnginePlan:
    """The fastest engine that fits; if none does, the one that needs least."""
    all_rungs = rungs(run, machine, wishes or Wishes())
    needs = [need_of(run, num_owned, options) for options in all_rungs]
    peaks = [host_peaks(run, num_owned, each, num_peers=run.run.peers) for each in all_rungs]
    fitting = [i for i in range(len(all_rungs)) if fits(needs[i], peaks[i], machine)]
    index = fitting[0] if fitting else len(all_rungs) - 1
    options = all_rungs[index]
    words = describe(options, run)
    reason = f"{words}: the fastest that fits" if fitting else f"nothing fits; {words} needs least"
    if fitting and index:
        reason += f", {index} faster ones do not"
    return EnginePlan(
        options=options,
        below=tuple(all_rungs[index + 1 :]),
        need=needs[index],
        peaks=peaks[index],
        fits=bool(fitting),
        step_s=step_seconds(run, num_owned, options, machine),
        reason=reason,
    )


def most_experts(run: RunConfig, machine: Machine, wishes: Wishes | None = None) -> int | None:
    """How many experts the machine can own with some engine; None if not even the shared part."""
    for num_owned in reversed(range(run.model.num_experts + 1)):
        if plan_engine(run, num_owned, machine, wishes).fits:
            return num_owned
    return None


def step_seconds(run: RunConfig, num_owned: int, options: EngineOptions, machine: Machine) -> float:
    """Predicted seconds of a step, from the machine's assumed speeds.

    Products, of a pipeline those of its slowest stage and the bubble, and once more the forward
    ones where layers are computed again; where experts are dealt out, the way of the tokens over
    the bus, one way after the other; in the streaming engine copies and updates run beside them
    and only the slowest counts.
    """
    sizes = sizes_of(run.model, -(-num_owned // options.ep))
    flops = run.train.batch_tokens * step_flops_with(run, num_owned)
    micro_tokens = run.train.micro_batch_sequences * run.data.sequence_length
    micro_batches = run.train.batch_tokens // micro_tokens
    if options.pp > 1:
        # While the first micro-batch flows in and the last one out, other stages wait.
        share = max(pipeline_cut(run, options).shares)
        flops *= share * (micro_batches + options.pp - 1) / micro_batches
    again = options.kind is EngineKind.STREAMING or options.recompute != "none"
    products_s = flops * (4 / 3 if again else 1) / (machine.tflops * 1e12)
    updates_s = sizes.trained / (machine.updates_g_s * 1e9)
    if options.kind is EngineKind.RESIDENT:
        on_gpu = machine.device == "cuda"
        # Rows whose expert is elsewhere, where routing is even.
        rows = run.train.batch_tokens * run.model.num_experts_per_tok * (1 - 1 / options.ep)
        itemsize = DTYPES[options.compute].itemsize
        crossing = crossing_bytes(rows, run.model, itemsize, again=again)
        bus_s = run.model.num_hidden_layers * crossing / (machine.bus_gb_s * 1e9)
        return products_s + bus_s + (updates_s / 50 if on_gpu else updates_s)
    layers = run.model.num_hidden_layers
    stay = layers if options.resident_layers is None else options.resident_layers
    frozen = frozen_layer_bytes(run, num_owned, options)
    weights = 2 * (layers - stay) * (2 * sizes.layer + frozen) + stay * 2 * sizes.layer
    passes = -(-micro_batches // (options.pass_micro_batches or micro_batches))
    # Sums of gradients go to the host after each pass, and come back for the next one.
    inward = passes * weights + (passes - 1) * 4 * sizes.trained
    bus_s = max(inward, passes * 4 * sizes.trained) / (machine.bus_gb_s * 1e9)
    return max(products_s, bus_s, updates_s)


def describe(options: EngineOptions, run: RunConfig) -> str:
    """An engine and its level in words."""
    layers = run.model.num_hidden_layers
    if options.kind is EngineKind.RESIDENT:
        words = "resident"
        if options.recompute != "none":
            words += ", layers computed again for backward"
        if options.ep > 1:
            words += f", experts dealt out over {options.ep}"
        if options.shards > 1:
            words += f", masters and moments cut over {options.shards}"
        if options.pp > 1:
            why = pipeline_cut(run, options).reason
            words += f", a pipeline of {options.pp} stages ({options.schedule}; {why})"
    else:
        stay = layers if options.resident_layers is None else options.resident_layers
        words = "streaming, " + (
            "all weights stay on the device"
            if stay >= layers
            else f"{stay} of {layers} layers stay on the device"
            if stay
            else "every layer is streamed"
        )
        if options.activation_checkpoints is not ActivationCheckpoints.DEVICE:
            words += ", activation checkpoints on the host"
        if options.frozen_folder is not None:
            words += ", frozen experts on disk"
    return words + (f", {options.moments} moments" if options.moments != "fp32" else "")
