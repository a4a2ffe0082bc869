"""swarm-peer that offers finite garbage from its second round on, without its own check."""

import torch

from peers.peer import main
from swarm.codecs import Content, encoded
from swarm.peer.training.offering import Offering
from swarm.protocol.values.manifest import Digest, Manifest, Unit

GARBAGE = 1e18


def store(
    self: Offering, tip: Manifest, unit: Unit, value: Content, tokens: int
) -> tuple[Digest, int]:
    if tip.round:
        layout = self.model.agreed.layout.by_unit[unit]
        value = encoded(layout, lambda part: torch.full((part.stop - part.start,), GARBAGE))
    return self.rounds.store_value(value)


if __name__ == "__main__":
    Offering.store = store  # type: ignore[method-assign]
    main()
