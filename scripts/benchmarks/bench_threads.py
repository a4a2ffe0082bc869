#!/usr/bin/env python3
"""Compares the speed of peers started by hand, without a thread option, with peers of swarm-local.

Both are swarms of the demo's model on a given number of cores, under load of processes that only
spin, at normal priority. swarm-local gives each peer one thread. A peer that is started by hand
measures the best number. The two kinds take turns, and the medians of their rounds are compared.

  local_s, hand_s   median seconds of a round
  ratio             hand_s / local_s. Exit status 1 above 1.5, or if a swarm did not finish

    .venv/bin/python scripts/benchmarks/bench_threads.py --cores 2 --load 2
"""

import argparse
import itertools
import json
import multiprocessing
import os
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from peers.command_line.command import ending_as_ctrl_c
from peers.peer import PASSIVE
from swarm.emulation.local_swarm import LocalSwarm, applied
from swarm.errors import SwarmError

RUN_FILE = Path(__file__).resolve().parents[2] / "configs/runs/demo.toml"
LIMIT = 1.5
GIVE_UP_S = 600.0
MANY = 1_000_000
CHOICE = re.compile(r"threads: (\d+) \(")
OPENMP = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT")


def spin() -> None:
    os.setsid()  # like programs of other users, since Linux first shares cores among sessions
    parent = multiprocessing.parent_process()
    while parent is None or parent.is_alive():  # no other process ends it after a kill -9
        for _ in range(MANY):
            pass


@contextmanager
def load(processes: int) -> Iterator[None]:
    spinning = [multiprocessing.Process(target=spin, daemon=True) for _ in range(processes)]
    for process in spinning:
        process.start()
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.join()


@dataclass(frozen=True)
class Seen:
    """The result of one swarm.

    Attributes:
        seconds: seconds of each round after the first, measured by the founder. GIVE_UP_S for a
            hanging round.
        threads: numbers of threads that its peers chose.
        is_finished: whether its run ended in time.
    """

    seconds: list[float]
    threads: list[int]
    is_finished: bool


def rounds_of(*, by_hand: bool, peers: int, rounds: int) -> Seen:
    """Trains a swarm, and returns its rounds."""
    folder = Path(tempfile.mkdtemp(prefix="swarm-threads-"))
    swarm = LocalSwarm(
        folder,
        RUN_FILE,
        peers,
        options=["--linger", "86400"],
        founder_options=["--rounds", str(rounds)],
    )
    if by_hand:
        swarm.environment = dict(PASSIVE)
    is_finished = True
    try:
        with swarm:
            swarm.start()
            try:
                swarm.wait_until(LocalSwarm.finished, what="the run", timeout_s=GIVE_UP_S)
            except SwarmError as error:
                is_finished = False
                print(f"  not finished: {str(error).partition(';')[0]}", file=sys.stderr)
            ends = [event["time"] for event in applied(swarm.peers[0].events(), "quorum")]
            threads = [
                int(number) for peer in swarm.peers for number in CHOICE.findall(peer.output())
            ]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    return Seen(seconds if is_finished else [*seconds, GIVE_UP_S], threads, is_finished)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--cores", type=int, default=2, help="cores for all processes (default: 2)")
    parser.add_argument("--load", type=int, default=2, help="spinning processes (default: 2)")
    parser.add_argument("--rounds", type=int, default=5, help="of each swarm (default: 5)")
    parser.add_argument("--turns", type=int, default=2, help="swarms of each kind (default: 2)")
    parser.add_argument("--json", action="store_true", help="the last line is one JSON object")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds must be 2 at least: the first is left out")
    return args


def main() -> int:
    args = parse()
    for name in OPENMP:  # a person who starts a peer by hand has not set these
        os.environ.pop(name, None)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    seconds: dict[str, list[float]] = {"local": [], "hand": []}
    threads: list[int] = []
    unfinished = 0
    with ending_as_ctrl_c(), load(args.load):
        for turn in range(args.turns):
            for kind in ("local", "hand") if turn % 2 == 0 else ("hand", "local"):
                found = rounds_of(by_hand=kind == "hand", peers=args.peers, rounds=args.rounds)
                seconds[kind] += found.seconds
                threads += found.threads if kind == "hand" else []
                unfinished += not found.is_finished
                shown = " ".join(f"{s:.1f}" for s in found.seconds)
                print(f"{kind:>5}: rounds of {shown} s", file=sys.stderr)
    local_s, hand_s = (statistics.median(seconds[kind]) for kind in ("local", "hand"))
    ratio = hand_s / local_s
    print(
        f"{args.peers} peers on {args.cores} cores with {args.load} busy processes: "
        f"swarm-local {local_s:.1f} s a round, by hand {hand_s:.1f} s, ratio {ratio:.2f} "
        f"(at most {LIMIT}); threads chosen {threads}; swarms that did not finish: {unfinished}"
    )
    if args.json:
        result = {
            "peers": args.peers,
            "cores": args.cores,
            "load": args.load,
            "local_s": round(local_s, 3),
            "hand_s": round(hand_s, 3),
            "ratio": round(ratio, 3),
            "local_rounds_s": [round(s, 2) for s in seconds["local"]],
            "hand_rounds_s": [round(s, 2) for s in seconds["hand"]],
            "threads": threads,
            "unfinished": unfinished,
        }
        print(json.dumps(result))
    return 1 if ratio > LIMIT or unfinished else 0


if __name__ == "__main__":
    sys.exit(main())
