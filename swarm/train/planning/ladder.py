"""Chooses an engine for a machine: the fastest with predicted needs that fit. Pure."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Literal

from swarm.config import RunConfig
from swarm.experts import ELEMENT_BYTES
from swarm.model.cost import parameters
from swarm.model.frozen import FrozenFormat
from swarm.model.transformer import ComputeType, Recompute
from swarm.train.engine import engine_options
from swarm.train.engine.hardware import Machine
from swarm.train.engine.mesh import Mesh
from swarm.train.engine.optimizer_moments import MOMENT_BYTES, MomentsFormat
from swarm.train.engine.sizes import Need, pipeline_cut
from swarm.train.planning.memory import HostPeaks, host_peaks, need_of
from swarm.train.planning.step_time import StepTime, step_time

FORMATS = tuple(MOMENT_BYTES)
"""Formats of moments, largest first. A smaller one is used only if no larger one fits."""


@dataclass(frozen=True)
class Rung:
    """One level: an engine, and its needs on a machine.

    Attributes:
        options: options of the engine, or of each of several workers.
        need: predicted for a step; of several workers, the largest.
        peaks: predicted host memory of the whole process, phase by phase.
        time: predicted seconds of a step, in parts.
        fits: whether the machine has enough of everything.
    """

    options: engine_options.EngineOptions
    need: Need
    peaks: HostPeaks
    time: StepTime
    fits: bool

    @property
    def cut(self) -> tuple[int, int, int]:
        """Numbers of workers that share the experts, the layers and the heads."""
        return self.options.ep, self.options.pp, self.options.tp

    @property
    def streams(self) -> bool:
        """Whether the weights are in host memory."""
        return self.options.kind is engine_options.EngineKind.STREAMING


def by_speed(ladder: Sequence[Rung]) -> list[Rung]:
    """Sorts by format of moments, then by speed; of equally fast rungs, the least cut comes first.

    Streaming comes last, since it is for models that fit in no other way.
    """

    def key(rung: Rung) -> tuple[bool, int, float, int, int]:
        options, form = rung.options, FORMATS.index(rung.options.moments)
        return rung.streams, form, rung.time.total, prod(rung.cut), options.shards

    return sorted(ladder, key=key)


def least(ladder: Sequence[Rung]) -> Rung:
    """The rung that needs least device memory."""
    return min(ladder, key=lambda rung: rung.need.crowded)


def that_need_less(ladder: Sequence[Rung], chosen: Rung) -> list[Rung]:
    """Rungs to step down to; each needs less device memory than `chosen` and earlier rungs.

    A streaming rung is included only if host memory suffices.
    """
    found = [chosen]
    for rung in ladder:
        is_one = rung.fits or not rung.streams
        if is_one and rung.need.crowded < found[-1].need.device:
            found.append(rung)
    return found[1:]


def best_of_each_cut(ladder: Sequence[Rung], chosen: Rung) -> list[Rung]:
    """One rung for each other way to cut a model; rungs that fit come first, by speed.

    Args:
        ladder: the rungs in the order of `by_speed`.
        chosen: a rung of the ladder.

    Returns:
        For each way, the first engine that fits, or the engine that needs least memory.
    """
    ways: dict[tuple[tuple[int, int, int], bool], list[Rung]] = {}
    for rung in ladder:
        ways.setdefault((rung.cut, rung.streams), []).append(rung)
    del ways[chosen.cut, chosen.streams]
    best = [next((rung for rung in way if rung.fits), least(way)) for way in ways.values()]
    fitting = by_speed([rung for rung in best if rung.fits])
    return fitting + by_speed([rung for rung in best if not rung.fits])


def why_not(chosen: Rung, others: Sequence[Rung], machine: Machine) -> str:
    """The end of a sentence, which names the next best way and a way that would be faster.

    Args:
        chosen: the engine that the plan takes.
        others: the result of `best_of_each_cut`.
        machine: the share of each worker.
    """
    words = ""
    seconds = chosen.time.total
    fitting = [rung for rung in others if rung.fits]
    alike = [rung for rung in fitting if rung.options.moments == chosen.options.moments]
    for rung in alike[:1]:
        words += f"; next best: {name_of(rung.options)}, {rung.time.total:.3g} s a step instead of "
        words += f"{seconds:.3g}, since {rung.time.longest_part(than=chosen.time)}"
    rounded = [rung for rung in fitting if rung not in alike and rung.time.total < seconds]
    for rung in sorted(rounded, key=lambda rung: rung.time.total)[:1]:
        words += f"; faster, with {rung.options.moments} moments: {name_of(rung.options)}, "
        words += f"{rung.time.total:.3g} s"
    missing = [rung for rung in others if not rung.fits and rung.time.total < seconds]
    for rung in sorted(missing, key=lambda rung: rung.time.total)[:1]:
        words += f"; faster, if it did fit: {name_of(rung.options)}, {_lack(rung, machine)}"
    return words


def name_of(options: engine_options.EngineOptions) -> str:
    """How several workers share a model, in words."""
    if options.kind is engine_options.EngineKind.STREAMING:
        return "streaming from one host copy"
    words = []
    if options.tp > 1:
        words.append(f"heads and experts cut over {options.tp}")
    elif options.ep > 1:
        words.append(f"experts dealt out over {options.ep}")
    if options.pp > 1:
        words.append(f"a pipeline of {options.pp} stages")
    if options.shards > 1:
        words.append(f"masters and moments cut over {options.shards}")
    return ", ".join(words) or "the whole model on each"


def _lack(rung: Rung, machine: Machine) -> str:
    bounds = [
        ("host memory", rung.peaks.highest, machine.usable_host),
        ("disk", rung.need.disk, machine.disk_bytes),
    ]
    if machine.device != "cpu":
        bounds.insert(0, ("GPU memory", rung.need.crowded, machine.usable_device))
    kind, needed, there = max(bounds, key=lambda bound: bound[1] - bound[2])
    return f"{needed / 1e9:,.1f} GB of {kind} needed, {max(there, 0) / 1e9:,.1f} usable"


RING = 3
"""Number of gradient buffers that layers share, if updates keep up with the backward pass."""


@dataclass(frozen=True)
class Wishes:
    """A person's settings. The planner decides those that are "auto" or "run".

    Attributes:
        folder: where frozen experts may be mapped from disk; None forbids it.
        meshes: allowed ways to share experts, heads and layers of a resident engine. Each has as
            many workers as the machine's fabric.
        schedule: schedule of a pipeline.
        chunks: runs of layers of each rank of an interleaved pipeline, if the model has enough.
        shard: whether workers that hold the same tensors cut masters and moments: only if nothing
            else fits ("auto"), never, or always. The state of cut heads is never cut.
    """

    engine: Literal["auto", "resident", "streaming"] = "auto"
    precision: Literal["run"] | ComputeType = "run"
    frozen: Literal["run"] | FrozenFormat = "run"
    moments: Literal["auto"] | MomentsFormat = "auto"
    recompute: Literal["auto"] | Recompute = "auto"
    activation_checkpoints: Literal["auto", "device", "host", "host_bf16"] = "auto"
    folder: Path | None = None
    meshes: tuple[Mesh, ...] = (Mesh(1, 1),)
    schedule: engine_options.ScheduleName = "1f1b"
    chunks: int = 2
    shard: Literal["auto", "none", "state"] = "auto"

    def flowing(self, mesh: Mesh, layers: int) -> tuple[engine_options.ScheduleName, int]:
        """The schedule of a mesh's pipelines of `layers` layers, and the chunks of each rank."""
        if self.schedule != "interleaved":
            return self.schedule, 1
        chunks = min(self.chunks, layers // mesh.pp)
        return ("interleaved", chunks) if chunks > 1 < mesh.pp else ("1f1b", 1)

    def shards(self, mesh: Mesh) -> tuple[int, ...]:
        """Numbers of workers over which a mesh may cut the state; 1, whole state, comes first."""
        alike = mesh.size // mesh.pp  # workers of one stage
        if alike == 1 or mesh.tp > 1 or self.shard == "none":
            return (1,)
        return (alike,) if self.shard == "state" else (1, alike)


@dataclass(frozen=True)
class EnginePlan(Rung):
    """An engine for a machine.

    Attributes:
        below: engines to step down to, in this order, if memory still runs out.
        reason: reason for this choice, in a sentence.
        others: for several workers, the best engine of each other way to cut the model. The fastest
            comes first. Engines that do not fit come last, with their smallest need.
    """

    below: tuple[engine_options.EngineOptions, ...]
    reason: str
    others: tuple[Rung, ...] = ()

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.time.total


def rungs(run: RunConfig, machine: Machine, wishes: Wishes) -> list[engine_options.EngineOptions]:
    """All engines that a person's settings allow, the fastest first."""
    base = engine_options.EngineOptions.of(run, device=machine.device).but(
        compute=wishes.precision, frozen=wishes.frozen
    )
    base = replace(base, host_threads=max(1, machine.cores - 2))
    moments: Sequence[MomentsFormat] = FORMATS
    if wishes.moments != "auto":
        moments = (wishes.moments,)
    return [
        replace(options, moments=form)
        for form in moments
        for options in _rungs(base, run, machine, wishes)
        # Tensor parallel cannot cut int8 moments, whose blocks are those of whole tensors.
        if options.tp == 1 or form != "int8"
    ]


def _rungs(
    base: engine_options.EngineOptions, run: RunConfig, machine: Machine, wishes: Wishes
) -> Iterator[engine_options.EngineOptions]:
    if wishes.engine != "streaming":
        ways: Sequence[Recompute] = ("none", "routing")
        if wishes.recompute != "auto":
            ways = (wishes.recompute,)
        for mesh, way in itertools.product(wishes.meshes, ways):
            schedule, chunks = wishes.flowing(mesh, run.model.num_hidden_layers)
            cut = replace(base, ep=mesh.ep, tp=mesh.tp, pp=mesh.pp, recompute=way)
            cut = replace(cut, schedule=schedule, chunks=chunks)
            shards = wishes.shards(mesh)
            # Whole state with recomputed layers needs more memory than the rung before.
            for number in shards[-1:] if way != ways[0] else shards:
                yield replace(cut, shards=number)
    if wishes.engine == "resident" or machine.fabric.nodes > 1:  # one host copy
        return
    micro_tokens = run.train.micro_batch_sequences * run.data.sequence_length
    together = max(1, engine_options.PASS_TOKENS // micro_tokens)
    workers = machine.fabric.size
    one_pass = run.train.batch_tokens <= workers * together * micro_tokens
    base = replace(
        base,
        kind=engine_options.EngineKind.STREAMING,
        pass_micro_batches=0 if one_pass else together,
    )
    layers = run.model.num_hidden_layers
    places: list[tuple[engine_options.ActivationCheckpoints, int]] = []
    if machine.device == "cuda":
        # Weights that stay on the device need no transfer. On a CPU they would be a useless second
        # copy.
        stay = [layers, layers * 3 // 4, layers // 2, layers // 4]
        places = [
            (engine_options.ActivationCheckpoints.DEVICE, number)
            for number in dict.fromkeys(stay)
            if number
        ]
    places += [(engine_options.ActivationCheckpoints.DEVICE, 0)]
    if machine.device == "cuda":
        places += [(engine_options.ActivationCheckpoints.HOST, 0)]
    if wishes.activation_checkpoints != "auto":
        numbers = dict.fromkeys(number for _, number in places)
        places = [
            (engine_options.ActivationCheckpoints(wishes.activation_checkpoints), number)
            for number in numbers
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
        # Blobs are mapped only if they have the engine's type: conversion at each read is too slow.
        lent = run.wire.experts == last.frozen
        yield replace(last, frozen_folder=wishes.folder, frozen_lent=lent)


def fits(need: Need, peaks: HostPeaks, machine: Machine) -> bool:
    """Whether a machine can hold an engine and the rounds; the state directory is not counted."""
    on_gpu = machine.device != "cpu"
    if need.disk > machine.disk_bytes or peaks.highest > machine.usable_host:
        return False
    return not on_gpu or need.crowded <= machine.usable_device


def plan_engine(
    run: RunConfig, num_owned: int, machine: Machine, wishes: Wishes | None = None
) -> EnginePlan:
    """The fastest engine that fits, or if none fits, the engine that needs least."""
    wishes = wishes or Wishes()
    ladder = [_rung(run, num_owned, each, machine) for each in rungs(run, machine, wishes)]
    several = machine.fabric.size > 1
    if several:
        ladder = by_speed(ladder)
    fitting = [rung for rung in ladder if rung.fits]
    chosen = fitting[0] if fitting else least(ladder) if several else ladder[-1]
    index = ladder.index(chosen)
    below, words = ladder[index + 1 :], describe(chosen.options, run)
    reason = f"{words}: the fastest that fits" if fitting else f"nothing fits; {words} needs least"
    others: list[Rung] = []
    if several:
        others = best_of_each_cut(ladder, chosen)
        below = that_need_less(below, chosen)
        reason += why_not(chosen, others, machine)
    elif fitting and index:
        reason += f", {index} faster ones do not"
    return EnginePlan(
        **vars(chosen),
        below=tuple(rung.options for rung in below),
        reason=reason,
        others=tuple(others),
    )


def fits_here(
    run: RunConfig, num_owned: int, options: engine_options.EngineOptions, machine: Machine
) -> bool:
    """Whether one engine is predicted to fit a machine; see `fits`."""
    return _rung(run, num_owned, options, machine).fits


def kept_for_workers(run: RunConfig) -> float:
    """The most bytes of shared values, in fp32, that are kept for new workers.

    Values since the newest private state are kept. That is written once a cycle if deltas are
    coded, otherwise in each round [P6].
    """
    is_coded = {run.wire.shared_coding, run.wire.experts_coding} != {"none"}
    rounds, every = run.round, run.round.shared_every
    cycle = max(every, rounds.experts_every) if rounds.stagger and is_coded else every
    return ELEMENT_BYTES["fp32"] * parameters(run.model).shared * cycle / every


def _rung(
    run: RunConfig, num_owned: int, options: engine_options.EngineOptions, machine: Machine
) -> Rung:
    workers = machine.fabric.size
    need = need_of(run, num_owned, options, workers)
    if workers > 1:
        need = replace(need, disk=need.disk + kept_for_workers(run))
    peaks = host_peaks(run, num_owned, options, num_peers=run.run.peers, need=need)
    time = step_time(run, num_owned, options, machine)
    return Rung(options, need, peaks, time, fits(need, peaks, machine))


def most_experts(run: RunConfig, machine: Machine, wishes: Wishes | None = None) -> int | None:
    """How many experts the machine can own with any engine; None if not even the rest fits."""
    return most_with(run, machine, rungs(run, machine, wishes or Wishes()))


def most_with(
    run: RunConfig, machine: Machine, ladder: Sequence[engine_options.EngineOptions]
) -> int | None:
    """Like `most_experts`, with one of these engines."""

    def fit(num_owned: int) -> bool:
        return any(_rung(run, num_owned, options, machine).fits for options in ladder)

    # An owned expert always needs more than a frozen one.
    numbers = range(run.model.num_experts + 1)
    found = bisect.bisect_left(numbers, x=True, key=lambda number: not fit(number))
    return found - 1 if found else None


def describe(options: engine_options.EngineOptions, run: RunConfig) -> str:
    """An engine and its level, in words."""
    layers = run.model.num_hidden_layers
    if options.kind is engine_options.EngineKind.RESIDENT:
        words = "resident"
        if options.recompute != "none":
            words += ", layers computed again for backward"
        if options.tp > 1:
            words += f", heads and experts cut over {options.tp}"
        elif options.ep > 1:
            words += f", experts dealt out over {options.ep}"
        if options.shards > 1:
            words += f", masters and moments cut over {options.shards}"
        if options.pp > 1:
            why, how = pipeline_cut(run, options).reason, str(options.schedule)
            if options.chunks > 1:
                how += f", {options.chunks} chunks of layers each"
            words += f", a pipeline of {options.pp} stages ({how}; {why})"
    else:
        stay = layers if options.resident_layers is None else options.resident_layers
        words = "streaming, " + (
            "all weights stay on the device"
            if stay >= layers
            else f"{stay} of {layers} layers stay on the device"
            if stay
            else "every layer is streamed"
        )
        if options.activation_checkpoints is not engine_options.ActivationCheckpoints.DEVICE:
            words += ", activation checkpoints on the host"
        if options.frozen_folder is not None:
            words += ", frozen experts on disk"
    return words + (f", {options.moments} moments" if options.moments != "fp32" else "")
