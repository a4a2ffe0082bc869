"""swarm-worker: lets the GPUs of this machine compute for a peer on another machine."""

from __future__ import annotations

import os
from pathlib import Path

import click

from peers.command_line.command import ending_as_ctrl_c
from peers.command_line.options import Options, option, options, program
from peers.peer import PASSIVE
from swarm.errors import ConfigError
from swarm.train.workers.roster import Node, address_of, launched_by


@program("swarm-worker")
@options("log_format", "log_level")
@option(
    "--key",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Copy of the peer's workers.key, which is in its state folder; must be given.",
)
@option(
    "--controller",
    metavar="HOST:PORT",
    help="Address in the peer's --workers-from; by default torchrun's host, and port 31340.",
)
@option(
    "--workers",
    type=click.IntRange(min=1),
    help="Number of workers; by default one for each GPU. Must be given without GPUs.",
)
@option(
    "--folder",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Folder with room for what the peer sends; by default the system's temporary folder.",
)
@option(
    "--once", is_flag=True, help="End when the peer has ended, instead of waiting for the next one."
)
def main(
    _: Options,
    *,
    key: Path | None,
    controller: str | None,
    workers: int | None,
    folder: Path | None,
    once: bool,
) -> None:
    """Lets this machine's GPUs compute for a peer that was started elsewhere.

    \b
    The peer:      swarm-peer ... --workers-from 10.0.0.1:31340 --remote-workers 8
    This machine:  swarm-worker --controller 10.0.0.1:31340 --key workers.key

    The peer makes the key, and its log says where. The workers begin when all machines are there,
    and end within 10 s of their peer. Then this program waits for the peer again. Nothing is
    encrypted: all machines must be in one private network. Under torchrun, or srun with several
    tasks a machine, each process is one worker.
    """  # noqa: D301 - click reads the backspace
    for name, value in PASSIVE.items():
        os.environ.setdefault(name, value)  # before torch loads OpenMP
    import torch  # takes seconds: not for --help

    from swarm.train.workers.agent import Agent  # loads torch: not for --help
    from swarm.train.workers.controller_wire import key_at  # loads torch: not for --help
    from swarm.train.workers.nodes import versions  # loads torch: not for --help

    launch = launched_by(os.environ)
    gpus = torch.cuda.device_count()
    number = workers or (gpus if launch.local is None else 1)
    if not number:
        hint = "give --workers N for a peer that computes on the CPU"
        raise ConfigError("PyTorch finds no GPU on this machine", hint=hint)
    if not (address := controller or launch.controller):
        raise ConfigError("--controller is missing", hint="for example 10.0.0.1:31340")
    if not key:
        raise ConfigError("--key is missing", hint="a copy of the peer's workers.key")
    agent = Agent(
        address_of(address, "--controller"),
        key_at(key.expanduser(), may_make=False),
        Node(number, gpus, launch.rank, versions()),
        launch.local,
        folder,
    )
    with ending_as_ctrl_c():  # so that the workers are ended first
        agent.serve(once=once)


if __name__ == "__main__":
    main()
