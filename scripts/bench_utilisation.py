#!/usr/bin/env python
"""What share of the time peers compute on named links, with a real run's ratio of compute to bytes.

Real peer processes in network namespaces of their own exchange a model's values. What a local step
computes is replaced by a timed wait and a small move of all values (timed_peer.py), so nothing is
learned. In modes with a parameter server parameter_server.py runs in the peers' place.

The scale: a real run (SPES 7B in its last phase: half batch, H = 50, 36 s a step, so 1,800 s of
computing a cycle) has on a link a cycle of some seconds, as swarm-plan counts them. A model with
its shares of shared tensors, experts, norms and routers has k of its K parameters. The model's step
lasts 36 s x (bytes of its cycle / bytes of the real cycle), so computing and bytes keep their
ratio, and k is such that a cycle lasts --cycle-s by that count: each mode and link has its own k.
Rates and round trips are not scaled, so what a round costs beside its bytes (greeting, rosters,
votes) weighs as much more as the cycle is shorter than the real one, 30 times as much for the 7B.
For the 2B and 9B the seconds of a step are computed, with the operations a second of a GPU that
36 s for the 7B's eight mean; 1 GPU a peer for the 2B, 8 for the 9B. N is --peers for all of them.

A cycle is H local steps of a peer and their rounds. The first is left out: peers start and connect,
and the windows of connections open. In seconds a cycle, mean of the peers:

  computing   local steps x their seconds; over wall seconds it is the utilisation
  encode      values or deltas of what is offered are made, hashed and stored
  private     the private state is not durable yet, where the offer waits for that
  waiting     from the offer to the manifest that the round agreed on
  apply       it is brought into the engine
  other       all else, such as a step that woke up late and the agreed state's validation

Beside them MB a peer and cycle: blobs sent and received, and IP packets up and down on its
interface. "Plan" is what `swarm-plan --link` says of the small run, its 4 s of control a round
included; "real" is what it says of the real one. Packets have 9,000 bytes where 1,500 would be more
of them than one process passes on; connections then open their windows sooner than on a real line.

All peers share this machine's cores: encode, apply and private are upper bounds where it has fewer
than a few for each. Needs root (see swarm-local --link); only --quick works without.

    .venv/bin/python scripts/bench_utilisation.py --json
    .venv/bin/python scripts/bench_utilisation.py --mode slices --link 100/20mbit,100ms --model 7b
    .venv/bin/python scripts/bench_utilisation.py --quick --json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from bench_wire import EVERYBODY, exchanging, interface_bytes, model_like, run_of
from parameter_server import Sizes
from rehearsal import RUN_FILE, add_common, folder_of, settings, teller
from timed_peer import FOLDER_VARIABLE, STEP_VARIABLE

from peers.link_tables import link_named
from swarm.config import RunConfig, parse_config
from swarm.config.amounts import LinkRates
from swarm.emulation.link_profiles import LINKS
from swarm.emulation.links import Link, Links
from swarm.emulation.local_swarm import Event, LocalSwarm, applied
from swarm.emulation.namespaces import (
    FAST_MTU_BYTES,
    MTU_BYTES,
    NamespaceLinks,
    address_of,
    why_not_here,
)
from swarm.errors import SwarmError
from swarm.model.cost import disk_bytes, parameters, shared_wire_bytes, step_flops_per_token
from swarm.model.link_plan import ASSUMED, Setting, carried_mbit, cycle_bytes, plan_link

SCRIPTS = Path(__file__).resolve().parent
STEP_7B_S, GPUS_7B = 36.0, 8
HIDDEN_STEP = 8
SHARED_PARTS = 64
MOST_DISK = 0.8
"""Of what is free."""
MOST_MBIT = 100.0
"""That all peers together send in packets of 1,500 bytes."""
QUORUM = "quorum"
START_S, SLOWER = 400.0, 4.0
"""A cycle is given up when it lasts so many times what was planned, and a start's seconds more."""
POLL_S = 0.2
SERVER_PORT = 7070


