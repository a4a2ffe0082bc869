"""swarm-local: a whole swarm on this machine, for a first try, for tests and for drills."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from peers.command_line.command import ending_as_ctrl_c
from peers.command_line.option_values import file_of, require_folder
from peers.command_line.options import Options, option, options, program
from swarm.config import parse_override
from swarm.emulation.fault_plan import parse_plan
from swarm.emulation.fault_runner import FaultRunner
from swarm.emulation.fault_verdict import fault_reports
from swarm.emulation.links import LINKS, Links
from swarm.emulation.local_peer import Event, LocalPeer
from swarm.emulation.local_swarm import LocalSwarm, applied, summary
from swarm.emulation.networks import open_links
from swarm.errors import ConfigError, SwarmError
from swarm.run_files import read_text

EVERY_S = 15.0
"""Most seconds between two lines, even if no round ends."""
LOCAL = "127.0.0.1"
STALL_S = 1800.0
"""Seconds without a new manifest or step after which the swarm is given up. Peers themselves wait
for a lost majority for ten minutes or more."""
_OF_EACH = frozenset(
    {
        *("peer.name", "peer.wait_for_peers", "peer.linger_s"),
        *("network.initial_peers", "network.host_maddrs", "network.announce_maddrs"),
        "network.identity_path",
    }
)
"""Settings that swarm-local makes for each peer."""


@dataclass
class Progress:
    """Prints a line for each manifest, once every living peer has it, and for each loss."""

    rounds_total: int
    as_json: bool
    said: int = 0
    """Height of the last printed manifest. Manifest 0 is never printed."""
    losses_said: set[str] = field(default_factory=set)
    steps_said: tuple[str, ...] = ()
    """The peers' local steps at the last look."""
    last_s: float = field(default_factory=time.monotonic)
    """When a peer last made progress."""
    heard_s: float = field(default_factory=time.monotonic)
    """When the last line was printed, even if only about a peer's progress."""

    def __call__(self, swarm: LocalSwarm) -> None:
        """Prints news from the peers' histories.

        Raises:
            SwarmError: nothing has happened for too long.
        """
        histories = [peer.events() for peer in swarm.peers if peer.alive]
        chains = [applied(events) for events in histories]
        # Lines do not wait for a peer without a manifest, such as a newcomer.
        newest = [chain[-1]["height"] for chain in chains if chain]
        everywhere = min(newest, default=-1) if len(newest) == len(chains) or self.said else -1
        by_height: dict[int, list[Event]] = {}
        for event in (event for chain in chains for event in chain):
            if self.said < event["height"] <= everywhere:
                by_height.setdefault(event["height"], []).append(event)
        for height in sorted(by_height):
            self._say_manifest(by_height[height])
            self.said = height
        for event in (e for events in histories for e in events if e["event"] == "validation"):
            if event["digest"] not in self.losses_said:
                self.losses_said.add(event["digest"])
                self._say(
                    f"round {event['round']}: held-out loss {event['val_loss']:.4f} nats/token, "
                    f"{event['bits_per_byte']:.4f} bits/byte"
                )
        if time.monotonic() - self.heard_s > EVERY_S:
            self.heard_s = time.monotonic()
            click.echo(how_far(histories), err=True)
        if (said := newest_steps(histories)) != self.steps_said:
            self.steps_said, self.last_s = said, time.monotonic()
        if time.monotonic() - self.last_s > STALL_S:
            raise SwarmError(f"no round or step within {STALL_S:.0f} s; logs in {swarm.folder}")

    def _say_manifest(self, events: list[Event]) -> None:
        first, digests = events[0], {event["digest"] for event in events}
        agreed = (
            f"digest {first['digest'][:12]}" if len(digests) == 1 else f"{len(digests)} DIGESTS"
        )
        what = "merge of similar experts" if first["kind"] == "merge" else "averaged"
        self._say(
            f"round {first['round']}/{self.rounds_total} {what}: {agreed} at {len(events)} peers, "
            f"{len(first['contributors'])} contributors"
        )

    def _say(self, line: str) -> None:
        self.last_s = self.heard_s = time.monotonic()
        click.echo(line, err=self.as_json)


def how_far(histories: Sequence[Sequence[Event]]) -> str:
    """Progress within a round: of the first peer that reports progress, and a count of others."""
    for index, events in enumerate(histories):
        if events and events[-1]["event"] == "progress":
            more = f"; {len(histories) - 1} more peers" if len(histories) > 1 else ""
            return f"peer {index}: {events[-1]['text']}{more}"
    return f"{len(histories)} peers start or end a round"


