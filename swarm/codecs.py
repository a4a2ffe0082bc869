"""Converts tensors to bytes and back. Nothing here depends on the sender.

A blob holds the elements that its unit's layout lists, one after the other, without header. They
are little-endian, as on all machines that torch runs on. Two codecs:

fp32  4 bytes an element; exact.
bf16  2 bytes an element; rounded to the nearest value, ties to even. A value in bf16's normal range
      is off by at most 2^-8 of itself (0.4 %). Values that are bf16 already stay exact.

The *agreed value* of a tensor is what a blob decodes to, in the codec's own dtype. All work is done
in chunks of a few MiB, so memory beyond arguments and results stays bounded. A `Content` is a blob
that is never in memory as a whole. A `Read` reads a blob in other storage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

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
"""Elements that are worked on at once."""
MAX_MAGNITUDE = 2.0**64
"""Larger values are refused: no weight is as large, and sums of smaller values fit fp32."""

Read = Callable[[int, int], Buffer]
"""Bytes of a blob: (offset, length)."""


@dataclass(frozen=True)
class Content:
    """The bytes of a blob, made piece by piece, again at each request.

    Attributes:
        num_bytes: bytes of all pieces together.
        pieces: starts to make the pieces.
    """

    num_bytes: int
    pieces: Callable[[], Iterator[Buffer]]
    """Each piece consists of whole elements."""

    @classmethod
    def of(cls, blob: Buffer) -> Content:
        """The content of a blob that is in memory."""
        return cls(len(blob), lambda: iter([blob]))

    def whole(self) -> bytes:
        """All bytes in memory, for a blob that is known to be small."""
        return b"".join(self)

    def __iter__(self) -> Iterator[Buffer]:
        """The pieces, from the beginning."""
        return self.pieces()


def encoded(layout: UnitLayout, read: Callable[[Slice], Tensor]) -> Content:
    """The blob of a unit.

    Peak memory: `CHUNK_ELEMENTS` elements from `read`, and the same number in the codec's type.

    `read` gives a run of elements flat, of any floating dtype or device.
    """

    def pieces() -> Iterator[Buffer]:
        for part in _chunks_of(layout):
            yield _encode(read(part).detach(), layout.codec)  # a variable would keep the chunk

    return Content(layout.num_bytes, pieces)


def _encode(values: Tensor, codec: Codec) -> memoryview:
    return bytes_of(torch.empty(len(values), dtype=DTYPES[codec]).copy_(values))


def cut_from(read: Callable[[str], Tensor]) -> Callable[[Slice], Tensor]:
    """A reader of runs of elements, made of a reader of whole tensors by name.

    The reader holds the tensor that was read last.
    """
    held: dict[str, Tensor] = {}

    def cut(part: Slice) -> Tensor:
        if part.name not in held:
            held.clear()  # first, so that never two are held
            held[part.name] = read(part.name).reshape(-1)
        return held[part.name][part.start : part.stop]

    return cut


def _chunks_of(layout: UnitLayout) -> Iterator[Slice]:
    for piece in layout.slices:
        for start in range(piece.start, piece.stop, CHUNK_ELEMENTS):
            yield Slice(piece.name, start, min(start + CHUNK_ELEMENTS, piece.stop))


def read_part(layout: UnitLayout, part: Slice, read: Read) -> Tensor:
    """Agreed values of a run of elements that lies within one slice of a unit.

    Returns:
        Flat values in the codec's dtype. They are a view of the bytes from `read`: do not overwrite
        them.
    """
    size = DTYPES[layout.codec].itemsize
    for offset, piece in _places(layout):
        if piece.name == part.name and piece.start <= part.start and part.stop <= piece.stop:
            begin = (offset + part.start - piece.start) * size
            return values_in(read(begin, (part.stop - part.start) * size), layout.codec)
    raise KeyError(f"{part} is not in {layout.unit}")


def read_parts(layout: UnitLayout, read: Read) -> Iterator[tuple[Slice, Tensor]]:
    """A unit in chunks: each chunk's run of elements, and its agreed values as from `read_part`."""
    for part in _chunks_of(layout):
        yield part, read_part(layout, part, read)


def read_tensors(
    layout: UnitLayout, shapes: Mapping[str, Shape], read: Read
) -> Iterator[tuple[str, Tensor]]:
    """The agreed tensors of a unit of whole tensors (an expert), one by one; see `read_part`."""
    for piece in layout.slices:
        yield piece.name, read_part(layout, piece, read).view(shapes[piece.name])


