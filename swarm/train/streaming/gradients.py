"""Gradients on the device: added up over micro-batches, then sent to the host unit by unit."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarm.train.guard import norm_of, square_sum
from swarm.train.streaming.arena import Arena, Packing
from swarm.train.streaming.bus import Bus, Mark
from swarm.train.streaming.host import GradientBuffer, GradientOffload
from swarm.train.streaming.units import HostUnit


class Accumulator:
    """One flat fp32 buffer for the gradients of one unit at a time.

    Attributes:
        views: the gradient of each parameter.
    """

    def __init__(self, num_bytes: int, num_tensors: int, bus: Bus) -> None:
        self._bus = bus
        self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=bus.device)
        self._norms = torch.empty(num_tensors, device=bus.device)
        self._left = Mark()
        self.views: dict[str, Tensor] = {}
        self._written: set[str] = set()

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self._buffer.nbytes + self._norms.nbytes

    def begin(self, packing: Packing, before: GradientOffload | None = None) -> None:
        """Starts with another unit, once the last one has left.

        Args:
            packing: of the unit's gradients.
            before: where its sum over earlier passes is, to be added to.
        """
        self.packing, self.views = packing, packing.views(self._buffer)
        if before is None:
            self._bus.wait(self._left)
            self._written = set()
            return
        sums = before.buffer.bytes_for(packing)
        here = self._buffer[: packing.num_bytes]
        self._bus.wait(self._bus.fetch(here, sums, self._left, before.arrived))
        self._written = set(self.views)

    def add(self, name: str, gradient: Tensor) -> None:
        """Adds one micro-batch's gradient of a parameter, in whatever type it has."""
        if name in self._written:
            self.views[name].add_(gradient.float())
        else:
            self.views[name].copy_(gradient)
            self._written.add(name)

    def send(self, target: Tensor, norms: Tensor) -> Mark:
        """Sends gradients and their norms to host memory; returns when they are there."""
        assert self._written == set(self.views), "a parameter has no gradient"
        found = [square_sum(view) for view in self.views.values()]
        self._norms[: len(found)] = norm_of(torch.stack(found), 1.0)
        done = self._bus.mark()
        self._bus.send(norms, self._norms[: len(found)], done)
        self._left = self._bus.send(target, self._buffer[: self.packing.num_bytes], done)
        return self._left


class Buffers:
    """Host memory for gradients: one piece for every unit, or few that layers share.

    Args:
        units: all units, in the order of the forward pass.
        shared: how many buffers the layers share; 0 gives each its own.
        pinned: for a GPU.
    """

    def __init__(self, units: Sequence[HostUnit], shared: int, *, pinned: bool) -> None:
        self._units = {unit.name: (place, unit) for place, unit in enumerate(units)}
        own = [unit for unit in units if not shared or unit.layer is None]
        layers = [unit.packing.num_bytes for unit in units if unit.layer is not None]
        self._own = {
            unit.name: GradientBuffer(unit.packing.num_bytes, pinned=pinned) for unit in own
        }
        self._ring = [GradientBuffer(max(layers), pinned=pinned) for _ in range(shared)]
        self._norms = Arena(4 * sum(len(unit.packing.fields) for unit in units), pinned=pinned)
        self._norms_of, start = {}, 0
        for unit in units:
            stop = start + len(unit.packing.fields)
            self._norms_of[unit.name] = self._norms.buffer.view(torch.float32)[start:stop]
            start = stop

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        return sum(buffer.num_bytes for buffer in [*self._own.values(), *self._ring])

    def offload(self, name: str, gradients: Accumulator) -> GradientOffload:
        """Sends a unit's gradients off.

        Waits for a buffer that nobody uses, and raises the error of the update before.
        """
        buffer = self._own.get(name)
        if buffer is None:
            buffer = self._ring.pop(0)
            self._ring.append(buffer)
        if buffer.busy is not None:
            busy, buffer.busy = buffer.busy, None
            busy.result()
        place, unit = self._units[name]
        norms = self._norms_of[name]
        arrived = gradients.send(buffer.bytes_for(unit.packing), norms)
        named = {each.name: norm for each, norm in zip(unit.packing.fields, norms, strict=True)}
        return GradientOffload(unit, place, buffer, named, arrived)

    def close(self) -> None:
        """Gives the memory back."""
        for buffer in [*self._own.values(), *self._ring]:
            buffer.close()
        self._norms.close()