@dataclass(frozen=True)
class Mode:
    """How a run exchanges.

    Attributes:
        setting: what goes over the wire, and when.
        overrides: settings of the run file beside those.
        server: link of a parameter server, "same" for that of the peers; "" where there is none.
    """

    setting: Setting
    overrides: tuple[str, ...] = ()
    server: str = ""


MODES = {
    "exact": Mode(Setting("fp32", "fp32")),
    "slices": Mode(Setting("b2", "b1", 5, 1, 5)),
    "diloco-fp32": Mode(Setting("fp32", "fp32", owners=EVERYBODY)),
    "diloco-int8": Mode(Setting("int8", "int8", owners=EVERYBODY)),
    "server": Mode(Setting("fp32", "fp32"), server="same"),
    "server-fast": Mode(Setting("fp32", "fp32"), server="datacentre"),
}
"""By the name that --mode takes; slices are shared b2 in each of five rounds, experts b1 in one."""
MEASURED_LINKS = ("100mbit,100ms", "100/20mbit,100ms", "home-world")
MAIN = (
    *((mode, MEASURED_LINKS[0]) for mode in MODES),
    ("exact", MEASURED_LINKS[1]),
    ("slices", MEASURED_LINKS[1]),
)
"""Measured where neither --mode nor --link nor --full is given."""


@dataclass(frozen=True)
class Model:
    """A real run whose ratio is wanted: its file, and GPUs of a peer."""

    file: str
    gpus: int


MODELS = {
    "2b": Model("spes_2b.toml", 1),
    "7b": Model("spes_7b.toml", GPUS_7B),
    "9b": Model("spes_9b.toml", 8),
}


@dataclass(frozen=True)
class Planned:
    """Seconds of a cycle, and the share of it that is computed."""

    cycle_s: float
    utilisation: float


@dataclass(frozen=True)
class Case:
    """One row to be measured.

    Attributes:
        mode, link, model: their names.
        num_peers: N.
        scale: bytes of its cycle to those of the real run's.
        compute_s: of the steps of a cycle.
        steps: H.
        plan: what swarm-plan says of it.
        real: and of the real run.
        overrides: settings of the rehearsed run; () with a server.
        sizes: of what a server exchanges.
    """

    mode: str
    link: str
    model: str
    num_peers: int
    scale: float
    compute_s: float
    steps: int
    plan: Planned
    real: Planned
    overrides: tuple[str, ...]
    sizes: Sizes | None = None

    @property
    def rounds(self) -> int:
        """P, of a cycle."""
        return MODES[self.mode].setting.rounds

    @property
    def step_s(self) -> float:
        """Seconds of a local step."""
        return self.compute_s / self.steps


@dataclass(frozen=True)
class PeerFigures:
    """What one peer did in a cycle, mean of the cycles; see the head of this file. Seconds, bytes.

    Attributes:
        not_counted: rounds of all cycles that went on without its shared tensors.
    """

    cycle_s: float
    computing: float
    stalls: Mapping[str, float]
    sent: float
    received: float
    up: float | None = None
    down: float | None = None
    not_counted: int = 0


@dataclass(frozen=True)
class Row:
    """A line of the table; MB and seconds of a peer and cycle, mean of the peers."""

    mode: str
    link: str
    model: str
    peers: int
    cycles: int
    parameters: float
    scale: float
    step_s: float
    cycle_s: float
    utilisation: float
    utilisation_least: float
    plan_utilisation: float
    plan_cycle_s: float
    real_utilisation: float
    stalls: Mapping[str, float]
    sent_mb: float
    received_mb: float
    up_mb: float | None
    down_mb: float | None
    not_counted: int
    load: float


# ---------------------------------------------------------------- the scale, pure


def like_of(model: str) -> RunConfig:
    """The real run."""
    path = RUN_FILE.with_name(MODELS[model].file)
    return parse_config(RunConfig, path.read_text(), source=str(path))


