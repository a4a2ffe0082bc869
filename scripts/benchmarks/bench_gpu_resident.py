#!/usr/bin/env python
"""The resident engine on a GPU: share of the peak rate (MFU), peak memory, longest context.

    python scripts/benchmarks/bench_gpu_resident.py mfu --shape 7b          # fits 80 GB
    # the paper's 2 x 2048 tokens
    python scripts/benchmarks/bench_gpu_resident.py peak --shape 2b
    # streaming, layers' inputs on the host
    python scripts/benchmarks/bench_gpu_resident.py context --shape 7b
    python scripts/benchmarks/bench_gpu_resident.py mfu --device cpu --shape demo --tokens 512 \\
        --length 64

MFU counts useful operations only: frozen experts without weight gradients, no recomputing,
attention over half the square. `--peak-tflops` is the dense bf16 rate for comparison. Each variant
is printed when it is done, and all variants again at the end. If a variant does not fit, its error
replaces its figures.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

from bench_gpu_measure import (
    LR,
    SHAPES,
    batches,
    fill,
    peak_gb,
    reset_peak,
    run_of,
    seconds_of_steps,
    settle,
    tflops,
)

from swarm.config import RunConfig
from swarm.errors import lacks_memory
from swarm.train.engine.engine import Engine
from swarm.train.engine.engine_options import ActivationCheckpoints, EngineKind, EngineOptions
from swarm.train.fallback_engine import make_engine
from swarm.train.planning.memory import need_of

WARM_UP = 2
Found = dict[str, Any]


def engine_of(run: RunConfig, owned: int, options: EngineOptions) -> Engine:
    """An engine with random weights."""
    engine = make_engine(run, options)
    try:
        engine.own(range(owned))
        fill(engine, run, options.device)
    except BaseException:
        engine.close()
        raise
    return engine


def figures_of(
    run: RunConfig, owned: int, options: EngineOptions, measured: Callable[[Engine], Found]
) -> Found:
    """The figures of an engine, from its start to its end, or its error if memory is short."""
    need = need_of(run, owned, options)
    found: Found = {"predicted_gb": need.device / 1e9}
    if options.kind is EngineKind.STREAMING:
        found["predicted_host_gb"] = need.host / 1e9
    try:
        found = _from_start_to_end(run, owned, options, measured) | found
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        found["error"] = str(error).partition("\n")[0]
    reset_peak(options.device)
    return found


def _from_start_to_end(
    run: RunConfig, owned: int, options: EngineOptions, measured: Callable[[Engine], Found]
) -> Found:
    """The figures of an engine that is freed when this returns or fails."""
    with closing(engine_of(run, owned, options)) as engine:
        return measured(engine)


def bench_mfu(args: argparse.Namespace) -> Iterator[tuple[str, Found]]:
    """Tokens per second and share of the peak rate, with and without recomputing layers."""
    shape = SHAPES[args.shape]
    sequences = max(1, args.tokens // args.length)
    micro = largest_divisor(sequences, args.micro or sequences)
    run = run_of(shape, sequences, args.length, clip="global", micro=micro)

    def measured(engine: Engine) -> Found:
        tokens = batches(run, WARM_UP + args.steps)
        for each in tokens[:WARM_UP]:
            engine.step(each, lr=LR)
        reset_peak(args.device)
        step_s = seconds_of_steps(
            lambda each: engine.step(each, lr=LR), tokens[WARM_UP:], args.device
        )
        rate = tflops(run, shape.owned, run.train.batch_tokens / step_s)
        return {
            "micro_sequences": micro,
            "step_s": step_s,
            "tokens_per_s": run.train.batch_tokens / step_s,
            "tflops": rate,
            "mfu": rate / args.peak_tflops,
            "peak_gb": peak_gb(args.device),
        }

    for recompute in args.recompute:
        options = replace(EngineOptions.of(run, device=args.device), recompute=recompute)
        yield recompute, figures_of(run, shape.owned, options, measured)


def largest_divisor(number: int, most: int) -> int:
    """The largest divisor of a number up to `most`."""
    return next(each for each in range(min(number, most), 0, -1) if number % each == 0)


def bench_peak(args: argparse.Namespace) -> Iterator[tuple[str, Found]]:
    """Peak of the paper's micro-batch, for this ownership and (7b, 2b) with all experts owned."""
    for name in filter(SHAPES.__contains__, (args.shape, f"{args.shape}-all")):
        run = run_of(SHAPES[name], 4, 2048, clip="global", micro=2)

        def measured(engine: Engine, run: RunConfig = run) -> Found:
            reset_peak(args.device)
            for each in batches(run, 3):
                engine.step(each, lr=LR)
            settle(args.device)
            return {"peak_gb": peak_gb(args.device)}

        options = EngineOptions.of(run, device=args.device)
        yield name, figures_of(run, SHAPES[name].owned, options, measured)


def bench_context(args: argparse.Namespace) -> Iterator[tuple[str, Found]]:
    """Doubles the length of one sequence until it no longer fits."""
    shape, length = SHAPES[args.shape], args.shortest
    while length <= args.longest:
        run = run_of(shape, 1, length, clip="unit")

        def measured(engine: Engine, run: RunConfig = run) -> Found:
            first, second = batches(run, 2)
            engine.step(first, lr=LR)
            reset_peak(args.device)
            step_s = seconds_of_steps(lambda each: engine.step(each, lr=LR), [second], args.device)
            return {"step_s": step_s, "peak_gb": peak_gb(args.device)}

        options = replace(
            EngineOptions.of(run, device=args.device),
            kind=EngineKind.STREAMING,
            activation_checkpoints=ActivationCheckpoints.HOST_BF16,
            moments="bf16",
            gradient_buffers=3,
            host_threads=max(1, len(os.sched_getaffinity(0)) - 2),
        )
        found = figures_of(run, shape.owned, options, measured)
        yield str(length), found
        if "error" in found:
            return
        length *= 2


def main() -> None:
    """Runs one of the three benchmarks. The last output is one JSON object of all variants."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bench", choices=["mfu", "peak", "context"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="7b")
    parser.add_argument("--tokens", type=int, default=16_384, help="of a step of mfu")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence of mfu")
    parser.add_argument("--shortest", type=int, default=65_536, help="sequence of context")
    parser.add_argument("--longest", type=int, default=524_288, help="sequence of context")
    parser.add_argument(
        "--micro", type=int, default=4, help="sequences of a micro-batch of mfu, at most; 0: all"
    )
    parser.add_argument("--steps", type=int, default=6, help="measured, of mfu")
    parser.add_argument("--recompute", nargs="+", default=["none", "routing"])
    parser.add_argument(
        "--peak-tflops", type=float, default=989.0, help="dense bf16; 989: H100 or H200 (SXM)"
    )
    args = parser.parse_args()
    bench = {"mfu": bench_mfu, "peak": bench_peak, "context": bench_context}[args.bench]
    found = {}
    for name, figures in bench(args):
        found[name] = figures
        print(json.dumps({name: figures}), flush=True)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
