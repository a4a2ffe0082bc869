#!/usr/bin/env python
"""Time and memory of one local step, against Transformers on the same weights and tokens.

A step is forward, backward, clipping and AdamW. The first losses of the three variants must agree:

  ours   the resident engine of peers, with a quarter of the experts owned and the others frozen
  plist  Transformers with the same trainable set and fused AdamW. Its experts are one fused
         parameter, so the best option of a user is to put the matrices of each expert into
         ParameterLists and to run the eager loop
  stock  unchanged Transformers: grouped_mm, every expert trained, default AdamW

Time is CPU time of the process with one thread, so that other programs count less, and wall time
with more threads. Each variant has its own process, as in use, because in a shared heap a variant
pays for pages that other variants have freed. Ratios are medians over repeats in which the variants
take turns, each repeat in another order. State is the memory between two steps (weights, moments,
kept gradients). The peak is the growth of resident memory above the libraries', in a separate
process.

    .venv/bin/python scripts/benchmarks/bench_step.py --dtype bf16 --vocab 32k --repeats 10
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from swarm.config import RunConfig, validate_config
from swarm.experts import expert_of, expert_tensor, shared_shapes
from swarm.model.huggingface import config_dict
from swarm.model.initial_weights import initial_tensors
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.host_memory import LiveBytes
from swarm.train.engine.resident import ResidentEngine

VARIANTS = ("ours", "plist", "stock")
VOCABULARIES = {"byte": 260, "32k": 32_000}
OWNED = (0, 1, 2, 3)
WARM_UP = 2

Precision = Literal["fp32", "bf16"]


def run_of(vocab: str) -> RunConfig:
    values = {
        "run": {"name": "bench", "rounds": 1},
        "model": {
            "vocab_size": VOCABULARIES[vocab],
            "hidden_size": 256,
            "num_hidden_layers": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_experts": 16,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 512,
        },
        "data": {"sequence_length": 256, "validation_bytes": 512},
        "train": {"batch_tokens": 2048, "micro_batch_sequences": 8},
        "optimizer": {"lr": 1e-4},
        "loss": {"balance": "global"},  # the balancing that Transformers has too
        "round": {"local_steps": 1},
    }
    return validate_config(RunConfig, values, source="bench_step")


def weights_of(run: RunConfig) -> dict[str, Tensor]:
    names = list(shared_shapes(run.model))
    for layer in range(run.model.num_hidden_layers):
        for expert in range(run.model.num_experts):
            names += [expert_tensor(layer, expert, kind) for kind in ("gate", "up", "down")]
    return initial_tensors(run, names)


# ---------------------------------------------------------------- variants


class ExpertList(nn.Module):
    """Transformers' eager loop over experts, with a parameter for each expert's matrices."""

    def __init__(self, gate_ups: list[Tensor], downs: list[Tensor]) -> None:
        super().__init__()
        self.gate_up_proj = nn.ParameterList(gate_ups)
        self.down_proj = nn.ParameterList(downs)
        for expert in range(len(downs)):
            for matrices in (self.gate_up_proj, self.down_proj):
                matrices[expert].requires_grad_(expert in OWNED)

    def forward(self, x_ND: Tensor, expert_NK: Tensor, weight_NK: Tensor) -> Tensor:
        out_ND = torch.zeros_like(x_ND)
        mask_EKN = F.one_hot(expert_NK, len(self.down_proj)).permute(2, 1, 0)
        for expert in mask_EKN.sum((1, 2)).nonzero()[:, 0].tolist():
            place, token = torch.where(mask_EKN[expert])
            gate, up = F.linear(x_ND[token], self.gate_up_proj[expert]).chunk(2, dim=-1)
            mixed = F.linear(F.silu(gate) * up, self.down_proj[expert])
            mixed = mixed * weight_NK[token, place, None]
            out_ND.index_add_(0, token, mixed.to(out_ND.dtype))
        return out_ND


def theirs(run: RunConfig, weights: dict[str, Tensor], *, listed: bool) -> PreTrainedModel:
    settings = config_dict(run)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    config._experts_implementation = "eager" if listed else "grouped_mm"
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    named = {name: value for name, value in weights.items() if expert_of(name) is None}
    model.load_state_dict(named, strict=False)
    for layer, block in enumerate(model.model.layers):
        of_expert = [
            [weights[expert_tensor(layer, expert, kind)] for kind in ("gate", "up", "down")]
            for expert in range(run.model.num_experts)
        ]
        gate_ups = [torch.cat([gate, up]) for gate, up, _ in of_expert]
        downs = [down.clone() for _, _, down in of_expert]
        if listed:
            block.mlp.experts = ExpertList(gate_ups, downs)
            continue
        with torch.no_grad():
            block.mlp.experts.gate_up_proj.copy_(torch.stack(gate_ups))
            block.mlp.experts.down_proj.copy_(torch.stack(downs))
    return model


def their_total(model: PreTrainedModel, tokens_BT1: Tensor, run: RunConfig) -> Tensor:
    out = model(tokens_BT1[:, :-1], output_router_logits=True)
    logits_NV = out.logits.flatten(0, 1).float()
    balance = load_balancing_loss_func(
        out.router_logits, run.model.num_experts, run.model.num_experts_per_tok
    )
    router_z = torch.cat(out.router_logits).float().logsumexp(-1).square().mean()
    total: Tensor = (
        F.cross_entropy(logits_NV, tokens_BT1[:, 1:].flatten())
        + run.loss.balance_weight * balance
        + run.loss.router_z_weight * router_z
        + run.loss.output_z_weight * logits_NV.logsumexp(-1).square().mean()
    )
    return total


class Ours:
    """The engine of a peer."""

    def __init__(self, dtype: Precision, run: RunConfig, weights: dict[str, Tensor]) -> None:
        options = EngineOptions.of(run).but(compute=dtype, frozen=dtype)
        self.run, self.engine = run, ResidentEngine(run, options)
        self.engine.own(OWNED)
        self.engine.write(weights)

    def step(self, tokens_BT1: Tensor) -> float:
        """Does one step on a batch and returns its loss."""
        return self.engine.step(tokens_BT1, lr=self.run.optimizer.lr).loss


class Theirs:
    """A model of Transformers with an optimizer of torch."""

    def __init__(self, name: str, dtype: str, run: RunConfig, weights: dict[str, Tensor]) -> None:
        self.run, self.autocast = run, dtype == "bf16"
        self.model = theirs(run, weights, listed=name == "plist")
        self.parameters = [p for p in self.model.parameters() if p.requires_grad and p.numel()]
        settings, fused = run.optimizer, None if name == "stock" else True
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=settings.lr,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=fused,
        )

    def step(self, tokens_BT1: Tensor) -> float:
        """See `Ours`."""
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            total = their_total(self.model, tokens_BT1, self.run)
        total.backward()
        nn.utils.clip_grad_norm_(self.parameters, self.run.optimizer.clip_norm)
        self.optimizer.step()
        return total.item()


def variant(
    name: str, dtype: Precision, run: RunConfig, weights: dict[str, Tensor]
) -> Ours | Theirs:
    """The variant of this name."""
    return Ours(dtype, run, weights) if name == "ours" else Theirs(name, dtype, run, weights)


# ---------------------------------------------------------------- measuring


def batches(run: RunConfig, count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (run.train.micro_batch_sequences, run.data.sequence_length + 1)
    return [torch.randint(0, run.model.vocab_size, shape, generator=generator)] * count


def steps_of(name: str, args: argparse.Namespace) -> None:
    """Makes a step for each line of stdin, and prints its loss and seconds."""
    run = run_of(args.vocab)
    clock = time.process_time if args.threads == 1 else time.perf_counter
    measured = variant(name, args.dtype, run, weights_of(run))
    for batch, _ in zip(batches(run, WARM_UP + args.repeats), sys.stdin, strict=False):
        start = clock()
        loss = measured.step(batch)
        print(loss, clock() - start, flush=True)


class Stepper:
    """A process that makes steps of one variant on request."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        command = own_command("--steps-of", name, args)
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def step(self) -> tuple[float, float]:
        """Loss and seconds of the next step."""
        process = self.process
        assert process.stdin and process.stdout
        print("step", file=process.stdin, flush=True)
        loss, seconds = process.stdout.readline().split()
        return float(loss), float(seconds)


