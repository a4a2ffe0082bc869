#!/usr/bin/env python3
"""A swarm at real size on this machine: the cost of each phase, compared with the plan.

Two real peers train a model of some 590 million parameters (two layers, few large experts). All
values and bytes are real, only the batches are small. The peers hold rounds and a merge. A third
peer joins. One peer is killed, and its experts are adopted. The model is exported. One peer leaves
and hands over.

  peak_rss      peak memory of each process in each phase, by its own report, and its plan
  seconds       seconds of each phase (the longest of the peers)
  disk          largest size of a state directory, and its plan
  bytes         sent and received per peer and round, and by the formula

The exit status is 1 if a phase exceeded its plan by more than 10 %. The last table has the same
phases of SPES 7B with four peers: peaks by the plan's formulas, seconds by this machine's seconds
per byte.

    .venv/bin/python scripts/benchmarks/bench_real_size.py --json
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rehearsal import RUN_FILE, add_common, folder_of, report, teller, tidy

from peers.command_line.command import ending_as_ctrl_c
from swarm.config import RunConfig, parse_config
from swarm.durable import bytes_on_disk
from swarm.emulation.local_peer import LocalPeer
from swarm.emulation.local_swarm import LocalSwarm, applied
from swarm.errors import SwarmError
from swarm.model.cost import (
    bytes_sent_per_peer_per_round,
    disk_bytes,
    expert_wire_bytes,
    parameters,
    shared_wire_bytes,
    trained_per_peer,
)
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.planning.memory import host_peaks

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = 1.10
START_S = 600.0
ROUND_S = EXPORT_S = 1500.0
EVENT_POLL_S, EXIT_POLL_S = 0.5, 0.05
FOUNDERS_ROUNDS = 3
"""Rounds of the first two peers, before anybody joins."""
NUM_OWNED_7B = 8
BEFORE_ADOPTING = ("training", "offering")
"""Phases that end before the peer's owned experts change. Other phases may include the change."""
SMALL = 2 * 10**7
"""Bytes below which a figure is no evidence about a plan."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=1536, help="hidden size (default: 1536)")
    parser.add_argument("--inner", type=int, default=7680, help="inner size of an expert")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument(
        "--kill", type=int, choices=(0, 1), default=1, help="which of the first two"
    )
    add_common(parser)
    return parser.parse_args()


def overrides(arguments: argparse.Namespace) -> list[str]:
    """The run's settings that make a rehearsal large."""
    return [
        f"model.hidden_size={arguments.hidden}",
        f"model.moe_intermediate_size={arguments.inner}",
        f"model.num_experts={arguments.experts}",
        "model.num_attention_heads=12",
        "model.num_key_value_heads=12",
        "train.batch_tokens=128",
        "train.micro_batch_sequences=1",
        "train.compute=bf16",
        "data.sequence_length=64",
        "round.local_steps=2",
        "merging.interval_steps=4",  # after every second round
        "wire.part_bytes=16777216",
    ]


@dataclass
class Life:
    """The peak memory and the longest time of one peer's process in each phase.

    Each peak has the number of experts that the peer owned then, because the plan depends on this
    number.
    """

    peaks: dict[str, tuple[int, int]] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    disk: int = 0

    def take(self, events: Sequence[Mapping[str, Any]]) -> None:
        """Reads the peer's own figures. An event reports the phases before it.

        A peer trains the experts of its first event already before this event, so these experts
        count for the earlier phases too.
        """
        owned = next((len(event["owned"]) for event in events if "owned" in event), 0)
        for event in events:
            before, owned = owned, len(event["owned"]) if "owned" in event else owned
            for phase, found in event.get("phases", {}).items():
                holds = before if phase in BEFORE_ADOPTING else max(before, owned)
                peak = (found["peak_rss_bytes"], holds)
                self.peaks[phase] = max(self.peaks.get(phase, (0, 0)), peak)
                self.seconds[phase] = max(self.seconds.get(phase, 0.0), found["seconds"])


def peak_rss_bytes(command: Sequence[str], timeout_s: float) -> int:
    """Runs a program. Returns its peak memory.

    Raises:
        SwarmError: the program failed, or did not end in time and was killed.
    """
    end_s = time.monotonic() + timeout_s
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        while not (found := os.wait4(process.pid, os.WNOHANG))[0]:
            if time.monotonic() > end_s:
                raise SwarmError(f"{command[2]} did not end within {timeout_s:.0f} s")
            time.sleep(EXIT_POLL_S)
        process.returncode = os.waitstatus_to_exitcode(found[1])
    finally:
        if process.returncode is None:
            process.kill()
            process.wait()
    if process.returncode:
        raise SwarmError(f"{command[2]} ended with status {process.returncode}")
    return found[2].ru_maxrss * 1024


