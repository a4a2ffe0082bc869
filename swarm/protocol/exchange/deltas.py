"""Values made from deltas (delta fetches), and the remainders of means of deltas. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from swarm.protocol.values.manifest import Digest, Manifest, Unit

MAX_DELTAS = 8
"""Most deltas from a stored value to a wanted one; a peer that would need more fetches the
value."""


@dataclass(frozen=True)
class Move:
    """How a value is made from the previous value."""

    unit: Unit
    base: Digest
    delta: Digest
    value: Digest


def moves_of(manifests: Iterable[Manifest]) -> dict[Digest, Move]:
    """The move to each value of these manifests that was made by a delta, by the value's digest."""
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
        None if no moves lead to the value, or if the value has fewer bytes than the deltas.
    """
    way: list[Move] = []
    while value not in stored:
        move = moves.get(value)
        if move is None or len(way) == MAX_DELTAS or (len(way) + 1) * delta_bytes >= value_bytes:
            return None
        way.append(move)
        value = move.base
    return tuple(reversed(way))


R = TypeVar("R")


class Remainders(Generic[R]):
    """Remainders of the units that this peer averages. `R` is the type of a remainder."""

    def __init__(self, tip: Digest, rounds: int) -> None:
        """Starts without remainders.

        Args:
            tip: digest of the tip that this peer has applied last.
            rounds: for how many rounds a remainder is valid if this peer makes no mean of its unit.
        """
        self._tip = tip
        self._rounds = rounds
        self._left: dict[Unit, tuple[int, R]] = {}
        """The remainder of each unit, with the round of its mean."""
        self._found: dict[tuple[Unit, Digest], R] = {}

    def of(self, unit: Unit) -> R | None:
        """The remainder to add to the next mean of a unit, if any."""
        left = self._left.get(unit)
        return left[1] if left else None

    def found(self, tip: Digest, unit: Unit, delta: Digest, left: R) -> None:
        """Notes the remainder of a mean on this tip; it counts if `delta` becomes agreed."""
        if tip == self._tip:
            self._found[unit, delta] = left

    def applied(self, manifest: Manifest, before: Manifest) -> list[R]:
        """Continues with the next tip; returns the dropped remainders."""
        found, self._found, self._tip = self._found, {}, manifest.digest
        if self._is_another_line(manifest, before):
            return [*found.values(), *self._drop(list(self._left))]
        if self._passed_some_over(manifest, before):
            return [*found.values(), *self._drop([unit for unit, _ in found])]
        for (unit, delta), left in found.items():
            if unit in manifest.sources and manifest.entries[unit].delta == delta:
                self._left[unit] = (manifest.round, left)
        old = [u for u, (at, _) in self._left.items() if manifest.round - at > self._rounds]
        return self._drop(old)

    def _is_another_line(self, manifest: Manifest, before: Manifest) -> bool:
        """Whether the new tip is on another branch than the means of this peer."""
        return manifest.generation != before.generation

    def _passed_some_over(self, manifest: Manifest, before: Manifest) -> bool:
        """Whether a skipped manifest may already contain the remainders."""
        return manifest.parent != before.digest

    def _drop(self, units: list[Unit]) -> list[R]:
        dropped = [self._left.pop(unit, None) for unit in units]
        return [left for _, left in filter(None, dropped)]

    def items(self) -> Iterator[tuple[Unit, R]]:
        """All remainders: those that count, and remainders whose delta may become agreed."""
        yield from ((unit, left) for unit, (_, left) in self._left.items())
        yield from ((unit, left) for (unit, _), left in self._found.items())
