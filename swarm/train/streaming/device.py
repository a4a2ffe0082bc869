"""The device's side of the streaming engine: places for units, gradients, copies to the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarm.background import Helpers
from swarm.config import RunConfig
from swarm.errors import StateError
from swarm.experts import PROJECTIONS, expert_tensor
from swarm.model.attention import RMSNorm
from swarm.model.frozen import FrozenFormat
from swarm.model.moe import Storage
from swarm.model.transformer import DTYPES, DecoderLayer
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.host_memory import Arena, Packing
from swarm.train.engine.ranks import Ranks
from swarm.train.streaming import host_model
from swarm.train.streaming.bus import Bus, Mark
from swarm.train.streaming.gradients import Accumulator, Buffers, GradientOffload

READ_S = 120.0
"""A disk that takes longer than this to read a layer's frozen experts counts as broken."""


@dataclass(frozen=True)
class Source:
    """Host memory from which a place is filled: a unit and, for a layer, its frozen experts."""

    unit: host_model.HostUnit
    frozen: host_model.FrozenUnit | None
    masters: bool = False
    """Whether fp32 masters are fetched instead of the copy in the compute type."""

    @property
    def trained(self) -> Tensor:
        """The bytes of the trained tensors."""
        return self.unit.master_buffer if self.masters else self.unit.wire_buffer


class Place:
    """Buffers of one unit on the device.

    Attributes:
        parameters: views of the trained part, by the parameters' names within the unit.
        layer: the decoder layer that computes with them; None for the head.
        holds: the unit that is here or arriving, with the versions of its trained and frozen parts.
        free: a mark, reached once the device no longer uses the contents.
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
        owned: experts in the trained part; all others are in the frozen part.
        form: format of the frozen experts.
        compute: type of all products.
        device: where the buffers lie.
    """
    frozen = host_model.frozen_packing(run, form, run.model.num_experts - len(owned))
    place = Place(packing, frozen, device)
    layer = DecoderLayer(run.model, Storage(form, compute, torch.device("meta")))
    place.parameters = {name: nn.Parameter(view) for name, view in place.views.items()}
    for name, parameter in place.parameters.items():
        where, _, leaf = name.rpartition(".")
        layer.get_submodule(where).register_parameter(leaf, parameter)
    if not owned:
        for leaf, empty in list(layer.mlp.experts.owned.items()):
            layer.mlp.experts.owned[leaf] = nn.Parameter(torch.empty_like(empty, device=device))
    layer.mlp.experts.hold(tuple(owned), host_model.stacks_of(form, frozen.views(place.frozen)))
    place.layer = layer
    return place


class Places:
    """Keeps the first layers in places of their own, and streams the others through two places.

    A thread fetches units in the order of the requests. It waits until the host has updated the
    unit and the device no longer uses the place. `take` raises the thread's exceptions.

    Args:
        bus: makes the copies.
        sources: the units by name.
        new_place: makes a place for a layer.
        num_layers: number of layers of the model.
        resident_layers: number of layers with a place of their own.
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
        """Starts fetching a unit if the device does not have its newest values yet."""
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
        """The place of a unit, ready for all later computation; raises errors of fetching."""
        place = self.prefetch(name)
        assert place.arriving is not None
        self._bus.wait(place.arriving.result())
        return place

    def release(self, place: Place) -> None:
        """Frees a place once the device has finished the computation that it was given so far."""
        place.free = self._bus.mark()

    def close(self) -> None:
        """Ends the thread and frees the staging memory.

        Raises:
            StateError: the disk with the frozen experts has not answered for `READ_S`. The thread
                may still use its memory then, so none of it may be freed.
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

    def _stage(self, place: Place, mapped: host_model.FrozenUnit) -> Mark:
        """Reads mapped files into pinned memory before the copy: a GPU cannot wait for a disk."""
        pinned = self._bus.device.type == "cuda"
        if not self._staging:
            self._staging.append(Arena(mapped.buffer.nbytes, pinned=pinned))
        staging = self._staging[0].buffer
        mapped.fill(staging)
        mark = self._bus.fetch(place.frozen, staging, place.free)
        mark.wait()  # before the next layer overwrites the staging memory
        return mark


EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_BUILT = ("_places", "_head", "_table", "_norm", "ends", "head_gradients")
"""Attributes that `release` removes."""


