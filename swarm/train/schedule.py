"""Learning rate and controls of routing, as functions of the run's cumulative steps."""

from __future__ import annotations

from blake3 import blake3

from swarm.config import RunConfig
from swarm.model.routing import RoutingControls


def learning_rate(step: int, run: RunConfig) -> float:
    """The learning rate of the step that follows `step` steps of the run.

    Args:
        step: the run's cumulative steps so far, as its newest manifest has them.
        run: gives the optimizer's settings and the length of the schedule.
    """
    return run.optimizer.lr * run.rate_share(step)


def schedule_step(tip_step: int, local_step: int, run: RunConfig) -> int:
    """Where in the schedule a peer's local step is, counted from its tip's cumulative steps.

    In the exact mode every local step is a step of the run. With `round.seconds` the run's steps
    follow the tokens of all peers, so that those of a round are the same for a fast and a slow
    peer: the whole round is trained as the tip's step says.
    """
    return tip_step if run.round.seconds else tip_step + local_step


def routing_controls_at(
    step: int, run: RunConfig, peer: str, sample: int, *, probe: bool = False
) -> RoutingControls:
    """The controls of the routing in the step that follows `step` steps of the run.

    Args:
        step: the run's cumulative steps so far.
        run: gives the settings and the length of the schedule.
        peer: id of the peer, and
        sample: number of the first sample of its batch: so each step of each peer has noise of its
            own.
        probe: whether the similarity of experts is measured in this step even if nothing is made
            of it.
    """
    settings = run.routing
    left = 1 - _progress(step, run, settings.own_expert_bias_share)
    rising = _progress(step, run, settings.balance_factor_share)
    digest = blake3(f"{run.run.seed}\n{peer}\n{sample}".encode()).digest(8)
    return RoutingControls(
        noise_seed=int.from_bytes(digest, "little") >> 1,
        own_expert_bias=settings.own_expert_bias * left,
        balance_factor=settings.balance_factor + (1 - settings.balance_factor) * rising,
        capacity_factor=settings.capacity_factor,
        probe=probe,
        draw_apart=run.loss.similarity_weight > 0,
    )


def _progress(step: int, run: RunConfig, share: float) -> float:
    """How much of the first `share` of the schedule is over: 0 at its start, 1 from its end on."""
    steps = share * run.schedule_steps
    return min(1.0, step / steps) if steps else 1.0
