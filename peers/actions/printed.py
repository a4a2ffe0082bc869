"""The lines that a running peer prints for a person."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

import click

from swarm.network.wire.daemon import is_loopback
from swarm.peer.status.observing import PeerObserver

logger = logging.getLogger(__name__)


def join_line(address: str, run_id: str | None = None, invitation: str | None = None) -> str:
    """The command that joins a run. The run's id is needed if several runs are announced."""
    named = f" --run-id {run_id}" if run_id else ""
    invited = f" --invitation {invitation}" if invitation else ""
    return f"swarm-peer --initial-peers {address}{named}{invited}"


def say_how_to_join(
    addresses: Sequence[str], run_id: str | None = None, invitation: str | None = None
) -> None:
    """Prints the joining command for a peer's first address. Prints nothing without an address."""
    for address in addresses[:1]:
        click.echo(join_line(address, run_id, invitation))
        if is_loopback(address):
            logger.warning("only peers on this machine reach that address; see --port")
    if others := addresses[1:]:
        logger.info("this peer also listens at %s", " ".join(others))
    sys.stdout.flush()


class Printed(PeerObserver):
    """Prints lines for people and scripts, above all the command with which others join."""

    _invitation: str | None = None

    def on_invitation(self, text: str) -> None:
        """Keeps the invitation for the command with which others join."""
        self._invitation = text

    def on_address(self, address: str) -> None:
        """Prints the command for this address at once, before other addresses."""
        say_how_to_join([address], invitation=self._invitation)

    def on_notice(self, line: str) -> None:
        """Prints the line."""
        click.echo(line)