class Bench:
    """The swarm and its measurements."""

    def __init__(self, arguments: argparse.Namespace, say: Callable[[str], None]) -> None:
        settings = overrides(arguments)
        self.say, self.kills = say, int(arguments.kill)
        self.run = parse_config(
            RunConfig, RUN_FILE.read_text(), source=str(RUN_FILE), overrides=settings
        )
        self.folder = folder_of(arguments, "real-size")
        options = [word for each in settings for word in ("--set", each)]
        self.swarm = LocalSwarm(
            self.folder / "swarm",
            RUN_FILE,
            2,
            options=["--engine", "resident", "--threads", "1", "--linger", "30"],
            founder_options=options,
        )
        self.lives: dict[int, Life] = {}

    def wait(self, done: Callable[[], bool], what: str, timeout_s: float = ROUND_S) -> None:
        """Waits, and measures the disks meanwhile."""

        def look(swarm: LocalSwarm) -> None:
            for peer in swarm.peers:
                life = self.lives.setdefault(peer.index, Life())
                life.disk = max(life.disk, bytes_on_disk(peer.folder))
            time.sleep(EVENT_POLL_S)

        self.swarm.wait_until(lambda _: done(), what=what, timeout_s=timeout_s, on_poll=look)
        self.say(what)

    def rounds(self, peer: LocalPeer) -> int:
        """The newest round that a peer applied."""
        found = applied(peer.events(), "quorum")
        return int(found[-1]["round"]) if found else 0

    def counted(self, peer: LocalPeer) -> bool:
        """Whether a round has counted this peer."""
        return any(event["counted"] for event in applied(peer.events(), "quorum"))

    def go(self) -> dict[str, Any]:
        """Runs all phases in order. Returns the figures of the export."""
        swarm = self.swarm
        swarm.start()
        first = swarm.peers[0]
        self.wait(lambda: self.rounds(first) >= 1, "first round", START_S + ROUND_S)
        self.wait(lambda: self.has_merged(first), "a merge")
        self.wait(lambda: self.rounds(first) >= FOUNDERS_ROUNDS, "third round")
        victim, stays = swarm.peers[self.kills], swarm.peers[1 - self.kills]
        third = swarm.add(["--initial-peers", stays.join_address()])
        self.wait(lambda: self.counted(third), "a joiner that was counted", 2 * ROUND_S)
        lost = set(applied(victim.events())[-1]["owned"])
        victim.kill()
        self.say(f"killed peer {victim.index}, which owned {sorted(lost)}")
        self.wait(lambda: self.adopted(lost, (stays, third)), "its experts adopted", 4 * ROUND_S)
        exported = self.export(stays)
        self.say("exported")
        third.send(signal.SIGTERM)
        third.wait(300.0)
        self.say("left")
        stays.send(signal.SIGTERM)
        stays.wait(300.0)
        for peer in swarm.peers:
            self.lives[peer.index].take(peer.events())
        return exported

    def has_merged(self, peer: LocalPeer) -> bool:
        """Whether a merge was applied."""
        return bool(applied(peer.events(), "merge"))

    def adopted(self, lost: set[int], by: Sequence[LocalPeer]) -> bool:
        """Whether these peers own all lost experts, and a later round counted these peers."""
        tips = [applied(peer.events())[-1] for peer in by]
        owned = {expert for tip in tips for expert in tip["owned"]}
        return lost <= owned and all(tip["counted"] for tip in tips)

    def export(self, peer: LocalPeer) -> dict[str, Any]:
        """Runs swarm-export as a user would. Its peak is the system's figure of the process."""
        began_s = time.monotonic()
        command = [sys.executable, "-m", "peers.export", "--initial-peers", peer.join_address()]
        command += ["--out", str(self.folder / "model")]
        peak = peak_rss_bytes(command, EXPORT_S)
        return {"seconds": round(time.monotonic() - began_s, 1), "peak_rss_bytes": peak}


