#!/usr/bin/env python
"""The streaming engine against FSDP2's CPU offload on one rank, and against all on the GPU.

Variants, on the same model code, shapes and random tokens, each in a process of its own:

  streamed  every layer streamed through two places
  weights   weights on the GPU, masters and moments on the host
  resident  everything on the GPU: the ceiling
  fsdp      fully_shard per layer, CPUOffloadPolicy, default AdamW, frozen experts in fp32
  tuned     fsdp with pinned memory, fused AdamW, explicit prefetch, frozen experts in bf16

FSDP recomputes layers in backward too (otherwise it could not keep their inputs), and takes each
step as one micro-batch. Figures: tokens/s, useful TFLOP/s (with attention, without recomputing and
weight gradients of frozen experts), share of time in which the GPU computes, bytes each way, peaks.
Validity: in a step every owned tensor changes, and no frozen tensor does.

    python scripts/benchmarks/bench_gpu_streaming.py --shape 7b --tokens 4096 16384 --steps 6
    python scripts/benchmarks/bench_gpu_streaming.py --device cpu --shape demo --tokens 512 \\
        --length 64
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_gpu_measure import (
    LR,
    SHAPES,
    batches,
    busy_share,
    changed_wrongly,
    fill,
    peak_gb,
    reset_peak,
    run_of,
    seconds_of_steps,
    tflops,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from peers.command_line.command import ending_as_ctrl_c
from swarm.config import RunConfig
from swarm.model.frozen import FrozenFormat
from swarm.model.transformer import Transformer
from swarm.train.engine.engine_options import EngineKind, EngineOptions
from swarm.train.fallback_engine import make_engine
from swarm.train.streaming.streaming_engine import StreamingEngine

VARIANTS = ("streamed", "weights", "resident", "fsdp", "tuned")
WARM_UP = 2


def options_of(variant: str, run: RunConfig, device: str) -> EngineOptions:
    """Our engine's options for a variant."""
    base = replace(EngineOptions.of(run, device=device), recompute="routing")
    if variant == "resident":
        return base
    cores = len(os.sched_getaffinity(0))
    streaming = replace(base, kind=EngineKind.STREAMING, host_threads=max(1, cores - 2))
    return replace(streaming, resident_layers=0 if variant == "streamed" else None)


def bench_ours(
    variant: str, run: RunConfig, owned: int, args: argparse.Namespace
) -> dict[str, Any]:
    """One of our engines."""
    engine = make_engine(run, options_of(variant, run, args.device))
    engine.own(range(owned))
    fill(engine, run, args.device)
    tokens = batches(run, WARM_UP + args.steps + 3)

    def step(each: Tensor) -> object:
        return engine.step(each, lr=LR)

    for each in tokens[:WARM_UP]:
        step(each)
    reset_peak(args.device)
    before = engine.traffic if isinstance(engine, StreamingEngine) else (0, 0)
    step_s = seconds_of_steps(step, tokens[WARM_UP:-3], args.device)
    found: dict[str, Any] = {"step_s": step_s, "device_peak_gb": peak_gb(args.device)}
    if isinstance(engine, StreamingEngine):
        moved = [now - then for now, then in zip(engine.traffic, before, strict=True)]
        found["gb_in"], found["gb_out"] = (num / args.steps / 1e9 for num in moved)
    if args.device == "cuda" and not args.no_profile:
        trace = args.traces / f"{variant}.json" if args.traces else None
        found["busy"] = busy_share(step, tokens[-3:-1], trace)
    if not args.no_validity:
        wrong = changed_wrongly(engine, run, lambda: step(tokens[-1]))
        found["valid"] = not wrong
    engine.close()
    return found


