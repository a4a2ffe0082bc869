#!/usr/bin/env python3
"""The duration of joining on a slow link, and its cost for the peers that already train.

Real peers run on this machine in an emulated network, with timed waits as local steps. Newcomers
join one after another by the printed line. Each works until a round has counted it, and leaves.

  join_s        seconds from a newcomer's command to its first counted local step
  bound_s       1.2 x (bytes of the state / rate of the link) + one round + 15 s for the start
  round_ratio   mean length of the others' rounds during the join, divided by that of other
                rounds, and its standard error: the standard deviation of a round is 3 %

    .venv/bin/python scripts/benchmarks/bench_join.py --link home-20 --joins 6
"""

import argparse
import math
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rehearsal import RUN_FILE, add_common, folder_of, killing, report, settings, teller, tidy

from peers.command_line.command import ending_as_ctrl_c
from swarm.emulation.fault_plan import FaultPlan
from swarm.emulation.fault_runner import FaultRunner
from swarm.emulation.fault_verdict import rounds_of
from swarm.emulation.links import LINKS
from swarm.emulation.local_peer import LocalPeer
from swarm.emulation.local_swarm import LocalSwarm, applied
from swarm.emulation.networks import open_links
from swarm.network.rounds.record_file import RecordFile

MODEL = settings(
    "model.hidden_size=256",
    "model.moe_intermediate_size=256",
    "model.num_hidden_layers=3",
    "data.sequence_length=32",
    "train.batch_tokens=32",
    "train.micro_batch_sequences=1",
    "merging.interval_steps=600000",
    "wire.part_bytes=1048576",
)
STEP_S = 7.5
"""A local step as a timed wait. Six make a round, and averaging then takes about a sixth of it."""
QUIET_ROUNDS = 2
START_S = 400.0
JOIN_S = 400.0
ALLOWED_START_S = 15.0
ALLOWED_FACTOR = 1.2


@dataclass(frozen=True)
class Join:
    """One newcomer.

    Attributes:
        seconds: time from its command to its first counted local step.
        bound_s: the limit of `seconds`.
        round_s: seconds of each of the others' rounds during the join.
    """

    seconds: float
    bound_s: float
    round_s: list[float]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--link", choices=list(LINKS), default="home-20")
    parser.add_argument("--peers", type=int, default=4, help="that train already (default: 4)")
    parser.add_argument("--joins", type=int, default=6)
    add_common(parser)
    arguments = parser.parse_args()
    if arguments.joins < 2:
        parser.error("--joins must be 2 at least: one value has no standard error")
    return arguments


def wait(swarm: LocalSwarm, done: Callable[[], bool], what: str, timeout_s: float) -> None:
    swarm.wait_until(lambda _: done(), what=what, timeout_s=timeout_s)


def num_rounds(swarm: LocalSwarm) -> int:
    return len(rounds_of([peer.events() for peer in swarm.peers]))


def state_bytes(peer: LocalPeer) -> int:
    """Bytes of the agreed state that a newcomer fetches."""
    record = RecordFile(next(peer.folder.glob("runs/*/record"))).read()
    assert record is not None
    return sum(entry.num_bytes for entry in record.tip.entries.values())


def first_counted_step_at(peer: LocalPeer) -> float | None:
    """When the local steps of a peer's first counted round began, with the previous manifest."""
    before: float | None = None
    for event in applied(peer.events()):
        if event["kind"] == "quorum" and event["counted"]:
            return before
        before = event["time"]
    return None


def join(swarm: LocalSwarm, quiet_s: float, rate_mbit: float) -> Join:
    """Lets one newcomer join and leave."""
    founder = swarm.peers[0]
    address, began_s = founder.join_address(), time.time()
    newcomer = swarm.add(["--initial-peers", address])
    wait(swarm, lambda: first_counted_step_at(newcomer) is not None, "a counted round", JOIN_S)
    at_s = first_counted_step_at(newcomer)
    assert at_s is not None
    histories = [peer.events() for peer in swarm.peers[:-1]]
    meanwhile = [r.seconds for r in rounds_of(histories) if began_s < r.ended_s <= at_s]
    bytes_s = state_bytes(founder) * 8 / (rate_mbit * 1e6)
    newcomer.send(signal.SIGINT)
    newcomer.wait(JOIN_S)
    swarm.peers.remove(newcomer)
    shutil.rmtree(newcomer.folder)  # the next newcomer starts without state
    return Join(at_s - began_s, ALLOWED_FACTOR * bytes_s + quiet_s + ALLOWED_START_S, meanwhile)


def rest(swarm: LocalSwarm) -> list[float]:
    """Lengths of a few rounds without a newcomer."""
    known = num_rounds(swarm)
    wait(swarm, lambda: num_rounds(swarm) > known + QUIET_ROUNDS, "quiet rounds", START_S)
    found = rounds_of([peer.events() for peer in swarm.peers])
    return [r.seconds for r in found[-QUIET_ROUNDS:]]


def ratio_of_means(some: Sequence[float], others: Sequence[float]) -> tuple[float, float]:
    """The ratio and its standard error. Each side needs at least two values."""
    means = statistics.mean(some), statistics.mean(others)
    ratio = means[0] / means[1]
    shares = [
        statistics.stdev(values) / mean / math.sqrt(len(values))
        for values, mean in zip((some, others), means, strict=True)
    ]
    return ratio, ratio * math.hypot(*shares)


def measure(
    arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]
) -> tuple[list[Join], list[float], int]:
    """The newcomers, the lengths of rounds without them, and the bytes of the agreed state."""
    links = open_links([arguments.link], say)
    swarm = LocalSwarm(
        folder / "swarm", RUN_FILE, arguments.peers, founder_options=MODEL, links=links
    )
    joins, quiet = list[Join](), list[float]()
    with killing(swarm):
        FaultRunner(swarm, FaultPlan(step_s=STEP_S), say=say).prepare()
        swarm.start()
        wait(swarm, lambda: num_rounds(swarm) >= 2, "two rounds", START_S)
        for _ in range(arguments.joins):
            quiet += rest(swarm)
            down_mbit = LINKS[arguments.link].down_mbit
            joins.append(join(swarm, statistics.median(quiet), down_mbit))
            say(f"joined after {joins[-1].seconds:.1f} s (bound {joins[-1].bound_s:.1f})")
        quiet += rest(swarm)
        return joins, quiet, state_bytes(swarm.peers[0])


def main() -> int:
    arguments = parse()
    folder, say = folder_of(arguments, "join"), teller()
    with ending_as_ctrl_c():
        joins, quiet, num_bytes = measure(arguments, folder, say)
    during = [seconds for found in joins for seconds in found.round_s]
    ratio, error = ratio_of_means(during, quiet)
    verdict = {
        "link": arguments.link,
        "state_megabytes": round(num_bytes / 1e6, 1),
        "join_s": [round(found.seconds, 1) for found in joins],
        "bound_s": [round(found.bound_s, 1) for found in joins],
        "quiet_round_s": [round(seconds, 2) for seconds in sorted(quiet)],
        "round_s_while_joining": [round(seconds, 2) for seconds in during],
        "round_ratio": round(ratio, 3),
        "round_ratio_error": round(error, 3),
    }
    report(verdict, arguments)
    tidy(folder, arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
