"""Maps bytes of units to elements of tensors, by the run configuration alone.

Each expert index has one unit, over all layers, with its tensors concatenated in the order of their
names. The shared tensors are concatenated likewise, separately for each codec and coding. They are
then cut into parts of nearly equal size, if necessary inside a tensor. In each round of the period
(`round.shared_every`) equally many parts are due. Bytes are little-endian.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from swarm import experts
from swarm.config import Codec, Coding, RunConfig


@dataclass(frozen=True)
class Layout:
    """All units of a run.

    Attributes:
        units: parts of the shared tensors (`shared.0`, ...), then experts (`expert.0`, ...).
        shapes: name -> shape of every tensor of the model, shared ones first.
        moments: the optimizer's moments of each tensor of an expert.
    """

    units: tuple[experts.UnitLayout, ...]
    shapes: Mapping[str, experts.Shape]
    moments: tuple[str, ...] = experts.ADAMW_MOMENTS

    @cached_property
    def by_unit(self) -> Mapping[str, experts.UnitLayout]:
        """Name of a unit -> its layout."""
        return {layout.unit: layout for layout in self.units}

    @cached_property
    def num_bytes(self) -> int:
        """Size of the whole agreed model on the wire and on disk."""
        return sum(layout.num_bytes for layout in self.units)


def layout_of(run: RunConfig) -> Layout:
    """The layout that every peer of the run derives for itself."""
    shared = experts.shared_shapes(run.model)
    shapes = dict(shared)
    units: list[experts.UnitLayout] = []
    kinds = {(shared_codec(name, run), shared_coding(name, run)) for name in shared}
    for codec, coding in sorted(
        kinds, key=lambda kind: (-experts.ELEMENT_BYTES[kind[0]], kind[1] != "none")
    ):
        sizes = {
            name: math.prod(shape)
            for name, shape in shared.items()
            if (shared_codec(name, run), shared_coding(name, run)) == (codec, coding)
        }
        max_elements = run.wire.part_bytes // experts.ELEMENT_BYTES[codec]
        for slices in _cut(sizes, max_elements, run.round.shared_every):
            units.append(_unit(experts.shared_unit(len(units)), codec, coding, slices))
    for expert in range(run.model.num_experts):
        of_expert = experts.expert_shapes(run.model, expert)
        shapes |= of_expert
        whole = tuple(experts.Slice(name, 0, math.prod(shape)) for name, shape in of_expert.items())
        kind = run.wire.experts, run.wire.experts_coding
        units.append(_unit(experts.expert_unit(expert), *kind, whole))
    moments = experts.moments_of(experts.expert_tensor(0, 0, "gate"), run.optimizer.kind)
    return Layout(tuple(units), shapes, moments)


def shared_codec(name: str, run: RunConfig) -> Codec:
    """The codec of a shared tensor; norms and routers, small and sensitive, are always fp32."""
    return "fp32" if experts.travels_exactly(name) else run.wire.shared


def shared_coding(name: str, run: RunConfig) -> Coding:
    """The coding of a shared tensor's deltas; norms and routers have no coding."""
    return "none" if experts.travels_exactly(name) else run.wire.shared_coding


def _unit(
    name: str, codec: Codec, coding: Coding, slices: tuple[experts.Slice, ...]
) -> experts.UnitLayout:
    num_elements = sum(piece.stop - piece.start for piece in slices)
    return experts.UnitLayout(
        name, codec, slices, num_elements, num_elements * experts.ELEMENT_BYTES[codec], coding
    )


def _cut(
    sizes: Mapping[str, int], max_elements: int, multiple: int
) -> Iterator[tuple[experts.Slice, ...]]:
    """Cuts concatenated tensors into the fewest parts; sizes differ by at most one element.

    Equal parts spread the averaging evenly over the reducers. If the number of parts is a multiple
    of the period, the averaging is also spread evenly over the rounds of a period.
    """
    total = sum(sizes.values())
    multiple = min(multiple, total) or 1
    num_parts = -(-total // (max_elements * multiple)) * multiple
    tensors = iter(sizes.items())
    name, size, start = "", 0, 0  # the current tensor, and where the next part begins in it
    for part in range(num_parts):
        wanted = total * (part + 1) // num_parts - total * part // num_parts
        slices = []
        while wanted:
            if start == size:
                (name, size), start = next(tensors), 0
            stop = min(size, start + wanted)
            slices.append(experts.Slice(name, start, stop))
            wanted -= stop - start
            start = stop
        yield tuple(slices)
