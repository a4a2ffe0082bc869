"""swarm-plan: the cost of a run for a peer, before anybody rents a machine."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from peers.command_line.command import for_tables
from peers.command_line.option_values import as_toml
from peers.command_line.options import Options, option, options, program
from swarm.config import NetworkSection, RunConfig
from swarm.data.tokenizer import require_vocabulary
from swarm.data.tokenizer_file import open_tokenizer
from swarm.errors import DoesNotFit
from swarm.peer.machine.forecast import ASSUMED_MBIT, DAY_S, WANTED_UTILISATION, Forecast, forecast
from swarm.progress import duration

if TYPE_CHECKING:
    from swarm.model.cost import Cost
    from swarm.peer.machine.engine_plan import RunPlan
    from swarm.train.engine.hardware import Machine
    from swarm.train.planning.ladder import EnginePlan

KEYS = (
    "parameters_total",
    "parameters_shared",
    "parameters_per_expert",
    "parameters_trained_per_peer",
    "state_bytes_per_peer",
    "disk_bytes",
    "bytes_sent_per_peer_per_round",
    "handover_bytes",
    "engine",
    "level",
    "fits",
    "owned_experts",
    "experts_that_fit",
    "losses_survived",
    "losses_until_pause",
    "micro_batch_tokens",
    "device_peak_bytes",
    "host_peak_bytes",
    "host_training_bytes",
    "host_round_bytes",
    "host_merge_bytes",
    "engine_disk_bytes",
    "step_s",
    "round_training_s",
    "round_averaging_s",
    "run_days",
    "tflops",
    "mbit",
)
"""The figures for scripts."""


@program("swarm-plan")
@options(
    "run", "config", "peers", "rounds", "settings", "tokenizer", "engine", "gpu", "host", "disk",
    "bus", "remote_workers", "between", "max_upload", "max_download", "data_quota", "as_json",
    "print_config", "log_format", "log_level",
)  # fmt: skip
@option(
    "--gpus",
    help="Plan for several GPUs in each machine that share the work of one peer: 8x80GB, or 8 or "
    "all of this machine.",
    metavar="NxSIZE|N|all",
)
@option(
    "--mbit",
    type=click.FloatRange(min=0, min_open=True),
    default=ASSUMED_MBIT,
    help="Rate of a peer's link each way, in Mbit/s. --link replaces it, and caps lower it.",
)
@option(
    "--link",
    help="Plan for this link of a peer, and list the settings that fit it. 100/20mbit,100ms is 100 "
    "Mbit/s down, 20 up and a round trip of 100 ms. Also: 50mbit, or "
    "up=20mbit,down=100mbit,rtt=100ms,loss=0.1%, or a name for swarm-local --link. Rates are in "
    "bits; an ambiguous link is an error.",
    metavar="DOWN/UP,RTT",
)
@option(
    "--utilisation",
    type=click.FloatRange(min=0, max=1, min_open=True, max_open=True),
    default=WANTED_UTILISATION,
    help="With --link: share of the time that a peer must compute with the listed settings.",
)
@option(
    "--step-seconds",
    type=click.FloatRange(min=0, min_open=True),
    help="Seconds of a local step of train.batch_tokens, in place of the estimate. Steps of phases "
    "with other batches are in proportion.",
)
def main(
    given: Options,
    *,
    gpus: str | None,
    mbit: float,
    link: str | None,
    utilisation: float,
    step_seconds: float | None,
) -> None:
    """Computes what a run costs a peer, and which engine fits this machine or a described one.

    \b
    This machine:  swarm-plan --run spes_2b
    Another one:   swarm-plan --run spes_2b --gpu 24GB --host 64GB --disk 500GB
    A link:        swarm-plan --run spes_7b --link 100/20mbit,100ms
    Many GPUs:     swarm-plan --run spes_7b --gpus 8x80GB --bus nvlink

    The device's peak is that of a step. The host's peaks are those of the whole process, phase by
    phase, without the corpus. Times follow from --mbit and from this machine's measured speed; the
    speed of a described GPU is assumed. A run that does not fit ends with exit code 12, after the
    figures.
    """  # noqa: D301 - click reads the backspace
    run, config = given.run_config(), given.peer_config()
    if given.print_config:
        click.echo(as_toml(run if given.print_config == "run" else config))
        return
    if given.tokenizer:
        require_vocabulary(run, open_tokenizer(given.tokenizer))
    from peers.actions import plan_tables  # loads torch: not for --help

    line = plan_tables.link_named(link) if link else None
    from swarm.peer.machine.engine_plan import plan_run  # loads torch: not for --help

    sizes = {"gpu": given.gpu, "gpus": gpus, "host": given.host, "disk": given.disk}
    planned = plan_run(run, config, given.state_dir, sizes)
    step_s, sent = step_seconds or planned.engine.step_s, planned.cost.bytes_sent_per_peer_per_round
    of_link = None
    if line:
        of_link = plan_tables.table_for(
            run, line, config.network, step_s=step_s, wanted=utilisation, beside=planned.is_beside
        )
    mbit = min(of_link.rates) if of_link else _under_caps(mbit, config.network)
    times = forecast(run, step_s=step_s, round_bytes=sent, mbit=mbit)
    if given.as_json:
        shown = _figures(run, planned) | _times(times, planned.machine, mbit)
        link_figures = {"link": plan_tables.as_figures(of_link)} if of_link else {}
        click.echo(
            json.dumps({key: shown[key] for key in KEYS} | _of_workers(run, planned) | link_figures)
        )
    else:
        console = for_tables()
        _print_machine(console, run, planned)
        described = given.gpu is not None or (gpus is not None and "x" in gpus.lower())
        console.print(times_table(run, times, planned.machine, mbit, is_described=described))
        if of_link:
            plan_tables.print_link(console, run, of_link)
    if not planned.fits:
        raise DoesNotFit("this run does not fit: " + "; ".join(map(str, planned.shortfalls)))


def _under_caps(mbit: float, network: NetworkSection) -> float:
    caps = (network.max_upload_mbit, network.max_download_mbit)
    return min([mbit, *(cap for cap in caps if cap)])


def _print_machine(console: Console, run: RunConfig, planned: RunPlan) -> None:
    """Prints the run's needs of a machine, and the chosen engine."""
    console.print(table_of(run, planned.cost))
    console.print(engine_table(run, planned.machine, planned.engine, planned.experts_that_fit))
    console.print(losses_table(run, planned))
    if planned.machine.fabric.size > 1:
        from peers.actions.plan_tables import (  # loads torch: not for --help
            ways_table,
            workers_table,
        )

        console.print(workers_table(run, planned))
        console.print(ways_table(run, planned))


