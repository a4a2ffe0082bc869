"""The learning rate, as a function of the run's cumulative steps."""

from __future__ import annotations

import math

from swarm.config import RunConfig


def learning_rate(step: int, run: RunConfig) -> float:
    """The learning rate of the step that follows `step` steps of the run.

    Linear warm-up from `warmup_from` x lr, then a cosine down to `final_share` x lr, which holds
    from `schedule_steps` on.

    Source: zjr2000/SPES at 2cbcd96 for warm-up from a share of lr; Loshchilov and Hutter,
    arXiv 1608.03983, for the cosine.

    Args:
        step: the run's cumulative steps so far, as its newest manifest has them.
        run: gives the optimizer's settings and the length of the schedule.
    """
    settings = run.optimizer
    if step < settings.warmup_steps:
        share = settings.warmup_from + (1 - settings.warmup_from) * step / settings.warmup_steps
        return settings.lr * share
    decay_steps = max(1, run.schedule_steps - settings.warmup_steps)
    progress = min(1.0, (step - settings.warmup_steps) / decay_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.lr * (settings.final_share + (1 - settings.final_share) * cosine)
