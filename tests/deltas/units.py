"""Units and their deltas in memory, for tests."""

import torch

from swarm.codecs import DTYPES, Buffer, Read
from swarm.codings import CODE_BYTES
from swarm.config import Codec, Coding
from swarm.deltas.unit_deltas import Delta, apply_delta, encode_delta
from swarm.experts import Slice, UnitLayout
from tests.blobs import blob_of

BLOCKED: tuple[Coding, ...] = tuple(CODE_BYTES)
CODINGS: tuple[Coding, ...] = ("bf16", *BLOCKED)


def unit(coding: Coding, codec: Codec, *sizes: int) -> UnitLayout:
    """A unit with one slice per size, in tensors a, b, ..., never at a tensor's beginning."""
    slices = tuple(Slice("abcdefgh"[i], 3, 3 + size) for i, size in enumerate(sizes))
    total = sum(sizes)
    return UnitLayout("expert.0", codec, slices, total, total * DTYPES[codec].itemsize, coding)


def reading(blob: Buffer) -> Read:
    return lambda offset, length: memoryview(blob)[offset : offset + length]


def delta_of(blob: Buffer) -> Delta:
    return Delta(len(blob), reading(blob))


def encoded(layout: UnitLayout, values: torch.Tensor) -> bytes:
    """The delta of a unit whose slices together have these values."""
    content = encode_delta(layout, lambda start, stop: values[start:stop])
    blob = content.whole()
    assert len(blob) == content.num_bytes
    return blob


def base_of(layout: UnitLayout, values: torch.Tensor) -> bytes:
    whole = UnitLayout(
        "x", layout.codec, (Slice("x", 0, len(values)),), len(values), layout.num_bytes
    )
    return blob_of(whole, {"x": values})


def applied(layout: UnitLayout, base: Buffer, blob: Buffer) -> bytes:
    return apply_delta(layout, reading(base), delta_of(blob)).whole()


def gaussian(size: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale
