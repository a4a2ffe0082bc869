"""Live values of a unit against its agreed one: what is offered, and how they follow [W8, M8]."""

from __future__ import annotations

import torch
from torch import Tensor

from swarm.codecs import Content, Read, read_part, read_parts
from swarm.deltas.units import (
    Delta,
    agreed_elements,
    decode_delta,
    elements_of,
    encode_delta,
    in_parts,
)
from swarm.experts import UnitLayout
from swarm.peer.unit_threads import Parts


def difference(engine: Parts, layout: UnitLayout, base: Read) -> Content:
    """The delta x - v of a unit that is trained here: all that the swarm has not got of it."""
    live, agreed = elements_of(layout, engine.read_part), agreed_elements(layout, base)
    return encode_delta(layout, lambda start, stop: live(start, stop) - agreed(start, stop).float())


def follow(
    engine: Parts, layout: UnitLayout, before: Read, after: Read, counted: Delta | None = None
) -> None:
    """Moves a live value x as the agreed one moved: to x + (v' - v) - c.

    In fp32, each operation rounded by itself; moments stay. Holds some copies of a run.

    Args:
        engine: holds x.
        layout: of the unit.
        before: of v.
        after: of v'.
        counted: c, this peer's own part of the move; None: it has none.
    """
    old, new = agreed_elements(layout, before), agreed_elements(layout, after)
    own = decode_delta(layout, counted) if counted else None

    def moves(start: int, stop: int) -> Tensor:
        moved = new(start, stop).float() - old(start, stop).float()
        return moved if own is None else moved.sub_(own(start, stop))

    for part, moved in in_parts(layout, moves):
        engine.write_part(part, engine.read_part(part) + moved)


def rebase(engine: Parts, layout: UnitLayout, before: Read, after: Read) -> None:
    """Moves a live value x from one agreed value to another: to v' + (x - v).

    Where there is no difference it has the agreed bits, a negative zero's included. A chunk of a
    few MiB at a time: 24 bytes for each of `codecs.CHUNK_ELEMENTS` at the peak.

    Args:
        engine: holds x.
        layout: of the unit.
        before: of v.
        after: of v'.
    """
    for part, agreed in read_parts(layout, after):
        moved = engine.read_part(part) - read_part(layout, part, before).float()
        value = agreed.float()
        engine.write_part(part, torch.where(moved == 0, value, value + moved))
