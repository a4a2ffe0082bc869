"""swarm-monitor: watches a run without taking part in it."""

from __future__ import annotations

import json
import logging
import os
import time
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.live import Live

from peers.options import Options, option, options, program
from swarm.errors import ConfigError, NobodyReachable
from swarm.monitor.metrics import glossary
from swarm.monitor.snapshot import Snapshot, as_json
from swarm.monitor.terminal import render, waiting
from swarm.protocol.printable import printable

if TYPE_CHECKING:
    from swarm.peer.looking import Watch

REFRESH_S = 2.0
FILE_WIDTH = 160
"""Characters a line in a file or pipe."""


@program("swarm-monitor")
@options("initial_peers", "tip", "as_json", "log_format", "log_level")
@option("--once", is_flag=True, help="Shows the swarm once and ends.")
@option("--run-id", help="Which run, where several are announced.")
@option(
    "--glossary", dest="show_glossary", is_flag=True, help="Says what each figure is, and ends."
)
def main(given: Options, once: bool, run_id: str | None, show_glossary: bool) -> None:
    """Watches a run: peers, owners of experts, rounds, losses, traffic, decisions.

    Reads signed records only; it publishes nothing and takes no part. Off a terminal it prints a
    line per change, with --json one object per look.
    """
    if show_glossary:
        click.echo(glossary())
        return
    if not given.initial_peers:
        raise ConfigError(
            "--initial-peers is missing", hint="every peer prints its address when it starts"
        )
    # What one look misses the next one sees; lines on stderr would tear the view.
    if given.log_level is None:
        logging.getLogger().setLevel(logging.ERROR)
    from swarm.network.blobs import BlobStore  # with the next: not for --help
    from swarm.network.observer import Observer  # loads hivemind and torch
    from swarm.peer.looking import START_S, Watch  # loads hivemind and torch

    store = BlobStore(None)
    observer = Observer.start(given.initial_peers, store, START_S, vouched=given.tip)
    try:
        watch = Watch(observer, store, run_id)
        if once:
            _show(watch.look(), given.as_json)
        elif given.as_json or not Console().is_terminal:
            _follow(watch, given.as_json)
        else:
            _live(watch)
    except KeyboardInterrupt:
        return
    finally:
        observer.stop()


def _show(snapshot: Snapshot, in_json: bool) -> None:
    if in_json:
        click.echo(json.dumps(as_json(snapshot)))
        return
    console = Console(highlight=False)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = FILE_WIDTH  # nobody's screen cuts it
    console.print(render(snapshot, width=console.width, height=max(console.height - 1, 23)))


def _follow(watch: Watch, in_json: bool) -> None:
    """One line per look (JSON) or per change; ends only with an interrupt."""
    said = ""
    while True:
        try:
            snapshot = watch.look()
        except NobodyReachable as error:
            line = f"unreachable reason={str(error)!r}"
        else:
            line = json.dumps(as_json(snapshot)) if in_json else _line(snapshot)
        if in_json or line != said:
            click.echo(printable(line, len(line)))
        said = line
        time.sleep(REFRESH_S)


def _line(snapshot: Snapshot) -> str:
    loss = f"{snapshot.losses[-1][1]:.4f}" if snapshot.losses else "none"
    equal = sum(row.record.manifest_digest == snapshot.manifest_digest for row in snapshot.peers)
    return (
        f"run={snapshot.run_id or 'gathering:' + snapshot.name} generation={snapshot.generation} "
        f"round={snapshot.round}/{snapshot.rounds_total} digest={snapshot.manifest_digest[:12]} "
        f"peers={len(snapshot.peers)} equal={equal} val_loss={loss}"
    )


def _live(watch: Watch) -> None:
    """Fills the terminal until it is interrupted."""
    console = Console(highlight=False)
    with Live(waiting("looking for the run ..."), console=console, screen=True) as live:
        while True:
            try:
                snapshot = watch.look()
            except NobodyReachable as error:
                live.update(waiting(printable(f"{error}; trying again")), refresh=True)
            else:
                height, width = console.height, console.width
                live.update(render(snapshot, width=width, height=height), refresh=True)
            time.sleep(REFRESH_S)


if __name__ == "__main__":
    main()
