#!/usr/bin/env python3
"""Idle time of a GPU between its last local step and READY: values stored, private state durable.

A state of the given size (fp32 masters and two moments) is saved in two ways in turn,

  before  values are encoded and stored, then one thread hashes and writes the state
  now     as in a peer: one thread hashes tensors and another writes them, at the same time

and read again, with the digest checked by one thread, and as in a peer. The figures are medians of
the turns. Both ways use the same disk in turn, so that both have the same noise. At the end, the
times for the state of the 7B are computed from the measured rates.

    .venv/bin/python scripts/benchmarks/bench_private_state.py --gigabytes 1
"""

import argparse
import json
import mmap
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from blake3 import blake3

from swarm.config import RunConfig, parse_config
from swarm.model.cost import owned_per_peer, private_bytes
from swarm.network.blobs.blob_store import BlobStore
from swarm.train.engine.engine import EngineState
from swarm.train.saving.checkpoint import PrivateState, Saving, load_private, save_private

SEVEN_B = Path(__file__).resolve().parents[2] / "configs/runs/spes_7b.toml"
NUM_UNITS = 8
KINDS = ("master", "exp_avg", "exp_avg_sq")


def make_state(gigabytes: float) -> PrivateState:
    elements = int(gigabytes * 1e9 / 4 / len(KINDS) / NUM_UNITS)
    tensors = {f"{kind}.{k}": torch.randn(elements) for kind in KINDS for k in range(NUM_UNITS)}
    engine = EngineState(tensors, (0,), 1, 0, 0)
    rng = {"cpu": torch.get_rng_state()}
    return PrivateState(
        engine, "run", "ab" * 32, 1, 6, 1, 1.0, 0, offered={}, expert_bases={}, rng=rng
    )


def store_values(state: PrivateState, folder: Path) -> None:
    """Stores the masters as bf16, the usual type of experts, in a blob store on the same disk."""
    store = BlobStore(folder)
    for k in range(NUM_UNITS):
        value = state.engine.tensors[f"master.{k}"].bfloat16().view(torch.uint8).numpy()
        store.pin([store.put(value.data)])


def save_before(path: Path, state: PrivateState) -> None:
    """The former way: one thread hashes a chunk, then writes it."""
    store_values(state, path.parent / "store")
    digest = blake3()
    with path.open("wb") as file:
        for _, tensor in sorted(state.engine.tensors.items()):
            for piece in tensor.view(torch.uint8).split(16 * 2**20):
                chunk = memoryview(piece.numpy())
                digest.update(chunk)
                file.write(chunk)
        file.write(digest.digest())
        file.flush()
        os.fsync(file.fileno())


def save_now(path: Path, state: PrivateState) -> None:
    with Saving(path, state.engine, state.rng) as begun:
        store_values(state, path.parent / "store")
        save_private(path, state, begun)


def load_before(path: Path) -> None:
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    blake3(memoryview(mapped)[:-32]).digest()


def timed(action: str, state: PrivateState, parent: Path) -> float:
    with tempfile.TemporaryDirectory(dir=parent, prefix="private-state-") as folder:
        path = Path(folder) / "private"
        if action.startswith("load"):
            save_private(path, state)
        os.sync()  # excludes waiting for the writes of others
        actions: dict[str, Callable[[], object]] = {
            "save_before": lambda: save_before(path, state),
            "save_now": lambda: save_now(path, state),
            "load_before": lambda: load_before(path),
            "load_now": lambda: load_private(path),
        }
        began_s = time.perf_counter()
        actions[action]()
        return time.perf_counter() - began_s


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gigabytes", type=float, default=1.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="folder on the measured disk")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    args = parser.parse_args()
    torch.set_num_threads(1)
    state = make_state(args.gigabytes)
    seconds: dict[str, list[float]] = {}
    for turn in range(args.turns):
        actions = ["save_before", "save_now", "load_before", "load_now"]
        for action in actions if turn % 2 == 0 else reversed(actions):
            took_s = timed(action, state, args.folder or Path(tempfile.gettempdir()))
            seconds.setdefault(action, []).append(took_s)
            print(f"{action:12} {took_s:6.2f} s", file=sys.stderr)
    median = {action: statistics.median(times) for action, times in seconds.items()}
    run = parse_config(RunConfig, SEVEN_B.read_text(), source=SEVEN_B.name, overrides=[])
    seven_gb = private_bytes(run, owned_per_peer(run, run.run.peers)) / 1e9
    result = {
        "gigabytes": args.gigabytes,
        **{f"{action}_s": round(value, 3) for action, value in median.items()},
        "save_ratio": round(median["save_now"] / median["save_before"], 3),
        "load_ratio": round(median["load_now"] / median["load_before"], 3),
        "seven_b_gigabytes": round(seven_gb, 1),
        "seven_b_before_s": round(median["save_before"] * seven_gb / args.gigabytes, 1),
        "seven_b_now_s": round(median["save_now"] * seven_gb / args.gigabytes, 1),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }
    print(*(f"{name:18} {value}" for name, value in result.items()), sep="\n")
    if args.json:
        print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
