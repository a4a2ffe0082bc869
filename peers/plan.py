"""swarm-plan: what a run costs a peer, before anybody rents a machine."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from rich import box
from rich.console import Console
from rich.table import Table

from peers.options import Options, as_toml, options, program
from swarm.config import RunConfig
from swarm.model.cost import Cost, cost_of

KEYS = (
    "parameters_total",
    "parameters_shared",
    "parameters_per_expert",
    "parameters_trained_per_peer",
    "state_bytes_per_peer",
    "disk_bytes",
    "bytes_sent_per_peer_per_round",
    "backup_bytes_per_peer_per_round",
    "handover_bytes",
)
"""What scripts may rely on."""


@program("swarm-plan")
@options("run", "peers", "rounds", "settings", "as_json", "print_config", "log_format")
def main(given: Options) -> None:
    """What a run costs a peer: parameters, memory, disk and bytes per round.

    Activations, the process itself and a corpus come on top of the memory and disk shown.
    """
    run = given.run_config()
    if given.print_config:
        click.echo(as_toml(run))
        return
    cost = cost_of(run, run.run.peers)
    if given.as_json:
        figures = asdict(cost)
        click.echo(json.dumps({key: figures[key] for key in KEYS}))
    else:
        Console(highlight=False).print(table_of(run, cost))


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
            "backup per round",
            _gigabytes(cost.backup_bytes_per_peer_per_round),
            f"of moments, beside that; backup_every_rounds = {run.ownership.backup_every_rounds}",
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
    """How long bytes take at a rate, in words."""
    duration_s = num_bytes * 8 / (rate_mbit * 1e6)
    if duration_s < 90:
        return f"{duration_s:.1f} s"
    return f"{duration_s / 60:.0f} min" if duration_s < 5400 else f"{duration_s / 3600:.1f} h"


def _millions(count: float) -> str:
    return f"{count / 1e6:,.1f} M" if count < 1e8 else f"{count / 1e6:,.0f} M"


def _gigabytes(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.1f} MB" if num_bytes < 1e9 else f"{num_bytes / 1e9:,.1f} GB"


if __name__ == "__main__":
    main()
