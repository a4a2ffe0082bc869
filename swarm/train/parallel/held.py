"""What one rank has of the masters and moments of a parameter that is cut over ranks.

Shapes: X elements of a tensor, x elements of a piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.train.adam_moments import BLOCK, SCALE, Moments, Piece
from swarm.train.parallel.shards import Cut

MASTER = "master"


@dataclass(frozen=True)
class Held:
    """The state of a piece of a parameter, which this rank has.

    Attributes:
        piece: which.
        master_x: fp32; a view of the parameter where that is fp32.
        moments: of one row, the piece.
    """

    piece: Piece
    master_x: Tensor
    moments: Moments

    def common(self, flat: slice) -> slice:
        """What it has of a run of the flattened parameter; perhaps nothing."""
        own = self.piece.in_whole
        start = max(own.start, flat.start)
        return slice(start, max(start, min(own.stop, flat.stop)))

    def part(self, kind: str, flat: slice) -> Tensor:
        """A view of what belongs to a run of the flattened parameter, by the kind of `state`."""
        if flat.stop <= flat.start:
            return self.master_x[:0]
        first = self.piece.in_whole.start
        local = slice(flat.start - first, flat.stop - first)
        if kind == MASTER:
            return self.master_x[local]
        return self.moments.parts[kind][0, places(kind, local)]


@dataclass(frozen=True)
class Row:
    """Where a tensor of the model lies: parameter, row of it, shape of the tensor."""

    name: str
    index: int
    shape: torch.Size


def take(held: Iterable[Held], cut: Cut, row: int, parts: Mapping[str, Tensor]) -> None:
    """Puts whole parts [1, X] of a row where pieces of it are held."""
    first = row * cut.size
    for each in held:
        run = each.common(slice(first, first + cut.size))
        for kind, part in parts.items():
            own = part[0, places(kind, slice(run.start - first, run.stop - first))]
            each.part(kind, run).copy_(own)


def places(kind: str, elements: slice) -> slice:
    """Where a kind has what belongs to these elements of a row, which begin with a block."""
    if not kind.endswith(SCALE) or elements.stop <= elements.start:
        return elements
    return slice(elements.start // BLOCK, -(-elements.stop // BLOCK))
