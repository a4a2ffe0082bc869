"""Makes, reads, checks, applies and averages deltas of whole units, some groups at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from swarm.codecs import (
    DTYPES,
    MAX_MAGNITUDE,
    Buffer,
    Content,
    Read,
    bytes_of,
    check_chunk,
    check_moves,
    mean_chunk,
    read_part,
    read_parts,
    values_in,
)
from swarm.codings import BLOCK, GROUP, coded_bytes, elements_bytes
from swarm.config import Coding
from swarm.deltas.blocks import canonical, decode_blocks, encode_blocks, moved
from swarm.errors import BadBlob
from swarm.experts import Slice, UnitLayout

GROUP_ELEMENTS = BLOCK * GROUP
RUN_ELEMENTS = 4 * GROUP_ELEMENTS
"""Elements of one operation: enough that several threads seldom wait for the interpreter."""

ReadElements = Callable[[int, int], Tensor]
"""A unit's elements from start to stop, counted across its slices: flat, any floating dtype."""


class Parts(Protocol):
    """Live values, by runs of elements within one tensor. Engines implement it."""

    def read_part(self, part: Slice) -> Tensor:
        """A flat fp32 copy of the run."""

    def write_part(self, part: Slice, values: Tensor) -> None:
        """Overwrites the run."""


@dataclass(frozen=True)
class Delta:
    """A delta in other storage.

    Attributes:
        num_bytes: size of the delta, which may be wrong.
        read: returns bytes of the delta.
    """

    num_bytes: int
    read: Read


def in_order(content: Content) -> Delta:
    """A delta that can be read only once, from beginning to end, as all functions here do."""
    pieces, held = iter(content), memoryview(b"")

    def read(_: int, length: int) -> Buffer:
        nonlocal held
        parts = []
        while length:
            if not held:
                held = memoryview(next(pieces)).cast("B")
            parts.append(held[:length])
            held, length = held[length:], length - len(parts[-1])
        return parts[0] if len(parts) == 1 else b"".join(parts)

    return Delta(content.num_bytes, read)


def encode_delta(layout: UnitLayout, values: ReadElements) -> Content:
    """The delta nearest to these differences.

    For its error see `swarm.deltas.blocks`. bf16 is off by at most 2^-8 of an element, or 2^-100.

    Args:
        layout: layout of the unit, with another coding than "none".
        values: reads the wanted change of the agreed value, and is not overwritten. `elements_of`
            makes it from a reader of slices.

    Raises:
        BadBlob: raised during reading, with the reason `non_finite`, if a difference is not a
            finite number.
    """

    def pieces() -> Iterator[Buffer]:
        for start, stop in runs(layout):
            yield encode_run(values(start, stop), layout.coding)

    return Content(coded_bytes(layout), pieces)