def newest_steps(histories: Sequence[Sequence[Event]]) -> tuple[str, ...]:
    """The last line of each peer about its local steps. A waiting peer repeats its line."""
    said = ([e["text"] for e in events if e["event"] == "progress"] for events in histories)
    return tuple(
        next((text for text in reversed(texts) if not text.startswith("waiting")), "")
        for texts in said
    )


def links_of(_: click.Context, __: click.Parameter, text: str | None) -> tuple[str, ...]:
    """The names of emulated links in a list with commas."""
    names = tuple(text.split(",")) if text else ()
    if wrong := [name for name in names if name not in LINKS]:
        raise click.BadParameter(f"{wrong[0]!r} is none of {', '.join(LINKS)}")
    return names


@program("swarm-local")
@options(
    "run", "rounds", "peers", "settings", "corpus", "follow_links", "list_skipped", "tokenizer",
    "initialise_from", "as_json", "log_format", "log_level",
)  # fmt: skip
@option(
    "--state-dir",
    type=click.Path(path_type=Path),
    help="Folder for the states and logs of all peers; by default a temporary folder, which is "
    "removed when the run is finished. --export keeps the model.",
)
@option(
    "--export",
    dest="export_to",
    type=click.Path(path_type=Path),
    help="Folder to export the model into.",
)
@option("--monitor/--no-monitor", default=False, help="Show swarm-monitor while peers train.")
@option("--page", is_flag=True, help="Serve swarm-monitor's page, and print its address.")
@option(
    "--faults",
    type=click.Path(path_type=Path),
    callback=file_of("faults"),
    help="Plan of faults: a file in TOML, or a name such as demo.",
)
@option(
    "--link",
    callback=links_of,
    metavar="NAME[,NAME...]",
    help="Emulated links between the peers; several names are given to the peers in turn.",
)
def main(
    options: Options,
    *,
    state_dir: Path | None,
    export_to: Path | None,
    monitor: bool,
    page: bool,
    faults: Path | None,
    link: Sequence[str],
) -> None:
    """Trains a swarm of several peers on this machine: real processes, real network, one run.

    With --json the last line is one JSON object. peers/README.md describes its fields.
    """
    run = options.run_config()
    assert options.run is not None, "run_config would have refused"
    if export_to:
        require_folder(export_to)
    plan = parse_plan(read_text(faults, "faults"), source=str(faults)) if faults else None
    for_all = peer_settings(options)
    from swarm.peer.text.run_start import founders_tokenizer, founders_weights  # loads torch, too
    from swarm.peer.text.run_text import corpus_of  # loads torch: not for --help

    # A missing text, or an unfit tokenizer or checkpoint, ends the program before the swarm starts.
    corpus = options.peer_config().corpus
    corpus_of(run, corpus.folder, follow_links=corpus.follow_links)
    founders_tokenizer(run, options.tokenizer)
    founders_weights(run, options.initialise_from)
    with ending_as_ctrl_c(), _folder_of(state_dir) as folder:
        swarm = LocalSwarm(
            folder,
            options.run,
            run.run.peers,
            options=["--linger", "86400", *_level(options), *_set(for_all)],
            founder_options=[*_set(options.run_settings()), *_given(options)],
        )
        with _network(link) as swarm.links:
            runner = FaultRunner(swarm, plan, say=_say) if plan else None
            progress = None if monitor else Progress(run.run.rounds, options.as_json)
            began_s = time.time()
            with swarm:
                present = _train(swarm, runner, progress, page)
        if export_to:
            _export(swarm.peers[min(present)], export_to, options.as_json)
        verdict = summary(swarm, present)
        if runner:
            histories = [peer.events() for peer in swarm.peers]
            verdict["faults"] = fault_reports(runner.happened, histories, began_s)
    if options.as_json:
        click.echo(json.dumps(verdict))
    else:
        click.echo(_sentence(verdict))


@contextlib.contextmanager
def _folder_of(given: Path | None) -> Iterator[Path]:
    """The folder of states and logs. A temporary folder is removed only at the end of the run."""
    if given:
        yield given.expanduser()
        return
    folder = Path(tempfile.mkdtemp(prefix="swarm-local-"))
    try:
        yield folder
    except BaseException as error:
        if isinstance(error, Exception) or _has_run(folder):
            _say(what_is_left(folder))
            raise
        shutil.rmtree(folder, ignore_errors=True)  # interrupted before there was a run
        raise
    shutil.rmtree(folder, ignore_errors=True)