def _of_workers(run: RunConfig, planned: RunPlan) -> dict[str, Any]:
    if planned.machine.fabric.size == 1:
        return {}
    from peers.actions.plan_tables import workers_figures  # loads torch: not for --help

    return {"workers": workers_figures(run, planned)}


def _figures(run: RunConfig, planned: RunPlan) -> dict[str, Any]:
    from swarm.train.planning.ladder import describe  # loads torch: not for --help

    plan = planned.engine
    return asdict(planned.cost) | {
        "engine": plan.options.kind.value,
        "level": describe(plan.options, run),
        "fits": planned.fits,
        "owned_experts": planned.owned_experts,
        "experts_that_fit": planned.experts_that_fit,
        "losses_survived": planned.losses_survived,
        "losses_until_pause": planned.losses_until_pause,
        "micro_batch_tokens": run.train.micro_batch_sequences * run.data.sequence_length,
        "device_peak_bytes": round(plan.need.crowded),
        "host_peak_bytes": round(plan.peaks.highest),
        "host_training_bytes": round(plan.peaks.training),
        "host_round_bytes": round(plan.peaks.running_a_round),
        "host_merge_bytes": round(plan.peaks.merging),
        "engine_disk_bytes": round(plan.need.disk),
        "step_s": round(plan.step_s, 4),
    }


def _times(times: Forecast, machine: Machine, mbit: float) -> dict[str, float]:
    return {
        "round_training_s": round(times.training_s, 3),
        "round_averaging_s": round(times.averaging_s, 3),
        "run_days": round(times.run_days, 5),
        "tflops": round(machine.tflops, 4),
        "mbit": mbit,
    }


