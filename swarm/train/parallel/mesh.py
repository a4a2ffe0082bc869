"""Who holds what: the ranks of a peer in groups, and the experts of a layer over a group. Pure.

With `ep` > 1 the experts are dealt out over groups of `ep` consecutive ranks: each rank of a group
holds whole experts, the same ones in every layer, and all shared tensors. Whole experts are what
peers own, offer and adopt, so that nothing of it has to be cut or put together. Consecutive ranks
are those with the shortest way to each other. Rank r has the seat r % ep of the group r // ep; the
ranks of one seat, one in each group, hold the same experts and add up their gradients.

With `pp` > 1 the layers are cut over such groups instead: the seats of a group are the stages of a
pipeline.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Mesh:
    """The ranks of a peer.

    Attributes:
        size: number of ranks.
        ep: ranks of a group, over which the experts are dealt out; divides `size`.
        pp: ranks of a group, over which the layers are cut; likewise. One of both is 1.
    """

    size: int
    ep: int
    pp: int = 1

    def __post_init__(self) -> None:
        """Holds the rule."""
        assert 1 in {self.ep, self.pp} and self.width > 0 and self.size % self.width == 0, self

    @property
    def width(self) -> int:
        """Ranks of a group."""
        return self.ep * self.pp

    @property
    def groups(self) -> tuple[range, ...]:
        """The ranks of each group: together they hold every expert and layer once."""
        width = self.width
        return tuple(range(first, first + width) for first in range(0, self.size, width))

    @property
    def replicas(self) -> tuple[range, ...]:
        """The ranks of each seat: they hold the same."""
        return tuple(range(seat, self.size, self.width) for seat in range(self.width))

    @property
    def ends(self) -> tuple[tuple[int, ...], ...]:
        """First and last rank of each group together, all others alone."""
        both = [(group[0], group[-1]) for group in self.groups if self.width > 1]
        inner = [(rank,) for group in self.groups for rank in group[1:-1]]
        return (*both, *inner)

    def group(self, rank: int) -> range:
        """The group of a rank."""
        return self.groups[rank // self.width]

    def seat(self, rank: int) -> int:
        """The place of a rank in its group."""
        return rank % self.width


@dataclass(frozen=True)
class Move:
    """An expert that goes from one seat to another."""

    expert: int
    giver: int
    taker: int


@dataclass(frozen=True)
class Dealing:
    """Which seat of a group holds which experts.

    Attributes:
        owned: of each seat the experts that this peer trains, ascending.
        frozen: of each seat the others, ascending.
    """

    owned: tuple[tuple[int, ...], ...]
    frozen: tuple[tuple[int, ...], ...]

    @property
    def order(self) -> tuple[int, ...]:
        """All experts: seat after seat, and of each the owned ones first."""
        seats = zip(self.owned, self.frozen, strict=True)
        return tuple(expert for owned, frozen in seats for expert in (*owned, *frozen))

    @property
    def counts(self) -> tuple[int, ...]:
        """How many experts each seat holds."""
        return tuple(len(o) + len(f) for o, f in zip(self.owned, self.frozen, strict=True))

    @property
    def seats(self) -> dict[int, int]:
        """Expert -> seat."""
        kinds = (self.owned, self.frozen)
        return {e: seat for kind in kinds for seat, experts in enumerate(kind) for e in experts}

    def moves(self, to: Dealing) -> tuple[Move, ...]:
        """What goes elsewhere when `to` takes the place of this dealing, by expert."""
        now, then = self.seats, to.seats
        return tuple(Move(e, now[e], then[e]) for e in sorted(now) if now[e] != then[e])


def deal(
    owned: Collection[int], num_experts: int, ep: int, former: Dealing | None = None
) -> Dealing:
    """Deals the experts of a layer out over the seats of a group.

    Owned and frozen experts are each dealt evenly, since they cost different memory: two seats
    differ by one of a kind at most. As few experts as possible leave their seat, and among these
    rather those whose kind changes: what was trained before has moments to take along.

    Args:
        owned: the experts that this peer trains.
        num_experts: of a layer.
        ep: number of seats.
        former: the dealing so far; None for none.
    """
    seats = former.seats if former else {}
    before = {e for experts in former.owned for e in experts} if former else set[int]()
    trained = sorted(set(owned))
    others = [expert for expert in range(num_experts) if expert not in set(trained)]
    mine = _dealt(trained, seats, before, [0] * ep)
    rest = _dealt(others, seats, set(seats) - before, [len(each) for each in mine])
    return Dealing(mine, rest)


def _dealt(
    experts: Sequence[int], seats: Mapping[int, int], settled: Collection[int], taken: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Deals the experts of one kind.

    Args:
        experts: of this kind, ascending.
        seats: where experts lie so far.
        settled: those that were of this kind before.
        taken: how many of the other kind each seat has: those with few come first.
    """
    ep = len(taken)
    there: list[list[int]] = [[] for _ in range(ep)]
    for expert in sorted(experts, key=lambda e: (e not in settled, e)):
        if expert in seats:
            there[seats[expert]].append(expert)
    least, more = divmod(len(experts), ep)
    # Seats that hold most already may hold one more: each of these is an expert less that moves.
    first = sorted(range(ep), key=lambda seat: (-len(there[seat]), taken[seat], seat))[:more]
    room = [least + (seat in first) for seat in range(ep)]
    kept = [there[seat][: room[seat]] for seat in range(ep)]
    staying = {expert for each in kept for expert in each}
    rest = iter([expert for expert in experts if expert not in staying])
    for seat in range(ep):
        kept[seat] += [next(rest) for _ in range(room[seat] - len(kept[seat]))]
    return tuple(tuple(sorted(each)) for each in kept)
