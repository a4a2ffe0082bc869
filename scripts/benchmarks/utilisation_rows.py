"""The rows of bench_utilisation.py: modes, their scale, and the account of a cycle. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, TypeVar

from bench_wire import EVERYBODY, exchanging, model_like, run_of
from parameter_server import Sizes
from rehearsal import RUN_FILE

from peers.actions.plan_tables import link_named
from swarm.config import RunConfig, parse_config
from swarm.config.amounts import LinkRates
from swarm.emulation.links import Link
from swarm.emulation.local_peer import Event
from swarm.model.cost import parameters, shared_wire_bytes, step_flops_per_token
from swarm.model.link_plan import ASSUMED, Setting, carried_mbit, cycle_bytes, plan_link

STEP_7B_S, GPUS_7B = 36.0, 8
HIDDEN_STEP = 8
SHARED_PARTS = 64
QUORUM = "quorum"
STALLS = ("encode", "private", "waiting", "apply", "other")

Line = TypeVar("Line", Link, LinkRates)


@dataclass(frozen=True)
class Mode:
    """A mode of a run's exchange.

    Attributes:
        setting: the traffic and its times.
        overrides: further settings of the run file.
        server: link of a parameter server, "same" for the peers' link. "" without a server.
    """

    setting: Setting
    overrides: tuple[str, ...] = ()
    server: str = ""


MODES = {
    "exact": Mode(Setting("fp32", "fp32")),
    "slices": Mode(Setting("b2", "b1", 5, 1, 5)),
    "overlapped": Mode(Setting("b2", "b1", 5, 1, 5, overlap=True), ("round.overlap=round",)),
    "diloco-fp32": Mode(Setting("fp32", "fp32", owners=EVERYBODY)),
    "server": Mode(Setting("fp32", "fp32"), server="same"),
    "server-fast": Mode(Setting("fp32", "fp32"), server="datacentre"),
}
"""The modes by their names for --mode. Slices have shared b2 in each of five rounds, and experts b1
in one. Overlapped is the same as slices, with steps during the rounds."""
MEASURED_LINKS = ("100mbit,100ms", "100/20mbit,100ms", "home-world")
MAIN = (
    *((mode, MEASURED_LINKS[0]) for mode in MODES),
    ("overlapped", MEASURED_LINKS[1]),
)
"""The default rows, without --mode, --link and --full."""


@dataclass(frozen=True)
class Model:
    """A real run with the wanted ratio: its run file, and the number of GPUs of a peer."""

    file: str
    gpus: int


MODELS = {
    "2b": Model("spes_2b.toml", 1),
    "7b": Model("spes_7b.toml", GPUS_7B),
    "9b": Model("spes_9b.toml", 8),
}


@dataclass(frozen=True)
class Planned:
    """Seconds of a cycle, and the share of them in which steps are computed."""

    cycle_s: float
    utilisation: float


@dataclass(frozen=True)
class Case:
    """One row to be measured.

    Attributes:
        mode, link, model: their names.
        num_peers: N.
        scale: bytes of its cycle divided by the bytes of the real run's cycle.
        compute_s: seconds of the steps of a cycle.
        steps: H.
        plan: the prediction of swarm-plan.
        real: the prediction of swarm-plan for the real run.
        overrides: settings of the rehearsed run. () with a server.
        sizes: elements that a server exchanges.
        slower: divisor of the links' rates.
        congestion: TCP's congestion control. None: this machine's.
        cap: cap of uploads, as a share of the uplink. None: no cap.
        last: the last peer's link, if it differs. The figures are then those of the other peers.
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
    slower: float = 1.0
    congestion: str | None = None
    cap: float | None = None
    last: str | None = None

    @property
    def rounds(self) -> int:
        """P, the rounds of a cycle."""
        return MODES[self.mode].setting.rounds

    @property
    def step_s(self) -> float:
        """Seconds of a local step."""
        return self.compute_s / self.steps


@dataclass(frozen=True)
class PeerFigures:
    """Seconds and bytes of one peer in a cycle, mean of the cycles; see the head of this file.

    Attributes:
        cpu: processor seconds of its process, without its libp2p daemon.
        not_counted: rounds of all cycles without its shared tensors.
    """

    cycle_s: float
    computing: float
    stalls: Mapping[str, float]
    sent: float
    received: float
    cpu: float | None = None
    up: float | None = None
    down: float | None = None
    not_counted: int = 0


