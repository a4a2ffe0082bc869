"""Shared parts of programs that rehearse a swarm's life: the run, the folder, the report."""

import argparse
import contextlib
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from peers.command_line.command import ending_as_ctrl_c
from swarm.emulation.local_swarm import LocalSwarm

RUN_FILE = Path(__file__).resolve().parents[2] / "configs/runs/rehearsal.toml"


def add_common(parser: argparse.ArgumentParser) -> None:
    """The common options."""
    parser.add_argument("--state-dir", type=Path, help="kept; by default a temporary folder")
    parser.add_argument("--json", action="store_true", help="one JSON object last on stdout")


def folder_of(arguments: argparse.Namespace, name: str) -> Path:
    """The folder of states and logs."""
    folder: Path = arguments.state_dir or Path(tempfile.mkdtemp(prefix=f"swarm-{name}-"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def tidy(folder: Path, arguments: argparse.Namespace) -> None:
    """Removes a temporary folder, which may hold gigabytes.

    After a failure the folder stays for inspection.
    """
    if arguments.state_dir is None:
        shutil.rmtree(folder, ignore_errors=True)


def rehearse(
    name: str,
    arguments: argparse.Namespace,
    verdict_of: Callable[[argparse.Namespace, Path, Callable[[str], None]], dict[str, Any]],
) -> int:
    """Runs a rehearsal in a new folder, reports its verdict, and returns the exit status.

    The temporary folder of a passed rehearsal is removed.

    Args:
        name: name of the rehearsal, part of the name of a temporary folder.
        arguments: the options, with those of `add_common`.
        verdict_of: rehearses in a folder. The verdict's "passed" is true if all went well.
    """
    folder, say, passed = folder_of(arguments, name), teller(), False
    try:
        with ending_as_ctrl_c():
            verdict = verdict_of(arguments, folder, say)
        report(verdict, arguments)
        passed = verdict["passed"]
    finally:
        if passed:
            tidy(folder, arguments)
        if folder.exists():
            say(f"states and logs are in {folder}")
    return 0 if passed else 1


@contextlib.contextmanager
def killing(swarm: LocalSwarm) -> Iterator[None]:
    """Kills the peers at the end, and closes their network even if a peer cannot be killed."""
    try:
        yield
    finally:
        try:
            swarm.kill()
        finally:
            if swarm.links is not None:
                swarm.links.close()


def settings(*overrides: str) -> list[str]:
    """The founder's options that change the rehearsed run."""
    return [word for override in overrides for word in ("--set", override)]


def teller() -> Callable[[str], None]:
    """Returns a function that prints progress with the seconds since now, as the report."""
    began_s = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began_s:7.1f} s  {text}", file=sys.stderr, flush=True)

    return say


def report(verdict: Mapping[str, object], arguments: argparse.Namespace) -> None:
    """Prints a line for each figure. With --json, lines go to stderr, and one object to stdout."""
    out = sys.stderr if arguments.json else sys.stdout
    print(*_lines(verdict), sep="\n", file=out)
    if arguments.json:
        print(json.dumps(verdict))


def _lines(verdict: Mapping[str, object]) -> Iterable[str]:
    return (f"{name:18} {value}" for name, value in verdict.items())