def times_table(
    run: RunConfig, times: Forecast, machine: Machine, mbit: float, *, is_described: bool
) -> Table:
    """The predicted times for people, and the speeds behind them."""
    how = "assumed" if is_described and machine.device == "cuda" else "measured here"
    table = Table(title="time", title_justify="left", box=box.SIMPLE, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    share = times.averaging_s / max(times.round_s, 1e-12)
    beside = ", during the steps" if times.overlaps else ""
    steps = "seconds that the run sets" if run.round.seconds else f"{run.round.local_steps} steps"
    when = "after the last phase, " if run.phases else ""
    for row in [
        ("speed", f"{machine.tflops:.3g} TFLOP/s", f"of matrix products, {how}"),
        (
            "link",
            f"{mbit:g} Mbit/s",
            "each way; --mbit, or the slower way of --link, under the caps",
        ),
        ("a round", in_words(times.round_s), f"{when}without waiting for others"),
        ("  training", in_words(times.training_s), steps),
        ("  averaging", in_words(times.averaging_s), f"of its bytes{beside}; {share:.0%} of it"),
        ("the run", in_words(times.run_s), f"{run.run.rounds:,} rounds"),
    ]:
        table.add_row(*row)
    return table


def in_words(duration_s: float) -> str:
    """Seconds in a suitable unit, up to days."""
    if duration_s < 90:
        return seconds_of(duration_s)
    if duration_s < 36 * 3600:
        return duration(duration_s)
    return f"{duration_s / DAY_S:,.1f} days"


def engine_table(run: RunConfig, machine: Machine, plan: EnginePlan, most: int | None) -> Table:
    """The chosen engine for people."""
    on_gpu, workers = machine.device == "cuda", machine.fabric.per_node
    number = f"{workers} x " if workers > 1 else ""
    gpu = f"{number}{_gigabytes(machine.device_bytes)} GPU, " if on_gpu else "no GPU, "
    host = _gigabytes(workers * machine.host_bytes)
    has = f"{gpu}{host} memory, {_gigabytes(machine.disk_bytes)} disk"
    nodes = machine.fabric.nodes
    title = f"on {nodes} machines, each with {has}" if nodes > 1 else f"on a machine with {has}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    need, micro = plan.need, run.train.micro_batch_sequences
    experts = f"{most} of {run.model.num_experts}" if most is not None else "none"
    where = "GPU" if on_gpu else "memory"
    of_each = " of each worker" if workers > 1 else ""
    with_engine = "masters, moments, gradients" if on_gpu else "with the engine"
    if workers > 1 and plan.streams:
        with_engine += ": its part of the one copy"
    for row in [
        ("engine", plan.options.kind.value, plan.reason),
        (
            "peak, device",
            _gigabytes(need.crowded),
            f"{where}{of_each}; {_gigabytes(need.activations)} of it activations",
        ),
        (
            "peak, host",
            _gigabytes(plan.peaks.highest),
            f"the whole process{of_each}, {with_engine}",
        ),
        ("  while training", _gigabytes(plan.peaks.training), "local steps"),
        ("  while a round runs", _gigabytes(plan.peaks.running_a_round), "all its phases"),
        ("  at a merge", _gigabytes(plan.peaks.merging), "of similar experts"),
        (
            "peak, disk",
            _gigabytes(need.disk),
            "mapped frozen experts, history for new workers",
        ),
        ("micro-batch", f"{micro} x {run.data.sequence_length}", "tokens; the run's"),
        ("step", seconds_of(plan.step_s), f"of {run.train.batch_tokens:,} tokens, estimated"),
        ("experts that fit", experts, "with some engine"),
    ]:
        table.add_row(*row)
    return table


def losses_table(run: RunConfig, planned: RunPlan) -> Table:
    """The number of machines that a run on machines like this one may lose."""
    peers, most = run.run.peers, planned.experts_that_fit or 0
    title = f"{peers} such peers, each with room for {most} experts and owner of "
    title += f"{planned.owned_experts}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    share = f"ownership.min_owned_share = {run.ownership.min_owned_share:g}"
    for name, number, then in [
        ("peers that may be lost", planned.losses_survived, "before an expert waits for an owner"),
        ("  until the run pauses", planned.losses_until_pause, share),
    ]:
        number_text = "too little room as it is" if number is None else str(number)
        table.add_row(name, number_text, then)
    return table


def seconds_of(duration_s: float) -> str:
    """Seconds, or milliseconds for short times."""
    return f"{duration_s * 1e3:.1f} ms" if duration_s < 1 else f"{duration_s:.1f} s"


def table_of(run: RunConfig, cost: Cost) -> Table:
    """The figures for people."""
    title = f"{run.run.name}: each of {run.run.peers} peers"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    rows = [
        ("parameters", _millions(cost.parameters_total), "of the model"),
        ("  shared", _millions(cost.parameters_shared), "trained by every peer"),
        ("  one expert", _millions(cost.parameters_per_expert), "in all layers"),
        ("  trained", _millions(cost.parameters_trained_per_peer), "shared and own experts"),
        (
            "training state",
            _gigabytes(cost.state_bytes_per_peer),
            f"memory; {cost.state_bytes_per_peer / cost.full_state_bytes:.0%} of training all",
        ),
        ("disk", _gigabytes(cost.disk_bytes), "state directory, without a corpus"),
        (
            "sent per round",
            _gigabytes(cost.bytes_sent_per_peer_per_round),
            f"received alike; {seconds(cost.bytes_sent_per_peer_per_round, 100)} at 100 Mbit/s",
        ),
        (
            "hand-over",
            _gigabytes(cost.handover_bytes),
            f"once, by a peer that leaves; {seconds(cost.handover_bytes, 100)} at 100 Mbit/s",
        ),
    ]
    for row in rows:
        table.add_row(*row)
    return table


def seconds(num_bytes: float, rate_mbit: float) -> str:
    """The time of bytes at a rate, in words."""
    duration_s = num_bytes * 8 / (rate_mbit * 1e6)
    return f"{duration_s:.1f} s" if duration_s < 90 else duration(duration_s)


def _millions(count: float) -> str:
    return f"{count / 1e6:,.1f} M" if count < 1e8 else f"{count / 1e6:,.0f} M"


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:,.1f} GB"


if __name__ == "__main__":
    main()
