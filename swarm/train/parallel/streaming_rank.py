"""Streaming on several devices from one host copy: the engine of one rank.

All ranks are processes of one machine. Masters, moments, frozen experts, gradients and the copy for
the devices are in shared memory (`train/engine/host_memory.py`). Each rank has its own device, bus,
inputs of layers, and block of the micro-batches.

After a layer's backward pass gradients are added up in the order of the ranks. Each rank adds up
its share, sends it to the host and updates it (`streaming/host_model.py`). No rank fetches a unit
before all have updated it. A step has the bits of one process if each rank has one micro-batch.

The first rank writes values and answers for all.
"""

# `Engine` and `RankEngine` document the methods.
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from swarm.config import RunConfig
from swarm.model.losses import Losses
from swarm.model.routing import RoutingControls
from swarm.train.engine.engine import Part, moments_in
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.host_memory import SharedMemory
from swarm.train.engine.rank_figures import RankFigures
from swarm.train.engine.ranks import Ranks
from swarm.train.engine.tensor_file import Form, forms_of
from swarm.train.parallel.data_parallel import LossesForm, dealt_means, figures_of
from swarm.train.streaming.streaming_engine import StreamingEngine


class StreamingRank(StreamingEngine):
    """The streaming engine of one rank. All ranks get the same calls and reach the same values.

    Any single rank can answer a question for a tensor.
    """

    def __init__(self, run: RunConfig, options: EngineOptions, ranks: Ranks) -> None:
        """Like `StreamingEngine`.

        Raises:
            ConfigError: some ranks are on another machine.
            Disconnected: another rank has ended.
        """
        super().__init__(run, options, ranks, SharedMemory(ranks))

    # ------------------------------------------------ who answers

    def answers(self, _name: str) -> bool:
        return self._ranks.rank == 0

    def takes_part(self, name: str) -> bool:
        return self.answers(name)

    def whole(self, _name: str, part: Tensor) -> Tensor:
        return part

    def shape(self, name: str) -> tuple[int, ...]:
        return self._store.shape(name)

    def moments_of(self, name: str) -> tuple[str, ...]:
        self.shape(name)
        return moments_in(self._run, self.owned, name)

    def state_forms(self) -> dict[str, Form]:
        return forms_of(self._store.state())

    # ------------------------------------------------ what all find

    def figures(self, sequences: int, seconds: float) -> RankFigures:
        count = -(-sequences // self._run.train.micro_batch_sequences)
        took_s = self._ranks.traffic.watch.take()
        return replace(figures_of(self._ranks, self._ranks, count, took_s), seconds=seconds)

    def _of_all(self, mine: list[Losses], count: int, controls: RoutingControls) -> list[Losses]:
        form = LossesForm.of(self._run, controls)
        rows = self._ranks.shared([form.row(each) for each in mine], count, form.width)
        return [form.losses(row, self._device.bus.device) for row in rows]

    def _of_each(
        self, means_of: Callable[[Sequence[Part]], list[float]], parts: Sequence[Part]
    ) -> list[float]:
        return dealt_means(self._ranks, means_of, parts)
