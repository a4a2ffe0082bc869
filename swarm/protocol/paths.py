"""How a value is made of one that is here, by the deltas that lead from that to it [W7]. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from swarm.protocol.manifest import Digest, Manifest, Unit

MAX_DELTAS = 8
"""On the way to one value; a peer that lacks more fetches the value."""


@dataclass(frozen=True)
class Move:
    """How one value is made of the one before."""

    unit: Unit
    base: Digest
    delta: Digest
    value: Digest


def moves_of(manifests: Iterable[Manifest]) -> dict[Digest, Move]:
    """Of each value of these manifests that a delta made: how, by its name."""
    moves = {}
    for manifest in manifests:
        for unit, entry in manifest.entries.items():
            if entry.base is not None and entry.delta is not None:
                moves[entry.digest] = Move(unit, entry.base, entry.delta, entry.digest)
    return moves


def way_to(
    value: Digest,
    moves: Mapping[Digest, Move],
    stored: Collection[Digest],
    delta_bytes: int,
    value_bytes: int,
) -> tuple[Move, ...] | None:
    """The moves that lead from a value that is `stored` to the wanted one, in their order.

    Returns:
        None if there is no such way, or the value itself is fewer bytes.
    """
    way: list[Move] = []
    while value not in stored:
        move = moves.get(value)
        if move is None or len(way) == MAX_DELTAS or (len(way) + 1) * delta_bytes >= value_bytes:
            return None
        way.append(move)
        value = move.base
    return tuple(reversed(way))