class ParameterStack:
    """Frozen experts as a parameter of their bank, so that FSDP also shards and fetches them."""

    def __init__(self, bank: nn.Module, name: str) -> None:
        self._bank, self._name = bank, name

    def dense(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """See `swarm.model.frozen.FrozenStack`."""
        return self._bank.get_parameter(self._name)[rows].to(dtype)


def fsdp_model(run: RunConfig, owned: int, args: argparse.Namespace, *, tuned: bool) -> Transformer:
    """Our model under fully_shard, weights random, on the CPU."""
    frozen: FrozenFormat = "bf16" if tuned else "fp32"
    model = Transformer(
        run.model, owned=range(owned), frozen=frozen, compute="bf16", recompute="layer"
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else nn.init.ones_(parameter)
    for bank in model.banks.values():
        stacks: dict[str, Any] = bank.frozen
        for name, stack in list(stacks.items()):
            tensor = stack.tensor.normal_(std=0.02)
            bank.register_parameter(f"frozen_{name}", nn.Parameter(tensor, requires_grad=False))
            stacks[name] = ParameterStack(bank, f"frozen_{name}")
    # Norms and routers compute in fp32. They stay whole on the device, slightly in FSDP's favor.
    exact = {p for n, p in model.named_parameters() if n.endswith(("norm.weight", "gate.weight"))}
    for parameter in exact:
        parameter.data = parameter.data.to(args.device)
    mesh = init_device_mesh(args.device, (1,))
    settings: dict[str, Any] = {
        "mesh": mesh,
        "ignored_params": exact,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            # The model casts by itself. FSDP would not cast when a layer is recomputed.
            cast_forward_inputs=False,
        ),
        "offload_policy": CPUOffloadPolicy(pin_memory=args.device == "cuda"),
    }
    for layer in model.model.layers:
        fully_shard(layer, **settings)
    fully_shard(model, **settings)
    if tuned:
        layers: list[Any] = list(model.model.layers)  # fully_shard has added these methods
        for layer, following in itertools.pairwise(layers):
            layer.set_modules_to_forward_prefetch([following])
            following.set_modules_to_backward_prefetch([layer])
    return model


def bench_fsdp(
    variant: str, run: RunConfig, owned: int, args: argparse.Namespace
) -> dict[str, Any]:
    """FSDP2 with CPU offload."""
    tuned = variant == "tuned"
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo", rank=0, world_size=1)
    torch.manual_seed(0)
    model = fsdp_model(run, owned, args, tuned=tuned)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sharded = [parameter for parameter in trained if isinstance(parameter, DTensor)]
    whole = [parameter for parameter in trained if not isinstance(parameter, DTensor)]
    settings = run.optimizer
    chosen: dict[str, Any] = {"fused": True} if tuned else {}
    optimizers = [
        torch.optim.AdamW(
            kind,
            lr=LR,
            betas=settings.betas,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            **chosen,
        )
        for kind in (sharded, whole)
    ]

    def step(tokens_BT1: Tensor) -> None:
        total = Whole.apply_to(model, tokens_BT1.to(args.device), run)
        total.backward()
        for kind in (sharded, whole):
            torch.nn.utils.clip_grad_norm_(kind, settings.clip_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    tokens = batches(run, WARM_UP + args.steps + 2)
    for each in tokens[:WARM_UP]:
        step(each)
    reset_peak(args.device)
    step_s = seconds_of_steps(step, tokens[WARM_UP:-2], args.device)
    found: dict[str, Any] = {"step_s": step_s, "device_peak_gb": peak_gb(args.device)}
    if args.device == "cuda" and not args.no_profile:
        trace = args.traces / f"{variant}.json" if args.traces else None
        found["busy"] = busy_share(step, tokens[-2:], trace)
    dist.destroy_process_group()
    return found


class Whole:
    """Calls `losses` as the model's forward, whose hooks fetch the weights of the root."""

    @staticmethod
    def apply_to(model: Transformer, tokens_BT1: Tensor, run: RunConfig) -> Tensor:
        """The loss of one batch."""
        kind: Any = type(model)
        forward = kind.forward

        def losses(self: Transformer, tokens: Tensor) -> Tensor:
            return self.losses(tokens, run.loss).total

        kind.forward = losses
        try:
            total: Tensor = model(tokens_BT1)
        finally:
            kind.forward = forward
        return total


def bench_one(args: argparse.Namespace) -> dict[str, Any]:
    """One variant at one size, in this process."""
    shape = replace(SHAPES[args.shape], layers=args.layers)
    sequences = max(1, args.tokens[0] // args.length)
    run = run_of(shape, sequences, args.length, clip="unit", micro=args.micro)
    bench = bench_fsdp if args.variant in ("fsdp", "tuned") else bench_ours
    found = bench(args.variant, run, shape.owned, args)
    tokens_per_s = run.train.batch_tokens / found["step_s"]
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {
        "variant": args.variant,
        "tokens": run.train.batch_tokens,
        "tokens_per_s": tokens_per_s,
        "tflops": tflops(run, shape.owned, tokens_per_s),
        "host_peak_gb": usage * 1024 / 1e9,
        **found,
    }


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="7b")
    parser.add_argument("--layers", type=int, default=0, help="fewer layers than the shape has")
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16_384])
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--micro", type=int, default=0, help="sequences of a micro-batch; 0: all")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--traces", type=Path, help="folder for Chrome traces")
    parser.add_argument("--no-profile", action="store_true")
    parser.add_argument("--no-validity", action="store_true")
    parser.add_argument("--limit-s", type=float, default=240.0, help="of one variant at one size")
    return parser.parse_args()


def main() -> None:
    """Runs all variants at all sizes, each in a process, and prints a table."""
    args = parsed()
    if args.variant:
        print(json.dumps(bench_one(args)))
        return
    results = []
    with ending_as_ctrl_c():  # ends the variant first
        for tokens, variant in itertools.product(args.tokens, args.variants):
            own = [sys.executable, __file__, "--variant", variant, "--tokens", str(tokens)]
            results.append(_in_process([*own, *_passed_on(args)], variant, tokens, args.limit_s))
            print(json.dumps(results[-1]), flush=True)
    _print_table(results)


def _passed_on(args: argparse.Namespace) -> list[str]:
    passed = ["--device", args.device, "--shape", args.shape, "--length", str(args.length)]
    passed += ["--layers", str(args.layers), "--micro", str(args.micro)]
    passed += ["--steps", str(args.steps)]
    passed += ["--traces", str(args.traces)] if args.traces else []
    passed += ["--no-profile"] if args.no_profile else []
    return passed + (["--no-validity"] if args.no_validity else [])


def _in_process(command: list[str], variant: str, tokens: int, limit_s: float) -> dict[str, Any]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=True)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    except subprocess.TimeoutExpired:
        return {"variant": variant, "tokens": tokens, "error": f"longer than {limit_s} s"}
    except subprocess.CalledProcessError as error:
        return {"variant": variant, "tokens": tokens, "error": error.stderr[-800:]}


def _print_table(results: list[dict[str, Any]]) -> None:
    columns = ["variant", "tokens", "step_s", "tokens_per_s", "tflops", "busy", "gb_in", "gb_out"]
    columns += ["device_peak_gb", "host_peak_gb", "valid"]
    print(" | ".join(columns))
    for row in results:
        cells = [row.get(column, "") for column in columns]
        if "error" in row:
            cells[2] = f"failed: {str(row['error']).strip().splitlines()[-1]}"
        print(" | ".join(f"{c:.4g}" if isinstance(c, float) else str(c) for c in cells))


if __name__ == "__main__":
    main()
