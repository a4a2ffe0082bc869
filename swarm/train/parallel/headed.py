"""Tensor parallel: the engine of one rank that has some of the heads of attention.

The ranks of a group have the same micro-batches, and each its heads and its experts (`tensor.py`).
What is cut by heads is put together from all of them where a whole tensor is asked for, and cut
where one is written (`heads.py`). Losses are told by the first rank of a group.
"""

# What the methods do is said in `Engine` and `RankEngine`.
# ruff: noqa: D102

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from swarm.config import ModelConfig, RunConfig
from swarm.experts import Slice, stacked_tensors
from swarm.model.moe import MakeAttention, MakeBank
from swarm.model.stage import Stage
from swarm.train.guard import norm_of
from swarm.train.optimizer import OwnedAdamW
from swarm.train.options import EngineOptions
from swarm.train.parallel.heads import Heads, HeadsAdamW
from swarm.train.parallel.ranks import Ranks
from swarm.train.parallel.sharding import RankEngine
from swarm.train.parallel.tensor import HeadsAttention, SharedBank, shared_output_losses


class HeadsEngine(RankEngine):
    """As `RankEngine`; to read a tensor that is cut is an operation of the ranks of a group."""

    def __init__(
        self, run: RunConfig, options: EngineOptions, ranks: Ranks, *, stage: Stage | None = None
    ) -> None:
        super().__init__(run, options, ranks, stage=stage)
        self._stage_ranks = ranks.part(self._mesh.stages)
        if not run.model.tie_word_embeddings:
            self._model.output = functools.partial(shared_output_losses, group=self._group)

    def _made(self, model: ModelConfig) -> tuple[MakeBank, MakeAttention]:
        self._heads = Heads(self._group, model)
        bank = functools.partial(SharedBank, group=self._group)
        return bank, functools.partial(HeadsAttention, heads=self._heads)

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

    # ------------------------------------------------ a step

    def _told(self, mine: range, rows: Sequence[Sequence[float]], shape: tuple[int, int]) -> Tensor:
        return super()._told(mine, rows if self._group.rank == 0 else (), shape)

    def _add_up(self) -> None:
        """As in `RankEngine`; some gradients are of the heads or tokens of one rank."""
        named = self._gradients_by_name()
        dealt = [each for name, each in named.items() if stacked_tensors(name, (0,))]
        shared = {name: each for name, each in named.items() if not stacked_tensors(name, (0,))}
        self._same.add_up([g for name, g in shared.items() if not self._heads.is_summed(name)])
        self._replicas.add_up(dealt)
        if partial := [g for name, g in shared.items() if self._heads.is_summed(name)]:
            self._stage_ranks.add_up(partial)

    def _norms(self, scale: float) -> dict[str, Tensor]:
        named = self._gradients_by_name()
        shared = {name: each for name, each in named.items() if not stacked_tensors(name, (0,))}
        squares = self._heads.square_sums(shared)
        found = {name: norm_of(each, scale).to(self._device) for name, each in squares.items()}
        return found | self._dealt_norms(scale)

    def _idle(self, _count: int) -> int:
        return 0  # all of a group have the same micro-batches