def allocate(layouts: Iterable[UnitLayout], shapes: Mapping[str, Shape]) -> dict[str, Tensor]:
    """Uninitialised tensors, in their agreed dtype, for all elements of these units.

    `fill` then takes one blob after the other, and each blob can be dropped after that. So a whole
    model is rebuilt with a single copy of its weights in memory.
    """
    codecs = {piece.name: layout.codec for layout in layouts for piece in layout.slices}
    return {name: torch.empty(shapes[name], dtype=DTYPES[codecs[name]]) for name in codecs}


def fill(tensors: Mapping[str, Tensor], layout: UnitLayout, blob: Buffer) -> None:
    """Writes a unit's agreed values into the tensors, or parts of tensors, that the unit holds.

    Args:
        tensors: at least those of the layout, by full name, contiguous, of any dtype and device.
            Values are converted, so fp32 tensors take bf16 values exactly.
        layout: layout of the unit.
        blob: bytes of the unit, already checked by `check_finite`.

    Raises:
        BadBlob: the size is not that of the layout.
    """
    _check_size(layout, blob)
    element_bytes = DTYPES[layout.codec].itemsize
    with torch.no_grad():
        for offset, piece in _places(layout):
            flat = tensors[piece.name].view(-1)[piece.start : piece.stop]
            within = memoryview(blob)[offset * element_bytes :][: len(flat) * element_bytes]
            chunks = values_in(within, layout.codec).split(CHUNK_ELEMENTS)
            for part, chunk in zip(flat.split(CHUNK_ELEMENTS), chunks, strict=True):
                part.copy_(chunk)


def check_finite(layout: UnitLayout, content: Content) -> None:
    """Refuses a unit's bytes that no honest peer would send. One pass, one piece in memory.

    Raises:
        BadBlob: reason `size` (another size than the layout's), `non_finite` (a NaN or infinity) or
            `out_of_range` (a magnitude above `MAX_MAGNITUDE`).
    """
    for start, chunk in _values_of(layout, content):
        check_chunk(layout, start, chunk)


def check_chunk(layout: UnitLayout, start: int, chunk: Tensor) -> None:
    """Refuses values that begin at element `start` of a unit, like `check_finite`."""
    low, high = (bound.item() for bound in torch.aminmax(chunk))
    if not (math.isfinite(low) and math.isfinite(high)):
        where = f"elements {start} to {start + len(chunk)}"
        raise BadBlob("non_finite", f"{layout.unit}: not a finite number among {where}")
    if max(-low, high) > MAX_MAGNITUDE:
        raise BadBlob("out_of_range", f"{layout.unit}: a value of magnitude {max(-low, high):.3g}")


def check_update(
    layout: UnitLayout, content: Content, base: Read, *, absolute: float, relative: float
) -> None:
    """Refuses a unit's bytes that local steps cannot have made, in one pass.

    Memory holds one piece. Each operation is rounded separately, so all machines judge alike.

    Args:
        layout: layout of the unit.
        content: bytes of the unit, which passed `check_finite`.
        base: reads the value from which the unit was trained.
        absolute: constant part of the largest distance of an element from the base's element.
        relative: part of this distance in proportion to the magnitude of the base's element.

    Raises:
        BadBlob: reason `size`, or `implausible_update` with the element that is furthest.
    """
    for chunk in _beyond(layout, content, base, absolute, relative):
        del chunk


def guarded(
    layout: UnitLayout, content: Content, base: Read, *, absolute: float, relative: float
) -> Content:
    """The same content, but reading it raises BadBlob where `check_update` would."""
    return Content(content.num_bytes, lambda: _beyond(layout, content, base, absolute, relative))


def _beyond(
    layout: UnitLayout, content: Content, base: Read, absolute: float, relative: float
) -> Iterator[Buffer]:
    """The pieces of a content. Each was found to be within its bounds."""
    if content.num_bytes != layout.num_bytes:
        raise _wrong_size(layout, content.num_bytes)
    done = 0
    for piece in content:
        for start, chunk in _chunks(layout, done, piece):
            before = _viewed(base(start, chunk.nbytes), chunk.dtype).float()
            check_moves(layout, (chunk.float() - before).abs_(), before, absolute, relative)
        done += len(piece)
        yield piece


def check_moves(
    layout: UnitLayout, moves: Tensor, before: Tensor, absolute: float, relative: float
) -> None:
    """Refuses moves (fp32, none negative) that local steps cannot have made, like `check_update`.

    `before` is fp32. It is not overwritten, because it may be the store's own memory.
    """
    beyond = moves - before.abs() * relative
    if not beyond.amax().item() <= absolute:  # argmax is ten times slower
        worst = int(beyond.argmax())
        raise BadBlob(
            "implausible_update",
            f"{layout.unit}: local steps cannot have moved an element by "
            f"{moves[worst].item():.3g} (limit {absolute:.3g})",
        )