def encode_run(values: Tensor, coding: Coding) -> Buffer:
    """The bytes of some groups of a delta, like `encode_delta`. `values` is not overwritten."""
    values = values.detach().to("cpu", torch.float32)
    if coding == "bf16":
        if not all(math.isfinite(bound.item()) for bound in torch.aminmax(values)):
            raise BadBlob("non_finite", "a difference that is to be coded is not a finite number")
        limited = canonical(values).clamp_(-MAX_MAGNITUDE, MAX_MAGNITUDE)
        return bytes_of(limited.to(torch.bfloat16))
    if len(values) % BLOCK:
        values = torch.cat([values, torch.zeros(-len(values) % BLOCK)])
    scales, codes = encode_blocks(values.view(-1, BLOCK), coding)
    parts = scales.view(torch.uint8).view(len(scales), -1), codes
    whole = len(scales) // GROUP * GROUP
    rest = torch.cat([part[whole:].reshape(-1) for part in parts])
    if not whole:
        return bytes_of(rest)
    groups = torch.cat([part[:whole].reshape(whole // GROUP, -1) for part in parts], dim=1)
    return bytes_of(torch.cat([groups.view(-1), rest]))


def decode_delta(layout: UnitLayout, delta: Delta) -> ReadElements:
    """A reader of a delta's elements p: fp32, whole groups at a time. Callers may overwrite them.

    Raises:
        BadBlob: with the reason `size` at once, and during reading as `decode_run`.
    """
    expected = coded_bytes(layout)
    if delta.num_bytes != expected:
        raise BadBlob("size", f"{layout.unit}: a delta of {delta.num_bytes} bytes, not {expected}")

    def elements(start: int, stop: int) -> Tensor:
        offset = elements_bytes(start, layout.coding)
        size = elements_bytes(stop, layout.coding) - offset
        return decode_run(delta.read(offset, size), stop - start, layout.coding)

    return elements


def decode_run(raw: Buffer, num_elements: int, coding: Coding) -> Tensor:
    """The elements p in the bytes of some groups: fp32 [num_elements]. Callers may overwrite them.

    Raises:
        BadBlob: as `decode_blocks`, and with bf16 `not_canonical` (-0, smaller than 2^-100, above
            2^64 or not finite).
    """
    if coding == "bf16":
        return _decode_bf16(values_in(raw, "bf16"))
    scales, codes = _parted(values_in(raw, "bf16"), -(-num_elements // BLOCK))
    return decode_blocks(scales, codes, num_elements, coding)


def _parted(values: Tensor, blocks: int) -> tuple[Tensor, Tensor]:
    """Scales bf16 [n] and codes uint8 [n, c] of n blocks, stored group by group."""
    width = len(values) // blocks  # size of a block with its scale, in units of two bytes
    whole = blocks // GROUP * GROUP
    in_groups, rest = values[: whole * width].view(-1, GROUP * width), values[whole * width :]
    if not whole:
        return rest[:blocks], rest[blocks:].view(torch.uint8).view(blocks, -1)
    scales = torch.cat([in_groups[:, :GROUP].reshape(-1), rest[: blocks - whole]])
    codes = torch.cat([in_groups[:, GROUP:].reshape(-1), rest[blocks - whole :]])
    return scales, codes.view(torch.uint8).view(blocks, -1)


def _decode_bf16(values: Tensor) -> Tensor:
    wide = values.float()
    low, high = (bound.item() for bound in torch.aminmax(wide))
    within = low >= -MAX_MAGNITUDE and high <= MAX_MAGNITUDE  # false for a NaN
    # Bits are compared, because a negative zero equals a positive one.
    if not within or not torch.equal(wide.view(torch.int32), canonical(wide).view(torch.int32)):
        raise BadBlob("not_canonical", "a delta has an element that no encoder of bf16 makes")
    return wide


def in_parts(layout: UnitLayout, elements: ReadElements) -> Iterator[tuple[Slice, Tensor]]:
    """All elements of a unit in runs within one tensor: the runs and their values."""
    for start, stop in runs(layout):
        values = elements(start, stop)
        for part, offset in _parts(layout, start, stop):
            yield part, values[offset : offset + part.stop - part.start]


def apply_delta(
    layout: UnitLayout,
    base: Read,
    delta: Delta,
    *,
    absolute: float = math.inf,
    relative: float = 0.0,
) -> Content:
    """The value v' = v + dec(delta) of a unit, with v in `base`: the same bits on every processor.

    Raises:
        BadBlob: at once and during reading, as `decode_delta` and `check_delta`, and as
            `codecs.check_finite` of the result.
    """
    before, by = agreed_elements(layout, base), decode_delta(layout, delta)

    def pieces() -> Iterator[Buffer]:
        for start, stop in runs(layout):
            v, moves = before(start, stop), by(start, stop)
            if absolute < math.inf:
                check_moves(layout, moves.abs(), v.float(), absolute, relative)
            yield bytes_of(moved_run(layout, start, v, moves))

    return Content(layout.num_bytes, pieces)


def moved_run(layout: UnitLayout, start: int, before: Tensor, by: Tensor) -> Tensor:
    """One run of a moved value from element `start` on, like `apply_delta`. Overwrites `by`."""
    after = moved(before, by, layout.codec)
    check_chunk(layout, start, after)
    return after


def check_delta(
    layout: UnitLayout,
    delta: Delta,
    base: Read | None = None,
    *,
    absolute: float = math.inf,
    relative: float = 0.0,
) -> None:
    """Refuses a delta that no honest peer would send.

    It takes one pass and memory for a run. Each operation is rounded separately, so all machines
    judge alike.

    Args:
        layout: layout of the unit.
        delta: the delta to check.
        base: reads the moved value. None: the size of the move is not checked.
        absolute: constant part of the limit of an element's move.
        relative: part of this limit in proportion to the base's magnitude.

    Raises:
        BadBlob: as `decode_delta`, or `implausible_update` with the largest move.
    """
    by = decode_delta(layout, delta)
    before = agreed_elements(layout, base) if base else None
    for start, stop in runs(layout):
        moves = by(start, stop).abs_()
        if before is not None:
            check_moves(layout, moves, before(start, stop).float(), absolute, relative)


def agreed_elements(layout: UnitLayout, read: Read) -> ReadElements:
    """The elements of an agreed value, in the codec's type. Do not overwrite them."""
    size = DTYPES[layout.codec].itemsize

    def elements(start: int, stop: int) -> Tensor:
        return values_in(read(start * size, (stop - start) * size), layout.codec)

    return elements


def elements_of(layout: UnitLayout, read: Callable[[Slice], Tensor]) -> ReadElements:
    """A reader of elements across tensors, from a reader of runs within one tensor."""

    def elements(start: int, stop: int) -> Tensor:
        parts = [read(part).detach() for part, _ in _parts(layout, start, stop)]
        return parts[0] if len(parts) == 1 else torch.cat([part.float() for part in parts])

    return elements


def runs(layout: UnitLayout) -> Iterator[tuple[int, int]]:
    """First element of each run of a unit, and of the next run."""
    for start in range(0, layout.num_elements, RUN_ELEMENTS):
        yield start, min(start + RUN_ELEMENTS, layout.num_elements)


def _parts(layout: UnitLayout, start: int, stop: int) -> Iterator[tuple[Slice, int]]:
    """The runs that contain the elements from start to stop, and the offset in each run."""
    begin = 0
    for piece in layout.slices:
        end = begin + piece.stop - piece.start
        first, last = max(start, begin), min(stop, end)
        if first < last:
            yield (
                Slice(piece.name, piece.start + first - begin, piece.start + last - begin),
                (first - start),
            )
        begin = end


def overwrite(live: Parts, layout: UnitLayout, value: Read) -> None:
    """Gives a live value the bits of another value, chunk by chunk."""
    for part, values in read_parts(layout, value):
        live.write_part(part, values)


def difference(live: Parts, layout: UnitLayout, base: Read) -> Content:
    """The difference x - v of a live value x: the progress that the swarm does not have yet.

    Policy: carried steps.
    """
    x, v = elements_of(layout, live.read_part), agreed_elements(layout, base)
    return encode_delta(layout, lambda start, stop: x(start, stop) - v(start, stop).float())


def follow(
    live: Parts, layout: UnitLayout, before: Read, after: Read, counted: Delta | None = None
) -> None:
    """Moves a live value x as the agreed value moved: to x + (v' - v) - c (carried steps).

    Computed in fp32, with each operation rounded separately. Moments do not change. Memory holds
    some copies of a run.

    Args:
        live: holds x.
        layout: layout of the unit.
        before: reads v.
        after: reads v'.
        counted: c, this peer's own part of the move. None if the peer has no part.
    """
    old, new = agreed_elements(layout, before), agreed_elements(layout, after)
    own = decode_delta(layout, counted) if counted else None

    def moves(start: int, stop: int) -> Tensor:
        by = new(start, stop).float() - old(start, stop).float()
        return by if own is None else by.sub_(own(start, stop))

    for part, by in in_parts(layout, moves):
        live.write_part(part, live.read_part(part) + by)


def rebase(live: Parts, layout: UnitLayout, before: Read, after: Read) -> None:
    """Moves a live value x from one agreed value to another: to v' + (x - v) (merge rebase).

    Elements without a difference get the agreed bits, even those of a negative zero. Peak memory:
    24 bytes for each of `codecs.CHUNK_ELEMENTS` elements.

    Args:
        live: holds x.
        layout: layout of the unit.
        before: reads v.
        after: reads v'.
    """
    for part, agreed in read_parts(layout, after):
        own = live.read_part(part) - read_part(layout, part, before).float()
        value = agreed.float()
        live.write_part(part, torch.where(own == 0, value, value + own))


@dataclass(frozen=True)
class Reduced:
    """One run of a reducer's result.

    Attributes:
        delta: B, the bytes of the delta nearest to t, the mean with the remainder.
        value: the bytes of v' = v + dec(B).
        left: g = t - (v' - v), fp32, the part of t that the move lacks. Computed from the value,
            not from the delta alone, so it includes the rounding to the agreed type.
    """

    delta: Buffer
    value: Buffer
    left: Buffer


def reduced(
    layout: UnitLayout,
    base: Read,
    deltas: Sequence[Delta],
    remainder: Read | None = None,
    weights: Sequence[int] | None = None,
) -> Iterator[Reduced]:
    """The mean of deltas, run by run. For a single delta without remainder, B is this delta.

    Args:
        layout: layout of the unit.
        base: reads v.
        deltas: deltas of the contributors, in this order.
        remainder: g of the previous mean. None: no remainder.
        weights: see `codecs.mean_chunk`.

    Raises:
        BadBlob: as `decode_delta`, and `codecs.check_finite` of the value.
    """
    wanted = mean_of_deltas(layout, deltas, remainder, weights)
    before = agreed_elements(layout, base)
    given = deltas[0].read if len(deltas) == 1 and remainder is None else None
    for start, stop in runs(layout):
        t = wanted(start, stop)
        if given:
            offset = elements_bytes(start, layout.coding)
            delta = given(offset, elements_bytes(stop, layout.coding) - offset)
        else:
            delta = encode_run(t, layout.coding)
        v, by = before(start, stop), decode_run(delta, stop - start, layout.coding)
        after = moved_run(layout, start, v, by)
        yield Reduced(delta, bytes_of(after), bytes_of(t.sub_(after.float() - v.float())))


def mean_of_deltas(
    layout: UnitLayout,
    deltas: Sequence[Delta],
    remainder: Read | None = None,
    weights: Sequence[int] | None = None,
) -> ReadElements:
    """The values that a reducer encodes: t = mean of dec(delta) in this order, plus g, in fp32."""
    decoded = [decode_delta(layout, delta) for delta in deltas]

    def elements(start: int, stop: int) -> Tensor:
        mean = mean_chunk([each(start, stop) for each in decoded], weights)
        if remainder is None:
            return mean
        return mean.add_(values_in(remainder(4 * start, 4 * (stop - start)), "fp32"))

    return elements
