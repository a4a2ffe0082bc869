"""The whole model as the host keeps it: units, frozen experts, and which are owned."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from swarm.config import RunConfig
from swarm.errors import BadBlob
from swarm.experts import Shape, Slice, all_shapes, expert_tensor, misfit, selection_biases, unknown
from swarm.model.moe import PROJECTIONS, Storage
from swarm.model.routing import bias_update
from swarm.model.transformer import DTYPES, DecoderLayer
from swarm.train.guard import unit_of
from swarm.train.options import EngineOptions
from swarm.train.streaming.arena import HostMemory
from swarm.train.streaming.units import FrozenUnit, HostUnit, unit_shapes


class HostStore:
    """Masters, moments and frozen experts in host memory.

    Attributes:
        units: trained tensors by unit, in the order of the forward pass.
        frozen: frozen experts by layer.
        biases: selection bias of each layer's router; none for a softmax router.
        owned: experts that are trained.
        memory: where all lies but the biases, of which each process has its own.
        tied: whether the head is the embedding.
    """

    def __init__(
        self, run: RunConfig, options: EngineOptions, memory: HostMemory | None = None
    ) -> None:
        self._run, self.memory = run, memory or HostMemory()
        self.tied = run.model.tie_word_embeddings
        self.owned: tuple[int, ...] = ()
        self._bias_names = selection_biases(run.model)
        self.biases = [torch.empty(run.model.num_experts) for _ in self._bias_names]
        self._shared = unit_shapes(run, layer_shapes(run))
        pinned = options.device == "cuda"
        compute = DTYPES[options.compute]
        finished = self.memory.take(8 * self.memory.size * len(self._shared)).buffer
        finished.zero_()
        table = finished.view(torch.int64).view(len(self._shared), -1)
        self.units = {
            name: HostUnit(
                name,
                run,
                compute,
                form=options.moments,
                pinned=pinned,
                memory=self.memory,
                finished_R=finished_R,
            )
            for name, finished_R in zip(self._shared, table, strict=True)
        }
        folder = options.frozen_folder
        self.frozen = [
            FrozenUnit(layer, run, options.frozen, pinned=pinned, folder=folder, memory=self.memory)
            for layer in range(run.model.num_hidden_layers)
        ]
        self._shapes = all_shapes(run.model)
        self._places = {
            expert_tensor(layer, expert, kind.removesuffix("_proj")): (layer, expert, kind)
            for layer in range(run.model.num_hidden_layers)
            for expert in range(run.model.num_experts)
            for kind in PROJECTIONS
        }
        self._move(())

    def own(self, owned: Sequence[int]) -> None:
        """Moves experts between masters and frozen storage; see `Engine.own`.

        Cost: one layer exists twice at a time.
        """
        self._move(tuple(owned))

    def _move(self, owned: tuple[int, ...]) -> None:
        for name, unit in self.units.items():
            if unit.layer is None:
                if not unit.masters:
                    unit.hold(self._shared[name], {})
                    unit.optimizer.follow(unit.masters, ())
                continue
            frozen = self.frozen[unit.layer]
            masters = unit.optimizer.masters()
            # New experts come from the frozen storage, newly frozen ones from the masters.
            unit.own(self._shared[name], owned, frozen)
            frozen.own(owned, masters)
        self.owned = owned
        self.memory.settle()

    def shape(self, name: str) -> Shape:
        """The shape of a tensor; raises BadBlob as `read`."""
        if name not in self._shapes:
            raise BadBlob("name", unknown(name))
        return self._shapes[name]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors by Hugging Face name as they are stored; int8 ones as fp32 copies.

        Raises:
            BadBlob: a name that the model has not.
        """
        read = {}
        for name in names:
            self.shape(name)
            if self._is_master(name):
                read[name] = self._master(name)
            else:
                layer, expert, projection = self._places[name]
                read[name] = self.frozen[layer].get(expert, projection)
        return read

    @torch.no_grad()
    def write(self, named: Mapping[str, Tensor]) -> None:
        """Copies tensors in, rounded as their storage is.

        Raises:
            BadBlob: an unknown name or a wrong shape; nothing has been written then.
        """
        with self.memory.writing():
            if not self.memory.writes:
                named = self._seen(named)
            self._check(named)
            for name, tensor in named.items():
                if self._is_master(name):
                    self._write_part(Slice(name, 0, tensor.numel()), tensor.reshape(-1))
                else:
                    layer, expert, projection = self._places[name]
                    self.frozen[layer].put(expert, projection, tensor)

    def _seen(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Notes what another process writes; returns that of which each has its own."""
        for name in named:
            self.shape(name)
            if not self._is_master(name):
                self.frozen[self._places[name][0]].version += 1
            elif name not in self._bias_names:
                self.units[unit_of(name)].version += 1
        return {name: named[name] for name in named if name in self._bias_names}

    def write_part(self, part: Slice, values: Tensor) -> None:
        """Overwrites a run of elements of a master, and of its copy that travels."""
        with self.memory.writing():
            self._write_part(part, values)

    def _write_part(self, part: Slice, values: Tensor) -> None:
        if part.name in self._bias_names:
            self._master(part.name)[part.start : part.stop].copy_(values)
        else:
            self.units[unit_of(part.name)].write(part, values)

    def lend(self, named: Mapping[str, Tensor]) -> None:
        """As `write`, but frozen experts on disk stay where these tensors lie, if of their type."""
        self._check(named)
        copied = {}
        for name, tensor in named.items():
            if self._is_master(name) or not self.frozen[self._places[name][0]].may_keep(tensor):
                copied[name] = tensor
                continue
            layer, expert, projection = self._places[name]
            self.frozen[layer].keep(expert, projection, tensor)
        self.write(copied)

    def _check(self, named: Mapping[str, Tensor]) -> None:
        for name, tensor in named.items():
            if why := misfit(name, (*tensor.shape,), self.shape(name)):
                raise BadBlob("shape", why)

    def read_moments(self, names: Collection[str]) -> dict[str, Tensor]:
        """See `OwnedAdamW.read_moments`."""
        found: dict[str, Tensor] = {}
        for unit in self.units.values():
            found |= unit.optimizer.read_moments(names)
        return found

    def write_moments(self, values: Mapping[str, Tensor]) -> None:
        """See `OwnedAdamW.write_moments`."""
        with self.memory.writing():
            for unit in self.units.values():
                unit.optimizer.write_moments(values)

    def state(self) -> dict[str, Tensor]:
        """Masters and moments of everything trained; see `OwnedAdamW.state`."""
        state: dict[str, Tensor] = {}
        for unit in self.units.values():
            state |= unit.optimizer.state()
        named = zip(self._bias_names, self.biases, strict=True)
        return state | {f"master.{name}": bias_E for name, bias_E in named}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over a state that `state` gave; raises CorruptState."""
        with self.memory.writing():
            for unit in self.units.values():
                unit.optimizer.load(tensors)
                unit.refresh()
        for name, bias_E in zip(self._bias_names, self.biases, strict=True):
            bias_E.copy_(tensors[f"master.{name}"])

    def balance(self, tokens_LE: Tensor) -> None:
        """Moves the selection biases after a step, as the run's settings say; see `bias_update`."""
        if rate := self._run.routing.bias_update_rate:
            for bias_E, update_E in zip(
                self.biases, bias_update(tokens_LE.cpu(), rate), strict=True
            ):
                bias_E.add_(update_E)

    def wait(self) -> None:
        """Waits for all updates under way; raises the error of one of them."""
        for unit in self.units.values():
            unit.wait()

    @property
    def num_bytes(self) -> int:
        """Bytes of everything here, files included."""
        units = sum(unit.num_bytes for unit in self.units.values())
        return units + sum(frozen.buffer.nbytes for frozen in self.frozen)

    def close(self) -> None:
        """Unpins the memory."""
        for unit in self.units.values():
            unit.close()
        for frozen in self.frozen:
            frozen.close()

    def _is_master(self, name: str) -> bool:
        return name not in self._places or self._places[name][1] in self.owned

    def _master(self, name: str) -> Tensor:
        if name in self._bias_names:
            return self.biases[self._bias_names.index(name)]
        return self.units[unit_of(name)].optimizer.masters()[name]


def layer_shapes(run: RunConfig) -> dict[str, Shape]:
    """Shared tensors of a layer that have gradients, named within it, as its parameters come."""
    layer = DecoderLayer(run.model, Storage("fp32", torch.float32, torch.device("meta")))
    return {
        name: tuple(parameter.shape)
        for name, parameter in layer.named_parameters()
        if parameter.requires_grad and ".experts.owned." not in name
    }
