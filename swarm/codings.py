"""The codings of deltas: their names, and the number of bytes that they take. No tensors here.

A *delta* says how far a unit's agreed value moves: v' = v + dec(delta). Its elements are taken in
the order of the unit's layout, in blocks of `BLOCK`. The last block is filled up with zeros. A
group of `GROUP` blocks (the last group may have fewer) begins with one bf16 scale for each block,
little-endian. The codes of its blocks follow, as `swarm.deltas.blocks` says. With "bf16", each
element is a bf16 number, without blocks. With "none", there is no delta, and the value itself is
sent. There is no header, so the size follows from the layout.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarm.config import Coding
from swarm.experts import UnitLayout

BLOCK = 256
"""Elements that share a scale."""
GROUP = 256
"""Blocks of a group, whose scales are stored together."""
SCALE_BYTES = 2
CODE_BYTES: Mapping[Coding, int] = {"b2": BLOCK // 4, "b1": BLOCK // 8}
"""Bytes of a block's codes, for each coding that has blocks."""


def coded_bytes(layout: UnitLayout) -> int:
    """Bytes of a unit's new value on the wire: of its delta, or with "none" of the value itself."""
    if layout.coding == "none":
        return layout.num_bytes
    return elements_bytes(layout.num_elements, layout.coding)


def elements_bytes(num_elements: int, coding: Coding) -> int:
    """Bytes of a delta's first elements, in whole groups, or of all its elements."""
    if coding == "bf16":
        return 2 * num_elements
    return -(-num_elements // BLOCK) * (SCALE_BYTES + CODE_BYTES[coding])
