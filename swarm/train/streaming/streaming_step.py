"""One pass of the streaming engine: all micro-batches of a batch through one layer at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swarm.config import RunConfig
from swarm.model.attention import Positions
from swarm.model.losses import LayerTerms, Losses, combine, output_losses
from swarm.model.moe import Recall, Routing
from swarm.model.routing import RoutingControls
from swarm.train.engine.engine_options import ActivationCheckpoints
from swarm.train.engine.host_memory import Arena
from swarm.train.engine.micro_batches import MicroBatch
from swarm.train.streaming.bus import Bus, Mark
from swarm.train.streaming.device import DeviceSide
from swarm.train.streaming.gradients import Accumulator, GradientOffload

Key = tuple[int, int]
"""Layer and micro-batch."""


class ActivationCheckpointStore:
    """Keeps the input of every layer, the residual stream, on the device or in host memory."""

    def __init__(self, bus: Bus, where: ActivationCheckpoints) -> None:
        self._bus, self._where = bus, where
        self._kept: dict[Key, Tensor] = {}
        self._arenas: dict[Key, Arena] = {}
        self._left: dict[Key, Mark] = {}
        self._back: dict[Key, tuple[Tensor, Mark]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of host memory."""
        return sum(arena.buffer.nbytes for arena in self._arenas.values())

    def put(self, key: Key, x_BTD: Tensor) -> None:
        """Keeps one layer's input for one micro-batch."""
        if self._where is ActivationCheckpoints.DEVICE:
            self._kept[key] = x_BTD
            return
        if self._where is ActivationCheckpoints.HOST_BF16:
            x_BTD = x_BTD.bfloat16()
        host = self._host(key, x_BTD)
        self._left[key] = self._bus.send(host, x_BTD, self._bus.mark())
        self._kept[key] = host
        self._bus.keep(x_BTD)

    def prefetch(self, key: Key) -> None:
        """Starts copying an input back to the device."""
        if (
            self._where is ActivationCheckpoints.DEVICE
            or key not in self._kept
            or key in self._back
        ):
            return
        host = self._kept[key]
        target = torch.empty_like(host, device=self._bus.device)
        # Earlier computation may still be using this memory.
        mark = self._bus.mark()
        self._back[key] = (target, self._bus.fetch(target, host, mark, self._left[key]))
        self._bus.keep(target)

    def take(self, key: Key) -> Tensor:
        """The input, fp32 on the device; removed from the store."""
        if self._where is ActivationCheckpoints.DEVICE:
            return self._kept.pop(key)
        self.prefetch(key)
        self._kept.pop(key)
        target, mark = self._back.pop(key)
        self._bus.wait(mark)
        return target.float()

    def clear(self) -> None:
        """Drops the inputs left by a failed step."""
        self._kept.clear()
        self._back.clear()

    def close(self) -> None:
        """Gives the host memory back."""
        for arena in self._arenas.values():
            arena.close()

    def _host(self, key: Key, x_BTD: Tensor) -> Tensor:
        arena = self._arenas.get(key)
        if arena is None or arena.buffer.nbytes < x_BTD.nbytes:
            pinned = self._bus.device.type == "cuda"
            if arena is not None:
                arena.close()
            arena = self._arenas[key] = Arena(x_BTD.nbytes, pinned=pinned)
        return arena.buffer[: x_BTD.nbytes].view(x_BTD.dtype).view(x_BTD.shape)


