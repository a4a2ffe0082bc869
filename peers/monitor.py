"""swarm-monitor: watches a run without taking part in it."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import click
from rich.console import Console
from rich.live import Live

from peers.command_line.command import for_tables
from peers.command_line.options import Options, option, options, program
from swarm.errors import ConfigError, NobodyReachable
from swarm.monitor.health import health_of
from swarm.monitor.metrics import glossary
from swarm.monitor.schema import as_json
from swarm.monitor.snapshot import Snapshot
from swarm.monitor.terminal import render, waiting
from swarm.protocol.records.printable import printable

if TYPE_CHECKING:  # loads hivemind and torch
    from swarm.peer.guest import History


class Source(Protocol):
    """Shows a run, living or finished."""

    before: Snapshot | None
    """The last look. None before the first one."""

    @property
    def refresh_s(self) -> float:
        """Seconds between looks."""

    def look(self) -> Snapshot:
        """The newest snapshot. Raises `SwarmError` if there is none now."""


@program("swarm-monitor")
@options("initial_peers", "run_id", "tip", "as_json", "log_format", "log_level")
@option("--once", is_flag=True, help="Show the swarm once and end.")
@option("--follow", is_flag=True, help="Print a line per change, also on a terminal.")
@option("--http", metavar="HOST:PORT", help="Serve a page instead; 8080 is 127.0.0.1:8080.")
@option(
    "--history",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Keep losses, rounds and events in this file over restarts.",
)
@option(
    "--events",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    multiple=True,
    help="events.jsonl of a peer, with the losses and events before this start.",
)
@option(
    "--replay",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Walk through the run in this state directory instead, manifest by manifest.",
)
@option("--glossary", dest="show_glossary", is_flag=True, help="Say what each figure is, and end.")
def main(
    given: Options,
    *,
    once: bool,
    follow: bool,
    http: str | None,
    history: Path | None,
    events: tuple[Path, ...],
    replay: Path | None,
    show_glossary: bool,
) -> None:
    """Watches a run: peers, owners of experts, rounds, losses, traffic, decisions.

    The monitor only reads signed records: it publishes nothing and takes no part. Without a
    terminal it prints a line per change, and with --json an object per look. With --http a browser
    shows the run.
    """
    if show_glossary:
        click.echo(glossary())
        return
    if http and (once or follow or given.as_json):
        raise ConfigError(
            "--http goes with none of --once, --follow, --json", hint="the page has /snapshot.json"
        )
    show: Callable[[Source], None] = _live
    if http:
        from peers.actions.monitor_page import page_at  # starlette and uvicorn: only for the page

        show = page_at(http)
    elif once:
        show = functools.partial(_show, in_json=given.as_json)
    elif follow or given.as_json or not Console().is_terminal:
        show = functools.partial(_follow, in_json=given.as_json)
    try:
        with _source(given, history, events, replay, to_end=once) as source:
            show(source)
    except KeyboardInterrupt:
        return


@contextlib.contextmanager
def _source(
    given: Options,
    history: Path | None,
    events: tuple[Path, ...],
    replay: Path | None,
    *,
    to_end: bool,
) -> Iterator[Source]:
    if replay:
        from peers.actions.monitor_files import Replay  # reads state directories: only for this

        yield Replay(replay, to_end=to_end)
        return
    if not given.initial_peers:
        raise ConfigError(
            "--initial-peers is missing", hint="every peer prints its address when it starts"
        )
    kept = _kept(history, events)
    # The next look sees what a failed look misses, and lines on stderr would damage the view.
    if given.log_level is None:
        logging.getLogger().setLevel(logging.ERROR)
    from swarm.network.blobs.blob_store import BlobStore  # imported here: not for --help
    from swarm.network.runs.observer import Observer  # loads hivemind and torch
    from swarm.peer.guest import START_S, Watch  # loads hivemind and torch

    store = BlobStore(None)
    observer = Observer.start(given.initial_peers, store, START_S, vouched=given.tip)
    try:
        yield Watch(observer, store, given.run_id, kept)
    finally:
        observer.stop()


def _kept(history: Path | None, events: tuple[Path, ...]) -> History | None:
    if not history and not events:
        return None
    from peers.actions.monitor_files import (  # reads files: only on request
        Earlier,
        HistoryFile,
    )

    file = HistoryFile(history) if history else None
    return Earlier(events, file) if events else file


def _show(source: Source, in_json: bool) -> None:
    snapshot = source.look()
    if in_json:
        click.echo(json.dumps(as_json(snapshot)))
        return
    console = for_tables()
    console.print(render(snapshot, width=console.width, height=max(console.height - 1, 23)))


def _follow(source: Source, in_json: bool) -> None:
    """Prints one line per look (JSON) or per change. Ends only with an interrupt."""
    said = ""
    while True:
        try:
            snapshot = source.look()
        except NobodyReachable as error:
            line = (
                _lost(source.before, str(error))
                if in_json
                else f"unreachable reason={str(error)!r}"
            )
        else:
            line = json.dumps(as_json(snapshot)) if in_json else _line(snapshot)
        if in_json or line != said:
            click.echo(printable(line, len(line)))
        said = line
        time.sleep(source.refresh_s)


def _lost(before: Snapshot | None, reason: str) -> str:
    """The last look, marked as lost. Before the first look, only the health."""
    if before is None:
        return json.dumps({"health": {"word": "unreachable", "reason": reason}})
    return json.dumps(as_json(before, unreachable=reason))


def _line(snapshot: Snapshot) -> str:
    loss = bits = "none"
    if snapshot.losses:
        loss = f"{snapshot.losses[-1][1]:.4f}"
        if snapshot.bits_per_byte_of_nat is not None:
            bits = f"{snapshot.losses[-1][1] * snapshot.bits_per_byte_of_nat:.4f}"
    speaking = snapshot.speaking
    equal = sum(row.record.manifest_digest == snapshot.manifest_digest for row in speaking)
    return (
        f"run={snapshot.run_id or 'gathering:' + snapshot.name} generation={snapshot.generation} "
        f"round={snapshot.round}/{snapshot.rounds_total} digest={snapshot.manifest_digest[:12]} "
        f"peers={len(speaking)} equal={equal} val_loss={loss} "
        f"bits_per_byte={bits} health={health_of(snapshot).word.value}"
    )


def _live(source: Source) -> None:
    """Fills the terminal until it is interrupted."""
    console = Console(highlight=False)
    with Live(waiting("looking for the run ..."), console=console, screen=True) as live:
        while True:
            try:
                snapshot = source.look()
            except NobodyReachable as error:
                live.update(waiting(printable(f"{error}; trying again")), refresh=True)
            else:
                height, width = console.height, console.width
                live.update(render(snapshot, width=width, height=height), refresh=True)
            time.sleep(source.refresh_s)


if __name__ == "__main__":
    main()
