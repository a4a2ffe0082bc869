"""The local steps between two rounds: learning rate, controls of routing, and the loop."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from blake3 import blake3

from swarm.config import RunConfig
from swarm.data.loader import Dealt, Loader, samples_at
from swarm.data.masks import masks_of
from swarm.model.routing import RoutingControls
from swarm.train.engine.engine import Engine, StepStats
from swarm.train.engine.rank_figures import RankFigures, together


def learning_rate(step: int, run: RunConfig) -> float:
    """The learning rate of the step that follows `step` steps of the run.

    Args:
        step: the run's cumulative steps so far, as its newest manifest has them.
        run: gives the optimizer's settings and the length of the schedule.
    """
    return run.optimizer.lr * run.rate_share(step)


def schedule_step(tip_step: int, local_step: int, run: RunConfig) -> int:
    """The position of a peer's local step in the schedule, from its tip's cumulative steps.

    In the exact mode, every local step is a step of the run. With `round.seconds` the run's steps
    follow from the tokens of all peers, and are the same for fast and slow peers. So all local
    steps of a round have the position of the tip's step.
    """
    return tip_step if run.round.seconds else tip_step + local_step


def routing_controls_at(
    step: int, run: RunConfig, peer: str, sample: int, *, probe: bool = False
) -> RoutingControls:
    """The controls of the routing in the step that follows `step` steps of the run.

    Args:
        step: the run's cumulative steps so far.
        run: gives the settings and the length of the schedule.
        peer: id of the peer.
        sample: number of the first sample of its batch; with the peer's id, it determines the
            step's noise.
        probe: whether the similarity of experts is measured in this step even if the loss does not
            use it.
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
    """Progress in the first `share` of the schedule: 0 at its start, 1 from its end on."""
    steps = share * run.schedule_steps
    return min(1.0, step / steps) if steps else 1.0


@dataclass(frozen=True)
class RoutingStats:
    """Figures over some local steps of one peer.

    Attributes:
        max_load: tokens of the busiest expert of a layer divided by the mean over the experts, in
            the layer with the largest ratio. 1 when routing is even, E / K when it has collapsed.
        idle_experts: (layer, expert) pairs that got no token at all.
        dropped: share of the choices of experts that exceeded a capacity.
        similarity: mean CKA of experts that got the same tokens, in the last step that measured it.
            None if no step did.
        shares: each expert's permille of all choices, over the layers; rounded, but 0 only for
            experts without a choice.
        pairs: pairs of experts with their CKA, the most similar first, of the same step as
            `similarity`.
    """

    max_load: float
    idle_experts: int
    dropped: float
    similarity: float | None
    shares: tuple[int, ...] = ()
    pairs: tuple[tuple[int, int, float], ...] = ()


def routing_stats(steps: Sequence[StepStats]) -> RoutingStats:
    """Sums up at least one step."""
    layers = [
        [sum(counts) for counts in zip(*of_layer, strict=True)]
        for of_layer in zip(*(stats.expert_tokens for stats in steps), strict=True)
    ]
    choices = sum(sum(layer) for layer in layers)
    measured = [stats for stats in steps if stats.similarity is not None]
    return RoutingStats(
        max_load=max(max(layer) * len(layer) / sum(layer) for layer in layers),
        idle_experts=sum(layer.count(0) for layer in layers),
        dropped=sum(stats.dropped for stats in steps) / choices,
        similarity=measured[-1].similarity if measured else None,
        shares=tuple(
            max(round(1000 * sum(tokens) / choices), 1) if any(tokens) else 0
            for tokens in zip(*layers, strict=True)
        ),
        pairs=measured[-1].pairs if measured else (),
    )


@dataclass(frozen=True)
class Task:
    """The work of a peer in a round.

    Attributes:
        peer: id of the peer.
        step: the run's cumulative steps at the tip.
        dealt: the samples for it to read, as stretches in reading order.
        batch_tokens: tokens per step.
        done: steps since the tip that are already done, on other samples.
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
        tokens: predicted tokens.
        seconds: duration of these steps.
        skipped: steps that changed nothing because loss or gradient was not finite.
        loss: mean of the finite losses. None if there were none.
        cross_entropy: mean of the finite cross-entropies in nats per token. None if there were
            none.
        completed: False if `stop` ended the loop early.
        routing: distribution of its tokens over the experts. None without a finite step.
        workers: figures of each worker process over all of the steps, by rank.
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
        """The sum with earlier steps of the round; the losses are those of the later steps."""
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
        loader: reads the samples of the task.
        run: gives the schedule.
        task: the samples, and the position in the run.
        left: called before each step with the steps done in this call and their seconds. It returns
            the number of further steps; 0 ends the loop.
        stop: called before each step. True ends the loop early, for example because the tip has
            changed.
        on_step: called after each step with its number and statistics. The number is the run's
            steps at the tip plus the local steps since, which in the exact mode is the step's
            number in the run.

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
