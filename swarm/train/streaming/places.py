"""Places on the device in which units stand while they compute; how units are fetched there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swarm.background import Helpers
from swarm.config import RunConfig
from swarm.errors import StateError
from swarm.model.frozen import FrozenFormat
from swarm.model.moe import Storage
from swarm.model.transformer import DecoderLayer
from swarm.train.streaming.arena import Arena, Packing
from swarm.train.streaming.bus import Bus, Mark
from swarm.train.streaming.units import FrozenUnit, HostUnit, frozen_packing, stacks_of

READ_S = 120.0
"""A disk that takes longer for a layer's frozen experts is broken."""


@dataclass(frozen=True)
class Source:
    """The source of one place: a unit and, for a layer, its frozen experts."""

    unit: HostUnit
    frozen: FrozenUnit | None
    masters: bool = False
    """Whether fp32 masters are fetched instead of the usual type."""

    @property
    def trained(self) -> Tensor:
        """The bytes of the trained tensors."""
        return self.unit.master_buffer if self.masters else self.unit.wire_buffer


class Place:
    """Buffers of one unit on the device.

    Attributes:
        parameters: views of the trained part, by the parameters' names within the unit.
        layer: the decoder layer that computes with them; None for the head.
        holds: unit and versions that are here or on their way.
        free: when the device has finished with its contents.
    """

    def __init__(self, trained: Packing, frozen: Packing | None, device: torch.device) -> None:
        self.trained = torch.empty(trained.num_bytes, dtype=torch.uint8, device=device)
        self.views = trained.views(self.trained)
        num_bytes = frozen.num_bytes if frozen else 0
        self.frozen = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.parameters: dict[str, nn.Parameter] = {}
        self.layer: DecoderLayer | None = None
        self.holds: tuple[str, int, int] | None = None
        self.free = Mark()
        self.arriving: Future[Mark] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return self.trained.nbytes + self.frozen.nbytes


def layer_place(
    run: RunConfig,
    packing: Packing,
    owned: Sequence[int],
    *,
    form: FrozenFormat,
    compute: torch.dtype,
    device: torch.device,
) -> Place:
    """A place with a decoder layer whose parameters are views of its buffers.

    Args:
        run: the model.
        packing: the trained tensors of a layer, named within the layer.
        owned: experts in the trained part; all others are in the frozen one.
        form: format of the frozen experts.
        compute: type of all products.
        device: where the buffers lie.
    """
    frozen = frozen_packing(run, form, run.model.num_experts - len(owned))
    place = Place(packing, frozen, device)
    layer = DecoderLayer(run.model, Storage(form, compute, torch.device("meta")))
    place.parameters = {name: nn.Parameter(view) for name, view in place.views.items()}
    for name, parameter in place.parameters.items():
        where, _, leaf = name.rpartition(".")
        layer.get_submodule(where).register_parameter(leaf, parameter)
    if not owned:
        for leaf, empty in list(layer.mlp.experts.owned.items()):
            layer.mlp.experts.owned[leaf] = nn.Parameter(torch.empty_like(empty, device=device))
    layer.mlp.experts.hold(tuple(owned), stacks_of(form, frozen.views(place.frozen)))
    place.layer = layer
    return place


class Places:
    """Keeps the first layers in places of their own and streams the others through two.

    Units are fetched by a thread, in the order in which they were asked for; it waits until the
    host has finished with a unit and the device with the place. An exception in it comes out of
    `take`.

    Args:
        bus: copies.
        sources: the units by name.
        new_place: makes a place for a layer.
        num_layers: of the model.
        resident_layers: how many have a place of their own.
    """

    def __init__(
        self,
        bus: Bus,
        sources: dict[str, Source],
        new_place: Callable[[], Place],
        num_layers: int,
        resident_layers: int,
    ) -> None:
        self._bus, self._sources = bus, sources
        self._own = {f"layer.{layer}": new_place() for layer in range(resident_layers)}
        num_shared = min(2, num_layers - resident_layers)
        self._shared = [new_place() for _ in range(num_shared)]
        self._fetcher = Helpers("swarm-fetch", 1, begin=bus.enter)
        self._staging: list[Arena] = []

    def add(self, name: str, place: Place) -> None:
        """Gives another unit a place of its own."""
        self._own[name] = place

    @property
    def num_bytes(self) -> int:
        """Bytes of all places on the device."""
        return sum(place.num_bytes for place in [*self._own.values(), *self._shared])

    def prefetch(self, name: str) -> Place:
        """Sets a unit on its way to the device, if its newest values are not there yet."""
        place = self._own.get(name) or self._choose(name)
        source = self._sources[name]
        frozen_version = source.frozen.version if source.frozen else 0
        wanted = (name, source.unit.version, frozen_version)
        if place.holds != wanted:
            before, place.holds = place.holds, wanted
            same = before is not None and before[0] == name
            trained = not (same and before is not None and before[1] == wanted[1])
            frozen = not (same and before is not None and before[2] == wanted[2])
            place.arriving = self._fetcher.submit(
                self._fill, place, source, trained=trained, frozen=frozen
            )
        if place in self._shared:  # the most recent last
            self._shared.remove(place)
            self._shared.append(place)
        return place

    def take(self, name: str) -> Place:
        """A unit, ready for all later computation; raises the error of fetching it."""
        place = self.prefetch(name)
        assert place.arriving is not None
        self._bus.wait(place.arriving.result())
        return place

    def release(self, place: Place) -> None:
        """Says that everything that computes with a place was given to the device."""
        place.free = self._bus.mark()

    def close(self) -> None:
        """Ends the thread and gives up the staging memory.

        Raises:
            StateError: the disk with the frozen experts has not answered for `READ_S`. Nothing that
                the thread reads or fills may be given up then.
        """
        if not self._fetcher.end(READ_S):
            raise StateError(
                f"the disk with the frozen experts has not answered for {READ_S:.0f} s",
                hint="see what the system says of the disk, then start again",
            )
        for arena in self._staging:
            arena.close()

    def _choose(self, name: str) -> Place:
        for place in self._shared:
            if place.holds is not None and place.holds[0] == name:
                return place
        return self._shared[0]

    def _fill(self, place: Place, source: Source, *, trained: bool, frozen: bool) -> Mark:
        mark = Mark()
        if trained:
            source.unit.settle()
            mark = self._bus.fetch(place.trained, source.trained, place.free)
        if frozen and source.frozen is not None and source.frozen.buffer.nbytes:
            if source.frozen.on_disk:
                mark = self._stage(place, source.frozen)
            else:
                mark = self._bus.fetch(place.frozen, source.frozen.buffer, place.free)
        return mark

    def _stage(self, place: Place, mapped: FrozenUnit) -> Mark:
        """Reads mapped files into pinned memory first: a copy engine cannot wait for a disk."""
        pinned = self._bus.device.type == "cuda"
        if not self._staging:
            self._staging.append(Arena(mapped.buffer.nbytes, pinned=pinned))
        staging = self._staging[0].buffer
        mapped.fill(staging)
        mark = self._bus.fetch(place.frozen, staging, place.free)
        mark.wait()  # before the next layer overwrites the staging memory
        return mark