def real_compute_s(model: str) -> float:
    """Seconds of the local steps of a cycle of the real run, in its last phase."""
    reference, run = like_of("7b"), like_of(model)
    gpus = MODELS[model].gpus / GPUS_7B
    return run.round.local_steps * STEP_7B_S * _step_flops(run) / _step_flops(reference) / gpus


def _step_flops(run: RunConfig) -> float:
    return run.train.batch_tokens * step_flops_per_token(run, run.run.peers)


def sizes_of(run: RunConfig, scale: float, num_peers: int) -> Sizes:
    """What goes through a parameter server."""
    counted = parameters(run.model)
    own = round(counted.experts * scale / num_peers)
    return Sizes(round(counted.shared * scale), own, num_peers)


def server_plan(sizes: Sizes, link: LinkRates, server: LinkRates, compute_s: float) -> Planned:
    """What is sent takes the slower of a peer's line and its part of the server's; then back."""
    (up, down), (its_up, its_down) = (carried_mbit(each, sizes.peers) for each in (link, server))
    there_s = sizes.sent * 8e-6 / min(up, its_down / sizes.peers)
    back_s = sizes.received * 8e-6 / min(down, its_up / sizes.peers)
    cycle_s = compute_s + (there_s + back_s) / ASSUMED.link_share
    return Planned(cycle_s, compute_s / cycle_s)


def planned(
    run: RunConfig, mode: Mode, link: LinkRates, compute_s: float, num_peers: int
) -> Planned:
    """What swarm-plan says of a run that exchanges so on a link."""
    rates = carried_mbit(link, num_peers)
    plan = plan_link(run, mode.setting, rates, compute_s=compute_s, num_peers=num_peers)
    return Planned(plan.round_s * mode.setting.rounds, plan.utilisation)


def case_of(mode: str, link: str, model: str, num_peers: int, cycle_s: float) -> Case:
    """The row's model and seconds, such that a cycle lasts about `cycle_s`."""
    how, like, compute_s = MODES[mode], like_of(model), real_compute_s(model)
    steps, rates = like.round.local_steps, link_named(link)
    if how.server:
        server = rates if how.server == "same" else link_named(how.server)
        real = server_plan(sizes_of(like, 1.0, num_peers), rates, server, compute_s)
        scale = cycle_s / real.cycle_s
        sizes = sizes_of(like, scale, num_peers)
        plan = server_plan(sizes, rates, server, compute_s * scale)
        return Case(mode, link, model, num_peers, scale, compute_s * scale, steps, plan, real, (),
                    sizes)  # fmt: skip
    real = planned(like, how, rates, compute_s, num_peers)
    wanted = parameters(like.model).total * cycle_s / real.cycle_s
    least = parameters(run_of(model_like(like, 1, HIDDEN_STEP)).model).total
    hidden = HIDDEN_STEP * max(1, round(wanted / least))
    overrides = overrides_of(how, like, hidden, num_peers)
    run = run_of(overrides)
    moved = [cycle_bytes(each, how.setting, num_peers) for each in (run, like)]
    scale = moved[0] / moved[1]
    plan = planned(run, how, rates, compute_s * scale, num_peers)
    return Case(mode, link, model, num_peers, scale, compute_s * scale, steps, plan, real,
                tuple(overrides))  # fmt: skip


