"""CPU threads of this peer: measured on its own engine, and set for torch.

torch keeps the number of OpenMP threads for each thread that asks for work, so it is set in the
trainer's, which makes all steps. Nothing here uses torch's inter-operation threads.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from swarm.config import ComputeSection, RunConfig
from swarm.data.masks import Masks
from swarm.model.routing import RoutingControls
from swarm.train.engine import StepStats
from swarm.train.ladder import EnginePlan
from swarm.train.stepping import Fits, SteppingEngine
from swarm.train.threads import (
    PASSES,
    StepWatch,
    Trial,
    budget_s,
    candidates,
    choose,
    choose_unmeasured,
)

logger = logging.getLogger(__name__)

SHORT_TOKENS = 64
"""Of one sequence: what is computed where a whole micro-batch takes too long to be measured."""
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores(quota: Path = _QUOTA) -> int:
    """Cores that this process may use: its affinity, or the container's quota if that is less."""
    cores = len(os.sched_getaffinity(0))
    try:
        limit, _, period = quota.read_text().partition(" ")
    except OSError:
        return cores
    return min(cores, max(1, math.ceil(int(limit) / int(period)))) if limit.isdigit() else cores


def start_threads(compute: ComputeSection) -> None:
    """Sets the threads of the calling thread: those asked for, else all that may be used.

    `OMP_NUM_THREADS` in the environment is a bound too: torch starts with it.
    """
    torch.set_num_threads(compute.threads or min(torch.get_num_threads(), usable_cores()))


def is_exact(run: RunConfig) -> bool:
    """Whether a run computes and sends fp32 values alone: one thread then is SPES to the bit.

    More threads add sums up in another order. Peers agree all the same, on what was computed.
    """
    types = {run.train.compute, run.train.frozen, run.wire.shared, run.wire.experts}
    return types == {"fp32"} and {run.wire.shared_coding, run.wire.experts_coding} == {"none"}


class ThreadedEngine(SteppingEngine):
    """A stepping engine that chooses the number of threads itself, and again when steps slow down.

    To be used by one thread. What it measures with changes no value; see `Engine.rehearse`.
    """

    def __init__(
        self,
        run: RunConfig,
        plan: EnginePlan,
        folder: Path | None = None,
        fits: Fits = lambda *_: True,
        *,
        cores: int,
        clock: Callable[[], float] = time.perf_counter,
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """Makes the engine of a plan; at the first step it measures with 1 to `cores` threads."""
        super().__init__(run, plan.options, plan.below, folder, fits)
        self._clock, self._cpu_clock = clock, cpu_clock
        self._numbers = candidates(cores)
        self._steps = run.round.local_steps
        self._micro_rows = run.train.micro_batch_sequences
        self._watch: StepWatch | None = None
        self._why: str | None = "not measured yet"

    def step(
        self,
        tokens_BT1: Tensor,
        *,
        lr: float,
        controls: RoutingControls | None = None,
        masks: Masks | None = None,
    ) -> StepStats:
        """See `Engine`."""
        if self._why is not None:
            self._choose(tokens_BT1, self._why)
        began_s = self._clock()
        stats = super().step(tokens_BT1, lr=lr, controls=controls, masks=masks)
        assert self._watch is not None
        now_s = self._clock()
        self._why = self._watch.saw((now_s - began_s) / stats.tokens, now_s)
        return stats

    def _choose(self, tokens_BT1: Tensor, why: str) -> None:
        current = torch.get_num_threads() if self._watch is not None else None
        short, trials = self._trials(tokens_BT1)
        if trials:
            choice = choose(trials, current)
        else:
            choice = choose_unmeasured(short, current or self._numbers[-1])
        torch.set_num_threads(choice.threads)
        logger.info("threads: %d (%s; %s)", choice.threads, choice.reason, why)
        self._watch = StepWatch(self._clock())

    def _trials(self, tokens_BT1: Tensor) -> tuple[Trial, list[Trial]]:
        """Computes a short piece, and then with each number what there is time for."""
        short_BT1 = tokens_BT1[:1, : SHORT_TOKENS + 1]
        micro_BT1 = tokens_BT1[: self._micro_rows]
        began_s = self._clock()
        self._trial(short_BT1, self._numbers[-1])  # takes its memory for the first time
        short = self._trial(short_BT1, 1)
        per_token_s = short.seconds / short_BT1[:, 1:].numel()
        left_s = budget_s(self._steps, per_token_s * tokens_BT1[:, 1:].numel())
        left_s -= self._clock() - began_s
        piece_BT1, piece_s = micro_BT1, per_token_s * micro_BT1[:, 1:].numel()
        if left_s < 2 * piece_s * len(self._numbers):
            piece_BT1, piece_s = short_BT1, short.seconds
        trials: list[Trial] = []
        for _ in range(PASSES):
            if left_s < piece_s * len(self._numbers):
                break
            passed_s = self._clock()
            trials += [self._trial(piece_BT1, threads) for threads in self._numbers]
            left_s -= self._clock() - passed_s
        return short, trials

    def _trial(self, tokens_BT1: Tensor, threads: int) -> Trial:
        torch.set_num_threads(threads)
        began_s, cpu_began_s = self._clock(), self._cpu_clock()
        self.rehearse(tokens_BT1)
        return Trial(threads, self._clock() - began_s, self._cpu_clock() - cpu_began_s)
