"""Held-out losses that the history of one peer tells."""

from __future__ import annotations

from pathlib import Path

from swarm import durable
from swarm.protocol.life_events import EventReader, Validation
from swarm.protocol.losses import Losses
from swarm.protocol.manifest import Digest


def kept_losses(events: Path) -> Losses:
    """What the history of one peer says, which has only measured some of the rounds itself.

    A file that is missing says nothing; a line that a kill has torn is passed over.
    """
    found: dict[int, float] = {}
    exactly: dict[Digest, float] = {}
    nat: float | None = None
    reader = EventReader()
    for line in durable.read_lines(events):
        try:
            _, _, event = reader.parse(line)
        except ValueError:
            continue
        if isinstance(event, Validation):
            found[event.round] = exactly[event.digest] = event.val_loss
            nat = event.bits_per_byte / event.val_loss if event.val_loss else nat
    return Losses(found, exactly, nat)
