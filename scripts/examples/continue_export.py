"""Trains an exported model alone for ten more steps, and shows the loss of each step.

    .venv/bin/python scripts/examples/continue_export.py out/demo-model out/alone

The state directory is a peer's: others may join its run later, and `swarm-export` exports it.
"""

import sys

import swarm


class Losses(swarm.PeerObserver):
    """Prints the progress, step by step and round by round."""

    def on_step(self, step: int, stats: swarm.StepStats) -> None:
        print(f"step {step}: {stats.cross_entropy:.3f} nats per token")

    def on_validation(self, round_number: int, val_loss: float, bits_per_byte: float) -> None:
        print(f"round {round_number}: held-out loss {val_loss:.3f}")
        print(f"round {round_number}: {bits_per_byte:.3f} bits per byte of text")


def main(export: str, folder: str, *settings: str) -> None:
    ten_steps = ["run.peers=1", "run.rounds=2", "round.local_steps=5"]
    run = swarm.load_run("demo", ["run.initial=given", *ten_steps, *settings])
    weights = swarm.load_export(export, run)
    with swarm.Peer.found(run, folder, weights=weights, observer=Losses()) as peer:
        tip = peer.train()
    state = swarm.load_state(folder)
    assert state.manifest == tip
    print(f"{folder} has round {tip.round}: {len(state.weights)} tensors after {tip.step} steps")


if __name__ == "__main__":
    main(*sys.argv[1:])
