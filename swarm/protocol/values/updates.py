"""How far local steps can move a value [U1]. Pure.

AdamW divides each element's mean gradient by the root of its mean square, so a step moves an
element by at most rho times the learning rate, whatever the gradients are, plus the weight decay.
With the gradients' weights a_i = (1 - b1) b1^i and c_i = (1 - b2) b2^i the inequality of Cauchy and
Schwarz gives rho^2 = sum of a_i^2 / c_i = (1 - b1)^2 / ((1 - b2) (1 - b1^2 / b2)), which needs
b1^2 < b2; a first step has 1. Kingma and Ba (arXiv 1412.6980, section 2.1) bound it alike.

Muon's step is 0.2 sqrt(longest side) times a matrix whose singular values are at most 1.21, and so
are its elements. The bound of a run with Muon is the larger of both, for all tensors.

All of this is in the run's configuration, so everybody computes the same bound, in the first round
too.

The learning rate is the schedule's at the steps behind a value. Where these may be steps of rounds
before, it is the largest that the schedule had since.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from swarm.config import Codec, ModelConfig, RunConfig
from swarm.protocol.values.manifest import Digest

SLACK = 2
"""Bounds are so many times what can be: moments in few bits, or taken over from another count of
updates, move a little further. No gradient does: garbage is beyond it by orders of magnitude."""
ROUNDING: dict[Codec, float] = {"fp32": 2.0**-16, "bf16": 2.0**-6}
"""What the wire and an owner's master may differ by, of the value itself."""
REST: dict[Codec, float] = {"fp32": 2.0**-16, "bf16": 2.0**-8}
"""The same where the value has become small since, as in a merge."""
IMPLAUSIBLE = "implausible_update"
REFUSALS = frozenset({IMPLAUSIBLE, "non_finite", "out_of_range"})
"""Why a value is refused that came whole: nobody else would take it, either."""


MUON_SCALE = 0.2
"""Of Muon's update by the root of the longest side: the root mean square of AdamW's updates."""
LARGEST_SINGULAR_VALUE = 1.21
"""Of what Muon orthogonalises: its polynomial is at most 1.2024 between 0 and 1.2024."""
GRAIN = 2**20
"""Shares of the learning rate are rounded up to one in so many, so that they are alike on all
processors."""


def _constant(_step: int) -> float:
    return 1.0


def largest_matrix_move(side: int) -> float:
    """How far one update of Muon moves an element at most, by the learning rate.

    No element of a matrix is larger than its largest singular value. `side`: the longest one of
    the matrix. Weight decay is apart.
    """
    return MUON_SCALE * math.sqrt(side) * LARGEST_SINGULAR_VALUE


def longest_side(model: ModelConfig) -> int:
    """Of all matrices of attention and of experts."""
    heads = max(model.num_attention_heads, model.num_key_value_heads) * model.dim_per_head
    return max(model.hidden_size, model.moe_intermediate_size, heads)


@dataclass(frozen=True)
class StepBound:
    """How far one local step moves an element at most."""

    absolute: float
    """At the largest learning rate."""
    relative: float
    """Of the element itself: weight decay, at the largest learning rate."""
    bias: float = 0.0
    """What no learning rate scales: of a router's selection bias."""
    rate_share: Callable[[int], float] = _constant
    """Of the largest learning rate, after so many steps of the run: it rises, then falls."""
    peak: int = 0
    """Where it is largest."""

    @classmethod
    def of(cls, run: RunConfig) -> StepBound:
        """The bound that follows from a configuration."""
        settings = run.optimizer
        first, second = settings.betas
        ratio = (1 - first) / math.sqrt((1 - second) * (1 - first**2 / second))
        moved, rate = settings.lr * max(1.0, ratio), settings.lr
        if settings.kind == "muon":
            matrix_lr = settings.matrix_lr or settings.lr
            moved = max(moved, matrix_lr * largest_matrix_move(longest_side(run.model)))
            rate = max(rate, matrix_lr)
        return cls(
            moved,
            rate * settings.weight_decay,
            run.routing.bias_update_rate,
            run.rate_share,
            settings.warmup_steps,
        )

    def between(self, first: int, last: int) -> StepBound:
        """The bound of a step that follows so many steps of the run, at least and at most."""
        steps = (first, last, min(max(first, self.peak), last))
        share = math.ceil(GRAIN * max(map(self.rate_share, steps))) / GRAIN
        return StepBound(self.absolute * share + self.bias, self.relative * share)


@dataclass(frozen=True)
class UpdateBound:
    """A value x is refused where |x - base| exceeds absolute + relative |base|."""

    base: Digest
    """The agreed value that it was trained from."""
    absolute: float
    relative: float


def bound_after(steps: int, base: Digest, codec: Codec, step: StepBound) -> UpdateBound:
    """How far so many local steps may have moved a value since `base`, the agreed one.

    Weight decay takes from what the steps have added as well: less than its relative part of that.
    """
    decay = SLACK * steps * step.relative
    moved = SLACK * steps * step.absolute
    return UpdateBound(base, moved * (1 + decay) + REST[codec], decay + ROUNDING[codec])
