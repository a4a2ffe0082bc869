#!/usr/bin/env python
"""Training state and peak of every engine and level: predicted, and measured on allocations.

The first table measures a model with the 7B's proportions (32 experts, a quarter owned, hidden size
2048 / 16) on the CPU, where device and host are one memory. Figures are bytes of living tensors
between two steps and at the peak of a step. The second table computes the paper's models, with
columns for device, host and disk.

    python scripts/benchmarks/bench_memory.py
"""

from __future__ import annotations

import argparse
import gc
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from swarm.config import RunConfig, parse_config
from swarm.experts import all_shapes
from swarm.model.cost import full_state_bytes
from swarm.train.engine.engine_options import ActivationCheckpoints, EngineKind, EngineOptions
from swarm.train.engine.host_memory import LiveBytes
from swarm.train.engine.sizes import Need, sizes_of
from swarm.train.fallback_engine import make_engine
from swarm.train.planning.ladder import describe
from swarm.train.planning.memory import need_of

RUNS = Path(__file__).parents[2] / "configs" / "runs"
PLANS = (("spes_2b", 1), ("spes_2b", 16), ("spes_7b", 8), ("spes_7b", 2))
"""Run file and experts owned: N = 16, R = N (everything), N = 4, N = 16."""


def levels(run: RunConfig, folder: Path) -> list[EngineOptions]:
    """The compared levels, the level with most memory first."""
    base = EngineOptions.of(run)
    streaming = replace(base, kind=EngineKind.STREAMING, resident_layers=0)
    host = replace(streaming, activation_checkpoints=ActivationCheckpoints.HOST)
    return [
        base,
        replace(base, recompute="routing"),
        replace(base, frozen="int8"),
        replace(base, frozen="int8", moments="int8"),
        replace(streaming, resident_layers=None),
        streaming,
        host,
        replace(host, frozen="int8"),
        replace(host, moments="int8", frozen_folder=folder),
    ]


def small_run() -> RunConfig:
    """The 7B's proportions at a sixteenth of its width and a quarter of its depth."""
    run = loaded("spes_7b")
    values = json.loads(run.canonical_json())
    values["model"] |= {
        "vocab_size": 2048,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "moe_intermediate_size": 128,
    }
    values["data"] |= {"sequence_length": 128, "validation_bytes": 256}
    values["train"] |= {"batch_tokens": 512, "micro_batch_sequences": 2}
    values["phases"] = []
    return RunConfig.model_validate_json(json.dumps(values))


def loaded(name: str) -> RunConfig:
    """A run file."""
    path = RUNS / f"{name}.toml"
    return parse_config(RunConfig, path.read_text(), source=str(path), overrides=())


def measured(run: RunConfig, owned: int, options: EngineOptions) -> tuple[int, int]:
    """State between steps, and peak within a step, in bytes of living tensors."""
    shape = (run.train.batch_tokens // run.data.sequence_length, run.data.sequence_length + 1)
    tokens = torch.randint(0, 2048, shape, generator=torch.Generator().manual_seed(0))
    with LiveBytes() as live:
        engine = make_engine(run, options)
        engine.own(range(owned))
        for name, size in all_shapes(run.model).items():
            engine.write({name: torch.ones(size) if len(size) == 1 else torch.randn(size) * 0.02})
        engine.step(tokens, lr=1e-4)
        engine.read(["model.norm.weight"])
        gc.collect()
        state = live.now
        live.reset()
        engine.step(tokens, lr=1e-4)
        peak = live.peak
        engine.close()
    return state, peak


def compare(folder: Path) -> list[dict[str, Any]]:
    """Predicted against measured, at every level."""
    run, owned = small_run(), 8
    rows = []
    for options in levels(run, folder):
        state, peak = measured(run, owned, options)
        need = need_of(run, owned, options)
        predicted = need.device_state + need.host + need.disk
        rows.append(
            {
                "level": name_of(options, run),
                "state_mb": state / 1e6,
                "predicted_state_mb": predicted / 1e6,
                "peak_mb": peak / 1e6,
                "predicted_peak_mb": (predicted + need.activations) / 1e6,
                "peak_error": (predicted + need.activations) / peak - 1,
            }
        )
    return rows


def name_of(options: EngineOptions, run: RunConfig) -> str:
    """A level, with the storage of frozen experts."""
    words = describe(options, run).replace("computed again for backward", "recomputed")
    return words if options.frozen == "bf16" else f"{words}, frozen {options.frozen}"


def computed(folder: Path) -> list[dict[str, Any]]:
    """The paper's models at every level, with micro-batches of 2 x 2048 tokens, one per pass."""
    rows = []
    for name, owned in PLANS:
        run = loaded(name)
        without_frozen = 1 if owned == run.model.num_experts else None
        for options in levels(run, folder)[:without_frozen]:
            # As in a peer, whose blob store has the agreed values as files.
            lent = options.frozen_folder is not None
            used = replace(options, device="cuda", pass_micro_batches=1, frozen_lent=lent)
            need = need_of(run, owned, used)
            rows.append({"run": name, "owned": owned, **columns(run, owned, options, need)})
    return rows


def columns(run: RunConfig, owned: int, options: EngineOptions, need: Need) -> dict[str, Any]:
    """One row of the computed table. State includes gradients, as in the paper."""
    gradients = 4 * sizes_of(run.model, owned).trained
    state = need.device_state + (gradients if options.kind is EngineKind.RESIDENT else 0)
    return {
        "level": name_of(options, run),
        "device_state_gb": state / 1e9,
        "of_full_training": state / full_state_bytes(run.model),
        "device_peak_gb": need.device / 1e9,
        "host_gb": need.host / 1e9,
        "disk_gb": need.disk / 1e9,
    }


def print_rows(rows: list[dict[str, Any]]) -> None:
    """A table in Markdown."""
    print(f"| {' | '.join(rows[0])} |")
    print("|---" * len(rows[0]) + "|")
    for row in rows:
        cells = [_text(name, cell) for name, cell in row.items()]
        print(f"| {' | '.join(cells)} |")
    print()


def _text(name: str, cell: Any) -> str:
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:.1%}" if name in ("peak_error", "of_full_training") else f"{cell:.1f}"


def main() -> None:
    """Prints both tables, or one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        tables = {"measured": compare(Path(folder)), "computed": computed(Path(folder))}
    if args.json:
        print(json.dumps(tables))
        return
    for rows in tables.values():
        print_rows(rows)


if __name__ == "__main__":
    main()