class Pass:
    """Forward and backward over one batch.

    Attributes:
        micro_batches: tokens, on the device where the caller has them, and masks.
        losses: losses of each micro-batch, detached.
    """

    def __init__(
        self,
        run: RunConfig,
        device: DeviceSide,
        checkpoints: ActivationCheckpointStore,
        micro_batches: Sequence[MicroBatch],
        *,
        divisor: int,
        scale: float,
        controls: Sequence[RoutingControls],
        before: Mapping[str, GradientOffload],
    ) -> None:
        """Prepares a pass.

        Args:
            run: the model and its losses.
            device: the device's side of the engine.
            checkpoints: keeps the inputs of layers.
            micro_batches: tokens and masks.
            divisor: number of micro-batches of the whole step.
            scale: scale of the loss.
            controls: the routing controls of each micro-batch.
            before: gradients of earlier passes of this step, by unit.
        """
        self._run, self._device, self._checkpoints = run, device, checkpoints
        self._scale, self.micro_batches = scale, micro_batches
        self._there = [
            each.tokens_BT1.to(device.bus.device, non_blocking=True) for each in micro_batches
        ]
        self._divisor, self._controls = divisor, controls
        self._layers = run.model.num_hidden_layers
        self._recalls = [[Recall() for _ in micro_batches] for _ in range(self._layers)]
        self._routings: list[list[Routing]] = [[] for _ in range(self._layers)]
        self.losses: list[Losses] = []
        self._before = before

    @torch.no_grad()
    def forward(self, x: list[Tensor], positions: Positions) -> list[Tensor]:
        """The last layer's output of each micro-batch; keeps every layer's input and routing."""
        if not x:
            return x
        device = self._device
        for layer in range(self._layers):
            place = device.take_layer_forward(layer)
            assert place.layer is not None
            for index, x_BTD in enumerate(x):
                self._checkpoints.put((layer, index), x_BTD)
                x[index], routing = place.layer(x_BTD, *self._how(layer, index, positions))
                self._routings[layer].append(_leaves(routing))
            device.give_back(place)
        return x

    def _how(
        self, layer: int, index: int, positions: Positions
    ) -> tuple[Positions, Recall, RoutingControls]:
        """Positions, recall and controls of a layer for one micro-batch."""
        own = positions._replace(documents=self.micro_batches[index].masked.documents)
        return own, self._recalls[layer][index], self._controls[index].part(layer)

    def head(self, x: list[Tensor]) -> list[Tensor]:
        """Gradients at the last layer's output, by micro-batch; adds up the head's gradients."""
        self._device.begin_head(self._before)
        return [self._one_head(index, x_BTD.detach()) for index, x_BTD in enumerate(x)]

    def _one_head(self, index: int, x_BTD: Tensor) -> Tensor:
        device, x_BTD = self._device, x_BTD.requires_grad_()
        norm, table_VD = device.take_head()
        head_VD = table_VD.detach().requires_grad_()
        masked = self.micro_batches[index].masked
        labels_BT = self._there[index][:, 1:]
        hidden_ND, labels_N, mean_over = masked.scored(norm(x_BTD), labels_BT)
        hidden_ND, z_weight = hidden_ND.to(device.compute), self._run.loss.output_z_weight
        output = output_losses(hidden_ND, head_VD, labels_N, z_weight, mean_over)
        routings = [layer[index] for layer in self._routings]
        weight_E = self._controls[index].count_weights(device.owned, routings[0].logits_NE)
        terms = [LayerTerms.of(routing) for routing in routings]
        losses = combine(output, terms, self._run.loss, weight_E)
        total = losses.total / self._divisor * self._scale
        leaves = [leaf for routing in routings for leaf in _floats(routing)]
        sources = [x_BTD, head_VD, norm.weight, *leaves]
        found = torch.autograd.grad(total, sources, allow_unused=True)
        for leaf, gradient in zip(leaves, found[3:], strict=True):
            leaf.grad = gradient
        self.losses.append(losses._replace(total=losses.total.detach()))
        device.add_head(found[2], found[1])
        device.end_head()
        return found[0]

    def layer_backward(self, layer: int, dx: list[Tensor], positions: Positions) -> Accumulator:
        """Recomputes a layer and runs its backward.

        Args:
            layer: number of the layer.
            dx: gradients at the layer's output, by micro-batch. Replaced by the gradients at its
                input.
            positions: the positions of all micro-batches.

        Returns:
            The layer's gradients, added up.
        """
        device, checkpoints = self._device, self._checkpoints
        if not dx:
            return device.next_accumulator(layer, self._before.get(f"layer.{layer}"))
        place = device.take_layer(layer)
        if layer > 0:
            device.prefetch_layer(layer - 1)
        assert place.layer is not None
        gradients = device.next_accumulator(layer, self._before.get(f"layer.{layer}"))
        names = [f"model.layers.{layer}.{name}" for name in place.parameters]
        for index, dx_BTD in enumerate(dx):
            x_BTD = checkpoints.take((layer, index)).detach().requires_grad_()
            checkpoints.prefetch(self._taken_next(layer, index))
            y_BTD, routing = place.layer(x_BTD, *self._how(layer, index, positions))
            roots = [(y_BTD, dx_BTD), *_with_gradients(routing, self._routings[layer][index])]
            dx[index], *found = torch.autograd.grad(
                [root for root, _ in roots],
                [x_BTD, *place.parameters.values()],
                [gradient for _, gradient in roots],
            )
            for name, gradient in zip(names, found, strict=True):
                gradients.add(name, gradient)
        self._routings[layer], self._recalls[layer] = [], []
        device.give_back(place)
        return gradients

    def _taken_next(self, layer: int, index: int) -> tuple[int, int]:
        last = index + 1 == len(self._there)
        return (layer - 1, 0) if last else (layer, index + 1)

    def embedding_backward(self, dx: Sequence[Tensor]) -> Accumulator:
        """The embedding's gradient, from the gradients at the first layer's inputs."""
        self._device.begin_embedding(self._before.get("embedding"))
        for micro_BT1, dx_BTD in zip(self._there, dx, strict=True):
            self._device.add_embedding(dx_BTD, micro_BT1[:, :-1])
        return self._device.ends


def _leaves(routing: Routing) -> Routing:
    """A detached copy of a routing whose tensors can take gradients."""
    parts: dict[str, Any] = {name: _leaf(part) for name, part in routing._asdict().items()}
    return Routing(**parts)


def _leaf(part: Tensor | None) -> Tensor | None:
    if part is None or not part.is_floating_point():
        return part
    return part.detach().requires_grad_()


def _floats(routing: Routing) -> list[Tensor]:
    return [part for part in routing if part is not None and part.is_floating_point()]


def _with_gradients(routing: Routing, leaves: Routing) -> list[tuple[Tensor, Tensor]]:
    """The tensors of a routing that the losses use, each with its gradient.

    A similarity of frozen experts alone is left out, since it depends on nothing trained.
    """
    pairs = zip(_floats(routing), _floats(leaves), strict=True)
    return [
        (part, leaf.grad) for part, leaf in pairs if leaf.grad is not None and part.requires_grad
    ]
