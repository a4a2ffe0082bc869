"""Held-out losses of the streaming engine: fp32 masters pass instead of the usual type.

All micro-batches of a pass go through a layer before the next one, which arrives meanwhile, as in
training; nothing is kept for a backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from swarm.config import RunConfig
from swarm.model.attention import rotary_tables
from swarm.model.losses import output_losses
from swarm.train.engine import Part, StandIn
from swarm.train.options import EngineOptions
from swarm.train.parallel.ranks import Ranks
from swarm.train.streaming.device import DeviceSide
from swarm.train.streaming.store import HostStore


class Evaluation:
    """Two places for layers and one for the head, on the device, until it is closed.

    Args:
        run: the model.
        options: of the engine.
        store: the source of units, none of which is being updated.
        ranks: processes that share the micro-batches.
    """

    def __init__(
        self, run: RunConfig, options: EngineOptions, store: HostStore, ranks: Ranks
    ) -> None:
        options = replace(options, resident_layers=0)
        self._run, self._together = run, options.evaluated_together(run, ranks.size)
        self._device = DeviceSide(run, options, store, ranks, masters=True)

    def close(self) -> None:
        """Gives the memory back."""
        self._device.release()

    @torch.no_grad()
    def means(self, agreed: StandIn | None, parts: Sequence[Part]) -> list[float]:
        """The mean cross-entropy of each micro-batch; for `agreed` see `Engine.evaluate`."""
        starts = range(0, len(parts), self._together)
        passes = [parts[start : start + self._together] for start in starts]
        return [mean for one in passes for mean in self._means(one, agreed)]

    def _means(self, parts: Sequence[Part], agreed: StandIn | None) -> list[float]:
        """Of one pass."""
        device, model = self._device, self._run.model
        there, length = device.bus.device, parts[0][0].shape[1] - 1
        device.prefetch_layer(0)
        x = [device.embedded(tokens_BT1[:, :-1]) for tokens_BT1, _ in parts]
        positions = rotary_tables(length, model.dim_per_head, model.rope_theta, there)
        for layer in range(model.num_hidden_layers):
            place = device.take_layer_forward(layer)
            if agreed:
                device.put_in(place, layer, agreed)
            assert place.layer is not None
            for index, x_BTD in enumerate(x):
                x[index], _ = place.layer(x_BTD, positions)
            device.give_back(place)
        norm, head_VD = device.take_head()
        z_weight, found = self._run.loss.output_z_weight, []
        for x_BTD, (tokens_BT1, scored_BT) in zip(x, parts, strict=True):
            hidden_ND = norm(x_BTD)[scored_BT.to(there)]
            labels_N = tokens_BT1[:, 1:][scored_BT].to(there)
            found.append(output_losses(hidden_ND, head_VD, labels_N, z_weight)[1].item())
        return found
