"""Numbers on which every processor computes the same, and the one addition that is done on them.

*Canonical* values are +0, or of a magnitude from 2^-100 to `codecs.MAX_MAGNITUDE` (2^64). A delta's
elements are products of an integer of 7 bits and a bf16 scale of at least 2^-96, or bf16 numbers:
they have at most 15 significant bits, so they are exact in fp32, whether or not a processor fuses
the product with the addition that follows. The sum of two such numbers is a multiple of 2^-123, so
never subnormal, and processors that flush subnormals to zero agree with the others. What rounds is
one fp32 addition, and one rounding to bf16 where that is the agreed type: both are IEEE's, ties to
even. A value that no delta has moved yet need not be canonical: what it has below 2^-126 is less
than half a unit in the last place of any p but 0, and next to that it becomes +0.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from swarm.codecs import DTYPES
from swarm.config import Codec
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


def _require_finite(values: Tensor) -> None:
    if not all(math.isfinite(bound.item()) for bound in torch.aminmax(values)):
        raise BadBlob("non_finite", "the value that is to be moved has a number that is not finite")
