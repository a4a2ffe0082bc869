"""The line that others copy to join a run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import click

from swarm.network.daemon import is_loopback

logger = logging.getLogger(__name__)


def join_line(address: str, run_id: str | None = None, invitation: str | None = None) -> str:
    """A command; with the run's id it means this run wherever several are announced."""
    named = f" --run-id {run_id}" if run_id else ""
    invited = f" --invitation {invitation}" if invitation else ""
    return f"swarm-peer --initial-peers {address}{named}{invited}"


def say_how_to_join(
    addresses: Sequence[str], run_id: str | None = None, invitation: str | None = None
) -> None:
    """Prints the line for the first of a peer's addresses; nothing where it listens nowhere."""
    for address in addresses[:1]:
        click.echo(join_line(address, run_id, invitation))
        if is_loopback(address):
            logger.warning("only peers on this machine reach that address; see --port")
    if others := addresses[1:]:
        logger.info("this peer also listens at %s", " ".join(others))
    sys.stdout.flush()
