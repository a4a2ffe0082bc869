"""swarm-peer: trains in a run. It founds one with --run, and joins one with --initial-peers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from peers.command_line.option_values import as_toml
from peers.command_line.options import Options, flags_of, options, program, require_founder
from swarm.config import PeerConfig

if TYPE_CHECKING:
    from swarm.peer.status.observing import PeerObserver


PEER_OPTIONS = (
    "run", "config", "run_id", "new_run", "tip", "invitation", "state_dir", "rounds", "peers",
    "settings", "port", "public_ip", *flags_of(PeerConfig), "tokenizer", "initialise_from",
    "tensorboard", "print_config", "log_format", "log_level",
)  # fmt: skip
"""Options of a peer, which swarm-doctor takes too."""
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
"""Settings that make idle threads sleep. By default, threads of torch's GNU OpenMP first spin for
some milliseconds, on cores that other peers of the machine could use."""


@program("swarm-peer")
@options(*PEER_OPTIONS)
@click.pass_obj
def main(observer: PeerObserver | None, options: Options) -> None:
    """Trains one peer of a swarm.

    \b
    Found a run:    swarm-peer --run demo --port 31330
    Join a run:     swarm-peer --initial-peers ADDRESS
    Resume a run:   swarm-peer --state-dir DIR

    Every start prints the line with which others join, and the text that they need. The first
    Ctrl+C or SIGTERM finishes the round and hands the experts over, within --leave-timeout. The
    second leaves at once. Agreed values are kept: the same command resumes, also after a kill -9 or
    a power cut, and meanwhile the others continue to train. Read more in peers/from_a_wheel.md (all
    steps), peers/running_a_swarm.md (costs, firewalls, services) and peers/what_can_go_wrong.md
    (each error and its remedy).
    """  # noqa: D301 - click reads the backspace
    config = options.peer_config()
    run = options.run_config() if options.run else None
    require_founder(options)
    if options.print_config:
        click.echo(in_effect(options, options.print_config))
        return
    from peers.actions.participation import take_part  # loads torch and hivemind: not for --help

    take_part(config, run, options, observer)


def in_effect(options: Options, kind: str) -> str:
    """Settings as a TOML file that --run or --config takes.

    Args:
        options: the given options. Settings of the machine include those kept from an earlier
            start.
        kind: `run` or `machine`.

    Raises:
        ConfigError: the kind is `run`, and --run is missing.
    """
    if kind == "run":
        return as_toml(options.run_config())
    from swarm.peer.machine.state_directory import (
        StateDirectory,  # loads torch and hivemind
        with_kept,  # imported here: not for --help
    )

    path = StateDirectory.unlocked(options.state_dir).settings_path
    return as_toml(with_kept(options.peer_config(), path))


def launch() -> None:
    """Starts swarm-peer. OpenMP reads its environment when `main` later imports torch.

    A person's own settings of OpenMP are kept.
    """
    for name, value in PASSIVE.items():
        os.environ.setdefault(name, value)
    main()


if __name__ == "__main__":
    main()
