#!/usr/bin/env python
"""The share of time that peers compute on named links, with a real run's compute per byte.

Real peer processes in separate network namespaces exchange a model's values. A timed wait and a
small move of all values replace the compute of a local step (timed_peer.py), so nothing is learned.
In modes with a parameter server, parameter_server.py replaces the peers.

The scale: swarm-plan predicts the seconds of a real run's cycle on a link (SPES 7B in its last
phase: half batch, H = 50, 36 s a step, so 1,800 s of computing a cycle). The small model has k of
the real run's K parameters, with its shares of shared tensors, experts, norms and routers. Its step
lasts 36 s x (bytes of its cycle / bytes of the real cycle), so the ratio of computing to bytes
stays. k is chosen so that a cycle lasts --cycle-s by the prediction, for each mode and link. Rates
and round trips are not scaled. So the fixed costs of a round (greeting, rosters, votes) weigh more,
by the ratio of the real cycle to the short cycle: 30 times for the 7B. For the 2B and 9B the
seconds of a step are computed from the speed of a GPU that follows from 36 s on the 7B's eight
GPUs. The 2B has 1 GPU per peer, and the 9B has 8. N is --peers for all models.

A cycle is H local steps of a peer and their rounds. The first cycle is left out, because peers
start and connect in it, and the windows of connections open. The figures are seconds per cycle,
mean of the peers:

  computing   local steps x their seconds. Divided by wall seconds it is the utilisation
  encode      making, hashing and storing the offered values or deltas
  private     waiting for the durable private state, if the offer waits for it. Where rounds
              overlap, both run during a step, and only their rest delays the step's update
  waiting     from the offer to the agreed manifest of the round
  apply       bringing the manifest into the engine
  other       all else, such as a step that woke up late and the agreed state's validation

Further columns are MB per peer and cycle: blobs sent and received, and IP packets up and down on
its interface. "Plan" is the prediction of `swarm-plan --link` for the small run, including its 4 s
of control per round. "Real" is the prediction for the real run. Packets have 9,000 bytes if one
process could not pass on packets of 1,500 bytes fast enough. Connections then open their windows
sooner than on a real line.

All peers share this machine's cores and disk, while a real peer has its own. So links and steps are
--slower times slower than named, and the model is smaller by the same factor. The work of
processors and disk then weighs less by this factor, as if there were more of them. Costs in round
trips weigh as before. Random losses grow by the square of the factor, so that a connection that
takes losses for congestion is slower by the factor. With --congestion bbr the losses stay.
"Processor" is the CPU seconds of a peer's process. Its libp2p daemon takes some 6 s per GB in
addition. Needs root (see swarm-local --link). Only --quick works without.

    .venv/bin/python scripts/benchmarks/bench_utilisation.py --json
    python scripts/benchmarks/bench_utilisation.py --mode slices --link 100/20mbit,100ms --model 7b
    .venv/bin/python scripts/benchmarks/bench_utilisation.py --quick --json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from bench_wire import interface_bytes, run_of
from parameter_server import Sizes
from rehearsal import RUN_FILE, add_common, folder_of, settings, teller
from timed_peer import FOLDER_VARIABLE, STEP_VARIABLE
from utilisation_rows import (
    MAIN,
    MEASURED_LINKS,
    MODELS,
    MODES,
    QUORUM,
    Case,
    PeerFigures,
    Row,
    case_of,
    figures_of,
    row_of,
    served_figures,
    slowed,
    table,
)

from peers.actions.plan_tables import link_named
from peers.command_line.command import ending_as_ctrl_c
from swarm.emulation.links import LINKS, Link, Links
from swarm.emulation.local_swarm import LocalSwarm, applied
from swarm.emulation.networks import (
    FAST_MTU_BYTES,
    MTU_BYTES,
    NamespaceLinks,
    address_of,
    why_not_here,
)
from swarm.errors import ConfigError, SwarmError
from swarm.model.cost import disk_bytes, owned_per_peer
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.planning.memory import host_peaks

BENCHMARKS = Path(__file__).resolve().parent
MOST_TAKEN = 0.9
"""Usable share of free disk and memory."""
IN_MEMORY, MEMORY = Path("/dev/shm"), Path("/proc/meminfo")
"""A state directory in the first folder takes memory instead of disk."""
MOST_MBIT = 100.0
"""Mbit/s that all peers together can send in packets of 1,500 bytes."""
START_S, SLOWER = 400.0, 4.0
"""A cycle is given up after SLOWER times its planned time. START_S is added for the start."""
POLL_S = 0.2
SERVER_PORT = 7070


def line_of(name: str) -> Link:
    """The link with this name or these rates."""
    rates = link_named(name)
    return LINKS.get(name) or Link(rates.up_mbit, rates.down_mbit, rates.rtt_ms, rates.loss_pct)


def links_of(case: Case) -> Links | None:
    """The network of a row. None if this user cannot make one."""
    if why_not_here():
        return None
    each, server = line_of(case.link), MODES[case.mode].server
    lines = [each] * case.num_peers
    if case.last:
        lines[-1] = line_of(case.last)
    if server:
        lines.append(each if server == "same" else line_of(server))
    lines = [slowed(line, case.slower, is_bbr=case.congestion == "bbr") for line in lines]
    is_much = case.num_peers * max(lines[0].up_mbit, lines[0].down_mbit) > MOST_MBIT
    mtu_bytes = FAST_MTU_BYTES if is_much or server else MTU_BYTES
    return NamespaceLinks(lines, mtu_bytes=mtu_bytes, congestion=case.congestion)


def measure(case: Case, cycles: int, folder: Path) -> list[PeerFigures]:
    """Measures a row.

    Raises:
        SwarmError: the swarm was too slow, or there is no room for it.
    """
    links = links_of(case)
    try:
        if case.sizes:
            return measure_server(case, case.sizes, cycles, links)
        return measure_swarm(case, cycles, folder, links)
    finally:
        if links is not None:
            links.close()


def patience_s(case: Case, cycles: int) -> float:
    """Time limit of all cycles, including the start."""
    return START_S + cycles * SLOWER * case.plan.cycle_s


def measure_swarm(case: Case, cycles: int, folder: Path, links: Links | None) -> list[PeerFigures]:
    """Figures of each peer of a swarm."""
    require_room(case, folder)
    rounds, times = case.rounds * (cycles + 1), folder / "times"
    times.mkdir(parents=True)
    swarm = LocalSwarm(
        folder / "swarm",
        RUN_FILE,
        case.num_peers,
        options=["--engine", "resident", "--threads", "1"],
        own_options=lambda peer: capped(case, peer),
        founder_options=settings(*case.overrides, f"run.rounds={rounds + case.rounds}"),
        environment={
            "OMP_NUM_THREADS": "1",
            STEP_VARIABLE: str(case.step_s),
            FOLDER_VARIABLE: str(times),
            "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path]),
        },
        program="timed_peer",
        links=links,
    )

    def lines_of(peer: int) -> list[dict[str, Any]]:
        path = times / f"peer-{peer}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        return [line for line in whole if line["kind"] == QUORUM]

    def after(num_cycles: int) -> list[tuple[int, int]]:
        """Counters of all interfaces when every peer has finished a number of cycles."""
        count = num_cycles * case.rounds
        swarm.wait_until(
            lambda _: all(len(lines_of(peer.index)) >= count for peer in swarm.peers),
            what=f"{count} rounds",
            timeout_s=patience_s(case, num_cycles),
            on_poll=lambda _: time.sleep(POLL_S),
        )
        return [counters(peer.prefix) for peer in swarm.peers] if links else []

    try:
        swarm.start()
        before, then = after(1), after(cycles + 1)
        found = [
            figures_of(lines_of(peer.index), applied(peer.events()), case, cycles)
            for peer in swarm.peers
        ]
    finally:
        swarm.kill()
    moved = [
        [(end - begin) / cycles for begin, end in zip(*both, strict=True)]
        for both in zip(before, then, strict=True)
    ]
    found = with_interfaces(found, moved)
    return found[:-1] if case.last else found


def capped(case: Case, peer: int) -> list[str]:
    """A peer's cap, as recommended for slow uplinks."""
    name = case.last if case.last and peer == case.num_peers - 1 else case.link
    up_mbit = line_of(name).up_mbit / case.slower
    return [] if case.cap is None else ["--max-upload", f"{case.cap * up_mbit:g}mbit"]


