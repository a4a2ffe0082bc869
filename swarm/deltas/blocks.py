"""The codings of blocks of 256 elements: p = L s, with a scale s of the block and integers L.

coding         codes of a block                            L                scale of the encoder
int8           256 bytes                                   code, not -128   largest magnitude / 127
int4           256 of 4 bits (`bits.pack`)                 code - 8, not 0  largest magnitude / 7
b2             256 of 2 bits                               2 code - 3       0.498 root mean square
b1             256 of 1 bit                                2 code - 1       mean magnitude
top8, 16, 32   k places, rising; k of 2 bits               0: 2, 1: 3,      mean magnitude of the
               for the k of the largest magnitudes         2: -2, 3: -3     chosen / 2.25

Scales are rounded to bf16; they are +0 or from 2^-96 to 2^40. Where a scale is +0 the block is, and
its codes say nothing. An encoder makes a smaller scale +0 and a larger one 2^40.

How far an element y may be from its code's value, with the scale s that was sent:

int8, int4     s / 2 (1 + 2^-14), which is 1/253 and 1/13.9 of the block's largest magnitude; if the
               scale was made 2^40, |y| - 127 s or |y| - 7 s where that is more
b2             s if |y| <= 4 s, else |y| - 3 s
b1             max(s, |y| - s)
top-k          |y| of those not chosen; of the chosen max(2 s, |y| - 3 s)

On Gaussian blocks the squared error is 0.0001, 0.016, 0.118, 0.362 and for top-8 0.805 of the
square of y. The error of a whole block is never longer than the block with b1 and top-k; with b2 it
may be 1.04 times as long, where a single one of 256 elements is not zero, and what is left over is
coded better. 0.498 is the best of four equal steps for a Gaussian (J. Max, "Quantizing for minimum
distortion", 1960); 2.25 lies between the magnitudes 2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from swarm.codings import BLOCK
from swarm.config import Coding
from swarm.deltas.bits import pack, unpack
from swarm.errors import BadBlob

MIN_SCALE, MAX_SCALE = 2.0**-96, 2.0**40


@dataclass(frozen=True)
class BlockCoding:
    """How blocks are coded.

    Attributes:
        encode: fp32 [n, 256] -> scales bf16 [n] and codes uint8 [n, c].
        multiples: codes uint8 [n, c] -> L, fp32 [n, 256], and which codes no encoder makes, or
            None if there are none: bool [n, 256], or [n, 1] where it is the block as a whole.
    """

    encode: Callable[[Tensor], tuple[Tensor, Tensor]]
    multiples: Callable[[Tensor], tuple[Tensor, Tensor | None]]


def encode_blocks(values: Tensor, coding: Coding) -> tuple[Tensor, Tensor]:
    """Scales bf16 [n] and codes uint8 [n, c] of fp32 [n, 256], which is not written to.

    Raises:
        BadBlob: reason `non_finite`.
    """
    return BLOCK_CODINGS[coding].encode(values)


def decode_blocks(scales: Tensor, codes: Tensor, num_elements: int, coding: Coding) -> Tensor:
    """The elements p = L s of blocks: fp32 [num_elements], which the caller may write to.

    Args:
        scales: bf16 [n].
        codes: uint8 [n, c].
        num_elements: from 256 (n - 1) + 1 to 256 n; what fills up the last block says nothing.
        coding: of blocks.

    Raises:
        BadBlob: reason `scale` (negative, not finite or out of range), `code` (one that no encoder
            makes) or `index` (places that do not rise).
    """
    if not _are_scales(scales):
        raise BadBlob("scale", "a scale of a delta is not +0 and not from 2^-96 to 2^40")
    multiples, never_made = BLOCK_CODINGS[coding].multiples(codes)
    if never_made is not None:
        if never_made.shape[1] == BLOCK:
            never_made.view(-1)[num_elements:] = False
        never_made &= (scales != 0).unsqueeze(1)
        if never_made.any():
            reason = "index" if never_made.shape[1] == 1 else "code"
            raise BadBlob(reason, f"a delta has a {reason} that no encoder of {coding} makes")
    return multiples.mul_(scales.float().unsqueeze(1)).view(-1)[:num_elements]


def _are_scales(scales: Tensor) -> bool:
    """By their bits: integers, whatever a processor does with numbers that are subnormal."""
    bits = scales.view(torch.int16)
    lowest, highest = (127 - 96) << 7, (127 + 40) << 7
    return bool(((bits == 0) | ((bits >= lowest) & (bits <= highest))).all())


def _scales_of(raw: Tensor) -> Tensor:
    """What encoders send for these scales: bf16 [n] of fp32 [n]."""
    if not raw.isfinite().all():
        raise BadBlob("non_finite", "a difference that is to be coded is not a finite number")
    scales = raw.clamp(max=MAX_SCALE).to(torch.bfloat16)
    return torch.where(scales < MIN_SCALE, 0.0, scales)


def _quotients(values: Tensor, scales: Tensor) -> Tensor:
    """Values in units of their blocks' scales: fp32 [n, 256]; 0 where the scale is."""
    inverse = torch.where(scales > 0, scales.float().reciprocal(), 0.0)
    return values * inverse.unsqueeze(1)


