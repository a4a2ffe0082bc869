"""Held-out losses of rounds before, as far as an exporter can see them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from swarm.protocol.manifest import PeerId
from swarm.protocol.records import ValidationRecord


@dataclass(frozen=True)
class Losses:
    """Held-out losses in nats per token.

    Attributes:
        by_round: round -> loss; of a round that was measured twice the later word.
        bits_per_byte_of_nat: how many bits per byte are one nat per token; None: not known.
    """

    by_round: Mapping[int, float] = field(default_factory=dict)
    bits_per_byte_of_nat: float | None = None

    def until(self, round_number: int) -> tuple[tuple[int, float], ...]:
        """Those of the rounds up to this one, ascending."""
        return tuple(sorted(each for each in self.by_round.items() if each[0] <= round_number))

    def with_newer(self, newer: Losses) -> Losses:
        """Both, where what is newer wins."""
        return Losses(
            dict(self.by_round) | dict(newer.by_round),
            newer.bits_per_byte_of_nat or self.bits_per_byte_of_nat,
        )


def told_losses(
    validations: Mapping[PeerId, ValidationRecord], members: Collection[PeerId]
) -> Losses:
    """What the records of members say; anybody may publish any figure, so others do not count."""
    found: dict[int, float] = {}
    nat: float | None = None
    by_age = sorted(validations.items(), key=lambda item: (item[1].round, item[0]))
    for peer, record in by_age:
        if peer in members:
            found |= dict(record.recent) | {record.round: record.val_loss}
            nat = record.bits_per_byte_of_nat
    return Losses(found, nat)


def kept_losses(events: Path) -> Losses:
    """What the history of one peer says, which has only measured some of the rounds itself.

    A file that is missing says nothing; a line that a kill has torn is passed over.
    """
    found: dict[int, float] = {}
    nat: float | None = None
    try:
        lines = events.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        lines = []
    for line in lines:
        try:
            event = json.loads(line)
            if event["event"] == "validation":
                found[int(event["round"])] = loss = float(event["val_loss"])
                nat = float(event["bits_per_byte"]) / loss if loss else nat
        except (ValueError, KeyError, TypeError):
            continue
    return Losses(found, nat)
