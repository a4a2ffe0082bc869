"""The local steps between two rounds: a loop to read, not to configure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarm.config import RunConfig
from swarm.data.loader import Loader
from swarm.train.engine import Engine, StepStats
from swarm.train.routing_stats import RoutingStats, routing_stats
from swarm.train.schedule import guidance_at, learning_rate


@dataclass(frozen=True)
class LocalStats:
    """What a peer's local steps of one round amounted to.

    Attributes:
        steps: steps done, skipped ones included.
        tokens: tokens they predicted.
        skipped: how many of them changed nothing because something was not finite.
        loss: mean of the finite losses; None if there were none.
        cross_entropy: mean of the finite cross-entropies in nats per token; None likewise.
        completed: False if the loop ended early because `stop` said so.
        routing: how its tokens were spread over the experts; None if there was no finite step.
    """

    steps: int
    tokens: int
    skipped: int
    loss: float | None
    cross_entropy: float | None
    completed: bool
    routing: RoutingStats | None = None


def train_local_steps(
    engine: Engine,
    loader: Loader,
    run: RunConfig,
    *,
    step: int,
    local_steps: int,
    batch_tokens: int,
    stop: Callable[[], bool],
    on_step: Callable[[int, StepStats], None],
) -> LocalStats:
    """Trains an engine on its stream for the steps of one round.

    Learning rate and batches depend on the run's cumulative step, never on a count of this peer's.

    Args:
        engine: what is trained.
        loader: this peer's stream.
        run: gives the schedule.
        step: the run's cumulative steps before the first of these, from its newest manifest.
        local_steps: H of the phase that holds.
        batch_tokens: tokens per step of the phase that holds.
        stop: asked before each step; True ends the loop, as when the tip has moved.
        on_step: told each cumulative step that was done, with its statistics.

    Raises:
        TrainingDiverged: three steps in a row were not finite.
        DataError: a batch could not be read.
    """
    done: list[StepStats] = []
    while len(done) < local_steps and not stop():
        now = step + len(done)
        tokens_BT1 = loader.batch(now, batch_tokens)
        last = len(done) + 1 == local_steps
        guidance = guidance_at(now, run, loader.data_index, probe=last)
        done.append(engine.step(tokens_BT1, lr=learning_rate(now, run), guidance=guidance))
        on_step(now, done[-1])
    kept = [stats for stats in done if not stats.skipped]
    return LocalStats(
        steps=len(done),
        tokens=sum(stats.tokens for stats in done),
        skipped=len(done) - len(kept),
        loss=sum(stats.loss for stats in kept) / len(kept) if kept else None,
        cross_entropy=sum(stats.cross_entropy for stats in kept) / len(kept) if kept else None,
        completed=len(done) == local_steps,
        routing=routing_stats(kept) if kept else None,
    )
