"""swarm-peer of a member that lies while a file exists. The file names the lie."""

import os
from pathlib import Path

import torch

from peers.peer import main
from swarm.codecs import Content, encoded
from swarm.peer.training.offering import Offering
from swarm.protocol.messages.messages import MAX_ATTEMPT, Ballot, Message, Prepare
from swarm.protocol.rounds.state import Outbox
from swarm.protocol.values.manifest import Digest, Manifest, PeerId, Unit

ATTACK_VARIABLE = "SWARM_TEST_ATTACK"
GARBAGE = 1e18


def attack() -> str:
    """The present attack. Empty for none."""
    path = Path(os.environ[ATTACK_VARIABLE])
    return path.read_text() if path.exists() else ""


honest_post, honest_store = Outbox.post, Offering.store


def post(self: Outbox, destination: PeerId, message: Message) -> None:
    """Names the last possible attempt in every message."""
    honest_post(self, destination, message)
    if attack() == "attempt-counters" and destination != self.me:
        honest_post(self, destination, Prepare(Ballot(MAX_ATTEMPT, self.me)))


def store(
    self: Offering, tip: Manifest, unit: Unit, value: Content, tokens: int
) -> tuple[Digest, int]:
    """Finite garbage instead of trained values."""
    if attack() != "garbage-values":
        return honest_store(self, tip, unit, value, tokens)
    layout = self.model.agreed.layout.by_unit[unit]
    value = encoded(layout, lambda part: torch.full((part.stop - part.start,), GARBAGE))
    return self.rounds.store_value(value)


if __name__ == "__main__":
    Outbox.post = post  # type: ignore[method-assign]
    Offering.store = store  # type: ignore[method-assign]
    main()