def measure_time(args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each variant's step in each repeat."""
    steppers = {name: Stepper(name, args) for name in args.variants}
    try:
        first = {name: stepper.step()[0] for name, stepper in steppers.items()}
        # bf16 rounds each product to 8 bits, and the order differs between variants.
        tolerance = 1e-5 if args.dtype == "fp32" else 5e-3
        if max(first.values()) - min(first.values()) > tolerance * max(first.values()):
            raise SystemExit(f"bench_step: the variants do not compute the same: {first}")
        seconds: dict[str, list[float]] = {name: [] for name in steppers}
        for repeat in range(WARM_UP - 1 + args.repeats):
            turn = repeat % len(args.variants)
            for name in [*args.variants[turn:], *args.variants[:turn]]:
                seconds[name].append(steppers[name].step()[1])
    finally:
        for stepper in steppers.values():
            stepper.process.kill()
            stepper.process.wait()
    return {name: several[WARM_UP - 1 :] for name, several in seconds.items()}


def measure_memory(name: str, args: argparse.Namespace) -> dict[str, int]:
    """State and peak resident bytes of one variant. Runs in a separate process."""
    run = run_of(args.vocab)
    before = resident_bytes("VmRSS")
    measured = variant(name, args.dtype, run, weights_of(run))
    for batch in batches(run, 3):
        measured.step(batch)
    peak = resident_bytes("VmHWM") - before
    with LiveBytes() as live:  # again, because counting needs memory too
        measured = variant(name, args.dtype, run, weights_of(run))
        measured.step(*batches(run, 1))
        gc.collect()
        return {"state": live.now, "peak": peak}


def resident_bytes(field: str) -> int:
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(field))