@dataclass(frozen=True)
class Row:
    """A line of the table: MB and seconds of a peer in a cycle, mean of the peers."""

    mode: str
    link: str
    model: str
    peers: int
    cycles: int
    parameters: float
    scale: float
    slower: float
    congestion: str
    cap: float | None
    step_s: float
    cycle_s: float
    utilisation: float
    utilisation_least: float
    plan_utilisation: float
    plan_cycle_s: float
    real_utilisation: float
    stalls: Mapping[str, float]
    cpu_s: float | None
    sent_mb: float
    received_mb: float
    up_mb: float | None
    down_mb: float | None
    not_counted: int
    load: float


# ---------------------------------------------------------------- the scale


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
    """The elements that a parameter server exchanges."""
    counted = parameters(run.model)
    own = round(counted.experts * scale / num_peers)
    return Sizes(round(counted.shared * scale), own, num_peers)


def server_plan(sizes: Sizes, link: LinkRates, server: LinkRates, compute_s: float) -> Planned:
    """The plan with a server: the slower of a peer's line and its part of the server's."""
    (up, down), (its_up, its_down) = (carried_mbit(each, sizes.peers) for each in (link, server))
    there_s = sizes.sent * 8e-6 / min(up, its_down / sizes.peers)
    back_s = sizes.received * 8e-6 / min(down, its_up / sizes.peers)
    cycle_s = compute_s + (there_s + back_s) / ASSUMED.link_share
    return Planned(cycle_s, compute_s / cycle_s)


def planned(
    run: RunConfig,
    mode: Mode,
    link: LinkRates,
    compute_s: float,
    num_peers: int,
    *,
    here: bool,
    is_bbr: bool = False,
) -> Planned:
    """The prediction of swarm-plan for this exchange on a link.

    With `here`, all peers share this machine's cores.
    """
    rates = carried_mbit(link, num_peers, is_bbr=is_bbr)
    cores = len(os.sched_getaffinity(0)) / num_peers if here else ASSUMED.cores
    plan = plan_link(
        run,
        mode.setting,
        rates,
        compute_s=compute_s,
        num_peers=num_peers,
        assumed=replace(ASSUMED, cores=cores),
    )
    return Planned(plan.round_s * mode.setting.rounds, plan.utilisation)


def slowed(link: Line, slower: float, *, is_bbr: bool = False) -> Line:
    """A link with both rates divided.

    Its losses grow by the square, so the rate of a connection that takes losses for congestion, MSS
    / (RTT sqrt(2/3 loss)) (Mathis et al., 1997), is divided too. With bbr the losses stay.
    """
    loss_pct = link.loss_pct * (1 if is_bbr else slower**2)
    up_mbit, down_mbit = link.up_mbit / slower, link.down_mbit / slower
    return replace(link, up_mbit=up_mbit, down_mbit=down_mbit, loss_pct=loss_pct)


def case_of(
    mode: str,
    link: str,
    model: str,
    num_peers: int,
    cycle_s: float,
    *,
    slower: float = 1.0,
    congestion: str | None = None,
) -> Case:
    """The row's model and seconds, for a cycle of about `cycle_s` on the slower links."""
    how, like, compute_s = MODES[mode], like_of(model), real_compute_s(model)
    steps, rates, is_bbr = like.round.local_steps, link_named(link), congestion == "bbr"
    here = slowed(rates, slower, is_bbr=is_bbr)
    if how.server:
        server = rates if how.server == "same" else link_named(how.server)
        real = server_plan(sizes_of(like, 1.0, num_peers), rates, server, compute_s)
        scale = cycle_s / real.cycle_s / slower
        sizes, compute_s = sizes_of(like, scale, num_peers), compute_s * scale * slower
        plan = server_plan(sizes, here, slowed(server, slower), compute_s)
        return Case(mode, link, model, num_peers, scale, compute_s, steps, plan, real, (),
                    sizes, slower, congestion)  # fmt: skip
    real = planned(like, how, rates, compute_s, num_peers, here=False, is_bbr=is_bbr)
    wanted = parameters(like.model).total * cycle_s / real.cycle_s / slower
    least = parameters(run_of(model_like(like, 1, HIDDEN_STEP)).model).total
    hidden = HIDDEN_STEP * max(1, round(wanted / least))
    overrides = overrides_of(how, like, hidden, num_peers)
    run = run_of(overrides)
    moved = [cycle_bytes(each, how.setting, num_peers) for each in (run, like)]
    scale = moved[0] / moved[1]
    compute_s *= scale * slower
    plan = planned(run, how, here, compute_s, num_peers, here=True, is_bbr=is_bbr)
    return Case(mode, link, model, num_peers, scale, compute_s, steps, plan, real,
                tuple(overrides), None, slower, congestion)  # fmt: skip


