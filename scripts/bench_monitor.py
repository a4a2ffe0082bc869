#!/usr/bin/env python
"""What a monitor with a page costs those that train: phases with and without one, in turn.

    .venv/bin/python scripts/bench_monitor.py --pairs 8 --seconds 30

One swarm of the demo's model trains all the time. In every second phase `swarm-monitor --http` is
attached, and one listener reads its events, as an open page does. Which of a pair comes first
changes from pair to pair. A phase counts the tokens of local steps by the seconds that these took,
from the rounds that ended in it: what the monitor's traffic and processor time slow down.

  without, with   median tokens/s of the phases, summed over the peers
  cost            median over the pairs of 1 - with / without; negative: faster with it
  quartiles       of the same, and `pairs` all of them
"""

from __future__ import annotations

import argparse
import contextlib
import json
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

from swarm.emulation.local_swarm import LocalSwarm, applied

RUN_FILE = Path(__file__).resolve().parent.parent / "configs/runs/demo.toml"
SETTINGS = ("--set", "run.rounds=100000", "--set", "round.local_steps=10")
START_S = 300.0
READ_BYTES = 65_536


@contextlib.contextmanager
def attached(swarm: LocalSwarm) -> Iterator[None]:
    """A monitor with a page, and one listener."""
    command = [sys.executable, "-m", "peers.monitor", "--http", "127.0.0.1:0", "--initial-peers"]
    with subprocess.Popen(
        [*command, swarm.peers[0].join_address()], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        url = process.stdout.readline().split()[-1]
        threading.Thread(target=_listen, args=(f"{url}events",), daemon=True).start()
        try:
            yield
        finally:
            process.terminate()


def _listen(url: str) -> None:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=60) as events:
        while events.read1(READ_BYTES):
            pass


def tokens_per_s(swarm: LocalSwarm, began: float, ended: float) -> float:
    """Of the local steps of rounds that ended between two times, summed over the peers."""
    total = 0.0
    for peer in swarm.peers:
        rounds = [e for e in applied(peer.events(), "quorum") if began <= e["time"] < ended]
        seconds = sum(event["training_s"] for event in rounds)
        total += sum(event["trained_tokens"] for event in rounds) / seconds if seconds else 0.0
    return total


def phase(swarm: LocalSwarm, seconds: float, *, is_watched: bool) -> float:
    """Tokens/s of one phase; the round in which it begins does not count."""
    with attached(swarm) if is_watched else contextlib.nullcontext():
        time.sleep(seconds / 4)
        began = time.time()
        time.sleep(seconds)
        return tokens_per_s(swarm, began, time.time())


def main() -> None:
    """Prints one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=30.0, help="that a phase counts")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-monitor-") as folder:
        path = Path(folder) / "swarm"
        with LocalSwarm(path, RUN_FILE, arguments.peers, founder_options=SETTINGS) as swarm:
            swarm.start()
            swarm.wait_until(_has_rounds, what="two rounds", timeout_s=START_S)
            pairs = []
            for number in range(arguments.pairs):
                order = (False, True) if number % 2 else (True, False)
                found = {w: phase(swarm, arguments.seconds, is_watched=w) for w in order}
                pairs.append((found[False], found[True]))
            swarm.kill()
    costs = [1 - watched / alone for alone, watched in pairs if alone]
    low, middle, high = statistics.quantiles(costs, n=4)
    verdict = {
        "without": round(statistics.median(alone for alone, _ in pairs)),
        "with": round(statistics.median(watched for _, watched in pairs)),
        "cost": round(middle, 4),
        "quartiles": [round(low, 4), round(high, 4)],
        "pairs": [[round(alone), round(watched)] for alone, watched in pairs],
        "load": [round(load, 1) for load in os.getloadavg()],
    }
    sys.stdout.write(json.dumps(verdict) + "\n")


def _has_rounds(swarm: LocalSwarm) -> bool:
    return all(len(applied(peer.events(), "quorum")) >= 2 for peer in swarm.peers)


if __name__ == "__main__":
    main()
