#!/usr/bin/env python
"""The cost of a monitor or of exports for training peers: phases with and without, in turn.

    .venv/bin/python scripts/benchmarks/bench_watching.py monitor --pairs 8 --seconds 30
    .venv/bin/python scripts/benchmarks/bench_watching.py export --pairs 8 --seconds 30

One swarm of the demo's model trains all the time, on all processor cores but the last one. In every
second phase a watcher runs on the last core, as on a separate machine. The watcher is
`swarm-monitor --http` with one listener that reads its events like an open page, or `swarm-export
--every 2 --evaluate`. The order within a pair changes from pair to pair. A phase's rate is the
tokens of its rounds divided by the time from the end of the first round to the end of the last.
This time includes local steps, averaging and serving the watcher. A second figure is the processor
time per token of the peers and their daemons. On a busy core both figures mean the same, but other
programs on the machine disturb the second figure less.

  tokens_per_s    median of the phases without and with it, summed over the peers
  cost            mean over the pairs of 1 - with / without, its standard error, and the quartiles.
                  Negative values mean faster training with it
  cpu_ms          processor milliseconds per 1,000 tokens, without and with it
  cpu_cost        likewise from cpu_ms: 1 - without / with
  `besides`       share of the processor time outside of the peers' main threads, which train:
                  serving, averaging, the daemons, without and with it
  besides_cost    likewise: with - without. It is the loss of the training threads on a processor
                  without idle time, and the least noisy of the three figures, because the speed of
                  the training itself cancels out
  pairs           all tokens/s. cpu_pairs: all cpu_ms. besides_pairs: all values of that share
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from peers.command_line.command import ending_as_ctrl_c
from swarm.emulation.local_swarm import LocalSwarm, applied

RUN_FILE = Path(__file__).resolve().parents[2] / "configs/runs/demo.toml"
SETTINGS = ("--set", "run.rounds=100000", "--set")
START_S = 300.0
READ_BYTES = 65_536


CORES = sorted(os.sched_getaffinity(0))
"""The peers' cores: all but the last."""


@contextlib.contextmanager
def watched_by(what: str, swarm: LocalSwarm) -> Iterator[None]:
    """A monitor with a page and one listener, or exports of every second round."""
    with tempfile.TemporaryDirectory(prefix="bench-exports-") as folder:
        options = {
            "monitor": ["--http", "127.0.0.1:0"],
            "export": ["--every", "2", "--evaluate", "--output-dir", folder],
        }[what]
        command = [sys.executable, "-m", f"peers.{what}", *options]
        command += ["--initial-peers", swarm.peers[0].join_address()]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            os.sched_setaffinity(process.pid, CORES[-1:])
            assert process.stdout
            if what == "monitor":
                url = f"{process.stdout.readline().split()[-1]}events"
                threading.Thread(target=_listen, args=(url,), daemon=True).start()
            try:
                yield
            finally:
                process.terminate()
            if what == "export":
                assert any(Path(folder).iterdir()), "nothing was exported"


def _listen(url: str) -> None:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=60) as events:
        while events.read1(READ_BYTES):
            pass


def tokens_per_s(swarm: LocalSwarm, began: float, ended: float) -> float:
    """Tokens per second of rounds that ended between two times, from the first end to the last."""
    total = 0.0
    for peer in swarm.peers:
        rounds = [e for e in applied(peer.events(), "quorum") if began <= e["time"] < ended]
        seconds = rounds[-1]["time"] - rounds[0]["time"] if len(rounds) > 1 else math.nan
        total += sum(event["trained_tokens"] for event in rounds[1:]) / seconds
    return total


class Spent(NamedTuple):
    """Processor seconds of the peers and of all processes that they have started."""

    all: float
    besides: float
    """Seconds of all threads but the peers' main threads, which train."""


def processor_s(swarm: LocalSwarm) -> Spent:
    """Processor seconds since the processes began."""
    parents = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    peers = {peer.process.pid for peer in swarm.peers if peer.process}
    ours = set(peers)
    while more := {pid for pid, parent in parents.items() if parent in ours} - ours:
        ours |= more
    threads = dict[int, float]()
    for pid in ours:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                threads[int(path.parent.name)] = int(path.read_text().split()[0]) / 1e9
    return Spent(
        sum(threads.values()), sum(s for thread, s in threads.items() if thread not in peers)
    )