def check_moments(layout: UnitLayout, content: Content) -> None:
    """Refuses a moments blob that no honest peer would send.

    It takes two passes, and memory for one piece.

    Raises:
        BadBlob: as `check_finite`, or `negative_moment`, since a second moment is a mean of
            squares.
    """
    check_finite(layout, content)
    squares = [
        (offset, offset + piece.stop - piece.start)
        for offset, piece in _places(layout)
        if piece.name.startswith("exp_avg_sq.")
    ]
    for start, chunk in _values_of(layout, content):
        for first, last in squares:
            within = chunk[max(first - start, 0) : max(last - start, 0)]
            if len(within) and within.min().item() < 0:
                raise BadBlob("negative_moment", f"{layout.unit}: a second moment below zero")


def _values_of(layout: UnitLayout, content: Content) -> Iterator[tuple[int, Tensor]]:
    """(first element, values) of each chunk of a content whose size is the layout's."""
    if content.num_bytes != layout.num_bytes:
        raise _wrong_size(layout, content.num_bytes)
    done = 0
    for piece in content:
        for start, chunk in _chunks(layout, done, piece):
            yield start // DTYPES[layout.codec].itemsize, chunk
        done += len(piece)


def mean_of(
    reads: Sequence[Read], num_bytes: int, codec: Codec, weights: Sequence[int] | None = None
) -> Content:
    """The mean of several blobs of one unit, as a blob of the same codec.

    The encoded result of `mean_chunk`: equal bits on all peers that have the blobs in the same
    order. The mean of one blob is this blob.

    Error in fp32: the rounding of n - 1 additions and one division; with weights, n products
    replace the division. In bf16, one more rounding (0.4 %). Cost: n passes. Peak memory: a chunk
    of each blob, of their fp32 sum and of the result. With weights, also of one product.

    `reads` gives blobs of `num_bytes` each. `weights` are positive. None: equal weights.
    """
    chunk_bytes = CHUNK_ELEMENTS * DTYPES[codec].itemsize

    def pieces() -> Iterator[Buffer]:
        for start in range(0, num_bytes, chunk_bytes):
            length = min(chunk_bytes, num_bytes - start)
            yield _encode(
                mean_chunk([values_in(read(start, length), codec) for read in reads], weights),
                codec,
            )

    return Content(num_bytes, pieces)


def mean_chunk(chunks: Sequence[Tensor], weights: Sequence[int] | None = None) -> Tensor:
    """The mean of several chunks, element by element: fp32 [n].

    Without weights: the fp32 sum in the given order, divided by their number. With weights w: the
    fp32 sum in the given order of (w_i / sum w, rounded to fp32) x_i. Each product is rounded by
    itself, so that no processor fuses it with the addition.

    If the inputs have passed `check_finite`, nothing overflows, and the mean passes the check too.
    Rounded shares may sum to more than 1, so a value above the limit becomes the limit.

    The chunks are fp32 or bf16 [n] each and are not overwritten. The weights are positive.
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


def _chunks(layout: UnitLayout, begin: int, piece: Buffer) -> Iterator[tuple[int, Tensor]]:
    """(first byte in the blob, values) of each chunk of a piece from byte `begin` on; read-only."""
    dtype = DTYPES[layout.codec]
    size = CHUNK_ELEMENTS * dtype.itemsize
    for start in range(0, len(piece), size):
        yield begin + start, _viewed(memoryview(piece)[start : start + size], dtype)


def values_in(blob: Buffer, codec: Codec) -> Tensor:
    """The values in a blob, without copying. Do not overwrite them."""
    return _viewed(blob, DTYPES[codec])


def _viewed(blob: Buffer, dtype: torch.dtype) -> Tensor:
    """A view through DLPack, because torch's other ways warn about read-only memory."""
    return from_dlpack(np.frombuffer(blob, dtype=np.uint8)).view(dtype)


def bytes_of(values: Tensor) -> memoryview:
    """The memory of a tensor, read-only.

    Copies go into tensors, the cheapest fresh memory: a bytearray is zeroed first, which takes six
    times as long as the copy (measured).
    """
    return values.view(torch.uint8).numpy().data.toreadonly()


def _check_size(layout: UnitLayout, blob: Buffer) -> None:
    if len(blob) != layout.num_bytes:
        raise _wrong_size(layout, len(blob))


def _wrong_size(layout: UnitLayout, num_bytes: int) -> BadBlob:
    return BadBlob("size", f"{layout.unit}: {num_bytes} bytes, its layout has {layout.num_bytes}")
