"""All that the trainer's thread has to do with the rounds, which run in another thread."""

from __future__ import annotations

from typing import Protocol

from swarm.codecs import Content
from swarm.protocol.manifest import Digest
from swarm.protocol.messages import Offer
from swarm.protocol.rounds import Rules
from swarm.protocol.training import Applied


class Rounds(Protocol):
    """See `swarm.network.round_driver.RoundDriver`; each may be called from any thread."""

    @property
    def rules(self) -> Rules:
        """Of the run."""

    @property
    def newest(self) -> Applied:
        """The newest tip."""

    def wait_for_tip(self, after: Digest, timeout_s: float) -> list[Applied]:
        """Tips since the one with digest `after`, oldest first; empty if none came in time."""

    def store_value(self, value: Content) -> tuple[Digest, int]:
        """Stores a value of this peer's own; returns digest and size."""

    def offer(self, offer: Offer) -> None:
        """Puts an offer into the round."""

    def expect(self, tip: Digest, remaining_s: float) -> None:
        """Says when the local steps on a tip will be done."""

    def leave(self) -> None:
        """Asks to leave the run."""

    @property
    def left(self) -> str | None:
        """Why this peer is no longer a member, once it has left."""

    @property
    def last_reason(self) -> str:
        """Why the protocol did what it did last, for people."""
