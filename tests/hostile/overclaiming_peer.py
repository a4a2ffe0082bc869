"""swarm-peer in a drill that claims steps of 1 ms, and counts its whole deal."""

import os
from dataclasses import replace
from pathlib import Path

from peers.emulated import emulate
from peers.peer import main
from swarm.emulation.controls import FOLDER_VARIABLE, INDEX_VARIABLE
from swarm.peer.training.trainer import Trainer
from swarm.protocol.messages.messages import Offer
from swarm.protocol.rounds.policies.deals import most_samples
from swarm.protocol.values.manifest import Manifest

honest_submit = Trainer.submit


def submit(self: Trainer, tip: Manifest, offer: Offer) -> None:
    rules = self.rounds.rules
    tokens = most_samples(self.model.me, tip, rules) * rules.sequence_length
    steps = tokens // rules.batch_tokens_at(tip.tokens)
    honest_submit(self, tip, replace(offer, steps=steps, tokens=tokens, seconds=0.001))


if __name__ == "__main__":
    Trainer.submit = submit  # type: ignore[method-assign]
    main(obj=emulate(Path(os.environ[FOLDER_VARIABLE]), int(os.environ[INDEX_VARIABLE])))