def overrides_of(mode: Mode, like: RunConfig, hidden: int, num_peers: int) -> list[str]:
    """The rehearsed run's settings for this model and exchange."""
    shape = model_like(like, 1, hidden)
    part_bytes = -(-shared_wire_bytes(run_of(shape)) // SHARED_PARTS)
    return [
        *shape,
        *exchanging(mode.setting, num_peers),
        f"wire.part_bytes={max(65_536, -(-part_bytes // 4096) * 4096)}",
        f"round.local_steps={like.round.local_steps // mode.setting.rounds}",
        "round.roster_after_s=120.0",  # rounds wait for all peers
        "merging.alpha=0.0",
        "data.validation_bytes=64",
        "train.batch_tokens=32",
        "train.micro_batch_sequences=1",
        *mode.overrides,
    ]


# ---------------------------------------------------------------- figures


def figures_of(
    lines: Sequence[Mapping[str, Any]], events: Sequence[Event], case: Case, cycles: int
) -> PeerFigures:
    """A peer's figures in the cycles after the first.

    Args:
        lines: the output of its timed_peer.py.
        events: the peer's applied manifests, from its history.
        case: the measured row.
        cycles: number of counted cycles.
    """
    rounds = [line for line in lines if line["kind"] == QUORUM][: case.rounds * (cycles + 1)]
    before, counted = rounds[case.rounds - 1], rounds[case.rounds :]
    numbers = {line["round"] for line in counted}
    told = [e for e in events if e["kind"] == QUORUM and e["round"] in numbers]
    wall_s = counted[-1]["at_s"] - before["at_s"]
    computing = sum(line["steps"] for line in counted) * case.step_s
    offering = sum(e["phases"].get("offering", {}).get("seconds", 0.0) for e in told)
    private = min(offering, sum(line["private_s"] for line in counted))

    def took(phase: str) -> float:
        return float(sum(event["phases"].get(phase, {}).get("seconds", 0.0) for event in told))

    stalls = {
        "encode": offering - private,
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
        cpu=(counted[-1]["cpu_s"] - before["cpu_s"]) / cycles,
        not_counted=sum(not event["counted"] for event in told),
    )


def served_figures(lines: Sequence[Mapping[str, float]], sizes: Sizes, cycles: int) -> PeerFigures:
    """Figures as in `figures_of`, of a peer of a parameter server, from its process's output."""
    counted = lines[1 : cycles + 1]
    wall_s = mean(line["wall_s"] for line in counted)
    computing = mean(line["computing_s"] for line in counted)
    waiting = mean(line["exchange_s"] for line in counted)
    stalls = {"encode": 0.0, "private": 0.0, "waiting": waiting, "apply": 0.0}
    stalls["other"] = wall_s - computing - waiting
    return PeerFigures(wall_s, computing, stalls, sizes.sent, sizes.received)


def row_of(case: Case, peers: Sequence[PeerFigures], cycles: int, *, load: float) -> Row:
    """Means over the peers."""
    shares = [each.computing / each.cycle_s for each in peers]

    def mean_of(name: str, unit: float = 1e6) -> float | None:
        found = [getattr(each, name) for each in peers]
        return None if None in found else round(mean(found) / unit, 3)

    total = parameters(like_of(case.model).model).total * case.scale
    return Row(
        case.mode, f"{case.link}, last {case.last}" if case.last else case.link, case.model,
        case.num_peers, cycles, round(total), case.scale,
        case.slower, case.congestion or "", case.cap, round(case.step_s, 4),
        round(mean(each.cycle_s for each in peers), 2), round(mean(shares), 4),
        round(min(shares), 4), round(case.plan.utilisation, 4), round(case.plan.cycle_s, 2),
        round(case.real.utilisation, 4),
        {name: round(mean(each.stalls[name] for each in peers), 2) for name in peers[0].stalls},
        mean_of("cpu", 1.0), mean_of("sent") or 0.0, mean_of("received") or 0.0, mean_of("up"),
        mean_of("down"), sum(each.not_counted for each in peers), round(load, 1),
    )  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    titles = ["mode", "link", "M parameters", "cycle, s", "computing", "plan", "real", *STALLS]
    titles += ["processor", "MB sent", "received", "up", "down", "not counted", "load"]
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    for row in rows:
        shares = (row.utilisation, row.plan_utilisation, row.real_utilisation)
        cells = [row.mode, row.link, f"{row.parameters / 1e6:.1f}", f"{row.cycle_s:.1f}"]
        cells += [f"{share:.1%}" for share in shares]
        cells += [f"{row.stalls[name]:.1f}" for name in STALLS]
        moved = (row.cpu_s, row.sent_mb, row.received_mb, row.up_mb, row.down_mb)
        cells += ["" if each is None else f"{each:.1f}" for each in moved]
        lines.append(f"| {' | '.join([*cells, str(row.not_counted), str(row.load)])} |")
    return "\n".join(lines)
