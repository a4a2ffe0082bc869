"""How tensors become bytes and bytes become tensors. Knows nothing of who sends.

A blob holds the elements that its unit's layout lists, one after the other, little-endian (as all
machines that torch runs on), without header. Two codecs:

fp32  4 bytes an element; exact.
bf16  2 bytes an element; nearest value, ties to even, so a value in bf16's normal range is off by
      at most 2^-8 of itself (0.4 %); values that are bf16 already are exact.

The *agreed value* of a tensor is what a blob decodes to, in the codec's own dtype. All work is
done in chunks of a few MiB, so memory beyond arguments and results stays bounded.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from swarm.config import Codec
from swarm.errors import BadBlob
from swarm.experts import Shape, Slice, UnitLayout

Buffer = bytes | bytearray | memoryview

DTYPES: Mapping[Codec, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtype of agreed tensors."""
CHUNK_ELEMENTS = 2**20
MAX_MAGNITUDE = 2.0**64
"""Larger values are refused: no weight is, and sums of smaller ones cannot overflow fp32."""


def encode_unit(layout: UnitLayout, tensors: Mapping[str, Tensor]) -> memoryview:
    """The blob of a unit.

    Args:
        layout: which elements go where.
        tensors: by full name, at least those that the layout lists; any floating dtype or device.

    Cost: one allocation of `layout.num_bytes` and one pass; a tensor that is not contiguous is
    copied first.
    """
    values = torch.empty(layout.num_elements, dtype=DTYPES[layout.codec])
    for offset, piece in _places(layout):
        flat = tensors[piece.name].detach().reshape(-1)[piece.start : piece.stop]
        values[offset : offset + len(flat)].copy_(flat)
    return _bytes_of(values)


