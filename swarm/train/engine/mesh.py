"""Which ranks hold which layers and experts, and the links between ranks. Pure."""

from __future__ import annotations

import bisect
import functools
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, combinations, pairwise
from math import inf
from typing import Literal

from swarm.config import RunConfig
from swarm.model.cost import head_step_flops, layer_step_flops
from swarm.model.stage import Stage

BusName = Literal["nvlink", "pcie"]
NETWORK_SHARE = 0.96
"""Usable share of a network's nominal rate: 48 of 50 GB/s, NVIDIA/nccl-tests issue 267."""


@dataclass(frozen=True)
class Bus:
    """The link between the GPUs of one machine.

    Attributes:
        name: name of the kind of link.
        gpu_gb_s: rate of one GPU, each way.
        mixed_gb_s: rate of all GPUs of a machine together, when each GPU sends to all others.
    """

    name: BusName
    gpu_gb_s: float
    mixed_gb_s: float = inf


# NVLink 4 has 18 links of 25 GB/s each way, 450 GB/s (NVIDIA H100 data sheet). NCCL assumes 20.6 a
# link (SM90_NVLINK_BW in its src/graph/topo.h). A switch carries the full rate of all GPUs.
NVLINK = Bus("nvlink", 18 * 20.6)
# PCIe 4 x16 has 32 GB/s each way. NCCL assumes 24 GB/s, twice its PCI_BW of generation 3, and also
# 24 GB/s each way between the sockets of an EPYC (AMD_ZEN34_BW). When all GPUs exchange bytes, a
# quarter of the bytes goes from one socket to the other. Without peer access bytes pass through the
# host, and the rate is lower.
PCIE = Bus("pcie", 24.0, 4 * 24.0)
BUSES: dict[BusName, Bus] = {bus.name: bus for bus in (NVLINK, PCIE)}


