"""AdamW over host memory that several processes may have in common."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from swarm.config import OptimizerConfig
from swarm.train.adam_moments import Moments, MomentsFormat
from swarm.train.optimizer import OwnedAdamW
from swarm.train.streaming.arena import HostMemory, Packing


class HostAdamW(OwnedAdamW):
    """As `OwnedAdamW`, called alike by all processes; one of them puts values there."""

    def __init__(self, settings: OptimizerConfig, form: MomentsFormat, memory: HostMemory) -> None:
        """As `OwnedAdamW`; moments are taken from `memory`."""
        super().__init__(settings, form)
        self._memory = memory

    def _new_moments(self, rows: int, size: int, device: torch.device) -> Moments:
        if self._memory.size == 1:
            return super()._new_moments(rows, size, device)
        like = Moments.zeros(self._form, rows, size, torch.device("meta")).parts
        packing = Packing.of((kind, tuple(part.shape), part.dtype) for kind, part in like.items())
        # Memory in common is zero when it is taken.
        return Moments(self._form, packing.views(self._memory.take(packing.num_bytes).buffer))

    def _keep_row(self, new: Moments, row: int, old: Moments, old_row: int) -> None:
        if self._memory.writes:
            super()._keep_row(new, row, old, old_row)

    def write_moments(self, values: Mapping[str, Tensor]) -> None:
        """See `OwnedAdamW`."""
        if self._memory.writes:
            super().write_moments(values)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `OwnedAdamW`."""
        if self._memory.writes:
            super().load(tensors)
