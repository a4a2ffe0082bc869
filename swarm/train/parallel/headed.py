"""Tensor parallel: the engine of one rank that has some of the heads of attention.

The ranks of a group have the same micro-batches, and each its heads, its experts and its tokens
(`tensor.py`).
What is cut by heads is put together from all of them where a whole tensor is asked for, and cut
where one is written (`heads.py`). Losses are told by the first rank of a group.
"""

# What the methods do is said in `Engine` and `RankEngine`.
# ruff: noqa: D102

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from swarm.config import ModelConfig, RunConfig
from swarm.experts import Slice, stacked_tensors
from swarm.model.moe import Pieces
from swarm.model.stage import Stage
from swarm.train.engine import StandIn
from swarm.train.guard import norm_of
from swarm.train.optimizer import OwnedAdamW
from swarm.train.options import EngineOptions
from swarm.train.parallel.heads import Heads, HeadsAdamW
from swarm.train.parallel.ranks import Ranks
from swarm.train.parallel.sharding import RankEngine
from swarm.train.parallel.tensor import HeadsAttention, SharedBank, SharedTokens


class HeadsEngine(RankEngine):
    """As `RankEngine`; to read a tensor that is cut is an operation of the ranks of a group."""

    def __init__(
        self, run: RunConfig, options: EngineOptions, ranks: Ranks, *, stage: Stage | None = None
    ) -> None:
        super().__init__(run, options, ranks, stage=stage)
        self._stage_ranks = ranks.part(self._mesh.stages)

    def _pieces(self, model: ModelConfig) -> Pieces:
        self._heads = Heads(self._group, model)
        return Pieces(
            functools.partial(SharedBank, group=self._group),
            functools.partial(HeadsAttention, heads=self._heads),
            SharedTokens(self._group),
        )

    def _adamw(self, options: EngineOptions) -> OwnedAdamW:
        return HeadsAdamW(self._run.optimizer, options.moments, self._heads)

    # ------------------------------------------------ who holds what

    def takes_part(self, name: str) -> bool:
        if self._heads.cuts(name):
            return self._replicas.rank == 0 and self.holds(name)
        return self.answers(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._heads.whole_shape(name, self._model.shape(name))

    def whole(self, name: str, part: Tensor) -> Tensor:
        return self._heads.whole(name, part)

    # ------------------------------------------------ values

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self.whole(name, part) for name, part in super().read(names).items()}

    def read_part(self, part: Slice) -> Tensor:
        if not self._heads.cuts(part.name):
            return super().read_part(part)
        return self.read([part.name])[part.name].view(-1)[part.start : part.stop].clone()

    def write(self, named: Mapping[str, Tensor]) -> None:
        held = {name: each for name, each in named.items() if self.holds(name)}
        super().write({**named, **self._heads.parts(held, self.shape)})

    def write_part(self, part: Slice, values: Tensor) -> None:
        if self._heads.cuts(part.name) and self.holds(part.name):
            self._heads.put(part, values, self._model.read([part.name])[part.name])
        else:
            super().write_part(part, values)

    def evaluate(
        self,
        tokens_BT1: Tensor,
        *,
        scored_BT: Tensor | None = None,
        agreed: StandIn | None = None,
    ) -> float:
        # Of texts of any length; no token sees those behind it, and nothing is dropped.
        missing = -(tokens_BT1.shape[1] - 1) % self._group.size
        if missing:
            scored = torch.ones_like(tokens_BT1[:, 1:], dtype=torch.bool)
            scored_BT = F.pad(scored if scored_BT is None else scored_BT, (0, missing))
            tokens_BT1 = F.pad(tokens_BT1, (0, missing))
        return super().evaluate(tokens_BT1, scored_BT=scored_BT, agreed=agreed)

    # ------------------------------------------------ a step

    def _told(self, mine: range, rows: Sequence[Sequence[float]], shape: tuple[int, int]) -> Tensor:
        return super()._told(mine, rows if self._group.rank == 0 else (), shape)

    def _add_up(self) -> None:
        """Heads and experts over the ranks that have the same; the rest is of a rank's tokens."""
        own: list[Tensor] = []
        of_tokens: list[Tensor] = []
        for name, gradient in self._gradients_by_name().items():
            is_own = self._heads.cuts(name) or stacked_tensors(name, (0,))
            (own if is_own else of_tokens).append(gradient)
        self._replicas.add_up(own)
        self._stage_ranks.add_up(of_tokens)

    def _norms(self, scale: float) -> dict[str, Tensor]:
        named = self._gradients_by_name()
        shared = {name: each for name, each in named.items() if not stacked_tensors(name, (0,))}
        squares = self._heads.square_sums(shared)
        found = {name: norm_of(each, scale).to(self._device) for name, each in squares.items()}
        return found | self._dealt_norms(scale)

    def _idle(self, _count: int) -> int:
        return 0  # all of a group have the same micro-batches