class DeviceSide:
    """A streaming engine's state on the device, and its gradient buffers on the host.

    Args:
        run: the model.
        options: device, compute type, number of layers that stay.
        store: the source of units.
        ranks: processes that add up their gradients.
        masters: True for an evaluation: fetches fp32 masters and has no gradients.
    """

    def __init__(
        self,
        run: RunConfig,
        options: EngineOptions,
        store: host_model.HostStore,
        ranks: Ranks,
        *,
        masters: bool = False,
    ) -> None:
        self._run, self._options, self._store, self._masters = run, options, store, masters
        self._ranks = ranks
        self.bus = Bus(torch.device(options.device))
        self.compute = torch.float32 if masters else DTYPES[options.compute]
        self.buffers: Buffers | None = None
        self.build()

    def build(self) -> None:
        """Allocates device memory for the experts owned now."""
        store, options = self._store, self._options
        layers = self._run.model.num_hidden_layers
        self._accumulators: list[Accumulator] = []
        sources = {
            name: Source(
                unit, None if unit.layer is None else store.frozen[unit.layer], self._masters
            )
            for name, unit in store.units.items()
        }
        resident = layers if options.resident_layers is None else options.resident_layers
        self._places = Places(self.bus, sources, self._new_place, layers, min(resident, layers))
        self._add_head()
        if not self._masters:
            self._add_gradients()

    def release(self) -> None:
        """Frees all memory that `build` has allocated; `build` allocates it again."""
        self.make_room()
        if self.buffers is not None:
            self.buffers.close()
            self.buffers = None

    def make_room(self) -> None:
        """Like `release`, but keeps the host's buffers: pinning them again would take long."""
        places: Places | None = vars(self).get("_places")
        if places is not None:
            places.close()
        self.bus.settle()
        for name in _BUILT:
            vars(self).pop(name, None)
        self._accumulators = []

    @property
    def owned(self) -> tuple[int, ...]:
        """The experts that are trained."""
        return self._store.owned

    @property
    def num_bytes(self) -> int:
        """Bytes of weights and gradients on the device."""
        return self._places.num_bytes + sum(each.num_bytes for each in self._accumulators)

    @property
    def host_bytes(self) -> int:
        """Bytes of gradients on the host."""
        return self.buffers.num_bytes if self.buffers else 0

    def _packing(self, unit: str) -> Packing:
        of = self._store.units[unit]
        return of.packing if self._masters else of.wire_packing

    def _new_place(self) -> Place:
        packing = self._packing("layer.0")
        prefix = len("model.layers.0.")
        within = Packing.of((f.name[prefix:], f.shape, f.dtype) for f in packing.fields)
        return layer_place(
            self._run,
            within,
            self._store.owned,
            form=self._options.frozen,
            compute=self.compute,
            device=self.bus.device,
        )

    def _add_head(self) -> None:
        device = self.bus.device
        self._head = Place(self._packing("head"), None, device)
        self._places.add("head", self._head)
        self._table = self._head.views.get(HEAD)
        if self._table is None:
            place = Place(self._packing("embedding"), None, device)
            self._places.add("embedding", place)
            self._table = place.views[EMBEDDING]
        self._norm = RMSNorm(1, self._run.model.rms_norm_eps, torch.device("meta"))
        self._norm.weight = nn.Parameter(self._head.views[NORM])

    def _add_gradients(self) -> None:
        units = self._store.units
        widest = units["layer.0"].packing
        self._accumulators = [
            self._accumulator(widest.num_bytes, len(widest.fields)) for _ in range(2)
        ]
        # An untied head shares the embedding's accumulator, since its gradients leave earlier.
        packings = [units["embedding"].packing, units["head"].packing]
        self.ends = self._accumulator(max(p.num_bytes for p in packings), 2)
        self.head_gradients = self.ends
        self._accumulators.append(self.ends)
        if self._store.tied:
            self.head_gradients = self._accumulator(units["head"].packing.num_bytes, 1)
            self._accumulators.append(self.head_gradients)
        if self.buffers is None:
            pinned = self.bus.device.type == "cuda"
            shared = self._options.gradient_buffers
            self.buffers = Buffers(list(units.values()), shared, self._store.memory, pinned=pinned)

    def _accumulator(self, num_bytes: int, num_tensors: int) -> Accumulator:
        return Accumulator(num_bytes, num_tensors, self.bus, self._ranks)

    # ------------------------------------------------ layers

    def prefetch_layer(self, layer: int) -> None:
        """Starts fetching a layer."""
        self._places.prefetch(f"layer.{layer}")

    def take_layer(self, layer: int) -> Place:
        """The place of a layer, ready for all later computation."""
        place = self._places.take(f"layer.{layer}")
        if self._store.biases:
            assert place.layer is not None
            bias_E = self._store.biases[layer].to(self.bus.device, copy=True)
            place.layer.mlp.gate.e_score_correction_bias = nn.Parameter(bias_E, requires_grad=False)
        return place

    def take_layer_forward(self, layer: int) -> Place:
        """Like `take_layer`, but also starts fetching the next unit of the forward pass."""
        place = self.take_layer(layer)
        if layer + 1 < self._run.model.num_hidden_layers:
            self.prefetch_layer(layer + 1)
        else:
            self.prefetch_head()
        return place

    def put_in(self, place: Place, layer: int, give: Callable[[str], Tensor]) -> None:
        """Overwrites the owned experts in a place; the host's masters stay as they are."""
        for row, expert in enumerate(self._store.owned):
            for kind in PROJECTIONS:
                stack = place.views[f"mlp.experts.owned.{kind}_proj"]
                stack[row].copy_(give(expert_tensor(layer, expert, kind)))

    def give_back(self, place: Place) -> None:
        """Frees a place once the device has finished the computation that it was given so far."""
        self._places.release(place)

    def next_accumulator(self, layer: int, before: GradientOffload | None) -> Accumulator:
        """The accumulator of a layer; `before` has the gradients of earlier passes, to be added."""
        accumulator = self._accumulators[layer % 2]
        accumulator.begin(self._store.units[f"layer.{layer}"], before)
        return accumulator

    # ------------------------------------------------ embedding and head

    def embedded(self, ids_BT: Tensor) -> Tensor:
        """The embeddings of tokens, looked up in the host's masters: rows travel, not the table."""
        unit = self._store.units["embedding"]
        unit.settle()
        rows_BTD = F.embedding(ids_BT.cpu(), unit.masters[EMBEDDING].detach())
        if self.bus.device.type == "cpu":
            return rows_BTD
        self.bus.bytes_in += rows_BTD.nbytes
        return rows_BTD.pin_memory().to(self.bus.device, non_blocking=True)

    def prefetch_head(self) -> None:
        """Starts fetching norm and head."""
        self._places.prefetch("head")
        if self._store.tied:
            self._places.prefetch("embedding")

    def take_head(self) -> tuple[RMSNorm, Tensor]:
        """The last norm and the head's fp32 matrix [V, D], ready for all later computation."""
        self._places.take("head")
        if self._store.tied:
            self._places.take("embedding")
        assert self._table is not None
        return self._norm, self._table

    def begin_head(self, before: Mapping[str, GradientOffload]) -> None:
        """Starts adding gradients of norm and head to those of earlier passes, given by unit."""
        if self._store.tied:
            self.ends.begin(self._store.units["embedding"], before.get("embedding"))
        self.head_gradients.begin(self._store.units["head"], before.get("head"))

    def add_head(self, norm: Tensor, matrix_VD: Tensor) -> None:
        """Adds one micro-batch's gradients of norm and head."""
        self.head_gradients.add(NORM, norm)
        self.ends.add(EMBEDDING if self._store.tied else HEAD, matrix_VD)

    def end_head(self) -> None:
        """Frees the head once the device has finished the computation that it was given so far."""
        self._places.release(self._head)

    def begin_embedding(self, before: GradientOffload | None) -> None:
        """Starts adding up the embedding's gradient, unless a tied head has started it."""
        if not self._store.tied:
            self.ends.begin(self._store.units["embedding"], before)

    def add_embedding(self, dx_BTD: Tensor, ids_BT: Tensor) -> None:
        """Adds one micro-batch's gradient of the embedding."""
        gradient_VD = torch.ops.aten.embedding_dense_backward(
            dx_BTD, ids_BT, self._run.model.vocab_size, -1, False
        )
        self.ends.add(EMBEDDING, gradient_VD)
