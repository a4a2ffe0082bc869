#!/usr/bin/env python
"""The cost of precisions and smaller moments in loss, on the demo's text.

Each row trains the model of configs/runs/demo.toml on the Python standard library. For each seed
all rows have the same weights, batches and learning rates. One peer owns half of the experts, and
the other experts keep their initial values. The columns are the held-out loss in nats per byte
(mean over the seeds, always evaluated in fp32), its mean difference from the first row with equal
seeds, the largest difference of any seed, and bytes of masters, moments and frozen experts.

    .venv/bin/python scripts/benchmarks/bench_precision.py --steps 150 --seeds 3
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from swarm.config import RunConfig, parse_config
from swarm.data.corpus import open_corpus
from swarm.data.held_out import HeldOut, held_out_documents, measured_on
from swarm.data.loader import Loader
from swarm.data.shards import Shards, open_shards
from swarm.data.tokenizer import BYTE
from swarm.experts import all_shapes
from swarm.model.initial_weights import initial_tensors
from swarm.train.engine.engine_options import ActivationCheckpoints, EngineKind, EngineOptions
from swarm.train.engine.local_steps import learning_rate
from swarm.train.fallback_engine import make_engine
from swarm.train.planning.memory import need_of

TEXT = ((0, 2**40),)
DEMO = Path(__file__).parents[2] / "configs" / "runs" / "demo.toml"
ADAMW = ("optimizer.kind=adamw", "optimizer.lr=2e-3")
OWNED = 4


@dataclass(frozen=True)
class Row:
    """One setting of training."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    clip: str = "global"


ROWS = (
    Row("fp32"),
    Row("moments bf16, stochastic rounding", {"moments": "bf16"}),
    Row("moments int8, blockwise", {"moments": "int8"}),
    Row("frozen experts bf16", {"frozen": "bf16"}),
    Row("frozen experts int8", {"frozen": "int8"}),
    Row("products in bf16", {"compute": "bf16"}),
    Row("products in fp16, scaled loss", {"compute": "fp16"}),
    Row(
        "activation checkpoints in bf16",
        {"kind": EngineKind.STREAMING, "activation_checkpoints": ActivationCheckpoints.HOST_BF16},
    ),
    Row("clipping by unit", clip="unit"),
    Row(
        "bf16 products and moments, int8 frozen",
        {"compute": "bf16", "moments": "bf16", "frozen": "int8"},
    ),
)


def run_of(row: Row, seed: int, steps: int) -> RunConfig:
    """The demo with this seed and length."""
    overrides = [f"run.seed={seed}", *ADAMW, f"optimizer.schedule_steps={steps}"]
    overrides += [
        f'optimizer.clip="{row.clip}"',
        'train.frozen="fp32"',
        "data.validation_bytes=8192",
    ]
    return parse_config(RunConfig, DEMO.read_text(), source=str(DEMO), overrides=overrides)


def trained(
    row: Row, seed: int, steps: int, shards: Shards, held_out: HeldOut
) -> tuple[float, float]:
    """Held-out loss, and bytes of the training state between steps."""
    run = run_of(row, seed, steps)
    base = EngineOptions.of(run)
    options = EngineOptions(**(vars(base) | row.options))
    engine = make_engine(run, options)
    engine.write(initial_tensors(run, list(all_shapes(run.model))))
    engine.own(range(OWNED))
    with Loader(shards, run) as loader:
        for step in range(steps):
            tokens_BT1 = loader.batch(TEXT, step, run.train.batch_tokens)
            engine.step(tokens_BT1, lr=learning_rate(step, run))
    loss = held_out.mean(lambda tokens, scored: engine.evaluate(tokens, scored_BT=scored))
    engine.close()
    need = need_of(run, OWNED, options)
    return loss, need.device_state + need.host


def main() -> None:
    """Trains every row with every seed and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cache", type=Path, default=Path("out") / "bench_precision")
    args = parser.parse_args()
    torch.set_num_threads(1)
    corpus, run = open_corpus(None), run_of(ROWS[0], 0, args.steps)
    shards = open_shards(corpus, args.cache, BYTE)
    documents = held_out_documents(corpus.documents(), run.data.validation_bytes)
    held_out = measured_on(BYTE, documents, run.data.sequence_length)
    print("setting | held-out loss | difference | largest | state MB", flush=True)
    first: list[float] = []
    for row in ROWS:
        found = [trained(row, seed, args.steps, shards, held_out) for seed in range(args.seeds)]
        losses = [loss for loss, _ in found]
        first = first or losses
        apart = [loss - other for loss, other in zip(losses, first, strict=True)]
        mean, largest = statistics.mean(apart), max(apart, key=abs)
        cells = [row.name, f"{statistics.mean(losses):.4f}", f"{mean:+.4f}", f"{largest:+.4f}"]
        print(" | ".join([*cells, f"{found[0][1] / 1e6:.1f}"]), flush=True)


if __name__ == "__main__":
    main()
