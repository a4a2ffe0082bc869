"""Codes of 1, 2 or 4 bits in bytes: the planes of a block lie on top of each other."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """Byte j of a row is the sum over i of codes[j + w i] 2^(bits i), where w is their number.

    Args:
        codes: uint8 [n, m], each below 2^bits.
        bits: 1, 2 or 4; m is a multiple of 8 / bits.

    Returns:
        uint8 [n, w] with w = m bits / 8.
    """
    planes = codes.view(len(codes), 8 // bits, -1)
    packed = planes[:, 0].clone()
    for plane in range(1, 8 // bits):
        packed |= planes[:, plane] << (bits * plane)
    return packed


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The codes of which `pack` made these bytes: uint8 [n, 8 w / bits] of uint8 [n, w]."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8).view(1, -1, 1)
    planes: Tensor = (packed.unsqueeze(1) >> shifts) & (2**bits - 1)
    return planes.view(len(packed), -1)