def overrides_of(mode: Mode, like: RunConfig, hidden: int, num_peers: int) -> list[str]:
    """Settings with which the rehearsed run has this model, and exchanges so."""
    shape = model_like(like, 1, hidden)
    part_bytes = -(-shared_wire_bytes(run_of(shape)) // SHARED_PARTS)
    return [
        *shape,
        *exchanging(mode.setting, num_peers),
        f"wire.part_bytes={max(65_536, -(-part_bytes // 4096) * 4096)}",
        f"round.local_steps={like.round.local_steps // mode.setting.rounds}",
        "round.roster_after_s=120.0",  # everybody is waited for
        "merging.alpha=0.0",
        "data.validation_bytes=64",
        "train.batch_tokens=32",
        "train.micro_batch_sequences=1",
        *mode.overrides,
    ]


# ---------------------------------------------------------------- figures, pure


def figures_of(
    lines: Sequence[Mapping[str, Any]], events: Sequence[Event], case: Case, cycles: int
) -> PeerFigures:
    """What a peer did in the cycles after the first.

    Args:
        lines: that its timed_peer.py wrote.
        events: manifests that it applied, from its history.
        case: what is measured.
        cycles: how many are counted.
    """
    rounds = [line for line in lines if line["kind"] == QUORUM][: case.rounds * (cycles + 1)]
    began_s, counted = rounds[case.rounds - 1]["at_s"], rounds[case.rounds :]
    numbers = {line["round"] for line in counted}
    told = [e for e in events if e["kind"] == QUORUM and e["round"] in numbers]
    wall_s = counted[-1]["at_s"] - began_s
    computing = sum(line["steps"] for line in counted) * case.step_s
    private = sum(line["private_s"] for line in counted)

    def took(phase: str) -> float:
        return sum(event["phases"].get(phase, {}).get("seconds", 0.0) for event in told)

    stalls = {
        "encode": took("offering") - private,
        "private": private,
        "waiting": took("averaging"),
        "apply": took("adopting"),
    }
    stalls["other"] = wall_s - computing - sum(stalls.values())
    return PeerFigures(
        wall_s / cycles,
        computing / cycles,
        {name: seconds / cycles for name, seconds in stalls.items()},
        sum(event["blob_bytes_sent"] for event in told) / cycles,
        sum(event["blob_bytes_received"] for event in told) / cycles,
        not_counted=sum(not event["counted"] for event in told),
    )


def served_figures(lines: Sequence[Mapping[str, float]], sizes: Sizes, cycles: int) -> PeerFigures:
    """The same of a peer of a parameter server, by what its process printed."""
    counted = lines[1 : cycles + 1]
    wall_s = mean(line["wall_s"] for line in counted)
    computing = mean(line["computing_s"] for line in counted)
    waiting = mean(line["exchange_s"] for line in counted)
    stalls = {"encode": 0.0, "private": 0.0, "waiting": waiting, "apply": 0.0}
    stalls["other"] = wall_s - computing - waiting
    return PeerFigures(wall_s, computing, stalls, sizes.sent, sizes.received)


def row_of(case: Case, peers: Sequence[PeerFigures], cycles: int) -> Row:
    """Means over the peers."""
    shares = [each.computing / each.cycle_s for each in peers]

    def megabytes(name: str) -> float | None:
        found = [getattr(each, name) for each in peers]
        return None if None in found else round(mean(found) / 1e6, 3)

    total = parameters(like_of(case.model).model).total * case.scale
    return Row(
        case.mode, case.link, case.model, case.num_peers, cycles, round(total), case.scale,
        round(case.step_s, 4), round(mean(each.cycle_s for each in peers), 2),
        round(mean(shares), 4), round(min(shares), 4), round(case.plan.utilisation, 4),
        round(case.plan.cycle_s, 2), round(case.real.utilisation, 4),
        {name: round(mean(each.stalls[name] for each in peers), 2) for name in peers[0].stalls},
        megabytes("sent") or 0.0, megabytes("received") or 0.0, megabytes("up"),
        megabytes("down"), sum(each.not_counted for each in peers), round(os.getloadavg()[0], 1),
    )  # fmt: skip


STALLS = ("encode", "private", "waiting", "apply", "other")


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    titles = ["mode", "link", "M parameters", "cycle, s", "computing", "plan", "real", *STALLS]
    titles += ["MB sent", "received", "up", "down", "not counted", "load"]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for row in rows:
        shares = (row.utilisation, row.plan_utilisation, row.real_utilisation)
        cells = [row.mode, row.link, f"{row.parameters / 1e6:.1f}", f"{row.cycle_s:.1f}"]
        cells += [f"{share:.1%}" for share in shares]
        cells += [f"{row.stalls[name]:.1f}" for name in STALLS]
        moved = (row.sent_mb, row.received_mb, row.up_mb, row.down_mb)
        cells += ["" if each is None else f"{each:.1f}" for each in moved]
        lines.append(f"| {' | '.join([*cells, str(row.not_counted), str(row.load)])} |")
    return "\n".join(lines)


# ---------------------------------------------------------------- measuring


def line_of(name: str) -> Link:
    """A link by its name or rates."""
    rates = link_named(name)
    return LINKS.get(name) or Link(rates.up_mbit, rates.down_mbit, rates.rtt_ms, rates.loss_pct)


def links_of(case: Case) -> Links | None:
    """The network of a row; None where this user cannot have one."""
    if why_not_here():
        return None
    each, server = line_of(case.link), MODES[case.mode].server
    lines = [each] * case.num_peers
    if server:
        lines.append(each if server == "same" else line_of(server))
    is_much = case.num_peers * max(each.up_mbit, each.down_mbit) > MOST_MBIT
    return NamespaceLinks(lines, mtu_bytes=FAST_MTU_BYTES if is_much or server else MTU_BYTES)


def measure(case: Case, cycles: int, folder: Path) -> list[PeerFigures]:
    """Measures a row.

    Raises:
        SwarmError: it did not get there in time, or there is no room for it.
    """
    links = links_of(case)
    try:
        if case.sizes:
            return measure_server(case, case.sizes, cycles, links)
        return measure_swarm(case, cycles, folder, links)
    finally:
        if links is not None:
            links.close()


def measure_swarm(case: Case, cycles: int, folder: Path, links: Links | None) -> list[PeerFigures]:
    """Figures of each peer of a swarm."""
    require_room(case, folder)
    rounds, times = case.rounds * (cycles + 1), folder / "times"
    times.mkdir(parents=True)
    swarm = LocalSwarm(
        folder / "swarm", RUN_FILE, case.num_peers,
        options=["--engine", "resident", "--threads", "1"],
        founder_options=settings(*case.overrides, f"run.rounds={rounds + case.rounds}"),
        environment={
            "OMP_NUM_THREADS": "1", STEP_VARIABLE: str(case.step_s), FOLDER_VARIABLE: str(times),
            "PYTHONPATH": os.pathsep.join([str(SCRIPTS), *sys.path]),
        },
        program="timed_peer", links=links,
    )  # fmt: skip

    def lines_of(peer: int) -> list[dict[str, Any]]:
        path = times / f"peer-{peer}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [found for line in lines if (found := json.loads(line))["kind"] == QUORUM]

    def after(count: int, num_cycles: int) -> list[tuple[int, int]]:
        """Counters of all interfaces once every peer has applied so many rounds."""
        swarm.wait_until(
            lambda _: all(len(lines_of(peer)) >= count for peer in range(case.num_peers)),
            what=f"{case.mode}, {case.link}: {count} rounds",
            timeout_s=START_S
            + num_cycles * SLOWER * max(case.plan.cycle_s, case.real.cycle_s * case.scale),
            on_poll=lambda _: time.sleep(POLL_S),
        )
        return [counters(peer.prefix) for peer in swarm.peers] if links else []

    try:
        swarm.start()
        before, then = after(case.rounds, 1), after(rounds, cycles)
        found = [
            figures_of(lines_of(peer.index), applied(peer.events()), case, cycles)
            for peer in swarm.peers
        ]
    finally:
        swarm.kill()
    return with_interfaces(found, before, then, cycles)


def require_room(case: Case, folder: Path) -> None:
    """Raises SwarmError if the disk is too small for the states of all peers."""
    needed = case.num_peers * disk_bytes(run_of(case.overrides), case.num_peers)
    free = MOST_DISK * shutil.disk_usage(folder.parent).free
    if needed > free:
        raise SwarmError(
            f"{needed / 1e9:.1f} GB of disk are needed, {free / 1e9:.1f} may be used",
            hint="choose a shorter --cycle-s, or a --state-dir on a larger disk",
        )


def with_interfaces(
    found: Sequence[PeerFigures],
    before: Sequence[tuple[int, int]],
    then: Sequence[tuple[int, int]],
    cycles: int,
) -> list[PeerFigures]:
    """Adds bytes of interfaces, where they were counted."""
    if not before:
        return list(found)
    return [
        PeerFigures(**{**asdict(each), "up": (end[0] - begin[0]) / cycles,
                       "down": (end[1] - begin[1]) / cycles})
        for each, begin, end in zip(found, before, then, strict=True)
    ]  # fmt: skip


def counters(prefix: Sequence[str]) -> tuple[int, int]:
    """Bytes sent and received by the interface of a namespace."""
    command = [*prefix, "cat", "/proc/net/dev"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    return interface_bytes(shown.stdout)


def measure_server(case: Case, sizes: Sizes, cycles: int, links: Links | None) -> list[PeerFigures]:
    """Figures of each peer of a parameter server; the server itself is the peer after the last."""
    places = [links.place(peer)[0] if links else [] for peer in range(sizes.peers + 1)]
    host = address_of(sizes.peers) if links else "127.0.0.1"
    common = ["--host", host, "--cycles", str(cycles + 1), "--peers", str(sizes.peers)]
    common += ["--shared", str(sizes.shared), "--own", str(sizes.own)]
    program = [sys.executable, str(SCRIPTS / "parameter_server.py")]
    end_s = time.monotonic() + START_S + (cycles + 1) * SLOWER * case.real.cycle_s * case.scale
    started = []
    try:
        server = subprocess.Popen(
            [*places[-1], *program, "serve", *common, "--port", str(SERVER_PORT if links else 0)],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(server)
        assert server.stdout
        port = server.stdout.readline().strip()
        if not port:
            raise SwarmError("the parameter server did not start")
        peers = [
            subprocess.Popen(
                [*place, *program, "train", *common, "--port", port,
                 "--compute-s", str(case.compute_s)],
                stdout=subprocess.PIPE, text=True,
            )
            for place in places[:-1]
        ]  # fmt: skip
        started += peers
        found = []
        for peer in peers:
            printed, _ = peer.communicate(timeout=max(1.0, end_s - time.monotonic()))
            if peer.returncode:
                raise SwarmError(f"a peer of the server ended with status {peer.returncode}")
            lines = [json.loads(line) for line in printed.splitlines()]
            found.append(served_figures(lines, sizes, cycles))
        return found
    except subprocess.TimeoutExpired as error:
        raise SwarmError(f"the parameter server's cycles are not over: {error}") from error
    finally:
        for process in started:
            process.kill()
            process.wait()


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
    parser.add_argument("--cycles", type=int, default=1, help="counted, after the first (1)")
    parser.add_argument("--full", action="store_true", help="all modes on all links")
    parser.add_argument(
        "--quick", action="store_true",
        help="a smoke test: 2 peers, short cycles, 2 modes; its figures mean nothing",
    )  # fmt: skip
    add_common(parser)
    arguments = parser.parse_args(words)
    if arguments.quick:
        arguments.peers, arguments.cycle_s = 2, 2.0
        arguments.mode = arguments.mode or ["slices", "server"]
        arguments.link = arguments.link or ["lan"]
    return arguments


def chosen(arguments: argparse.Namespace) -> list[Case]:
    """The rows that are asked for."""
    pairs: Sequence[tuple[str, str]] = MAIN
    if arguments.full or arguments.mode or arguments.link:
        links = arguments.link or (MEASURED_LINKS if arguments.full else MEASURED_LINKS[:1])
        pairs = [(mode, link) for link in links for mode in arguments.mode or MODES]
    return [
        case_of(mode, link, arguments.model, arguments.peers, arguments.cycle_s)
        for mode, link in pairs
    ]


def main(
    words: Sequence[str] | None = None,
    *,
    with_peers: Callable[[Case, int, Path], list[PeerFigures]] = measure,
) -> int:
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
            row = row_of(case, with_peers(case, arguments.cycles, home), arguments.cycles)
        except SwarmError as error:
            failed.append(f"{name}: {error}")
            say(failed[-1])
            continue
        finally:
            if arguments.state_dir is None:
                shutil.rmtree(home, ignore_errors=True)
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