def own_command(what: str, name: str, args: argparse.Namespace) -> list[str]:
    """This script again, for one variant."""
    command = [sys.executable, __file__, what, name, "--dtype", args.dtype, "--vocab", args.vocab]
    return [*command, "--threads", str(args.threads), "--repeats", str(args.repeats)]


def in_own_process(name: str, args: argparse.Namespace) -> dict[str, int]:
    command = own_command("--memory-of", name, args)
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
    measured: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return measured


def ratios(seconds: list[float], ours: list[float]) -> str:
    paired = sorted(theirs / our for theirs, our in zip(seconds, ours, strict=True))
    low, high = paired[len(paired) // 10], paired[-1 - len(paired) // 10]
    return f"{statistics.median(paired):.2f}x [{low:.2f}..{high:.2f}]"


def report(args: argparse.Namespace) -> None:
    seconds = measure_time(args)
    memory = {name: in_own_process(name, args) for name in args.variants}
    print(
        f"\n{args.dtype}, {args.vocab} vocabulary, {args.threads} thread(s), n = {args.repeats}; "
        "time is relative to ours, [10 %..90 %] of the pairs"
    )
    print(f"{'variant':8}{'median s':>10}{'time / ours':>24}{'state MiB':>11}{'peak MiB':>10}")
    for name in args.variants:
        relative = "1" if name == "ours" else ratios(seconds[name], seconds["ours"])
        state, peak = (memory[name][kind] / 2**20 for kind in ("state", "peak"))
        median = statistics.median(seconds[name])
        print(f"{name:8}{median:10.3f}{relative:>24}{state:11.0f}{peak:10.0f}")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="time and memory of one local step")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--vocab", choices=tuple(VOCABULARIES), default="byte")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--variants", type=lambda text: text.split(","), default=list(VARIANTS))
    parser.add_argument("--memory-of", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--steps-of", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.variants[:1] != ["ours"] or not set(args.variants) <= set(VARIANTS):
        parser.error(f"--variants: ours first, then any of {', '.join(VARIANTS[1:])}")
    return args


def main() -> None:
    args = parse(sys.argv[1:])
    torch.manual_seed(0)
    torch.set_num_threads(args.threads)
    if args.memory_of:
        print(json.dumps(measure_memory(args.memory_of, args)))
    elif args.steps_of:
        steps_of(args.steps_of, args)
    else:
        report(args)


if __name__ == "__main__":
    main()
