"""What a reducer makes of several deltas of one unit, and what it keeps of that for later means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from swarm.codecs import Buffer, Read, bytes_of, mean_chunk, values_in
from swarm.codings import elements_bytes
from swarm.deltas.units import (
    Delta,
    ReadElements,
    agreed_elements,
    decode_delta,
    decode_run,
    encode_run,
    moved_run,
    runs,
)
from swarm.experts import UnitLayout


@dataclass(frozen=True)
class Reduced:
    """One run of what a reducer makes.

    Attributes:
        delta: B, bytes of the delta that comes nearest to t, the mean with the remainder.
        value: v' = v + dec(B): bytes of the value.
        left: g = t - (v' - v), fp32: what the move lacks. Against the value, not against the delta
            alone, so that what rounding to the agreed type took is in it.
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
    """The mean of deltas, run by run; B of one without remainder is that one.

    Args:
        layout: of the unit.
        base: of v.
        deltas: of the contributors, in this order.
        remainder: of g; what the mean before left over; None: nothing.
        weights: as `codecs.mean_chunk`.

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
    """What a reducer encodes: t = the mean of dec(delta) in this order, plus g; fp32."""
    decoded = [decode_delta(layout, delta) for delta in deltas]

    def elements(start: int, stop: int) -> Tensor:
        mean = mean_chunk([each(start, stop) for each in decoded], weights)
        if remainder is None:
            return mean
        return mean.add_(values_in(remainder(4 * start, 4 * (stop - start)), "fp32"))

    return elements
