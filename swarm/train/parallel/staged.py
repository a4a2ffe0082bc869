"""Pipeline parallel: the engine of one rank, which holds one stage of the model.

Micro-batches are dealt in blocks to the pipelines of a peer; within one they flow through all of
its stages (`pipeline.py`), and gradients are added up in their order. So one pipeline has the bits
of one process, but for a tied embedding: its gradient is the sum of those at both ends, each added
up over the micro-batches, where one process adds both for each micro-batch.

With `ep` > 1 there are `ep` pipelines side by side, whose ranks share the experts of each stage, or
with `tp` its heads too.

Of the norms each stage forms its own, and tells them to the others: all clip by the same factor.

Masters and moments may be cut over the ranks of all pipelines that hold the same stage. A tied
embedding is cut alike at both ends, whose shares are then added up.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swarm.config import RunConfig
from swarm.experts import EMBEDDING
from swarm.model.losses import Losses
from swarm.model.masking import Masked
from swarm.model.routing import RoutingControls
from swarm.train.engine import Part
from swarm.train.micro_batches import MicroBatch
from swarm.train.options import EngineOptions
from swarm.train.parallel.headed import HeadsEngine
from swarm.train.parallel.mesh import Mesh
from swarm.train.parallel.pipeline import Flow, Pipeline
from swarm.train.parallel.ranks import Ranks
from swarm.train.parallel.sharded import ShardedEngine
from swarm.train.parallel.sharding import RankEngine
from swarm.train.sizes import pipeline_cut


class StageEngine(RankEngine):
    """The engine of a rank that holds one stage; all ranks are called alike.

    It can be asked for, and keeps, only what belongs to its stage.
    """

    def __init__(self, run: RunConfig, options: EngineOptions, ranks: Ranks) -> None:
        """As `RankEngine`, with `pp` stages."""
        mesh = Mesh(ranks.size, options.ep, options.pp, options.tp)
        cut = pipeline_cut(run, options)
        super().__init__(run, options, ranks, stage=cut.stages[mesh.stage(ranks.rank)])
        self._stages = ranks.part(mesh.pipelines)
        self._ends: Ranks | None = None
        if run.model.tie_word_embeddings:
            self._ends = ranks.part(mesh.ends)
        self._pipeline = Pipeline(self._model, self._stages, run.loss)
        self._schedule = options.schedule

    # ------------------------------------------------ who holds what

    def holds(self, name: str) -> bool:
        """Whether a tensor belongs to this rank's stage, and to its share of the experts."""
        tied = self._run.model.tie_word_embeddings
        return self._model.stage.holds(name, tied=tied) and super().holds(name)

    def answers(self, name: str) -> bool:
        """Whether this rank, and no other one, tells the controller a tensor's value."""
        return super().answers(name) and self._speaks_for(name)

    def _speaks_for(self, name: str) -> bool:
        """Whether this rank counts a tensor's values, and no other one of its pipeline."""
        return self.holds(name) and (name != EMBEDDING or self._model.stage.is_first)

    def _biases(self) -> Sequence[str]:
        return [name for name in super()._biases() if self.holds(name)]

    # ------------------------------------------------ a step

    def _gradients(self, parts: Sequence[MicroBatch], controls: RoutingControls) -> list[Losses]:
        mine = self._same.block(len(parts))
        idle = self._idle(len(parts))
        flow = Flow(
            parts=[*(parts[k] for k in mine), *[None] * idle],
            shape=parts[0].tokens_BT1.shape,
            controls=[*(controls.part(k) for k in mine), *[controls] * idle],
            divisor=len(parts),
            scale=self._guard.scale.value,
        )
        found = self._pipeline.train(flow, self._schedule) if flow.parts else []
        return self._of_all(mine, found, len(parts), controls)

    def _add_up(self) -> None:
        """As in `RankEngine`, then of a tied embedding over both ends of each pipeline."""
        super()._add_up()
        if self._ends is not None and self._ends.size > 1:
            self._ends.add_up([self._gradients_by_name()[EMBEDDING]])

    def _norms(self, scale: float) -> dict[str, Tensor]:
        mine = super()._norms(scale)
        names = self._trained_names()
        # What is fp32 comes through as it is.
        table = torch.zeros(len(names), dtype=torch.float64)
        own = [index for index, name in enumerate(names) if self._speaks_for(name)]
        table[own] = torch.stack([mine[names[index]] for index in own]).double().cpu()
        values = self._stages.united(table).float().to(self._device)
        return dict(zip(names, values.unbind(), strict=True))

    # ------------------------------------------------ evaluation

    def _means_of(self, parts: Sequence[Part]) -> list[float]:
        mine, idle = self._same.block(len(parts)), [None] * self._idle(len(parts))
        own = [
            MicroBatch(micro_BT1, Masked(scored_BT=scored_BT.to(self._device)))
            for micro_BT1, scored_BT in (parts[k] for k in mine)
        ]
        found = [[each.cross_entropy.item()] for each in self._pipeline.evaluate([*own, *idle])]
        means: list[float] = self._told(mine, found, (len(parts), 1))[:, 0].tolist()
        return means


class ShardedStageEngine(StageEngine, ShardedEngine):
    """A stage whose masters and moments are cut over the ranks that hold the same stage."""

    def _norms(self, scale: float) -> dict[str, Tensor]:
        """Of all stages in one operation: each rank knows those of its shares alone."""
        return ShardedEngine._norms(self, scale)


class HeadsStageEngine(StageEngine, HeadsEngine):
    """A stage of which each rank has some of the heads."""
