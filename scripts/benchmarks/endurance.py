"""A real swarm for hours: memory of its processes, and sizes of its folders.

See scripts/benchmarks/endurance.
"""

import argparse
import csv
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import product
from pathlib import Path
from typing import Any

from rehearsal import RUN_FILE, add_common, killing, rehearse, settings

from swarm.emulation.controls import FOLDER_VARIABLE, ControlFolder, Controls
from swarm.emulation.local_peer import LocalPeer, children_of
from swarm.emulation.local_swarm import LocalSwarm, applied
from swarm.errors import SwarmError

NUM_PEERS = 3
STEP_S = 0.25
DAEMON = "p2pd"
"""libp2p's program, which each peer starts once."""
SETTINGS = settings("round.local_steps=6", "merging.interval_steps=600")
"""Six timed steps of 0.25 s and averaging: rounds of about 2 s, with a merge every 100 rounds."""
SAMPLE_EVERY_S = 20.0
WARM_UP_S = 600.0
"""Seconds in which caches fill. Later samples are compared with those at the end of this time."""
WINDOW_S = 600.0
ALLOWED_GROWTH = 1.05
FEW = 2
"""Additional descriptors or threads that do not count as growth, because connections come and
go."""
ALLOWED_DISK_PER_ROUND = 2_000
START_S = 120.0
STILL_S = 120.0
"""Seconds without a new round after which a swarm counts as hanging."""
FORMULA = f"""\
Memory, descriptors and threads are counted per process (each peer and its libp2p daemon). Growth is
the median of the last {WINDOW_S:.0f} s over the median of the {WINDOW_S:.0f} s after a warm-up of
{WARM_UP_S:.0f} s. Disk is the growth of each kind of file in bytes a round, over the same time.

Exit status: 0, or 1 if a process grew by more than 5 % (and by more than {FEW} descriptors or
threads), a kind of file of a peer by more than
{ALLOWED_DISK_PER_ROUND} bytes a round, no round ended for {STILL_S:.0f} s, a peer ended, or two
peers have different manifests at one height."""


@dataclass(frozen=True)
class Sample:
    """The figures of one process at one moment."""

    at_s: float
    """Seconds since the swarm started."""
    peer: int
    process: str
    """Kind of the process: `peer` or `daemon`."""
    rounds: int
    rss_bytes: int
    descriptors: int
    threads: int


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/benchmarks/endurance",
        description="Three real peers on this machine, rounds of about 2 s. Two of them only dial "
        "out, so what they have for each other goes through the third.",
        epilog=FORMULA,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hours", type=float, default=2.5, help="(default: 2.5)")
    add_common(parser)
    return parser.parse_args()


def process_sample(pid: int) -> tuple[int, int, int]:
    """Resident bytes, open descriptors and threads of a process.

    Raises:
        OSError: the process has ended.
    """
    status = Path(f"/proc/{pid}/status").read_text()
    entries = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    resident = 1024 * int(entries["VmRSS"].split()[0])
    return resident, len(os.listdir(f"/proc/{pid}/fd")), int(entries["Threads"])


def disk_by_kind(folder: Path) -> dict[str, int]:
    """Bytes of a peer's folder and its log, by kind of file: names without digits and digests."""
    sizes: dict[str, int] = {}
    for path in [folder.with_suffix(".log"), *folder.rglob("*")]:
        try:
            if not path.is_file():
                continue
            size = path.stat().st_size
        except OSError:  # removed between listing and reading
            continue
        kind = path.suffix if len(path.stem) > 24 or any(map(str.isdigit, path.stem)) else path.name
        where = path.parent.name if path.suffix in (".pack", "") else ""
        kind = f"{where}/*{path.suffix}" if kind == path.suffix else kind
        sizes[kind] = sizes.get(kind, 0) + size
    return sizes


def rounds_of(peer: LocalPeer) -> int:
    """Training rounds that a peer has applied so far."""
    return len(applied(peer.events(), "quorum"))


class Recorder:
    """Samples in memory and as a table on disk, so that an ended run can be examined too."""

    def __init__(self, path: Path) -> None:
        self.samples: list[Sample] = []
        self.disk: list[tuple[float, int, int, dict[str, int]]] = []
        """Samples of each peer: seconds, peer, rounds, bytes by kind."""
        self._path = path
        self._write([[f.name for f in fields(Sample)]])

    def _write(self, rows: Sequence[Sequence[object]]) -> None:
        with self._path.open("a", newline="") as file:
            csv.writer(file).writerows(rows)

    def take(self, swarm: LocalSwarm, at_s: float) -> None:
        """Samples all processes of the swarm."""
        for peer in swarm.peers:
            assert peer.process is not None
            rounds = rounds_of(peer)
            self.disk.append((at_s, peer.index, rounds, disk_by_kind(peer.folder)))
            pid = peer.process.pid
            pids = [("peer", pid), *(("daemon", each) for each in children_of(pid, DAEMON))]
            for process, pid in pids:
                sample = Sample(at_s, peer.index, process, rounds, *process_sample(pid))
                self.samples.append(sample)
                self._write([astuple(sample)])


def growth(samples: Sequence[Sample], figure: str) -> tuple[float, float, float]:
    """One process's figure: median after the warm-up, median at the end, and their ratio."""
    end_s = samples[-1].at_s
    first = [s for s in samples if WARM_UP_S <= s.at_s < WARM_UP_S + WINDOW_S]
    last = [s for s in samples if s.at_s >= end_s - WINDOW_S]
    before = statistics.median(getattr(s, figure) for s in first or samples)
    after = statistics.median(getattr(s, figure) for s in last)
    return before, after, after / before


