"""The codings of blocks of 256 elements: p = L s, with a scale s of the block and integers L.

coding   codes of a block     L              scale of the encoder
b2       256 of 2 bits        2 code - 3     0.498 root mean square
b1       256 of 1 bit         2 code - 1     mean magnitude

Scales are rounded to bf16. They are +0 or from 2^-96 to 2^40. If a scale is +0, the block is 0 and
its codes have no meaning. An encoder replaces a scale below 2^-96 by +0 and a scale above 2^40 by
2^40.

Largest distance of an element y from its code's value, with the sent scale s:

b2       s if |y| <= 4 s, else |y| - 3 s
b1       max(s, |y| - s)

On Gaussian blocks the squared error is 0.118 and 0.362 of the square of y. With b1, the norm of a
block's error never exceeds the norm of the block. With b2, it may be 1.04 times the norm, if only
one of 256 elements is not zero. The remainder is then coded better. 0.498 is the best of four equal
steps for a Gaussian (J. Max, "Quantizing for minimum distortion", 1960).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import hardshrink

from swarm.codecs import DTYPES
from swarm.codings import BLOCK
from swarm.config import Codec, Coding
from swarm.errors import BadBlob

_BELOW_SMALLEST = 2.0**-100 * (1 - 2.0**-24)
"""The next number of fp32 below 2^-100."""


def canonical(values: Tensor) -> Tensor:
    """Replaces magnitudes below 2^-100 and negative zeros by +0. Returns a copy in fp32.

    A NaN may become +0, so check for NaN first.
    """
    return hardshrink(values.float(), _BELOW_SMALLEST)


def moved(before: Tensor, by: Tensor, codec: Codec) -> Tensor:
    """The values v' = can(v + p), rounded to the agreed type: the same bits on every processor.

    Args:
        before: agreed values v, fp32 or bf16 [n].
        by: decoded elements p of a delta, fp32 [n]. Overwritten.
        codec: codec of the unit.

    Returns:
        [n] of the codec's type. `codecs.check_chunk` must still check their range.

    Raises:
        BadBlob: reason `non_finite`, if `before` was not finite.
    """
    after = by.add_(before)
    _require_finite(after)
    return canonical(after).to(DTYPES[codec])


def _require_finite(values: Tensor) -> None:
    if not all(math.isfinite(bound.item()) for bound in torch.aminmax(values)):
        raise BadBlob("non_finite", "the value to be moved has a number that is not finite")


MIN_SCALE, MAX_SCALE = 2.0**-96, 2.0**40


@dataclass(frozen=True)
class BlockCoding:
    """A coding of blocks.

    Attributes:
        encode: fp32 [n, 256] -> scales bf16 [n] and codes uint8 [n, c].
        multiples: codes uint8 [n, c] -> L, fp32 [n, 256].
    """

    encode: Callable[[Tensor], tuple[Tensor, Tensor]]
    multiples: Callable[[Tensor], Tensor]


def encode_blocks(values: Tensor, coding: Coding) -> tuple[Tensor, Tensor]:
    """Scales bf16 [n] and codes uint8 [n, c] of fp32 [n, 256], which does not change.

    Raises:
        BadBlob: reason `non_finite`.
    """
    return BLOCK_CODINGS[coding].encode(values)


def decode_blocks(scales: Tensor, codes: Tensor, num_elements: int, coding: Coding) -> Tensor:
    """The elements p = L s of blocks: fp32 [num_elements], which the caller may overwrite.

    Args:
        scales: bf16 [n].
        codes: uint8 [n, c].
        num_elements: from 256 (n - 1) + 1 to 256 n. The rest of the last block has no meaning.
        coding: a coding that has blocks.

    Raises:
        BadBlob: reason `scale` (negative, not finite or out of range).
    """
    if not _are_scales(scales):
        raise BadBlob("scale", "a scale of a delta is not +0 and not from 2^-96 to 2^40")
    multiples = BLOCK_CODINGS[coding].multiples(codes)
    return multiples.mul_(scales.float().unsqueeze(1)).view(-1)[:num_elements]


def _are_scales(scales: Tensor) -> bool:
    """Compares bits as integers, because processors differ in subnormal numbers."""
    bits = scales.view(torch.int16)
    lowest, highest = (127 - 96) << 7, (127 + 40) << 7
    return bool(((bits == 0) | ((bits >= lowest) & (bits <= highest))).all())


def _scales_of(raw: Tensor) -> Tensor:
    """The scales as encoders send them: bf16 [n] from fp32 [n]."""
    if not raw.isfinite().all():
        raise BadBlob("non_finite", "a difference to be coded is not a finite number")
    scales = raw.clamp(max=MAX_SCALE).to(torch.bfloat16)
    return torch.where(scales < MIN_SCALE, 0.0, scales)


def _quotients(values: Tensor, scales: Tensor) -> Tensor:
    """Values in units of their blocks' scales: fp32 [n, 256], 0 if the scale is 0."""
    inverse = torch.where(scales > 0, scales.float().reciprocal(), 0.0)
    return values * inverse.unsqueeze(1)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Packs codes: byte j of a row of w bytes is the sum over i of codes[j + w i] 2^(bits i).

    Args:
        codes: uint8 [n, m], each below 2^bits.
        bits: 1 or 2. m is a multiple of 8 / bits.

    Returns:
        uint8 [n, w] with w = m bits / 8.
    """
    planes = codes.view(len(codes), 8 // bits, -1)
    packed = planes[:, 0].clone()
    for plane in range(1, 8 // bits):
        packed |= planes[:, plane] << (bits * plane)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The codes in bytes from `pack`: uint8 [n, 8 w / bits] from uint8 [n, w]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(1, -1, 1)
    planes: Tensor = (packed.unsqueeze(1) >> shifts) & (2**bits - 1)
    return planes.view(len(packed), -1)


def _encode_b2(values: Tensor) -> tuple[Tensor, Tensor]:
    raw = torch.linalg.vector_norm(values, dim=1) * (0.498 / BLOCK**0.5)
    extreme = ~((raw > 2.0**-50) & (raw < 2.0**50))  # squares may not fit fp32
    if extreme.any():
        norms = torch.linalg.vector_norm(values[extreme].double(), dim=1)
        raw[extreme] = (norms * (0.498 / BLOCK**0.5)).float()
    scales = _scales_of(raw)
    halves = _quotients(values, scales).mul_(0.5).add_(2.0).clamp_(0, 3.5)
    return scales, pack(halves.to(torch.int8).view(torch.uint8), 2)  # int8 is 7 times as fast


def _multiples_b2(codes: Tensor) -> Tensor:
    return unpack(codes, 2).float().mul_(2).sub_(3)


def _encode_b1(values: Tensor) -> tuple[Tensor, Tensor]:
    scales = _scales_of(values.abs().mean(dim=1))
    return scales, pack((values >= 0).view(torch.uint8), 1)


def _multiples_b1(codes: Tensor) -> Tensor:
    return unpack(codes, 1).float().mul_(2).sub_(1)


BLOCK_CODINGS: Mapping[Coding, BlockCoding] = {
    "b2": BlockCoding(_encode_b2, _multiples_b2),
    "b1": BlockCoding(_encode_b1, _multiples_b1),
}
