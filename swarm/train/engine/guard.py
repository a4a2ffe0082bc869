"""Decisions about a step before it changes anything: clip, scale or skip it."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swarm.config import OptimizerConfig
from swarm.errors import TrainingDiverged
from swarm.experts import EMBEDDING, layer_of
from swarm.train.engine.muon import takes_muon

SKIPS_UNTIL_DIVERGED = 3
"""A peer's training ends after this many steps in a row whose loss or gradient is not finite."""
SPIKE = 4.0
"""A gradient norm of this many times its running mean counts as a spike."""
MEMORY = 0.98
"""Decay of the running mean of gradient norms, which looks back some 50 steps."""
SQUARED = 2**16
"""Elements that a CPU converts to fp64 at once. They fit its cache."""

logger = logging.getLogger(__name__)


def unit_of(name: str) -> str:
    """The unit of a parameter: "embedding", "layer.N" or "head"."""
    layer = layer_of(name)
    if layer is not None:
        return f"layer.{layer}"
    return "embedding" if name == EMBEDDING else "head"


def square_sums(gradients: Sequence[Tensor]) -> Tensor:
    """The sum of the squares of each of several fp32 gradients, fp64 [len(gradients)].

    With fp64, sums over parts give the same fp32 norm as one sum over the whole, however a gradient
    is cut. An fp32 sum over 2^24 elements is also inaccurate: on a CPU the norm is 0.07 % too
    small.
    """
    if gradients[0].is_cuda:
        # A few kernels for all. They add up in fp64 what they read in fp32.
        norms: Sequence[Tensor] = torch._foreach_norm(list(gradients), 2, torch.float64)
        return torch.stack(list(norms)).square()
    return torch.stack([_square_sum(gradient) for gradient in gradients])


