"""The device's side of the streaming engine: places, gradients, and the way to the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarm.config import RunConfig
from swarm.experts import PROJECTIONS, expert_tensor
from swarm.model.attention import RMSNorm
from swarm.model.transformer import DTYPES
from swarm.train.options import EngineOptions
from swarm.train.parallel.ranks import Ranks
from swarm.train.streaming.arena import Packing
from swarm.train.streaming.bus import Bus
from swarm.train.streaming.gradients import Accumulator, Buffers
from swarm.train.streaming.host import GradientOffload
from swarm.train.streaming.places import Place, Places, Source, layer_place
from swarm.train.streaming.store import HostStore

EMBEDDING, NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_BUILT = ("_places", "_head", "_table", "_norm", "ends", "head_gradients")
"""Attributes that `release` takes away."""


class DeviceSide:
    """Everything of a streaming engine that lies on the device, and its buffers on the host.

    Args:
        run: the model.
        options: device, compute type, how many layers stay.
        store: the source of units.
        ranks: processes that add up their gradients.
        masters: fetches fp32 masters and has no gradients, to evaluate.
    """

    def __init__(
        self,
        run: RunConfig,
        options: EngineOptions,
        store: HostStore,
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
        """Takes device memory for the experts owned now."""
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
        """Gives the memory back, as far as `build` has taken it; `build` takes it again."""
        self.make_room()
        if self.buffers is not None:
            self.buffers.close()
            self.buffers = None

    def make_room(self) -> None:
        """As `release`, of the device alone: buffers on the host stay, which take long to pin."""
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
        # Without tied weights the head's gradients have left before the embedding's come.
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
        """Sets a layer on its way."""
        self._places.prefetch(f"layer.{layer}")

    def take_layer(self, layer: int) -> Place:
        """A layer that is ready for all later computation."""
        place = self._places.take(f"layer.{layer}")
        if self._store.biases:
            assert place.layer is not None
            bias_E = self._store.biases[layer].to(self.bus.device, copy=True)
            place.layer.mlp.gate.e_score_correction_bias = nn.Parameter(bias_E, requires_grad=False)
        return place

    def take_layer_forward(self, layer: int) -> Place:
        """As `take_layer`; what follows it in forward is set on its way."""
        place = self.take_layer(layer)
        if layer + 1 < self._run.model.num_hidden_layers:
            self.prefetch_layer(layer + 1)
        else:
            self.prefetch_head()
        return place

    def put_in(self, place: Place, layer: int, give: Callable[[str], Tensor]) -> None:
        """Overwrites the owned experts in a place that was taken; the host's masters stay."""
        for row, expert in enumerate(self._store.owned):
            for kind in PROJECTIONS:
                stack = place.views[f"mlp.experts.owned.{kind}_proj"]
                stack[row].copy_(give(expert_tensor(layer, expert, kind)))

    def give_back(self, place: Place) -> None:
        """Says that everything that computes with a place was given to the device."""
        self._places.release(place)

    def next_accumulator(self, layer: int, before: GradientOffload | None) -> Accumulator:
        """The place where the gradients of a layer are added to those of earlier passes."""
        accumulator = self._accumulators[layer % 2]
        accumulator.begin(self._store.units[f"layer.{layer}"], before)
        return accumulator

    # ------------------------------------------------ embedding and head

    def embedded(self, ids_BT: Tensor) -> Tensor:
        """Looks rows up in the host's masters: few rows travel, not the table."""
        unit = self._store.units["embedding"]
        unit.settle()
        rows_BTD = F.embedding(ids_BT.cpu(), unit.masters[EMBEDDING].detach())
        if self.bus.device.type == "cpu":
            return rows_BTD
        self.bus.bytes_in += rows_BTD.nbytes
        return rows_BTD.pin_memory().to(self.bus.device, non_blocking=True)

    def prefetch_head(self) -> None:
        """Sets norm and head on their way."""
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
        """Starts adding up the gradients of norm and head, to those of earlier passes by unit."""
        if self._store.tied:
            self.ends.begin(self._store.units["embedding"], before.get("embedding"))
        self.head_gradients.begin(self._store.units["head"], before.get("head"))

    def add_head(self, norm: Tensor, matrix_VD: Tensor) -> None:
        """Adds one micro-batch's gradients of norm and head."""
        self.head_gradients.add(NORM, norm)
        self.ends.add(EMBEDDING if self._store.tied else HEAD, matrix_VD)

    def end_head(self) -> None:
        """Says that everything that computes with the head was given to the device."""
        self._places.release(self._head)

    def begin_embedding(self, before: GradientOffload | None) -> None:
        """Starts adding up the gradient of the embedding, unless the head has begun it."""
        if not self._store.tied:
            self.ends.begin(self._store.units["embedding"], before)

    def add_embedding(self, dx_BTD: Tensor, ids_BT: Tensor) -> None:
        """Adds one micro-batch's gradient of the embedding."""
        gradient_VD = torch.ops.aten.embedding_dense_backward(
            dx_BTD, ids_BT, self._run.model.vocab_size, -1, False
        )
        self.ends.add(EMBEDDING, gradient_VD)
