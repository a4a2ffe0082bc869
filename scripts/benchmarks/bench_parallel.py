#!/usr/bin/env python
"""Several processes as one engine against one process: seconds, and traffic between them.

    # CPU, the demo's model
    python scripts/benchmarks/bench_parallel.py
    python scripts/benchmarks/bench_parallel.py --device cuda --shape 2b --meshes w1 dp2 \\
        --backend gloo

A mesh is named by its parts. w1 is one worker, and dp2 two whole models. ep2 distributes the
experts over two workers, pp2 cuts the layers over two workers, and tp2 cuts heads, experts and
tokens over two workers. dp2-ep2 and tp2-pp2 combine two of these forms. s2 is two workers that
stream layers from one host copy of the weights. In every turn, each mesh and the resident engine of
this process train the same batches from the same weights. Workers that share a GPU need --backend
gloo.

  step_s      seconds of a step. ratio: divided by the resident engine's in the same turn (medians)
  apart       largest difference of a step's loss from the resident engine's
  operations  operations between workers in a step, by kind, counted by the first worker. bytes:
              sent by the first worker
  offer_s     seconds to copy a round's offer to the host: shared tensors and owned experts
  adopt_s     seconds to copy all tensors from the host
  state_s     seconds to read the private state
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from bench_gpu_measure import LR, SHAPES, batches, fill, reset_peak, run_of, settle

from swarm.config import RunConfig
from swarm.experts import all_shapes, expert_of
from swarm.train.engine.engine import Engine
from swarm.train.engine.engine_options import EngineKind, EngineOptions
from swarm.train.fallback_engine import make_engine
from swarm.train.workers.crew import Crew, Place
from swarm.train.workers.parallel_engine import ParallelEngine

WARM_UP = 2
RESIDENT = "resident"


@dataclass(frozen=True)
class Form:
    """A mesh of workers.

    Attributes:
        workers: number of processes.
        ep: workers that share the experts.
        pp: workers that share the layers.
        tp: workers that share heads, experts and tokens.
        kind: kind of each worker's engine.
    """

    workers: int
    ep: int
    pp: int
    tp: int = 1
    kind: EngineKind = EngineKind.RESIDENT

    @staticmethod
    def of(name: str) -> Form:
        """Parses a name such as dp2-ep2. Raises ValueError."""
        sizes = {"w": 1, "dp": 1, "ep": 1, "pp": 1, "tp": 1, "s": 0}
        for part in name.split("-"):
            found = re.fullmatch("(w|dp|ep|pp|tp|s)([1-9][0-9]?)", part)
            if not found or ("s" in found[1] and part != name):
                raise ValueError(f"{name}: such as w1, dp2, ep2, pp4, tp2, dp2-ep2, s2")
            sizes[found[1]] = int(found[2])
        if streaming := sizes.pop("s"):
            return Form(streaming, 1, 1, kind=EngineKind.STREAMING)
        if min(sizes["ep"], sizes["tp"]) > 1:
            raise ValueError(f"{name}: such as w1, dp2, ep2, tp2; with tp the experts are cut too")
        number = math.prod(sizes.values())
        return Form(number, max(sizes["ep"], sizes["tp"]), sizes["pp"], sizes["tp"])


def engine_of(name: str, run: RunConfig, owned: int, args: argparse.Namespace) -> Engine:
    """An engine with weights that depend only on the seed."""
    options = replace(EngineOptions.of(run, device=args.device), schedule=args.schedule)
    if name == RESIDENT:
        engine: Engine = make_engine(run, options)
    else:
        form = Form.of(name)
        place = Place(form.workers, args.device, args.threads, args.backend)
        options = replace(options, ep=form.ep, pp=form.pp, tp=form.tp, kind=form.kind)
        engine = ParallelEngine(run, [options], lambda: Crew(place))
    engine.own(range(owned))
    fill(engine, run, args.device)
    return engine


def seconds_of(work: Callable[[], object], device: str) -> float:
    """Seconds of one call."""
    settle(device)
    began_s = time.perf_counter()
    work()
    settle(device)
    return time.perf_counter() - began_s


def measured(name: str, run: RunConfig, owned: int, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one engine, from its start to its end."""
    with closing(engine_of(name, run, owned, args)) as engine:
        found = measured_of(engine, run, args)
    del engine
    reset_peak(args.device)
    return found