def what_is_left(folder: Path) -> str:
    """Names the folder of an unfinished run and, if it has begun, the way to resume it."""
    first, others = folder / "peer-0", folder / "peer-N"
    if not _has_run(folder):
        return f"states and logs are in {folder}; no run was founded"
    return (
        f"states and logs are in {folder}; swarm-export --state-dir {first} --out DIR writes the "
        f"model of the newest round. swarm-peer --state-dir {first} resumes it, the other peers by "
        f"swarm-peer --state-dir {others} --initial-peers ADDRESS, with the address that it prints"
    )


def _has_run(folder: Path) -> bool:
    return any(folder.glob("peer-*/runs/*/record"))


def peer_settings(options: Options) -> tuple[str, ...]:
    """The settings of `--set` and flags that apply to each peer of the swarm.

    Raises:
        ConfigError: a setting is wrong, or differs for each peer.
    """
    options.peer_config()
    settings = options.peer_settings()
    for setting in settings:
        section, field, _ = parse_override(setting)
        if f"{section}.{field}" in _OF_EACH:
            raise ConfigError(
                f"--set {setting!r}: swarm-local gives every peer its own {section}.{field}",
                hint="leave it out, or start the peers one by one with swarm-peer",
            )
    return settings


def _set(settings: Sequence[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def _given(options: Options) -> list[str]:
    """The options of the founder alone."""
    flags = {"--tokenizer": options.tokenizer, "--initialise-from": options.initialise_from}
    return [word for flag, folder in flags.items() if folder for word in (flag, str(folder))]


def _level(options: Options) -> list[str]:
    return ["--log-level", options.log_level] if options.log_level else []


def _say(line: str) -> None:
    click.echo(line, err=True)


@contextlib.contextmanager
def _network(link: Sequence[str]) -> Iterator[Links | None]:
    if not link:
        yield None
        return
    links = open_links(link, _say)
    try:
        yield links
    finally:
        links.close()


def _sentence(verdict: Mapping[str, Any]) -> str:
    faults = f"{len(verdict['faults'])} faults, " if "faults" in verdict else ""
    return (
        f"{verdict['rounds']} rounds, {verdict['merges']} merges, {faults}held-out loss "
        f"{verdict['val_loss_first']:.3f} -> {verdict['val_loss_last']:.3f} nats/token "
        f"({verdict['bits_per_byte_last']:.3f} bits/byte), "
        f"{len(verdict['manifest_digests'])} digest, {verdict['tokens_lost']} tokens lost, "
        f"{verdict['bytes_sent_per_peer_per_round'] / 1e6:.2f} MB sent per peer and round, "
        f"{verdict['seconds']:.0f} s"
    )


def _train(
    swarm: LocalSwarm, runner: FaultRunner | None, progress: Progress | None, page: bool
) -> list[int]:
    """Trains until the run is finished. Returns the peers that are there at the end."""
    if runner:
        runner.prepare()
    swarm.start()
    if runner:
        runner.begin()

    def on_poll(swarm: LocalSwarm) -> None:
        for act in (runner.poll if runner else None, progress):
            if act:
                act(swarm)

    shown = [_monitor(swarm.peers[0], "--http", f"{LOCAL}:0")] if page else []
    shown += [] if progress else [_monitor(swarm.peers[0])]
    try:
        swarm.wait_until(
            LocalSwarm.finished, what="the run", timeout_s=float("inf"), on_poll=on_poll
        )
    finally:
        for process in shown:
            process.terminate()
            process.wait(10)
    return [peer.index for peer in swarm.peers if peer.alive]


def _monitor(founder: LocalPeer, *options: str) -> subprocess.Popen[bytes]:
    address = ["--initial-peers", founder.join_address()]
    if not options:
        _say(f"in a browser: swarm-monitor {' '.join(address)} --http 8080")
    command = [sys.executable, "-m", "peers.monitor", *address, *options]
    # Only the verdict goes to stdout, so the page's address goes to stderr, like progress with
    # --json.
    out = sys.stderr if options else None
    return subprocess.Popen([*founder.prefix, *command], stdin=subprocess.DEVNULL, stdout=out)


def _export(peer: LocalPeer, folder: Path, as_json: bool) -> None:
    command = [sys.executable, "-m", "peers.export", "--state-dir", str(peer.folder)]
    result = subprocess.run(
        [*command, "--out", str(folder)],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if as_json else None,
        timeout=STALL_S,
        check=False,
    )
    if result.returncode:
        raise SwarmError(f"swarm-export ended with status {result.returncode}")


if __name__ == "__main__":
    main()
