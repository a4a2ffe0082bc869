"""Prints the cost of a run for a peer, then builds the run's model and computes a loss.

.venv/bin/python scripts/examples/plan_model.py demo
"""

import sys

import torch

import swarm


def main(name: str, *settings: str) -> None:
    run = swarm.load_run(name, settings)
    plan = swarm.plan_run(run, sizes={"gpu": "24GB", "host": "64GB"})
    sent_mb = plan.cost.bytes_sent_per_peer_per_round / 1e6
    print(f"{plan.cost.parameters_total / 1e6:.2f} M parameters, {sent_mb:.2f} MB sent per round")
    print(f"engine: {plan.engine.reason}; fits: {plan.fits}")

    model = swarm.build_model(run)
    tokens_BT1 = torch.randint(run.model.vocab_size, (2, run.data.sequence_length + 1))
    print(f"loss before training: {model.losses(tokens_BT1, run.loss).cross_entropy.item():.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
