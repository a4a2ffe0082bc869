#!/usr/bin/env python
"""Saves the private state of several workers: in parts that they write, against one file.

    python scripts/benchmarks/bench_parts.py --workers 1 2 4 --turns 3

Workers that hold the whole model (fp32 masters and moments of the size that --hidden gives) save it
in turn

  one    in one file, from tensors that come one by one in the first worker's answers
  parts  in parts, each written by a worker, and an index

with the same tensors, on the same disk. Figures are medians of the turns, with the ratio of each
turn's pair. read_s is the time to read the parts back and check their digests.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch
from bench_gpu_measure import SHAPES, run_of
from torch import Tensor

from swarm.config import RunConfig
from swarm.train.engine.engine import EngineState
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.tensor_file import Form, LazyTensors, forms_of
from swarm.train.saving.checkpoint import PrivateState, load_private, save_private
from swarm.train.workers.command_history import num_bytes_of
from swarm.train.workers.crew import Crew, Place
from swarm.train.workers.parallel_engine import ParallelEngine


class OneByOne(LazyTensors):
    """The same tensors, without the interface for writing parts."""

    def __init__(self, tensors: LazyTensors) -> None:
        self._tensors = tensors

    def forms(self) -> dict[str, Form]:
        return self._tensors.forms()

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def run_with(hidden: int) -> RunConfig:
    """The demo's run with wider layers."""
    run = run_of(SHAPES["demo"], 2, 128, clip="global", micro=1)
    values = json.loads(run.canonical_json())
    values["model"] |= {"hidden_size": hidden, "moe_intermediate_size": 2 * hidden}
    return RunConfig.model_validate_json(json.dumps(values))


def seconds_of_saving(folder: Path, state: EngineState) -> float:
    rng = {"cpu": torch.get_rng_state()}
    private = PrivateState(
        state, "run", "ab" * 32, 1, 6, 1, 1.0, 0, offered={}, expert_bases={}, rng=rng
    )
    os.sync()  # excludes waiting for the writes of others
    began_s = time.perf_counter()
    save_private(folder / "private", private)
    return time.perf_counter() - began_s


def measured(workers: int, args: argparse.Namespace) -> dict[str, object]:
    """The figures for one number of workers."""
    run = run_with(args.hidden)
    place = Place(workers)
    seconds: dict[str, list[float]] = {"one": [], "parts": [], "read": []}
    with closing(ParallelEngine(run, [EngineOptions.of(run)], lambda: Crew(place))) as engine:
        engine.own(range(run.model.num_experts))
        state = engine.state_dict()
        assert isinstance(state.tensors, LazyTensors)
        ways = {"one": replace(state, tensors=OneByOne(state.tensors)), "parts": state}
        size = sum(map(num_bytes_of, forms_of(state.tensors).values()))
        order = [way for turn in range(args.turns) for way in sorted(ways, reverse=turn % 2 == 1)]
        for way in order:
            with tempfile.TemporaryDirectory(dir=args.folder, prefix="parts-") as folder:
                seconds[way].append(seconds_of_saving(Path(folder), ways[way]))
                began_s = time.perf_counter()
                load_private(Path(folder) / "private")
                seconds["read"] += [time.perf_counter() - began_s] * (way == "parts")
    ratios = [mine / other for mine, other in zip(seconds["parts"], seconds["one"], strict=True)]
    return {
        "megabytes": round(size / 1e6, 1),
        **{f"{way}_s": round(statistics.median(each), 2) for way, each in seconds.items()},
        "ratio": round(statistics.median(ratios), 2),
        "ratios": [round(ratio, 2) for ratio in ratios],
    }


def main() -> None:
    """Prints a table, and one JSON object last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--hidden", type=int, default=512, help="size of the residual stream")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="folder on the measured disk")
    args = parser.parse_args()
    found = {workers: measured(workers, args) for workers in args.workers}
    rows = [
        "| workers | MB | one file, s | parts, s | ratio | read, s |",
        "|---|---|---|---|---|---|",
    ]
    for workers, each in found.items():
        rows.append(
            f"| {workers} | {each['megabytes']} | {each['one_s']} | {each['parts_s']} "
            f"| {each['ratio']} {each['ratios']} | {each['read_s']} |"
        )
    sys.stdout.write("\n".join(rows) + f"\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
