"""Numbers on which every processor computes the same, and the one addition that is done on them.

*Canonical* values are +0, or of a magnitude from 2^-100 to `codecs.MAX_MAGNITUDE` (2^64). A delta's
elements are products of an integer of 7 bits and a bf16 scale of at least 2^-96, or bf16 numbers:
they have at most 15 significant bits, so they are exact in fp32, whether or not a processor fuses
the product with the addition that follows. The sum of two such numbers is a multiple of 2^-123, so
never subnormal, and processors that flush subnormals to zero agree with the others. What rounds is
one fp32 addition, and one rounding to bf16 where that is the agreed type: both are IEEE's, ties to
even. A value that no delta has moved yet need not be canonical: what it has below 2^-126 is less
than half a unit in the last place of any p but 0, and next to that it becomes +0.

An outer optimizer adds two lines. Its settings mu and eta are multiples of 1/256 with at most 8
significant bits, momenta and moves bf16 numbers, 0 or at least 2^-100: their products have 16
significant bits and are multiples of 2^-115, so they are exact too, and each line rounds in one
addition, then to bf16.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from swarm.codecs import DTYPES
from swarm.config import Codec, OuterConfig
from swarm.config.outer import UNIT
from swarm.errors import BadBlob

_BELOW_SMALLEST = 2.0**-100 * (1 - 2.0**-24)
"""The next number of fp32 below 2^-100."""


def canonical(values: Tensor) -> Tensor:
    """Magnitudes below 2^-100 as +0, a negative zero too; the others as they are. fp32, a copy.

    A NaN may become +0: look for it first.
    """
    return hardshrink(values.float(), _BELOW_SMALLEST)


def moved(before: Tensor, by: Tensor, codec: Codec) -> Tensor:
    """The values v' = can(v + p), rounded to the agreed type: the same bits on every processor.

    Args:
        before: agreed values v, fp32 or bf16 [n].
        by: decoded elements p of a delta, fp32 [n]; what is in it is lost.
        codec: of the unit.

    Returns:
        [n] of the codec's type; `codecs.check_chunk` has still to look at their range.

    Raises:
        BadBlob: reason `non_finite`, if `before` was not finite.
    """
    after = by.add_(before)
    _require_finite(after)
    return canonical(after).to(DTYPES[codec])


def outer_step(
    before: Tensor, momentum: Tensor, by: Tensor, outer: OuterConfig
) -> tuple[Tensor, Tensor]:
    """A value and its momentum after a delta, by Nesterov: the same bits on every processor.

        u' = rb(mu u + p),    t = rb(p + mu u'),    v' = can(v + eta t)

    with rb = can, then the nearest bf16. Of the same p in each round u goes to p / (1 - mu), t too,
    and v moves by eta p / (1 - mu).

    Args:
        before: agreed values v, fp32 [n].
        momentum: u, bf16 [n].
        by: decoded elements p of a delta, fp32 [n]; not written to.
        outer: mu and eta.

    Returns:
        v', fp32 [n], and u', bf16 [n]; `codecs.check_chunk` has still to look at their range.

    Raises:
        BadBlob: reason `non_finite`, if one of what is given was not finite or is too large.
    """
    mu, eta = outer.momentum / UNIT, outer.rate / UNIT
    ahead = (momentum.float() * mu).add_(by)
    _require_finite(ahead)
    ahead = canonical(ahead).to(torch.bfloat16)
    move = (ahead.float() * mu).add_(by)
    _require_finite(move)
    after = canonical(move).to(torch.bfloat16).float().mul_(eta).add_(before)
    _require_finite(after)
    return canonical(after), ahead


def _require_finite(values: Tensor) -> None:
    if not all(math.isfinite(bound.item()) for bound in torch.aminmax(values)):
        raise BadBlob("non_finite", "the value that is to be moved has a number that is not finite")