def compared(bench: Bench, exported: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row for each process and phase: measured, planned, ratio."""
    run = bench.run
    rows = []
    for index, life in sorted(bench.lives.items()):
        for phase, (peak, owned) in sorted(life.peaks.items()):
            plan = asdict(host_peaks(run, owned, EngineOptions.of(run, device="cpu"), num_peers=3))
            if phase in plan:
                rows.append(row(f"peer {index}", phase, peak, plan[phase], life.seconds[phase]))
        rows.append(row(f"peer {index}", "disk", life.disk, disk_bytes(run, 2), 0.0))
    plan = asdict(host_peaks(run, 0, EngineOptions.of(run, device="cpu"), num_peers=3))
    peak = int(exported["peak_rss_bytes"])
    rows.append(row("export", "exporting", peak, plan["exporting"], exported["seconds"]))
    return rows


def row(
    process: str, phase: str, measured: float, planned: float, seconds: float
) -> dict[str, Any]:
    return {
        "process": process,
        "phase": phase,
        "megabytes": round(measured / 1e6),
        "planned_megabytes": round(planned / 1e6),
        "ratio": round(measured / planned, 3),
        "seconds": round(seconds, 1),
    }


def traffic(bench: Bench) -> dict[str, Any]:
    """Blob bytes of the rounds before the join, against the formula."""
    rounds = [
        event
        for peer in bench.swarm.peers[:2]
        for event in applied(peer.events(), "quorum")
        if event["round"] <= FOUNDERS_ROUNDS and len(event["contributors"]) == 2
    ]
    sent = [event["blob_bytes_sent"] for event in rounds]
    mean = sum(sent) / len(sent) if sent else None
    formula = bytes_sent_per_peer_per_round(bench.run, 2)
    return {
        "sent_megabytes": None if mean is None else round(mean / 1e6, 1),
        "formula_megabytes": round(formula / 1e6, 1),
        "rounds": len(sent) // 2,
    }


def bytes_of_phases(run: RunConfig, num_peers: int) -> dict[str, float]:
    """The bytes to which the seconds of each phase are assumed to be proportional."""
    shared, experts = shared_wire_bytes(run), expert_wire_bytes(run)
    private = 12 * trained_per_peer(run, num_peers)
    donors = run.merging.top_k + 1
    return {
        "offering": shared + experts / num_peers + private,
        "averaging": bytes_sent_per_peer_per_round(run, num_peers),
        "adopting": shared + experts,
        "merging": experts * (1 + donors),
        "exporting": shared + experts,
    }


def extrapolated(bench: Bench) -> dict[str, Any]:
    """The phases of SPES 7B, four peers: planned peaks, and seconds by bytes."""
    path = ROOT / "configs/runs/spes_7b.toml"
    large = parse_config(RunConfig, path.read_text(), source=str(path))
    options = EngineOptions.of(large, device="cpu")
    plan = asdict(host_peaks(large, NUM_OWNED_7B, options, num_peers=4))
    here, there = bytes_of_phases(bench.run, 2), bytes_of_phases(large, 4)
    seconds = {
        phase: max(life.seconds.get(phase, 0.0) for life in bench.lives.values()) for phase in here
    }
    return {
        "how": "peaks: the same formulas; seconds: measured here, times the phase's bytes there "
        "by its bytes here (averaging over loopback: at home a link's rate decides)",
        "peak_gigabytes": {phase: round(peak / 1e9, 1) for phase, peak in plan.items()},
        "seconds": {p: round(seconds[p] * there[p] / here[p]) for p in here if seconds[p]},
        "disk_gigabytes": round(disk_bytes(large, 4) / 1e9, 1),
    }


def main() -> int:
    arguments = parse()
    say = teller()
    bench = Bench(arguments, say)
    counted = parameters(bench.run.model)
    say(f"{counted.total / 1e6:.0f} M parameters, {bench.folder}")
    with ending_as_ctrl_c():
        try:
            exported = bench.go()
        finally:
            bench.swarm.kill()
    rows = compared(bench, exported)
    for each in rows:
        say("{process:8} {phase:12} {megabytes:6} MB, planned {planned_megabytes:6} "
            "({ratio:.2f}), {seconds} s".format(**each))  # fmt: skip
    above = [each for each in rows if each["ratio"] > ALLOWED and each["megabytes"] * 1e6 > SMALL]
    verdict = {
        "parameters": counted.total,
        "phases": rows,
        "traffic": traffic(bench),
        "spes_7b": extrapolated(bench),
        "above_plan": [f"{each['process']} {each['phase']}" for each in above],
    }
    report(
        {k: json.dumps(v) for k, v in verdict.items()}, argparse.Namespace(json=False)
    ) if not arguments.json else print(json.dumps(verdict))
    tidy(bench.folder, arguments)
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
