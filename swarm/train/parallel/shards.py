"""Which elements of the trained tensors each of several ranks keeps masters and moments of. Pure.

Each parameter is cut by itself into runs of its flattened elements, one for each rank, of the same
length but for less than a step. A run begins where the update of its elements has the bits of an
update of the whole parameter: at a multiple of the width of a vector register, and in int8 at a
block of its row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from swarm.train.adam_moments import BLOCK, MomentsFormat, Piece
from swarm.train.sizes import is_cast

STEP = 64
"""Elements: no processor has wider registers."""


def is_compute_copy(name: str) -> bool:
    """Whether every use of a parameter casts it, so that ranks need no fp32 master of all of it.

    Attention, head and experts; a tied head is an embedding, whose fp32 values are the residual
    stream.
    """
    return is_cast(name) or name == "lm_head.weight"


@dataclass(frozen=True)
class Cut:
    """A parameter that is cut over ranks.

    Attributes:
        rows: experts of a stack, else 1.
        size: elements of a row.
        bounds: of the flattened parameter, where the run of each rank begins, and the end.
        by_row: whether moments lie in blocks that begin with each row.
    """

    rows: int
    size: int
    bounds: tuple[int, ...]
    by_row: bool

    @classmethod
    def of(cls, rows: int, size: int, ways: int, form: MomentsFormat) -> Cut:
        """Cuts a parameter over so many ranks.

        Args:
            rows: experts of a stack, else 1.
            size: elements of a row.
            ways: number of ranks.
            form: of the moments.
        """
        by_row = form == "int8"
        step, unit = (BLOCK, size) if by_row else (STEP, rows * size)

        def begin(target: int) -> int:
            row, inner = divmod(target, unit)
            return row * unit + inner // step * step

        starts = [begin(rows * size * rank // ways) for rank in range(ways)]
        return cls(rows, size, (*starts, rows * size), by_row)

    def run(self, rank: int) -> slice:
        """The elements of a rank, of the flattened parameter."""
        return slice(self.bounds[rank], self.bounds[rank + 1])

    def in_row(self, rank: int, row: int) -> slice:
        """Those of a row, counted from where it begins; perhaps none."""
        run, first = self.run(rank), row * self.size
        start = min(max(run.start - first, 0), self.size)
        return slice(start, max(start, min(run.stop - first, self.size)))

    def pieces(self, name: str, rank: int) -> Iterator[Piece]:
        """The run of a rank, apart where blocks begin anew; the parameter is one row elsewhere."""
        if not self.by_row:
            run = self.run(rank)
            if run.stop > run.start:
                yield Piece(name, 0, run.start, run.stop, 0)
            return
        for row in range(self.rows):
            part = self.in_row(rank, row)
            if part.stop > part.start:
                yield Piece(name, row, part.start, part.stop, row * self.size)

    def together(self, piece: Piece, step: int) -> Iterator[tuple[Piece, Piece]]:
        """A piece cut as an update of the whole parameter is, and the whole of each of these.

        Args:
            piece: of `pieces`.
            step: elements that the update takes at once.
        """
        end = self.size if self.by_row else self.rows * self.size
        for start in range(piece.start // step * step, piece.stop, step):
            stop = min(start + step, end)
            part = Piece(
                piece.name, piece.row, max(start, piece.start), min(stop, piece.stop), piece.offset
            )
            yield part, Piece(piece.name, piece.row, start, stop, piece.offset)
