#!/usr/bin/env python
"""A round of a few peers on loopback, against hivemind.DecentralizedAverager on the same tensors.

Every expert has several owners. Two swarms with equal numbers of processes average the owners'
values:

  ours      RoundDriver over RoundMachine, Node and BlobStore, without a trainer: from tensors in
            memory to the agreed tensors in memory. Every peer ends with *every* expert and the
            shared tensors of a one-layer model: verified, agreed by a quorum, durable on disk
  hivemind  one averager for each expert group in each owner's process (the way to average
            different tensors with different peers). Only the owners get the result

Seconds are from the parent's command to the last process's answer. CPU-seconds are those of all
processes of a swarm, including their children (p2pd, hivemind's averagers and DHT). hivemind runs
with its default time-outs, and a group begins as soon as it is complete. A result is wrong if it is
not within 1e-6 of numpy's mean.

The swarms are measured in blocks. In a block one swarm is started, warms up for a round, is
measured and stopped, then the other swarm. So each swarm has the machine for itself. Every second
block begins with the other swarm. (While an idle swarm of hivemind's ran, a round of ours took a
third more CPU-seconds.) Figures are medians over all rounds of all blocks, except warm-up rounds.

    python scripts/benchmarks/bench_averaging.py --experts 64 --owners 2 --megabytes 1 --rounds 9
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench_averaging_peers import DEADLINE_S, Setting, serve_hivemind, serve_ours


@dataclass(frozen=True)
class Measured:
    seconds: float
    cpu_s: float
    num_wrong: int


class Swarm:
    """Worker processes of one kind."""

    def __init__(self, serve: Callable[..., None], setting: Setting, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.processes = []
        self.links: list[Connection] = []
        for index in range(setting.peers):
            ours, theirs = context.Pipe()
            home = folder / f"{serve.__name__}-{index}"
            home.mkdir()
            process = context.Process(target=serve, args=(theirs, setting, index, home))
            process.start()
            theirs.close()
            self.processes.append(process)
            self.links.append(ours)
        try:
            self._introduce()
        except BaseException:
            self.close()
            raise

    def _introduce(self) -> None:
        known: list[str] = []
        peer_ids = []
        for link in self.links:
            link.send(known)
            peer_id, addresses = self._answer(link)
            known = known or addresses
            peer_ids.append(peer_id)
        self._all(peer_ids)

    def measure(self, round_number: int) -> Measured:
        self._all(("prepare", round_number))
        cpu_s, began_s = self._cpu_s(), time.perf_counter()
        self._all(("average", round_number))
        seconds = time.perf_counter() - began_s
        cpu_s = self._cpu_s() - cpu_s
        return Measured(seconds, cpu_s, sum(self._all(("num_wrong", round_number))))

    def _all(self, word: object) -> list[Any]:
        for link in self.links:
            link.send(word)
        return [self._answer(link) for link in self.links]

    def _answer(self, link: Connection) -> Any:
        if not link.poll(2 * DEADLINE_S):
            raise TimeoutError("a worker does not answer")
        return link.recv()

    def _cpu_s(self) -> float:
        return sum(cpu_s_of(process.pid) for process in self.processes if process.pid)

    def close(self) -> None:
        for link in self.links:
            with suppress(BrokenPipeError):  # the worker has failed
                link.send(None)
        for process in self.processes:
            process.join(60)
            if process.is_alive():
                process.kill()


def cpu_s_of(pid: int) -> float:
    """CPU-seconds of a process, its living descendants, and its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        children = [
            child
            for task in Path(f"/proc/{pid}/task").iterdir()
            for child in (task / "children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return 0.0  # the process ended meanwhile
    ticks = sum(int(field) for field in fields[11:15])
    return ticks / os.sysconf("SC_CLK_TCK") + sum(cpu_s_of(int(child)) for child in children)


def measure_in_blocks(
    kinds: Mapping[str, Callable[..., None]],
    setting: Setting,
    folder: Path,
    *,
    num_rounds: int,
    num_blocks: int,
) -> dict[str, list[Measured]]:
    measured: dict[str, list[Measured]] = {name: [] for name in kinds}
    for block in range(num_blocks):
        share = len(range(block, num_rounds, num_blocks))
        for name in list(kinds)[:: -1 if block % 2 else 1]:
            home = folder / f"block-{block}-{name}"
            home.mkdir()
            with closing(Swarm(kinds[name], setting, home)) as swarm:
                measured[name] += measure_rounds(swarm, share, f"block {block} {name:10}")
            shutil.rmtree(home)
    return measured


def measure_rounds(swarm: Swarm, num_rounds: int, title: str) -> list[Measured]:
    """Measures rounds after a warm-up round."""
    measured = []
    for round_number in range(num_rounds + 1):
        result = swarm.measure(round_number)
        print(
            f"{title} {round_number or 'warm-up':>8}{result.seconds:8.2f} s"
            f"{result.cpu_s:8.2f} CPU-s{result.num_wrong:6} wrong",
            flush=True,
        )
        measured.append(result)
    return measured[1:]


def print_table(measured: Mapping[str, list[Measured]]) -> None:
    print(f"{'':10}{'seconds':>22}{'CPU-seconds':>22}{'wrong results':>15}")
    medians = {}
    for name, rounds in measured.items():
        columns = []
        for values in ([m.seconds for m in rounds], [m.cpu_s for m in rounds]):
            columns.append(f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})")
        medians[name] = (
            statistics.median(m.seconds for m in rounds),
            statistics.median(m.cpu_s for m in rounds),
        )
        wrong = sum(m.num_wrong for m in rounds)
        print(f"{name:10}{columns[0]:>22}{columns[1]:>22}{wrong:>15}")
    if "hivemind" in medians:
        ratios = [ours / theirs for ours, theirs in zip(*medians.values(), strict=True)]
        print(f"{'ratio':10}{ratios[0]:>22.3f}{ratios[1]:>22.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--owners", type=int, default=2)
    parser.add_argument("--megabytes", type=float, default=1.0, help="of one expert, in fp32")
    parser.add_argument("--rounds", type=int, default=8, help="in all blocks together")
    parser.add_argument("--blocks", type=int, default=2, help="each with a round more to warm up")
    parser.add_argument("--skip-hivemind", action="store_true")
    arguments = parser.parse_args()
    setting = Setting(arguments.peers, arguments.experts, arguments.owners, arguments.megabytes)
    kinds = {"ours": serve_ours} | ({} if arguments.skip_hivemind else {"hivemind": serve_hivemind})
    if not 1 <= arguments.blocks <= arguments.rounds:
        parser.error("--blocks must be from 1 to --rounds")
    with tempfile.TemporaryDirectory(prefix="bench-averaging-") as folder:
        print_table(
            measure_in_blocks(
                kinds,
                setting,
                Path(folder),
                num_rounds=arguments.rounds,
                num_blocks=arguments.blocks,
            )
        )


if __name__ == "__main__":
    main()