def _as_codes(values: Tensor, low: int, high: int) -> Tensor:
    """The integers in fp32 numbers, cut off: uint8. Torch is 7 times as fast with int8."""
    return values.clamp_(low, high + 0.5).to(torch.int8).view(torch.uint8)


def _encode_int8(values: Tensor) -> tuple[Tensor, Tensor]:
    scales = _scales_of(values.abs().amax(dim=1) / 127)
    rounded = _quotients(values, scales).round_().clamp_(-127, 127)
    return scales, rounded.to(torch.int8).view(torch.uint8)


def _multiples_int8(codes: Tensor) -> tuple[Tensor, Tensor | None]:
    signed = codes.view(torch.int8)
    return signed.float(), None if signed.amin() > -128 else signed == -128


def _encode_int4(values: Tensor) -> tuple[Tensor, Tensor]:
    scales = _scales_of(values.abs().amax(dim=1) / 7)
    return scales, pack(_as_codes(_quotients(values, scales).add_(8.5), 1, 15), 4)


def _multiples_int4(codes: Tensor) -> tuple[Tensor, Tensor | None]:
    unpacked = unpack(codes, 4)
    return unpacked.float().sub_(8), None if unpacked.all() else unpacked == 0


def _encode_b2(values: Tensor) -> tuple[Tensor, Tensor]:
    raw = torch.linalg.vector_norm(values, dim=1) * (0.498 / BLOCK**0.5)
    extreme = ~((raw > 2.0**-50) & (raw < 2.0**50))  # its squares may not fit fp32
    if extreme.any():
        norms = torch.linalg.vector_norm(values[extreme].double(), dim=1)
        raw[extreme] = (norms * (0.498 / BLOCK**0.5)).float()
    scales = _scales_of(raw)
    halves = _quotients(values, scales).mul_(0.5).add_(2.0)
    return scales, pack(_as_codes(halves, 0, 3), 2)


def _multiples_b2(codes: Tensor) -> tuple[Tensor, None]:
    return unpack(codes, 2).float().mul_(2).sub_(3), None


def _encode_b1(values: Tensor) -> tuple[Tensor, Tensor]:
    scales = _scales_of(values.abs().mean(dim=1))
    return scales, pack((values >= 0).view(torch.uint8), 1)


def _multiples_b1(codes: Tensor) -> tuple[Tensor, None]:
    return unpack(codes, 1).float().mul_(2).sub_(1), None


def _largest(values: Tensor, k: int) -> Tensor:
    """The places of the k largest magnitudes of each block, rising: int64 [n, k].

    Magnitudes are compared to 15 of their 23 bits, with the place in the others: numpy sorts such
    integers six times as fast as `torch.topk` finds what it returns.
    """
    keys = (values.view(torch.int32) & 0x7FFFFF00) | torch.arange(BLOCK, dtype=torch.int32)
    chosen = np.partition(keys.numpy(), BLOCK - k, axis=1)[:, BLOCK - k :] & 0xFF
    return torch.from_numpy(np.sort(chosen, axis=1)).to(torch.int64)


def _encode_top(values: Tensor, k: int) -> tuple[Tensor, Tensor]:
    places = _largest(values, k)
    chosen = values.gather(1, places)
    scales = _scales_of(chosen.abs().mean(dim=1) / 2.25)
    is_three = _quotients(chosen.abs(), scales) >= 2.5
    codes = is_three.to(torch.uint8) | ((chosen < 0).to(torch.uint8) << 1)
    return scales, torch.cat([places.to(torch.uint8), pack(codes, 2)], dim=1)


def _multiples_top(codes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    places, kinds = codes[:, :k].to(torch.int64), unpack(codes[:, k:].contiguous(), 2)
    levels = ((kinds & 1) + 2).float() * (1 - (kinds & 2).float())
    falls = (places[:, 1:] <= places[:, :-1]).any(dim=1, keepdim=True)
    return torch.zeros(len(codes), BLOCK).scatter_(1, places, levels), falls


def _top(k: int) -> BlockCoding:
    return BlockCoding(partial(_encode_top, k=k), partial(_multiples_top, k=k))


BLOCK_CODINGS: Mapping[Coding, BlockCoding] = {
    "int8": BlockCoding(_encode_int8, _multiples_int8),
    "int4": BlockCoding(_encode_int4, _multiples_int4),
    "b2": BlockCoding(_encode_b2, _multiples_b2),
    "b1": BlockCoding(_encode_b1, _multiples_b1),
    "top8": _top(8),
    "top16": _top(16),
    "top32": _top(32),
}
