"""Which part of a unit's gradients and updates each of several processes takes. Pure.

An update is made piece by piece (`optimizer.py`), and a piece is one process's, so that every
element is updated in the very operation in which one process alone would have updated it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from swarm.train.adam_moments import Piece
from swarm.train.streaming.arena import Packing


def begin_of(piece: Piece, packing: Packing) -> int:
    """The byte of a packed fp32 buffer where a piece begins."""
    (field,) = (field for field in packing.fields if field.name == piece.name)
    return field.offset + 4 * (piece.offset + piece.start)


def runs_of(begins: Sequence[int], num_bytes: int, ways: int) -> tuple[slice, ...]:
    """Cuts a buffer into runs of bytes of about equal length, some perhaps empty.

    Args:
        begins: where a run may begin; one of them is 0.
        num_bytes: of the buffer.
        ways: number of runs.
    """
    places = sorted({*begins, num_bytes})

    def nearest(target: float) -> int:
        return min(places, key=lambda place: abs(place - target))

    bounds = [nearest(num_bytes * way / ways) for way in range(ways + 1)]
    return tuple(slice(start, stop) for start, stop in itertools.pairwise(bounds))
