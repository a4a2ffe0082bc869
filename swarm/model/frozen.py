"""Storage of frozen experts: fp32 or bf16 without change, or one byte per element.

Shapes: E experts of a stack, O output rows, I input columns of one matrix.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

FrozenFormat = Literal["fp32", "bf16", "int8"]
DENSE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
INT8_LARGEST = 127


class FrozenStack(Protocol):
    """The same matrix of several frozen experts, stacked."""

    def dense(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """The matrices of some experts as a [E, O, I] tensor of `dtype`."""

    def get(self, row: int) -> Tensor:
        """One matrix [O, I]: a view of the storage, or an fp32 copy if the storage is coded."""

    def put(self, row: int, matrix_OI: Tensor) -> None:
        """Stores one matrix, rounded to the format."""


@dataclass(frozen=True)
class DenseStack:
    """Matrices stored as one [E, O, I] tensor of fp32 or bf16."""

    tensor: Tensor

    def dense(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """See `FrozenStack`. A view if the type already matches."""
        return self.tensor[rows].to(dtype)

    def get(self, row: int) -> Tensor:
        """See `FrozenStack`."""
        return self.tensor[row].detach()

    def put(self, row: int, matrix_OI: Tensor) -> None:
        """See `FrozenStack`."""
        self.tensor[row].detach().copy_(matrix_OI)


@dataclass(frozen=True)
class Int8Stack:
    """Matrices stored as int8 with one scale per output row.

    The scale is |largest| / 127, rounded to the eight bits of a bf16. The largest element then
    always becomes 127, so quantizing values that were read back changes no bit. The product of a
    code and its scale is exact in fp32.

    Attributes:
        codes: int8 [E, O, I].
        scale: fp32 [E, O, 1].
    """

    codes: Tensor
    scale: Tensor

    def dense(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """See `FrozenStack`. Cost: one pass over the matrices."""
        return self.codes[rows].to(dtype).mul_(self.scale[rows].to(dtype))

    def get(self, row: int) -> Tensor:
        """See `FrozenStack`."""
        return self.codes[row].float().mul_(self.scale[row])

    def put(self, row: int, matrix_OI: Tensor) -> None:
        """See `FrozenStack`."""
        floats_OI = matrix_OI.detach().float()
        largest_O1 = floats_OI.abs().amax(-1, keepdim=True)
        scale_O1 = (largest_O1 / INT8_LARGEST).bfloat16().float()
        # A row of zeros, or of values below bf16's smallest number, has the scale 0 and codes of 0.
        inverse_O1 = torch.where(scale_O1 > 0, 1 / scale_O1, torch.zeros_like(scale_O1))
        codes_OI = (floats_OI * inverse_O1).round_().clamp_(-INT8_LARGEST, INT8_LARGEST)
        self.codes[row].copy_(codes_OI.nan_to_num_(nan=0.0))
        self.scale[row].copy_(scale_O1)


def stack_parts(
    form: FrozenFormat, shape: Sequence[int]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of each tensor that stores a stack of this [E, O, I] shape."""
    whole = tuple(shape)
    if form == "int8":
        return {"codes": (whole, torch.int8), "scale": ((*whole[:-1], 1), torch.float32)}
    return {"tensor": (whole, DENSE_TYPES[form])}


def stack_of(form: FrozenFormat, parts: Mapping[str, Tensor]) -> FrozenStack:
    """A stack over the tensors that `stack_parts` describes."""
    if form == "int8":
        return Int8Stack(parts["codes"], parts["scale"])
    return DenseStack(parts["tensor"])


def empty_stack(form: FrozenFormat, shape: Sequence[int], device: torch.device) -> FrozenStack:
    """A stack of uninitialized matrices."""
    parts = stack_parts(form, shape)
    tensors = {name: torch.empty(s, dtype=t, device=device) for name, (s, t) in parts.items()}
    return stack_of(form, tensors)


def frozen_bytes(form: FrozenFormat, shape: Sequence[int]) -> int:
    """Bytes of a stack of this shape."""
    parts = stack_parts(form, shape).values()
    return sum(math.prod(part) * dtype.itemsize for part, dtype in parts)
