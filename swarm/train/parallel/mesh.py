"""Who holds what: the ranks of a peer in groups, and the experts of a layer over a group. Pure.

A group is `pp` x `ep` consecutive ranks that hold every layer and every expert once. Rank r has the
seat r % (pp * ep) of its group, and that seat is expert seat seat % ep of stage seat // ep.

- With `pp` > 1 the layers are cut over the stages of a group, one after the other.
- With `ep` > 1 the experts of each layer are dealt out over the `ep` ranks of its stage: each holds
  whole experts, the same ones in every layer, and all shared tensors of the stage. Whole experts
  are what peers own, offer and adopt, so that nothing of it has to be cut or put together.
- With `tp` > 1, which then is `ep`, these ranks share micro-batches: each has its heads of
  attention, its experts and, outside of both, its tokens. They gather and add up activations
  several times a layer, more often than anything else that ranks do together, so they are next to
  each other.

Consecutive ranks are those with the shortest way to each other, and `ep` is the inner dimension:
of a micro-batch K rows a token go to experts and back in every layer, and only one from stage to
stage. The ranks of one seat, one in each group, hold the same and add up their gradients.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

Sets = tuple[tuple[int, ...], ...]
"""Sets of ranks, each rank in one of them."""


@dataclass(frozen=True)
class Mesh:
    """The ranks of a peer.

    Attributes:
        size: number of ranks.
        ep: ranks of a stage, over which the experts are dealt out.
        pp: stages of a group, over which the layers are cut; `ep` times `pp` divides `size`.
        tp: ranks of a stage, over which the heads of attention are cut: 1 or `ep`.
    """

    size: int
    ep: int
    pp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        """Holds the rule."""
        assert self.ep > 0 and self.pp > 0 and self.size % self.width == 0, self
        assert self.tp in {1, self.ep}, self

    @property
    def width(self) -> int:
        """Ranks of a group, which hold every layer and expert once."""
        return self.ep * self.pp

    @property
    def replicas(self) -> Sets:
        """The ranks of each seat: they hold the same."""
        return tuple(tuple(range(seat, self.size, self.width)) for seat in range(self.width))

    @property
    def sharers(self) -> Sets:
        """The ranks of each stage of each group: they share the experts of its layers."""
        return tuple(tuple(range(at, at + self.ep)) for at in range(0, self.size, self.ep))

    @property
    def pipelines(self) -> Sets:
        """Of each group, and each expert seat in it, a rank of every stage, in their order."""
        width, ep = self.width, self.ep
        firsts = (group + seat for group in range(0, self.size, width) for seat in range(ep))
        return tuple(tuple(range(first, first + width, ep)) for first in firsts)

    @property
    def stages(self) -> Sets:
        """The ranks of each stage in all groups: they hold the same shared tensors."""
        ranks = range(self.size)
        return tuple(
            tuple(rank for rank in ranks if self.stage(rank) == stage) for stage in range(self.pp)
        )

    @property
    def streams(self) -> Sets:
        """Ranks with different micro-batches: all of a stage, unless some share these."""
        return self.stages if self.tp == 1 else self.replicas

    @property
    def ends(self) -> Sets:
        """First and last rank of each pipeline together, all others alone."""
        if self.pp == 1:
            return tuple((rank,) for rank in range(self.size))
        both = [(ranks[0], ranks[-1]) for ranks in self.pipelines]
        inner = [(rank,) for ranks in self.pipelines for rank in ranks[1:-1]]
        return (*both, *inner)

    def stage(self, rank: int) -> int:
        """The stage of a rank."""
        return rank % self.width // self.ep


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