def allocate(layouts: Iterable[UnitLayout], shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Uninitialised tensors, in their agreed dtype, for all that these units hold.

    With `fill` for one blob after the other, a whole model is rebuilt with a single copy of its
    weights in memory: a blob can be dropped as soon as it is filled in.
    """
    codecs = {piece.name: layout.codec for layout in layouts for piece in layout.slices}
    return {name: torch.empty(shapes[name], dtype=DTYPES[codecs[name]]) for name in codecs}


def fill(tensors: Mapping[str, Tensor], layout: UnitLayout, blob: Buffer) -> None:
    """Writes a unit's agreed values into the tensors (or parts of them) that it holds.

    Args:
        tensors: by full name, at least those of the layout; contiguous, any dtype or device.
            Values are converted, so fp32 tensors take bf16 values exactly.
        layout: of the unit.
        blob: its bytes, checked before by `check_finite`.

    Raises:
        BadBlob: the size is not that of the layout.
    """
    _check_size(layout, blob)
    element_bytes = DTYPES[layout.codec].itemsize
    with torch.no_grad():
        for offset, piece in _places(layout):
            flat = tensors[piece.name].view(-1)[piece.start : piece.stop]
            within = memoryview(blob)[offset * element_bytes :][: len(flat) * element_bytes]
            for start, chunk in _chunks(within, layout.codec):
                flat[start : start + len(chunk)].copy_(chunk)


def decode_unit(layout: UnitLayout, shapes: Mapping[str, Shape], blob: Buffer) -> dict[str, Tensor]:
    """Name -> agreed tensor, for a unit of whole tensors (an expert).

    Cost: one copy of the blob; the tensors share its memory.

    Raises:
        BadBlob: the size is not that of the layout.
    """
    _check_size(layout, blob)
    return _whole_tensors(layout, shapes, _values_in(blob, layout.codec).clone())


def view_unit(layout: UnitLayout, shapes: Mapping[str, Shape], blob: Buffer) -> dict[str, Tensor]:
    """As `decode_unit`, but the tensors lie in the blob itself: nobody may write to them.

    They keep its memory; an odd address is good enough for copies, not for kernels of all kinds.

    Raises:
        BadBlob: the size is not that of the layout.
    """
    _check_size(layout, blob)
    return _whole_tensors(layout, shapes, _values_in(blob, layout.codec))


def _whole_tensors(
    layout: UnitLayout, shapes: Mapping[str, Shape], values: Tensor
) -> dict[str, Tensor]:
    tensors = {}
    for offset, piece in _places(layout):
        size = math.prod(shapes[piece.name])
        assert (piece.start, piece.stop) == (0, size), f"{piece.name} is cut; use fill"
        tensors[piece.name] = values[offset : offset + size].view(shapes[piece.name])
    return tensors


def check_finite(layout: UnitLayout, blob: Buffer) -> None:
    """Refuses a unit's bytes that no honest peer would send. One pass over the blob.

    Raises:
        BadBlob: reason `size` (not the layout's), `non_finite` (a NaN or infinity) or
            `out_of_range` (a magnitude above `MAX_MAGNITUDE`).
    """
    _check_size(layout, blob)
    for start, chunk in _chunks(blob, layout.codec):
        low, high = (bound.item() for bound in torch.aminmax(chunk))
        if not (math.isfinite(low) and math.isfinite(high)):
            where = f"elements {start} to {start + len(chunk)}"
            raise BadBlob("non_finite", f"{layout.unit}: not a finite number among {where}")
        if max(-low, high) > MAX_MAGNITUDE:
            raise BadBlob(
                "out_of_range", f"{layout.unit}: a value of magnitude {max(-low, high):.3g}"
            )


def check_moments(layout: UnitLayout, blob: Buffer) -> None:
    """Refuses a moments blob that no honest peer would send.

    Raises:
        BadBlob: as `check_finite`, or `negative_moment`: a second moment is a mean of squares.
    """
    check_finite(layout, blob)
    for name, values in zip(
        (piece.name for piece in layout.slices), _cut(layout, blob), strict=True
    ):
        if name.startswith("exp_avg_sq.") and values.min().item() < 0:
            raise BadBlob("negative_moment", f"{layout.unit}: a second moment below zero")


def mean(blobs: Sequence[Buffer], codec: Codec, weights: Sequence[int] | None = None) -> memoryview:
    """The mean of several blobs of one unit, as a blob of the same codec.

    `mean_chunk`, then encoded: the same bits on every peer that is given the same order. The mean
    of one blob is that blob.

    Error: fp32, the rounding of n - 1 additions and a division, with weights of n products
    instead; bf16, one rounding more (0.4 %). Cost: n passes; memory for the result and two chunks,
    with weights three.

    Args:
        blobs: of equal size.
        codec: theirs.
        weights: of each blob, positive; None: all count the same.
    """
    assert len({len(blob) for blob in blobs}) == 1, "blobs of one unit have one size"
    if len(blobs) == 1:
        return memoryview(blobs[0]).toreadonly()
    values = torch.empty_like(_values_in(blobs[0], codec))
    for chunks in zip(*(_chunks(blob, codec) for blob in blobs), strict=True):
        start = chunks[0][0]
        total = mean_chunk([chunk for _, chunk in chunks], weights)
        values[start : start + len(total)].copy_(total)
    return _bytes_of(values)


def mean_chunk(chunks: Sequence[Tensor], weights: Sequence[int] | None = None) -> Tensor:
    """The mean of values that belong together, element by element: fp32 [n].

    Without weights: fp32 sum in the given order, divided by their number. With weights w: fp32 sum
    in the given order of (w_i / sum w, rounded to fp32) x_i, each product rounded by itself, so
    that no processor fuses it with the addition. With inputs that passed `check_finite` nothing
    overflows, and the mean passes it again: shares that were rounded up may exceed 1 in sum, so
    what they lift above the limit is the limit.

    Args:
        chunks: fp32 or bf16 [n] each, not written to.
        weights: of each chunk, positive.
    """
    if weights is None:
        total = chunks[0].to(torch.float32, copy=True)
        for chunk in chunks[1:]:
            total += chunk
        return total.div_(len(chunks))
    shares = [np.float32(weight / sum(weights)).item() for weight in weights]
    total = chunks[0].to(torch.float32) * shares[0]
    for chunk, share in zip(chunks[1:], shares[1:], strict=True):
        total += chunk.to(torch.float32) * share
    return total.clamp_(-MAX_MAGNITUDE, MAX_MAGNITUDE)


def _places(layout: UnitLayout) -> Iterator[tuple[int, Slice]]:
    """Each slice with its offset, in elements, in the unit."""
    offset = 0
    for piece in layout.slices:
        yield offset, piece
        offset += piece.stop - piece.start


def _cut(layout: UnitLayout, blob: Buffer) -> Iterator[Tensor]:
    """The values of each slice, flat, not to be written to."""
    values = _values_in(blob, layout.codec)
    for offset, piece in _places(layout):
        yield values[offset : offset + piece.stop - piece.start]


def _chunks(blob: Buffer, codec: Codec) -> Iterator[tuple[int, Tensor]]:
    """(first element, values) of each chunk, not to be written to."""
    values = _values_in(blob, codec)
    for start in range(0, len(values), CHUNK_ELEMENTS):
        yield start, values[start : start + CHUNK_ELEMENTS]


def _values_in(blob: Buffer, codec: Codec) -> Tensor:
    """The values in a blob, without copying; not to be written to.

    By way of DLPack, since torch warns about read-only memory otherwise.
    """
    return from_dlpack(np.frombuffer(blob, dtype=np.uint8)).view(DTYPES[codec])


def _bytes_of(values: Tensor) -> memoryview:
    """The memory of a tensor, read-only.

    Tensors are the cheapest fresh memory: a bytearray is zeroed first (measured: six times the
    cost of the copy).
    """
    return values.view(torch.uint8).numpy().data.toreadonly()


def _check_size(layout: UnitLayout, blob: Buffer) -> None:
    if len(blob) != layout.num_bytes:
        raise BadBlob(
            "size", f"{layout.unit}: {len(blob)} bytes, its layout has {layout.num_bytes}"
        )