@dataclass(frozen=True)
class Fabric:
    """The ranks of a peer in equal machines.

    Attributes:
        size: number of ranks.
        per_node: most ranks in a machine.
        bus: bus within a machine.
        between_gb_s: rate of one machine to all others, each way.
    """

    size: int = 1
    per_node: int = 1
    bus: Bus = PCIE
    between_gb_s: float = 1.25

    @property
    def nodes(self) -> int:
        """Number of machines."""
        return -(-self.size // self.per_node)

    def exchange_s(self, parts: Sequence[Sequence[int]], leaving: float) -> float:
        """Seconds of an exchange in which each rank sends equal amounts to the others of its part.

        Args:
            parts: sets of ranks that exchange at the same time.
            leaving: bytes that each rank sends. A rank that is alone in its part sends nothing.
        """
        near, far = [0.0] * self.size, [0.0] * self.size
        for part in parts:
            neighbours = Counter(rank // self.per_node for rank in part)
            for rank in part if len(part) > 1 else ():
                share = (neighbours[rank // self.per_node] - 1) / (len(part) - 1)
                near[rank] += leaving * share
                far[rank] += leaving * (1 - share)
        mixed_s = max(self._sums(near)) / (self.bus.mixed_gb_s * 1e9)
        return max(mixed_s, self._seconds(near, far))

    def stream_s(self, pairs: Sequence[tuple[int, int]], num_bytes: float) -> float:
        """Seconds in which the first rank of each pair sends to the second, all pairs at once."""
        near, far = [0.0] * self.size, [0.0] * self.size
        for sender, receiver in pairs:
            is_near = sender // self.per_node == receiver // self.per_node
            (near if is_near else far)[sender] += num_bytes
        return self._seconds(near, far)

    def _seconds(self, near: Sequence[float], far: Sequence[float]) -> float:
        """Seconds of the slower of bus and network, which are used at the same time."""
        bus_s = max(near) / (self.bus.gpu_gb_s * 1e9)
        return max(bus_s, max(self._sums(far)) / (self.between_gb_s * NETWORK_SHARE * 1e9))

    def _sums(self, of_ranks: Sequence[float]) -> list[float]:
        starts = range(0, self.size, self.per_node)
        return [sum(of_ranks[start : start + self.per_node]) for start in starts]

    def __str__(self) -> str:
        """The ranks in words."""
        here = min(self.size, self.per_node)
        words = f"{here} in a machine over {self.bus.name}" if here > 1 else "one in a machine"
        if self.nodes == 1:
            return words
        return f"{words}, {self.nodes} machines over {8 * self.between_gb_s:g} Gbit/s"


ALONE = Fabric()
"""The fabric of a single rank."""


@dataclass(frozen=True)
class Cut:
    """The stages of a pipeline.

    Attributes:
        stages: stages of each rank. Every layer is in one stage.
        shares: each stage's part of the operations of a step. They sum to 1.
        slot: the slowest chunk's part of the operations. Without chunks, the slowest stage's part.
        reason: reason of the cut, in a sentence.
    """

    stages: tuple[Stage, ...]
    shares: tuple[float, ...]
    slot: float
    reason: str


def bubble_of(stages: int, micro_batches: float, chunks: int = 1) -> float:
    """The share of a pipeline's time in which a stage waits: (p - 1) / (v m + p - 1).

    This holds for stages of equal duration, and equally for gpipe and 1f1b, which have one chunk
    (Narayanan et al., arXiv 2104.04473, section 2.2, there as a share of the compute time).

    Args:
        stages: ranks of the pipeline, p.
        micro_batches: number of micro-batches that go through the pipeline, m. May be a mean.
        chunks: runs of layers that each rank has, v.
    """
    return (stages - 1) / (chunks * micro_batches + stages - 1)


def flows_of(micro_batches: int, stages: int) -> tuple[int, ...]:
    """The micro-batches that an interleaved pipeline takes in one pass of its schedule.

    Torch's schedule takes micro-batches in equal rounds, so max(1, m // p) must divide their
    number. For other numbers, the micro-batches beyond a multiple of the stages form a second pass.
    So gradients are added up in the same order.

    Args:
        micro_batches: number of micro-batches of the pipeline, m.
        stages: p.
    """
    if micro_batches % max(1, micro_batches // stages) == 0:
        return (micro_batches,)
    rest = micro_batches % stages
    return micro_batches - rest, rest


def cut_of(run: RunConfig, num_owned: int, stages: int, chunks: int = 1) -> Cut:
    """Cuts the layers of a model evenly by the operations of a step.

    Args:
        run: the model.
        num_owned: experts that the peer trains.
        stages: number of stages, at least one.
        chunks: runs of layers that each stage has. With two stages of two chunks, the first stage
            has the first and third quarter of the layers. Each chunk has at least one layer.
    """
    layers = run.model.num_hidden_layers
    layer, head = layer_step_flops(run, num_owned), head_step_flops(run.model)
    costs = [layer] * (layers - 1) + [layer + head]
    parts = cut_evenly(costs, stages * chunks)
    sums = [sum(costs[part.start : part.stop]) / sum(costs) for part in parts]
    shares = tuple(sum(sums[stage::stages]) for stage in range(stages))
    names = " | ".join(f"{part.start}-{part.stop - 1}" for part in parts)
    slowest = "chunk" if chunks > 1 else "stage"
    reason = (
        f"layers {names}, with the head, which counts as {head / layer:.1f} layers, in the last "
        f"{slowest}; the slowest one computes {max(sums):.1%} of a step"
    )
    held = [parts[stage::stages] for stage in range(stages)]
    layers_of = [own[0] if chunks == 1 else tuple(chain(*own)) for own in held]
    return Cut(tuple(Stage(each, layers) for each in layers_of), shares, max(sums), reason)


def cut_evenly(costs: Sequence[float], stages: int) -> tuple[range, ...]:
    """Cuts a row of costs into consecutive parts so that the largest sum is as small as possible.

    Of several such cuts, the cut with the least sum of squares is taken, so that the other parts
    are even too.

    Args:
        costs: cost of each item, above 0.
        stages: number of parts, at most the number of items. Each part has at least one item.
    """
    assert 0 < stages <= len(costs), (stages, len(costs))
    return _cut_evenly(tuple(costs), stages)


@functools.lru_cache(maxsize=256)
def _cut_evenly(costs: tuple[float, ...], stages: int) -> tuple[range, ...]:
    """Cached, because a planner asks for the same cut many times."""
    sums = [0.0, *accumulate(costs)]
    possible = sorted(sums[stop] - sums[start] for start, stop in combinations(range(len(sums)), 2))
    limit = possible[
        bisect.bisect_left(possible, x=True, key=lambda limit: _parts(sums, limit) <= stages)
    ]
    # For each number of first items: the least sum of squares, and the ends of the parts.
    least: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for _ in range(stages):
        found: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start, stop in combinations(range(len(sums)), 2):
            part = sums[stop] - sums[start]
            if start in least and part <= limit:
                squares, ends = least[start]
                with_it = (squares + part**2, (*ends, stop))
                found[stop] = min(found.get(stop, with_it), with_it)
        least = found
    _, ends = least[len(costs)]
    return tuple(range(start, stop) for start, stop in pairwise(ends))


def _parts(sums: Sequence[float], limit: float) -> float:
    """The least number of consecutive parts with sums within a limit."""
    number, start = 0, 0
    while start < len(sums) - 1:
        stop = start
        while stop + 1 < len(sums) and sums[stop + 1] - sums[start] <= limit:
            stop += 1
        if stop == start:
            return float("inf")
        number, start = number + 1, stop
    return number


Sets = tuple[tuple[int, ...], ...]
"""Sets of ranks. Each rank is in one set."""


@dataclass(frozen=True)
class Mesh:
    """The ranks of a peer, in groups of equal size. The seat of a rank is its place in its group.

    Attributes:
        size: number of ranks.
        ep: ranks of a stage over which the experts are distributed.
        pp: stages of a group over which the layers are cut. `ep` times `pp` divides `size`.
        tp: ranks of a stage over which the heads of attention are cut: 1 or `ep`.
    """

    size: int
    ep: int
    pp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        """Checks the sizes."""
        assert self.ep > 0 and self.pp > 0 and self.size % self.width == 0, self
        assert self.tp in {1, self.ep}, self

    @property
    def width(self) -> int:
        """Number of ranks of a group, which together hold every layer and expert once."""
        return self.ep * self.pp

    @property
    def replicas(self) -> Sets:
        """The ranks of each seat, which hold the same tensors."""
        return tuple(tuple(range(seat, self.size, self.width)) for seat in range(self.width))

    @property
    def sharers(self) -> Sets:
        """The ranks of each stage of each group, which share the experts of the stage's layers."""
        return tuple(tuple(range(at, at + self.ep)) for at in range(0, self.size, self.ep))

    @property
    def pipelines(self) -> Sets:
        """The pipeline of each expert seat of each group: a rank of every stage, in their order."""
        width, ep = self.width, self.ep
        firsts = (group + seat for group in range(0, self.size, width) for seat in range(ep))
        return tuple(tuple(range(first, first + width, ep)) for first in firsts)

    @property
    def stages(self) -> Sets:
        """The ranks of each stage in all groups, which hold the same shared tensors."""
        ranks = range(self.size)
        return tuple(
            tuple(rank for rank in ranks if self.stage(rank) == stage) for stage in range(self.pp)
        )

    @property
    def streams(self) -> Sets:
        """Ranks with different micro-batches: all of a stage, unless some share them."""
        return self.stages if self.tp == 1 else self.replicas

    @property
    def ends(self) -> Sets:
        """First and last rank of each pipeline as a set, every other rank as a separate set."""
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
    """An expert that moves from one seat to another."""

    expert: int
    giver: int
    taker: int


@dataclass(frozen=True)
class Dealing:
    """The experts that each seat of a group holds.

    Attributes:
        owned: the experts of each seat that this peer trains, ascending.
        frozen: the other experts of each seat, ascending.
    """

    owned: tuple[tuple[int, ...], ...]
    frozen: tuple[tuple[int, ...], ...]

    @property
    def order(self) -> tuple[int, ...]:
        """All experts, seat after seat, the owned experts of each seat first."""
        seats = zip(self.owned, self.frozen, strict=True)
        return tuple(expert for owned, frozen in seats for expert in (*owned, *frozen))

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of experts of each seat."""
        return tuple(len(o) + len(f) for o, f in zip(self.owned, self.frozen, strict=True))

    @property
    def seats(self) -> dict[int, int]:
        """The seat of each expert."""
        kinds = (self.owned, self.frozen)
        return {e: seat for kind in kinds for seat, experts in enumerate(kind) for e in experts}

    def moves(self, to: Dealing) -> tuple[Move, ...]:
        """The moves when `to` replaces this dealing, by expert."""
        now, then = self.seats, to.seats
        return tuple(Move(e, now[e], then[e]) for e in sorted(now) if now[e] != then[e])


def deal(
    owned: Collection[int], num_experts: int, ep: int, former: Dealing | None = None
) -> Dealing:
    """Distributes the experts of a layer over the seats of a group.

    Owned and frozen experts cost different memory, so each kind is spread evenly: two seats differ
    by at most one expert of a kind. As few experts as possible change their seat. Experts that have
    just become owned or frozen change first, since moving an expert that stays owned means moving
    its moments too.

    Args:
        owned: the experts that this peer trains.
        num_experts: number of experts of a layer.
        ep: number of seats.
        former: the present dealing. None if there is none.
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
        experts: experts of this kind, ascending.
        seats: the present seats of experts.
        settled: experts that were of this kind before.
        taken: number of experts of the other kind at each seat. Seats with few are filled first.
    """
    ep = len(taken)
    there: list[list[int]] = [[] for _ in range(ep)]
    for expert in sorted(experts, key=lambda e: (e not in settled, e)):
        if expert in seats:
            there[seats[expert]].append(expert)
    least, more = divmod(len(experts), ep)
    # Extra experts go to the seats that already hold most, since each one there saves a move.
    first = sorted(range(ep), key=lambda seat: (-len(there[seat]), taken[seat], seat))[:more]
    room = [least + (seat in first) for seat in range(ep)]
    kept = [there[seat][: room[seat]] for seat in range(ep)]
    staying = {expert for each in kept for expert in each}
    rest = iter([expert for expert in experts if expert not in staying])
    for seat in range(ep):
        kept[seat] += [next(rest) for _ in range(room[seat] - len(kept[seat]))]
    return tuple(tuple(sorted(each)) for each in kept)