def disk_growth(
    disk: Sequence[tuple[float, int, int, Mapping[str, int]]], peer: int
) -> dict[str, float]:
    """Bytes a round by which each kind of a peer's files grew since the warm-up.

    Compares means of windows, because packs are written and collected in turn.
    """
    mine = [entry for entry in disk if entry[1] == peer]
    end_s = mine[-1][0]
    first = [e for e in mine if WARM_UP_S <= e[0] < WARM_UP_S + WINDOW_S] or mine[:1]
    last = [e for e in mine if e[0] >= end_s - WINDOW_S]
    rounds = statistics.mean(e[2] for e in last) - statistics.mean(e[2] for e in first)
    kinds = {kind for entry in mine for kind in entry[3]}

    def mean(entries: Sequence[tuple[float, int, int, Mapping[str, int]]], kind: str) -> float:
        return statistics.mean(entry[3].get(kind, 0) for entry in entries)

    return {k: (mean(last, k) - mean(first, k)) / max(rounds, 1.0) for k in sorted(kinds)}


def run(swarm: LocalSwarm, recorder: Recorder, hours: float, say: Callable[[str], None]) -> str:
    """Runs the swarm for a time. Returns why it stopped early, or an empty string."""
    swarm.start()
    swarm.wait_until(
        lambda s: min(map(rounds_of, s.peers)) > 0, what="the first round", timeout_s=START_S
    )
    began_s = moved_s = said_s = time.monotonic()
    rounds = 0
    while (now_s := time.monotonic()) - began_s < 3600 * hours:
        if ended := [peer.index for peer in swarm.peers if not peer.alive]:
            return f"peers {ended} ended"
        newest = min(map(rounds_of, swarm.peers))
        if newest > rounds:
            rounds, moved_s = newest, now_s
        elif now_s - moved_s > STILL_S:
            return f"no round after {rounds} for {STILL_S:.0f} s"
        recorder.take(swarm, now_s - began_s)
        if now_s - said_s > WINDOW_S:
            said_s = now_s
            held = [s for s in recorder.samples[-2 * NUM_PEERS :] if s.process == "peer"]
            shown = ", ".join(f"{s.rss_bytes / 1e6:.0f} MB" for s in held)
            say(f"round {rounds}; peers hold {shown}")
        time.sleep(SAMPLE_EVERY_S)
    return ""


def watched(swarm: LocalSwarm, recorder: Recorder, hours: float, say: Callable[[str], None]) -> str:
    """Does the same as `run`.

    An error after the first sample counts as a reason too, so the figures are shown.
    """
    try:
        return run(swarm, recorder, hours, say)
    except (SwarmError, OSError, KeyboardInterrupt) as error:
        if not recorder.samples:
            raise
        return str(error) or type(error).__name__


def verdict_of(swarm: LocalSwarm, recorder: Recorder, why: str) -> dict[str, Any]:
    """The report: growth by process, growth on disk by kind of file, and whether the run passed."""
    verdict: dict[str, Any] = {"stopped_early": why}
    worst = 1.0
    each = product(range(NUM_PEERS), ("peer", "daemon"), ("rss_bytes", "descriptors", "threads"))
    for peer, process, figure in each:
        mine = [s for s in recorder.samples if (s.peer, s.process) == (peer, process)]
        before, after, ratio = growth(mine, figure)
        verdict[f"{process}-{peer} {figure}"] = f"{before:.0f} -> {after:.0f} ({ratio:.3f})"
        if figure == "rss_bytes" or after - before > FEW:
            worst = max(worst, ratio)
    disk = {peer: disk_growth(recorder.disk, peer) for peer in range(NUM_PEERS)}
    for peer, kinds in disk.items():
        shown = {kind: round(grown) for kind, grown in kinds.items() if abs(grown) >= 1}
        verdict[f"disk-{peer} bytes a round"] = {**shown, "all": round(sum(kinds.values()))}
    digests: dict[tuple[str, int], set[str]] = {}
    for living in swarm.peers:
        for event in applied(living.events()):
            height = (event["kind"], event["round"])
            digests.setdefault(height, set()).add(event["digest"])
    divergences = sum(len(found) > 1 for found in digests.values())
    most_disk = max(grown for kinds in disk.values() for grown in kinds.values())
    return {
        **verdict,
        "rounds": min(rounds_of(peer) for peer in swarm.peers),
        "seconds": round(recorder.samples[-1].at_s),
        "divergences": divergences,
        "largest_growth": round(worst, 4),
        "largest_disk_bytes_per_round": round(most_disk),
        "passed": not why
        and not divergences
        and worst <= ALLOWED_GROWTH
        and most_disk <= ALLOWED_DISK_PER_ROUND,
    }


def endured(
    arguments: argparse.Namespace, folder: Path, say: Callable[[str], None]
) -> dict[str, Any]:
    """Runs a swarm and reports."""
    controls = ControlFolder(folder / "controls")
    controls.create()
    controls.tell_all(Controls(step_s=STEP_S))
    environment = {"OMP_NUM_THREADS": "1", FOLDER_VARIABLE: str(controls.path)}
    swarm = LocalSwarm(
        folder / "swarm",
        RUN_FILE,
        NUM_PEERS,
        founder_options=SETTINGS,
        own_options=lambda index: ["--client-mode"] if index else [],
        environment=environment,
        program="peers.emulated",
    )
    with killing(swarm):
        recorder = Recorder(folder / "samples.csv")
        why = watched(swarm, recorder, arguments.hours, say)
        return verdict_of(swarm, recorder, why)


def main() -> int:
    return rehearse("endurance", parse(), endured)


if __name__ == "__main__":
    sys.exit(main())