def tokens(swarm: LocalSwarm) -> int:
    """Tokens of all rounds so far."""
    rounds = [event for peer in swarm.peers for event in applied(peer.events(), "quorum")]
    return sum(event["trained_tokens"] for event in rounds)


class Phase(NamedTuple):
    """The figures of one phase."""

    tokens_per_s: float
    cpu_ms: float
    """Processor milliseconds per 1,000 tokens."""
    besides: float
    """Share of the processor time outside of the training threads."""


def phase(swarm: LocalSwarm, seconds: float, watcher: str | None) -> Phase:
    """Measures one phase. The round in which it begins does not count for its tokens/s."""
    with watched_by(watcher, swarm) if watcher else contextlib.nullcontext():
        time.sleep(seconds / 4)
        began, done, before = time.time(), tokens(swarm), processor_s(swarm)
        time.sleep(seconds)
        done, until = tokens(swarm) - done, processor_s(swarm)
        spent_s, besides_s = until.all - before.all, until.besides - before.besides
    rate = tokens_per_s(swarm, began, time.time())
    return Phase(rate, 1e6 * spent_s / max(done, 1), besides_s / spent_s)


def spread(costs: list[float]) -> dict[str, Any]:
    """Mean, standard error and quartiles."""
    low, _, high = statistics.quantiles(costs, n=4)
    return {
        "mean": round(statistics.mean(costs), 4),
        "standard_error": round(statistics.stdev(costs) / math.sqrt(len(costs)), 4),
        "quartiles": [round(low, 4), round(high, 4)],
    }


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("watcher", choices=["monitor", "export"])
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--local-steps", type=int, default=10, help="of a round; the demo has 50")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30.0, help="that a phase counts")
    arguments = parser.parse_args()
    if len(CORES) < 2:
        parser.error("needs two processor cores: the watcher has one to itself")
    os.sched_setaffinity(0, CORES[:-1])
    settings = (*SETTINGS, f"round.local_steps={arguments.local_steps}")
    with ending_as_ctrl_c(), tempfile.TemporaryDirectory(prefix="bench-watching-") as folder:
        path = Path(folder) / "swarm"
        with LocalSwarm(path, RUN_FILE, arguments.peers, founder_options=settings) as swarm:
            swarm.start()
            swarm.wait_until(_has_rounds, what="two rounds", timeout_s=START_S)
            pairs = []
            for number in range(arguments.pairs):
                watchers = (None, arguments.watcher)
                order = watchers if number % 2 else watchers[::-1]
                found = {each: phase(swarm, arguments.seconds, each) for each in order}
                pairs.append((found[None], found[arguments.watcher]))
            swarm.kill()
    rates = [(alone.tokens_per_s, watched.tokens_per_s) for alone, watched in pairs]
    spent = [(alone.cpu_ms, watched.cpu_ms) for alone, watched in pairs]
    besides = [(alone.besides, watched.besides) for alone, watched in pairs]
    verdict = {
        "tokens_per_s": [round(statistics.median(each)) for each in zip(*rates, strict=True)],
        "cost": spread([1 - watched / alone for alone, watched in rates]),
        "cpu_ms": [round(statistics.median(each), 1) for each in zip(*spent, strict=True)],
        "cpu_cost": spread([1 - alone / watched for alone, watched in spent]),
        "besides": [round(statistics.median(each), 4) for each in zip(*besides, strict=True)],
        "besides_cost": spread([watched - alone for alone, watched in besides]),
        "pairs": [[round(one) for one in pair] for pair in rates],
        "cpu_pairs": [[round(one, 1) for one in pair] for pair in spent],
        "besides_pairs": [[round(one, 4) for one in pair] for pair in besides],
        "load": [round(load, 1) for load in os.getloadavg()],
    }
    sys.stdout.write(json.dumps(verdict) + "\n")


def _has_rounds(swarm: LocalSwarm) -> bool:
    return all(len(applied(peer.events(), "quorum")) >= 2 for peer in swarm.peers)


if __name__ == "__main__":
    main()