def forget_states(folder: Path) -> None:
    """Removes the large states of a row's peers. Their logs stay."""
    for state in (folder / "swarm").glob("peer-*/"):
        shutil.rmtree(state, ignore_errors=True)


def require_room(case: Case, folder: Path) -> None:
    """Raises SwarmError if disk or memory are too small for all peers."""
    run, peers = run_of(case.overrides), case.num_peers
    options = EngineOptions.of(run)
    disk = peers * disk_bytes(run, peers)
    host = peers * host_peaks(run, owned_per_peer(run, peers), options, num_peers=peers).highest
    if IN_MEMORY.exists() and folder.parent.stat().st_dev == IN_MEMORY.stat().st_dev:
        host += disk
    pages = next(line for line in MEMORY.read_text().splitlines() if "MemAvailable" in line)
    for what, needed, free in (
        ("disk", disk, shutil.disk_usage(folder.parent).free),
        ("memory", host, int(pages.split()[1]) * 1024),
    ):
        if needed > MOST_TAKEN * free:
            raise SwarmError(
                f"{needed / 1e9:.1f} GB of {what} are needed, {free / 1e9:.1f} are free",
                hint="choose a shorter --cycle-s, or another --state-dir",
            )


def with_interfaces(
    found: Sequence[PeerFigures], moved: Sequence[Sequence[float]]
) -> list[PeerFigures]:
    """Adds the bytes up and down of each interface in a cycle, if they were counted."""
    if not moved:
        return list(found)
    both = zip(found, moved, strict=True)
    return [replace(each, up=up, down=down) for each, (up, down) in both]