def measured_of(engine: Engine, run: RunConfig, args: argparse.Namespace) -> dict[str, Any]:
    """Measures steps first, then the calls of a round."""
    losses, steps_s = [], []
    for tokens_BT1 in batches(run, WARM_UP + args.steps):
        began_s = time.perf_counter()
        losses.append(engine.step(tokens_BT1, lr=LR).loss)
        settle(args.device)
        steps_s.append(time.perf_counter() - began_s)
    traffic = engine.traffic if isinstance(engine, ParallelEngine) else {}
    names = list(all_shapes(run.model))
    experts = {each: expert_of(each) for each in names}
    offered = [n for n in names if experts[n] is None or experts[n] in engine.owned]
    held = engine.read(names)
    return {
        "losses": losses,
        "step_s": statistics.median(steps_s[WARM_UP:]),
        "operations": {kind: count for kind, (count, _) in traffic.items()},
        "bytes": {kind: size for kind, (_, size) in traffic.items()},
        "offer_s": seconds_of(lambda: engine.read(offered), args.device),
        "adopt_s": seconds_of(lambda: engine.write(held), args.device),
        "state_s": seconds_of(engine.state_dict, args.device),
    }


def summary(turns: Sequence[dict[str, Any]], resident: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The figures of one mesh, over all turns."""
    pairs = list(zip(turns, resident, strict=True))
    ratios = [mine["step_s"] / other["step_s"] for mine, other in pairs]
    return {
        "step_s": statistics.median(each["step_s"] for each in turns),
        "ratio": statistics.median(ratios),
        "ratios": [round(each, 3) for each in ratios],
        "apart": max(
            abs(loss - other)
            for turn, against in pairs
            for loss, other in zip(turn["losses"], against["losses"], strict=True)
        ),
        **{key: turns[-1][key] for key in ("operations", "bytes")},
        **{
            key: statistics.median(each[key] for each in turns)
            for key in ("offer_s", "adopt_s", "state_s")
        },
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    """The table for a README."""
    head = ["mesh", "step, s", "of the resident engine's", "loss apart", "operations a step"]
    head += ["MB a step", "offer, s", "adopt, s", "private state, s"]
    rows = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, each in found.items():
        kinds = ", ".join(f"{count} {kind}" for kind, count in each["operations"].items())
        rows.append(
            f"| {name} | {each['step_s']:.3f} | {each['ratio']:.2f} | {each['apart']:.1e} | {kinds}"
            f" | {sum(each['bytes'].values()) / 1e6:.2f} | {each['offer_s']:.3f} "
            f"| {each['adopt_s']:.3f} | {each['state_s']:.3f} |"
        )
    return "\n".join(rows)


def main() -> None:
    """Prints a table, and one JSON object last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--meshes", nargs="+", default=["w1", "dp2", "ep2", "pp2"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cpu")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="demo")
    parser.add_argument("--sequences", type=int, default=16, help="of a step")
    parser.add_argument("--micro", type=int, default=2, help="sequences of a micro-batch")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=8, help=f"measured, after {WARM_UP} others")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="of each process (default: 1)")
    parser.add_argument("--schedule", choices=["1f1b", "gpipe"], default="1f1b")
    args = parser.parse_args()
    try:
        names = [RESIDENT, *dict.fromkeys(name for name in args.meshes if Form.of(name))]
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(args.threads)  # threads of the resident engine, which is in this process
    shape = SHAPES[args.shape]
    run = run_of(shape, args.sequences, args.length, clip="global", micro=args.micro)
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(args.turns):
        for name in names:
            turns[name].append(measured(name, run, shape.owned, args))
            sys.stderr.write(f"{name}: {turns[name][-1]['step_s']:.3f} s a step\n")
    found = {name: summary(turns[name], turns[RESIDENT]) for name in names}
    sys.stdout.write(f"{table(found)}\n{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
