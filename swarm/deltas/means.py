"""What a reducer makes of several deltas of one unit, and what it keeps of that for later means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from swarm.codecs import Buffer, Content, Read, bytes_of, mean_chunk, values_in
from swarm.deltas.units import Delta, ReadElements, decode_delta, groups
from swarm.experts import UnitLayout


def mean_of_deltas(
    layout: UnitLayout,
    deltas: Sequence[Delta],
    carried: ReadElements | None = None,
    weights: Sequence[int] | None = None,
) -> ReadElements:
    """What a reducer encodes: t = the mean of dec(delta) in this order, plus what it carries; fp32.

    Args:
        layout: of the unit.
        deltas: of the contributors.
        carried: g, what earlier means of this reducer left over; None is 0.
        weights: as `codecs.mean_chunk`.

    Raises:
        BadBlob: here and while it is read, as `decode_delta`.
    """
    decoded = [decode_delta(layout, delta) for delta in deltas]

    def elements(start: int, stop: int) -> Tensor:
        mean = mean_chunk([each(start, stop) for each in decoded], weights)
        return mean if carried is None else mean.add_(carried(start, stop))

    return elements


def left_over(
    layout: UnitLayout, wanted: ReadElements, before: ReadElements, after: ReadElements
) -> Content:
    """What a move of the agreed value lacks: g = t - (v' - v), fp32, for `left_over_elements`.

    Against the value and not against the delta alone, so that what rounding the value to its agreed
    type took is in it.
    """

    def pieces() -> Iterator[Buffer]:
        for start, stop in groups(layout):
            moved = after(start, stop).float() - before(start, stop).float()
            yield bytes_of(wanted(start, stop) - moved)

    return Content(4 * layout.num_elements, pieces)


def left_over_elements(read: Read) -> ReadElements:
    """The elements of what `left_over` made; not to be written to."""
    return lambda start, stop: values_in(read(4 * start, 4 * (stop - start)), "fp32")
