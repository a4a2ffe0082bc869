#!/usr/bin/env python
"""The resident engine on a GPU: share of the peak rate (MFU), peak memory, longest context.

    python scripts/bench_gpu_resident.py mfu --shape 7b --tokens 32768
    python scripts/bench_gpu_resident.py peak --shape 2b         # the paper's 2 x 2048 tokens
    python scripts/bench_gpu_resident.py context --shape 7b  # streaming, layers' inputs on the host
    python scripts/bench_gpu_resident.py mfu --device cpu --shape demo --tokens 512 --length 64

MFU counts useful operations only: frozen experts without weight gradients, nothing recomputed,
attention over half the square. `--peak-tflops` is the dense bf16 rate it is compared with.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import replace
from typing import Any

import torch
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
from swarm.train.engine import Engine
from swarm.train.memory import need_of
from swarm.train.options import ActivationCheckpoints, EngineKind, EngineOptions
from swarm.train.stepping import make_engine

WARM_UP = 2


def engine_of(run: RunConfig, owned: int, options: EngineOptions) -> Engine:
    """An engine with random weights."""
    engine = make_engine(run, options)
    engine.own(range(owned))
    fill(engine, run, options.device)
    return engine


def bench_mfu(args: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second and share of the peak rate, with and without computing layers again."""
    shape, found = SHAPES[args.shape], {}
    run = run_of(shape, args.tokens // args.length, args.length, clip="global", micro=args.micro)
    for recompute in args.recompute:
        options = replace(EngineOptions.of(run, device=args.device), recompute=recompute)
        engine = engine_of(run, shape.owned, options)
        tokens = batches(run, WARM_UP + args.steps)
        for each in tokens[:WARM_UP]:
            engine.step(each, lr=LR)
        reset_peak(args.device)
        step_s = seconds_of_steps(
            lambda each, engine=engine: engine.step(each, lr=LR), tokens[WARM_UP:], args.device
        )
        rate = tflops(run, shape.owned, run.train.batch_tokens / step_s)
        found[recompute] = {
            "step_s": step_s,
            "tokens_per_s": run.train.batch_tokens / step_s,
            "tflops": rate,
            "mfu": rate / args.peak_tflops,
            "peak_gb": peak_gb(args.device),
            "predicted_gb": need_of(run, shape.owned, options).device / 1e9,
        }
        engine.close()
        del engine
        reset_peak(args.device)
    return found


def bench_peak(args: argparse.Namespace) -> dict[str, Any]:
    """Peak of the paper's micro-batch, for this ownership and for owning everything."""
    found = {}
    for name in (args.shape, f"{args.shape}-all"):
        run = run_of(SHAPES[name], 4, 2048, clip="global", micro=2)
        options = EngineOptions.of(run, device=args.device)
        engine = engine_of(run, SHAPES[name].owned, options)
        reset_peak(args.device)
        for each in batches(run, 3):
            engine.step(each, lr=LR)
        settle(args.device)
        predicted = need_of(run, SHAPES[name].owned, options).device / 1e9
        found[name] = {"peak_gb": peak_gb(args.device), "predicted_gb": predicted}
        engine.close()
        del engine
        reset_peak(args.device)
    return found


def bench_context(args: argparse.Namespace) -> dict[str, Any]:
    """Doubles the length of one sequence until it no longer fits."""
    shape, found, length = SHAPES[args.shape], {}, args.length
    while length <= args.longest:
        run = run_of(shape, 1, length, clip="unit")
        options = replace(
            EngineOptions.of(run, device=args.device),
            kind=EngineKind.STREAMING,
            activation_checkpoints=ActivationCheckpoints.HOST_BF16,
            moments="bf16",
            gradient_buffers=3,
            host_threads=max(1, len(os.sched_getaffinity(0)) - 2),
        )
        predicted = need_of(run, shape.owned, options)
        engine = engine_of(run, shape.owned, options)
        try:
            first, second = batches(run, 2)
            engine.step(first, lr=LR)
            reset_peak(args.device)
            step_s = seconds_of_steps(
                lambda each, engine=engine: engine.step(each, lr=LR), [second], args.device
            )
        except torch.OutOfMemoryError as error:
            found[str(length)] = {"error": str(error).splitlines()[0]}
            break
        found[str(length)] = {
            "step_s": step_s,
            "peak_gb": peak_gb(args.device),
            "predicted_gb": predicted.device / 1e9,
            "predicted_host_gb": predicted.host / 1e9,
        }
        print(json.dumps({str(length): found[str(length)]}), flush=True)
        engine.close()
        del engine
        length *= 2
    return found


def main() -> None:
    """Runs one of the three benches and prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bench", choices=["mfu", "peak", "context"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="7b")
    parser.add_argument("--tokens", type=int, default=32_768)
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--longest", type=int, default=524_288)
    parser.add_argument("--micro", type=int, default=0, help="sequences of a micro-batch; 0: all")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--recompute", nargs="+", default=["none", "routing"])
    parser.add_argument("--peak-tflops", type=float, default=989.0, help="H200, dense bf16")
    args = parser.parse_args()
    bench = {"mfu": bench_mfu, "peak": bench_peak, "context": bench_context}[args.bench]
    print(json.dumps(bench(args), indent=1))


if __name__ == "__main__":
    main()
