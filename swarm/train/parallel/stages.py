"""Pipeline parallel: which layers each stage of a pipeline holds, and why. Pure.

A pipeline is as fast as its slowest stage. The head is a product with the whole vocabulary, which
can cost as much as several layers; the embedding looks rows up and costs none.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, combinations, pairwise

from swarm.config import RunConfig
from swarm.model.cost import head_step_flops, layer_step_flops
from swarm.model.stage import Stage


@dataclass(frozen=True)
class Cut:
    """The stages of a pipeline.

    Attributes:
        stages: of each rank; every layer is in one of them.
        shares: of each stage, its part of the operations of a step; they sum to 1.
        slot: of the slowest chunk, its part of them; without chunks that of the slowest stage.
        reason: in a sentence.
    """

    stages: tuple[Stage, ...]
    shares: tuple[float, ...]
    slot: float
    reason: str


def bubble_of(stages: int, micro_batches: float, chunks: int = 1) -> float:
    """The part of a pipeline's time in which a stage waits: (p - 1) / (v m + p - 1).

    Of stages that all take as long; the same for gpipe and 1f1b, which have one chunk (Narayanan et
    al., arXiv 2104.04473, section 2.2, there as a part of the time of products).

    Args:
        stages: ranks of the pipeline, p.
        micro_batches: that flow through it, m; perhaps a mean.
        chunks: runs of layers that each rank has, v.
    """
    return (stages - 1) / (chunks * micro_batches + stages - 1)


def flows_of(micro_batches: int, stages: int) -> tuple[int, ...]:
    """How many micro-batches flow through an interleaved pipeline in one go.

    Torch's schedule takes them in rounds that are alike, which not every number allows: it has to
    divide by max(1, m // p). Of others those beyond a multiple of the stages come in a go of their
    own, so that gradients are added up in the same order.

    Args:
        micro_batches: of the pipeline, m.
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
        stages: at least one.
        chunks: runs of layers that each stage has: of two stages with two chunks the first has the
            first and third quarter of the layers. At most one layer for each chunk of all stages.
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

    Among such cuts it is the one with the least sum of squares, so the other parts are even too.

    Args:
        costs: of each item, above 0.
        stages: number of parts, of one item at least; at most the number of items.
    """
    assert 0 < stages <= len(costs), (stages, len(costs))
    return _cut_evenly(tuple(costs), stages)


@functools.lru_cache(maxsize=256)
def _cut_evenly(costs: tuple[float, ...], stages: int) -> tuple[range, ...]:
    """A planner asks for the same cut again and again."""
    sums = [0.0, *accumulate(costs)]
    possible = sorted(sums[stop] - sums[start] for start, stop in combinations(range(len(sums)), 2))
    limit = possible[
        bisect.bisect_left(possible, x=True, key=lambda limit: _parts(sums, limit) <= stages)
    ]
    # Of the first so many items: the least sum of squares, and where the parts end.
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
    """The least number of consecutive parts, none of which exceeds a limit."""
    number, start = 0, 0
    while start < len(sums) - 1:
        stop = start
        while stop + 1 < len(sums) and sums[stop + 1] - sums[start] <= limit:
            stop += 1
        if stop == start:
            return float("inf")
        number, start = number + 1, stop
    return number
