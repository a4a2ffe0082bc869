"""Shared parts of the GPU benchmarks: shapes, weights, timing, load of the device, validity.

Imported by bench_gpu_streaming.py and bench_gpu_resident.py.
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from swarm.config import RunConfig, parse_config
from swarm.experts import all_shapes, expert_of
from swarm.model.cost import step_flops_with
from swarm.train.engine.engine import Engine

RUNS = Path(__file__).parents[2] / "configs" / "runs"
LR = 1e-4


@dataclass(frozen=True)
class Shape:
    """A model and how many of its experts the peer owns.

    Attributes:
        file: run file in configs/runs.
        owned: number of owned experts.
        layers: number of layers, fewer than the file's to fit a limit. 0: the file's.
    """

    file: str
    owned: int
    layers: int = 0


SHAPES = {
    "7b": Shape("spes_7b", 8),
    "7b-all": Shape("spes_7b", 32),
    "2b": Shape("spes_2b", 1),
    "2b-all": Shape("spes_2b", 16),
    "demo": Shape("demo", 2),
}
"""7b and 2b are as in the paper (N = 4 and 16). With "-all" the peer owns everything. demo is for a
CPU."""


def run_of(shape: Shape, sequences: int, length: int, *, clip: str, micro: int = 0) -> RunConfig:
    """The run with one pass of a number of sequences as its step.

    Args:
        shape: see `SHAPES`.
        sequences: sequences of a step.
        length: tokens of a sequence.
        clip: "unit" lets updates overlap the backward pass.
        micro: sequences of a micro-batch. 0: all sequences.
    """
    path = RUNS / f"{shape.file}.toml"
    run = parse_config(RunConfig, path.read_text(), source=str(path), overrides=())
    values = json.loads(run.canonical_json())
    values["data"]["sequence_length"] = length
    values["train"] |= {
        "batch_tokens": sequences * length,
        "micro_batch_sequences": micro or sequences,
        "compute": "bf16",
        "frozen": "bf16",
    }
    values["phases"] = []
    values["optimizer"]["clip"] = clip
    if shape.layers:
        values["model"]["num_hidden_layers"] = shape.layers
    return RunConfig.model_validate_json(json.dumps(values))


def fill(engine: Engine, run: RunConfig, device: str) -> None:
    """Random weights: norms 1, matrices N(0, 0.02), drawn on the device tensor by tensor."""
    generator = torch.Generator(device).manual_seed(0)
    for name, shape in all_shapes(run.model).items():
        if len(shape) == 1:
            engine.write({name: torch.ones(shape)})
        else:
            drawn = torch.randn(shape, generator=generator, device=device)
            engine.write({name: drawn.mul_(0.02)})


def batches(run: RunConfig, number: int) -> list[Tensor]:
    """Random tokens, different in every step."""
    generator = torch.Generator().manual_seed(1)
    sequences = run.train.batch_tokens // run.data.sequence_length
    shape = (sequences, run.data.sequence_length + 1)
    return [
        torch.randint(0, run.model.vocab_size, shape, generator=generator) for _ in range(number)
    ]


def settle(device: str) -> None:
    """Waits for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def reset_peak(device: str) -> None:
    """Frees unused memory and resets the recorded peak."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_gb(device: str) -> float:
    """Peak of allocations on the GPU. 0 on a CPU."""
    return torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else 0.0


def seconds_of_steps(step: Callable[[Tensor], object], tokens: list[Tensor], device: str) -> float:
    """Seconds of a step with a full pipeline: the total divided by the number of steps."""
    settle(device)
    begin_s = time.perf_counter()
    for each in tokens:
        step(each)
    settle(device)
    return (time.perf_counter() - begin_s) / len(tokens)


def tflops(run: RunConfig, owned: int, tokens_per_s: float) -> float:
    """Useful operations per second, without recomputing and weight gradients of frozen experts."""
    return step_flops_with(run, owned) * tokens_per_s / 1e12


def busy_share(step: Callable[[Tensor], object], tokens: list[Tensor], trace: Path | None) -> float:
    """Share of time in which the GPU computes, without copies, from a profile of two steps.

    Args:
        step: the profiled step.
        tokens: batches of the steps.
        trace: file for the trace, which Perfetto can show.
    """
    kinds = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=kinds) as profile:
        for each in tokens:
            step(each)
        torch.cuda.synchronize()
    if trace is not None:
        profile.export_chrome_trace(str(trace))
    events = [event for event in profile.events() if event.device_type.name == "CUDA"]
    kernels = [e for e in events if not e.name.lower().startswith(("memcpy", "memset"))]
    if not kernels:
        return 0.0
    whole = [(event.time_range.start, event.time_range.end) for event in events]
    first, last = min(start for start, _ in whole), max(end for _, end in whole)
    covered = covered_length((e.time_range.start, e.time_range.end) for e in kernels)
    return float(covered / (last - first))


def covered_length(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of some spans."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def changed_wrongly(engine: Engine, run: RunConfig, step: Callable[[], object]) -> list[str]:
    """Owned tensors that a step did not change, and frozen tensors that it changed."""
    names = list(all_shapes(run.model))
    before = _sums(engine, names)
    step()
    after = _sums(engine, names)
    wrong = []
    for name in names:
        expert = expert_of(name)
        trained = expert is None or expert in engine.owned
        if (before[name] != after[name]) != trained:
            wrong.append(name)
    return wrong


def _sums(engine: Engine, names: Iterable[str]) -> dict[str, int]:
    """A checksum of each tensor: the sum of its bits, which a change of a few elements alters."""
    sums = {}
    for name in names:
        bits = engine.read([name])[name].view(torch.int32)
        sums[name] = int(bits.sum(dtype=torch.int64))
    return sums


def median(values: Iterable[float]) -> float:
    """The middle value."""
    return statistics.median(values)