def counters(prefix: Sequence[str]) -> tuple[int, int]:
    """Bytes sent and received by the interface of a namespace."""
    command = [*prefix, "cat", "/proc/net/dev"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return interface_bytes(shown.stdout)


def measure_server(case: Case, sizes: Sizes, cycles: int, links: Links | None) -> list[PeerFigures]:
    """Figures of each peer of a parameter server. The server is the peer after the last."""
    places = [links.place(peer)[0] if links else [] for peer in range(sizes.peers + 1)]
    host = address_of(sizes.peers) if links else "127.0.0.1"
    common = ["--host", host, "--cycles", str(cycles + 1), "--peers", str(sizes.peers)]
    common += ["--shared", str(sizes.shared), "--own", str(sizes.own)]
    started: list[subprocess.Popen[str]] = []

    def start(place: Sequence[str], role: str, *options: str) -> subprocess.Popen[str]:
        program = [sys.executable, str(BENCHMARKS / "parameter_server.py"), role]
        command = [*place, *program, *common, *options]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        return started[-1]

    end_s = time.monotonic() + patience_s(case, cycles + 1)
    try:
        server = start(places[-1], "serve", "--port", str(SERVER_PORT if links else 0))
        assert server.stdout
        if not (port := server.stdout.readline().strip()):
            raise SwarmError("the parameter server did not start")
        compute = ("--port", port, "--compute-s", str(case.compute_s))
        found = []
        for peer in [start(place, "train", *compute) for place in places[:-1]]:
            printed, _ = peer.communicate(timeout=max(1.0, end_s - time.monotonic()))
            if peer.returncode:
                raise SwarmError(f"a peer of the server ended with status {peer.returncode}")
            lines = [json.loads(line) for line in printed.splitlines()]
            found.append(served_figures(lines, sizes, cycles))
    except subprocess.TimeoutExpired as error:
        raise SwarmError(f"the parameter server's cycles are not over: {error}") from error
    finally:
        for process in started:
            process.kill()
            process.communicate()
    counted = [counters(place) for place in places[:-1]] if links else []
    return with_interfaces(found, [[each / (cycles + 1) for each in both] for both in counted])


# ---------------------------------------------------------------- the program


def parsed(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mode", nargs="+", choices=list(MODES), help="these alone")
    parser.add_argument(
        "--link", nargs="+", metavar="LINK",
        help="these alone: names of swarm-local --link, or rates as swarm-plan --link takes them",
    )  # fmt: skip
    parser.add_argument("--model", choices=list(MODELS), default="7b", help="whose ratio (7b)")
    parser.add_argument("--peers", type=int, default=4, help="N (default: 4)")
    parser.add_argument("--cycle-s", type=float, default=60.0, help="of a cycle, by the plan (60)")
    parser.add_argument(
        "--slower", type=float, default=8.0,
        help="links, and the pace of the steps, than the named ones; see above (8)",
    )  # fmt: skip
    parser.add_argument(
        "--last", metavar="LINK",
        help="of the last peer, which only affects the others and is not in the figures",
    )  # fmt: skip
    parser.add_argument("--cap", type=float, help="of uploads, as a share of the uplink")
    parser.add_argument("--congestion", help="TCP's control, as bbr (default: this machine's)")
    parser.add_argument("--cycles", type=int, default=1, help="counted, after the first (1)")
    parser.add_argument("--full", action="store_true", help="all modes on all links")
    parser.add_argument(
        "--quick", action="store_true",
        help="a smoke test: 2 peers, short cycles, 2 modes, with meaningless figures",
    )  # fmt: skip
    add_common(parser)
    arguments = parser.parse_args(words)
    if arguments.quick:
        arguments.peers, arguments.cycle_s, arguments.slower = 2, 2.0, 1.0
        arguments.mode = arguments.mode or ["exact", "server"]
        arguments.link = arguments.link or ["lan"]
    try:
        for name in (*(arguments.link or ()), *([arguments.last] if arguments.last else ())):
            line_of(name)
    except ConfigError as error:
        parser.error(str(error))
    return arguments


def chosen(arguments: argparse.Namespace) -> list[Case]:
    """The requested rows."""
    pairs: Sequence[tuple[str, str]] = MAIN
    if arguments.full or arguments.mode or arguments.link:
        links = arguments.link or (MEASURED_LINKS if arguments.full else MEASURED_LINKS[:1])
        pairs = [(mode, link) for link in links for mode in arguments.mode or MODES]
    cases = [
        case_of(
            mode, link, arguments.model, arguments.peers, arguments.cycle_s,
            slower=arguments.slower, congestion=arguments.congestion,
        )
        for mode, link in pairs
    ]  # fmt: skip
    return [replace(case, cap=arguments.cap, last=arguments.last) for case in cases]


def main(words: Sequence[str] | None = None) -> int:
    arguments = parsed(words)
    if not arguments.quick and (why := why_not_here()):
        sys.exit(why)
    folder, say = folder_of(arguments, "utilisation"), teller()
    rows: list[Row] = []
    failed: list[str] = []
    for count, case in enumerate(chosen(arguments)):
        name, home = f"{case.mode}, {case.link}", folder / f"row-{count}"
        say(f"{name}: steps of {case.step_s:.2f} s, {case.plan.cycle_s:.0f} s a cycle as planned")
        try:
            with ending_as_ctrl_c():
                found = measure(case, arguments.cycles, home)
        except SwarmError as error:
            failed.append(f"{name}: {error}")
            say(failed[-1])
            continue
        finally:
            if arguments.state_dir is None:
                forget_states(home)
        row = row_of(case, found, arguments.cycles, load=os.getloadavg()[0])
        rows.append(row)
        say(f"{name}: {row.utilisation:.1%}, by the plan {row.plan_utilisation:.1%}")
    out = sys.stderr if arguments.json else sys.stdout
    print(table(rows), *failed, sep="\n", file=out)
    if arguments.json:
        rows_told = [asdict(row) for row in rows]
        print(json.dumps({"cores": os.cpu_count(), "rows": rows_told, "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
