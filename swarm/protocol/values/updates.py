"""How far local steps can move a value (update bounds). Pure.

AdamW divides each element's mean gradient by the root of its mean square. So, for any gradients, a
step moves an element by at most rho times the learning rate, plus the weight decay. Let b1 and b2
be Adam's betas. In the two means, the gradient of i steps ago has the weights a_i = (1 - b1) b1^i
and c_i = (1 - b2) b2^i. The inequality of Cauchy and Schwarz then gives rho^2 = sum of a_i^2 / c_i
= (1 - b1)^2 / ((1 - b2) (1 - b1^2 / b2)). This needs b1^2 < b2. For a first step rho is 1. Kingma
and Ba (arXiv 1412.6980, section 2.1) give the same bound.

Muon's step is 0.2 sqrt(longest side) times a matrix whose singular values are at most 1.21. So the
matrix's elements are at most 1.21 too. In a run with Muon, the larger of the two bounds holds for
all tensors.

All these numbers are in the run's configuration. So all peers compute the same bound, even in the
first round.

The learning rate is that of the schedule at the steps that made a value. If these may be steps of
earlier rounds, it is the schedule's largest learning rate since then.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from swarm.config import MUON_SCALE, Codec, ModelConfig, RunConfig
from swarm.experts import expert_shapes, is_matrix, shared_shapes
from swarm.protocol.values.manifest import Digest

SLACK = 2
"""Bounds are this many times the possible move. A value may move a little further than possible by
the formula if its moments have few bits, or come from another number of updates. No gradient moves
it further, and garbage exceeds a bound by orders of magnitude."""
ROUNDING: dict[Codec, float] = {"fp32": 2.0**-16, "bf16": 2.0**-6}
"""How far a value on the wire and its owner's master may differ, relative to the value."""
REST: dict[Codec, float] = {"fp32": 2.0**-16, "bf16": 2.0**-8}
"""The same difference as an absolute number, for a value that has since become small, for
example by a merge."""
IMPLAUSIBLE = "implausible_update"
REFUSALS = frozenset({IMPLAUSIBLE, "non_finite", "out_of_range"})
"""Reasons to refuse a value that arrived whole; all other peers would refuse it too."""


LARGEST_SINGULAR_VALUE = 1.21
"""Largest singular value of a matrix that Muon has orthogonalised: Muon's polynomial is at most
1.2024 between 0 and 1.2024."""
GRAIN = 2**20
"""Shares of the learning rate are rounded up to a multiple of 1 / GRAIN, so that all processors
compute the same share."""


def _constant(_step: int) -> float:
    return 1.0


def largest_matrix_move(side: int) -> float:
    """The most that one update of Muon moves an element, as a multiple of the learning rate.

    No element of a matrix is larger than the matrix's largest singular value. `side` is the
    matrix's longest side. Weight decay is not included.
    """
    return MUON_SCALE * math.sqrt(side) * LARGEST_SINGULAR_VALUE


def longest_side(model: ModelConfig) -> int:
    """The longest side of all matrices of attention and of experts."""
    shapes = {**shared_shapes(model), **expert_shapes(model, 0)}
    return max(max(shape) for name, shape in shapes.items() if is_matrix(name))


@dataclass(frozen=True)
class StepBound:
    """The largest move of an element in one local step."""

    absolute: float
    """The absolute part, at the largest learning rate."""
    relative: float
    """The part relative to the element: weight decay, at the largest learning rate."""
    bias: float = 0.0
    """The part that no learning rate scales, which is that of a router's selection bias."""
    rate_share: Callable[[int], float] = _constant
    """Share of the largest learning rate after a given step of the run; it rises, then falls."""
    peak: int = 0
    """The step where the share is largest."""

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
        """The bound of a step after at least `first` and at most `last` steps of the run."""
        steps = (first, last, min(max(first, self.peak), last))
        share = math.ceil(GRAIN * max(map(self.rate_share, steps))) / GRAIN
        return StepBound(self.absolute * share + self.bias, self.relative * share)


@dataclass(frozen=True)
class UpdateBound:
    """A value x is refused where |x - base| exceeds absolute + relative |base|."""

    base: Digest
    """The agreed value from which x was trained."""
    absolute: float
    relative: float


def bound_after(steps: int, base: Digest, codec: Codec, step: StepBound) -> UpdateBound:
    """The bound of a value that `steps` local steps have moved from `base`, the agreed value.

    Weight decay also acts on the movement by earlier steps, by less than its relative part.
    """
    decay = SLACK * steps * step.relative
    moved = SLACK * steps * step.absolute
    return UpdateBound(base, moved * (1 + decay) + REST[codec], decay + ROUNDING[codec])