def _square_sum(gradient: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for piece in gradient.view(-1).split(SQUARED):
        doubles = piece.double()
        total += torch.dot(doubles, doubles)
    return total


def norm_of(square: Tensor, scale: float) -> Tensor:
    """The fp32 norms of gradients, from sums of squares that were taken of scaled gradients."""
    return (square.sqrt() / scale).float()


def total_norm(norms: Mapping[str, Tensor]) -> Tensor:
    """The norm of all gradients from their single norms, added up in the order of names."""
    total: Tensor = torch.linalg.vector_norm(torch.stack([norms[name] for name in sorted(norms)]))
    return total


def clip_factors(
    norms: Mapping[str, Tensor], settings: OptimizerConfig, scale: float = 1.0
) -> dict[str, Tensor]:
    """The factor of each parameter's gradient. One without a factor stays as it is.

    Each factor also divides by `scale`, the loss's. Muon's matrices are not clipped, since the size
    of a gradient does not change its update. The norms below are those of AdamW's parameters.

    global: clip_norm divided by the norm of all gradients, if that norm is larger.
    unit: the same for each unit (embedding, layer, head) separately, with the limit clip_norm /
        sqrt(number of units). So the norm of all gradients never exceeds clip_norm, and a unit can
        be updated as soon as its own gradients are there.
    """
    if settings.clip == "global":
        return _factors(norms, settings, settings.clip_norm, scale)
    units: dict[str, dict[str, Tensor]] = {}
    for name, norm in norms.items():
        units.setdefault(unit_of(name), {})[name] = norm
    factors: dict[str, Tensor] = {}
    for named in units.values():
        factors |= unit_factors(named, settings, len(units), scale)
    return factors


def unit_factors(
    norms: Mapping[str, Tensor], settings: OptimizerConfig, num_units: int, scale: float = 1.0
) -> dict[str, Tensor]:
    """The factors of the gradients of one unit, given the number of units; see `clip_factors`."""
    return _factors(norms, settings, settings.clip_norm / math.sqrt(num_units), scale)


def _factors(
    norms: Mapping[str, Tensor], settings: OptimizerConfig, limit: float, scale: float
) -> dict[str, Tensor]:
    clipped = {name: norm for name, norm in norms.items() if not takes_muon(name, settings)}
    factors = dict[str, Tensor]()
    if clipped:
        factors = dict.fromkeys(clipped, _factor(total_norm(clipped), limit) / scale)
    if scale != 1 and (others := norms.keys() - clipped):
        factors |= dict.fromkeys(others, torch.ones_like(norms[min(others)]) / scale)
    return factors


def _factor(norm: Tensor, limit: float) -> Tensor:
    # The same formula as torch.nn.utils.clip_grad_norm_, bit for bit.
    return torch.clamp(limit / (norm + 1e-6), max=1.0)


@dataclass(frozen=True)
class LossScale:
    """The factor of the loss that keeps small fp16 gradients from underflow.

    It is halved on overflow, and doubled after 2000 steps without one. It is always a power of two,
    so that the division is exact. For other types than fp16 it is 1.

    Source: Micikevicius et al., arXiv 1710.03740; the numbers are those of torch.amp.GradScaler.
    """

    value: float = 1.0
    good_steps: int = 0

    START = 2.0**16
    GROW_AFTER = 2000

    def after(self, *, overflow: bool) -> LossScale:
        """The scale for the next step."""
        if overflow:
            return LossScale(max(1.0, self.value / 2))
        if self.good_steps + 1 >= self.GROW_AFTER:
            return LossScale(self.value * 2)
        return replace(self, good_steps=self.good_steps + 1)


UNSCALED = LossScale()
"""The scale of all types but fp16."""


class Guard:
    """Counts skipped steps and ends training that diverges.

    Attributes:
        scale: scale of the loss, for the next step.
        skipped: steps skipped so far.
        skipped_in_a_row: steps skipped since the last update.
        spikes: steps whose gradient norm was far above the running mean.
        spiked: whether the last finite step was a spike.
    """

    def __init__(self, compute: str) -> None:
        self._scaled = compute == "fp16"
        self.scale = LossScale(LossScale.START) if self._scaled else UNSCALED
        self.skipped = self.skipped_in_a_row = self.spikes = 0
        self.spiked = False
        self._mean_norm: float | None = None

    def resume(self, skipped: int, skipped_in_a_row: int, scale: LossScale) -> None:
        """Resumes from the counts of a saved state."""
        self.skipped, self.skipped_in_a_row = skipped, skipped_in_a_row
        # The state of an engine with another type has no scale for fp16.
        if self._scaled and scale.value > 1:
            self.scale = scale

    def finite(self, loss: float, norm: float) -> bool:
        """Whether loss and gradient of a step are finite. If not, the step must change nothing.

        An fp16 overflow with a finite loss lowers the scale, and does not count as divergence.

        Raises:
            TrainingDiverged: the third skipped step in a row.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self._look_for_spike(norm)
            self.skipped_in_a_row = 0
            if self._scaled:
                self.scale = self.scale.after(overflow=False)
            return True
        self.skipped += 1
        overflow = self._scaled and math.isfinite(loss) and self.scale.value > 1
        if self._scaled:
            self.scale = self.scale.after(overflow=True)
        found = f"loss {loss}, gradient norm {norm}"
        if overflow:
            logger.info("fp16 overflow: loss scale is now %g", self.scale.value)
            return False
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row >= SKIPS_UNTIL_DIVERGED:
            raise TrainingDiverged(
                f"{self.skipped_in_a_row} steps in a row were not finite, the last with {found}; "
                "nothing of them was offered to the swarm",
                hint="lower optimizer.lr, or look at the text this peer trains on",
            )
        logger.warning("step skipped: %s; %d so far", found, self.skipped)
        return False

    def _look_for_spike(self, norm: float) -> None:
        mean = self._mean_norm
        self.spiked = mean is not None and norm > SPIKE * mean
        if mean is not None and self.spiked:
            self.spikes += 1
            logger.warning(
                "gradient norm %.3g is %.1f times its mean; %d spikes so far",
                norm,
                norm / mean,
                self.spikes,
            )
        self._mean_norm = norm if mean is None else MEMORY * mean + (1 - MEMORY) * norm
