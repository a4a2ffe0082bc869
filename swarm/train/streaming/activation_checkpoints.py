"""Activation checkpoints: the inputs of all layers, kept until the backward pass needs them.

Shapes: B sequences, T tokens, D hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarm.train.options import ActivationCheckpoints
from swarm.train.streaming.arena import Arena
from swarm.train.streaming.bus import Bus, Mark

Key = tuple[int, int]
"""Layer and micro-batch."""


class ActivationCheckpointStore:
    """Keeps the residual stream in front of every layer, on the device or in host memory."""

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
        """Keeps one layer's input of one micro-batch."""
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
        """Sets an input on its way back."""
        if (
            self._where is ActivationCheckpoints.DEVICE
            or key not in self._kept
            or key in self._back
        ):
            return
        host = self._kept[key]
        target = torch.empty_like(host, device=self._bus.device)
        # A computation may have just used the memory.
        mark = self._bus.mark()
        self._back[key] = (target, self._bus.fetch(target, host, mark, self._left[key]))
        self._bus.keep(target)

    def take(self, key: Key) -> Tensor:
        """The input, fp32 on the device; it is not kept any longer."""
        if self._where is ActivationCheckpoints.DEVICE:
            return self._kept.pop(key)
        self.prefetch(key)
        self._kept.pop(key)
        target, mark = self._back.pop(key)
        self._bus.wait(mark)
        return target.float()

    def clear(self) -> None:
        """Drops the leftovers of a step that failed."""
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
