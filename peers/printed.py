"""What a person reads of a peer as it runs."""

from __future__ import annotations

import click

from peers.join_line import say_how_to_join
from swarm.peer.observing import PeerObserver


class Printed(PeerObserver):
    """Prints what people, and scripts, need to know of a peer: the line with which others join."""

    _invitation: str | None = None

    def on_invitation(self, text: str) -> None:
        """Keeps it for the line with which others join."""
        self._invitation = text

    def on_address(self, address: str) -> None:
        """Prints it at once, before any other address."""
        say_how_to_join([address], invitation=self._invitation)

    def on_notice(self, line: str) -> None:
        """Prints it."""
        click.echo(line)
