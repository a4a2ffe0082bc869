"""The local steps between two rounds: a loop to read, not to configure."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from swarm.config import RunConfig
from swarm.data.loader import Dealt, Loader
from swarm.data.masks import masks_of
from swarm.data.streams import samples_at
from swarm.train.engine import Engine, StepStats
from swarm.train.parallel.figures import RankFigures, together
from swarm.train.routing_stats import RoutingStats, routing_stats
from swarm.train.schedule import learning_rate, routing_controls_at, schedule_step


@dataclass(frozen=True)
class Task:
    """The work of a peer in a round.

    Attributes:
        peer: its id.
        step: the run's cumulative steps at the tip.
        dealt: the samples that it reads, as stretches in reading order.
        batch_tokens: tokens per step.
        done: steps since the tip that were done before, on other samples.
    """

    peer: str
    step: int
    dealt: Dealt
    batch_tokens: int
    done: int = 0


@dataclass(frozen=True)
class LocalStats:
    """The sum of a peer's local steps of one round.

    Attributes:
        steps: steps done, skipped ones included.
        tokens: tokens they predicted.
        seconds: how long they took.
        skipped: how many of them changed nothing because something was not finite.
        loss: mean of the finite losses; None if there were none.
        cross_entropy: mean of the finite cross-entropies in nats per token; None likewise.
        completed: False if the loop ended early because `stop` said so.
        routing: how its tokens were spread over the experts; None if there was no finite step.
        workers: what each of several worker processes did in all of the steps, by rank.
    """

    steps: int
    tokens: int
    seconds: float
    skipped: int
    loss: float | None
    cross_entropy: float | None
    completed: bool
    routing: RoutingStats | None = None
    workers: tuple[RankFigures, ...] = ()

    def after(self, before: LocalStats | None) -> LocalStats:
        """The same with steps that were done before in the round; their losses are not in it."""
        if before is None:
            return self
        return replace(
            self,
            steps=before.steps + self.steps,
            tokens=before.tokens + self.tokens,
            seconds=before.seconds + self.seconds,
            skipped=before.skipped + self.skipped,
        )


def train_local_steps(
    engine: Engine,
    loader: Loader,
    run: RunConfig,
    task: Task,
    *,
    left: Callable[[int, float], int],
    stop: Callable[[], bool],
    on_step: Callable[[int, StepStats], None],
) -> LocalStats:
    """Trains an engine for one round.

    Args:
        engine: the model to train.
        loader: of the text that the task's samples are from.
        run: gives the schedule.
        task: samples, and where in the run they are.
        left: asked before each step how many more there are to be, given the steps of this call
            and the seconds they took; 0 ends the loop.
        stop: asked before each step; True ends the loop early, as when the tip has moved.
        on_step: told each step that was done, counted from the beginning of the run in the exact
            mode, with its statistics.

    Raises:
        TrainingDiverged: three steps in a row were not finite.
        DataError: a batch could not be read, or was not dealt.
    """
    taken: list[StepStats] = []
    began_s, seconds = time.monotonic(), 0.0
    while (to_do := left(len(taken), seconds)) and not stop():
        local_step = task.done + len(taken)
        tokens_BT1 = loader.batch(task.dealt, len(taken), task.batch_tokens)
        first_sample = int(samples_at(task.dealt, len(taken) * len(tokens_BT1), 1)[0])
        now = schedule_step(task.step, local_step, run)
        controls = routing_controls_at(now, run, task.peer, first_sample, probe=to_do == 1)
        masks = masks_of(tokens_BT1, run, loader.end_of_text)
        lr = learning_rate(now, run)
        taken.append(engine.step(tokens_BT1, lr=lr, controls=controls, masks=masks))
        on_step(task.step + local_step, taken[-1])
        seconds = time.monotonic() - began_s
    kept = [stats for stats in taken if not stats.skipped]
    return LocalStats(
        steps=len(taken),
        tokens=sum(stats.tokens for stats in taken),
        seconds=seconds,
        skipped=len(taken) - len(kept),
        loss=sum(stats.loss for stats in kept) / len(kept) if kept else None,
        cross_entropy=sum(stats.cross_entropy for stats in kept) / len(kept) if kept else None,
        completed=not to_do,
        routing=routing_stats(kept) if kept else None,
        workers=together(stats.workers for stats in taken),
    )
