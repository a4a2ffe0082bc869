"""Data and expert parallel with state that is cut: the engine of one rank.

Masters and moments of what ranks hold alike are cut over these: those of the shared tensors over
all ranks (of a pipeline those of the same stage), those of dealt experts over the ranks of a seat
(`sharded_adamw.py`). Gradients are whole
on every rank until the end of a step; then each element is added up in the order of the ranks by
the one that has its state, and all get the new values. Each rank forms the norms of what it has in
fp64 and tells them to all, so that clipping does not depend on the cut.
"""

# What the methods do is said in `Engine`.
# ruff: noqa: D102

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from swarm.experts import Slice, stacked_tensors
from swarm.model.transformer import DTYPES
from swarm.train.engine import StandIn, is_trained
from swarm.train.guard import norm_of, square_sum
from swarm.train.optimizer import OwnedAdamW
from swarm.train.options import EngineOptions
from swarm.train.parallel.ranks import Ranks
from swarm.train.parallel.sharded_adamw import ShardedAdamW
from swarm.train.parallel.sharding import RankEngine
from swarm.train.tensor_file import LazyTensors


class ShardedEngine(RankEngine):
    """As `RankEngine`; to read a trained tensor is an operation of all ranks that hold it."""

    _optimizer: ShardedAdamW

    def _adamw(self, options: EngineOptions) -> OwnedAdamW:
        compute = DTYPES[options.compute]
        return ShardedAdamW(self._run.optimizer, options.moments, compute, self._alike)

    def _alike(self, name: str) -> Ranks:
        """The ranks that hold a parameter alike."""
        is_dealt = self._mesh.ep > 1 and stacked_tensors(name, (0,))
        return self._replicas if is_dealt else self._same

    # ------------------------------------------------ who holds what

    def takes_part(self, name: str) -> bool:
        return self.holds(name) if self._is_cut(name) else self.answers(name)

    def _is_cut(self, name: str) -> bool:
        """Whether a tensor has a state that ranks share."""
        return is_trained(name, self.owned) and name not in self._biases()

    def own(self, experts: Sequence[int]) -> None:
        if tuple(sorted(experts)) != self.owned:
            with self._optimizer.whole():
                super().own(experts)

    # ------------------------------------------------ a step

    def _add_up(self) -> None:
        self._optimizer.add_up()

    def _gradients_by_name(self) -> dict[str, Tensor]:
        return self._optimizer.own_gradients()

    def _norms(self, scale: float) -> dict[str, Tensor]:
        names = self._trained_names()
        # A row for each rank, so that the sum over them has one order.
        squares = torch.zeros(self._ranks.size, len(names), dtype=torch.float64)
        own = self._gradients_by_name()
        here = [k for k, name in enumerate(names) if name in own and self._speaks_for(name)]
        found = [square_sum(own[names[index]]) for index in here]
        squares[self._ranks.rank, here] = torch.stack(found).cpu()
        total = self._ranks.united(squares).sum(0)
        values = norm_of(total, scale).to(self._device)
        return dict(zip(names, values.unbind(), strict=True))

    # ------------------------------------------------ values

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        found = {}
        for name in names:
            if self._is_cut(name):
                found[name] = self._optimizer.master(name).to("cpu", copy=True)
            else:
                found |= super().read([name])
        return found

    def read_part(self, part: Slice) -> Tensor:
        whole_X = self.read([part.name])[part.name].view(-1)
        return whole_X[part.start : part.stop].clone()

    def write(self, named: Mapping[str, Tensor]) -> None:
        super().write(named)
        for name in named:
            if self._is_cut(name) and self.holds(name):
                self._optimizer.write(name, 0, named[name])

    def write_part(self, part: Slice, values: Tensor) -> None:
        super().write_part(part, values)
        if self.holds(part.name):
            self._optimizer.write(part.name, part.start, values)

    def evaluate(
        self,
        tokens_BT1: Tensor,
        *,
        scored_BT: Tensor | None = None,
        agreed: StandIn | None = None,
    ) -> float:
        with self._optimizer.whole():
            return super().evaluate(tokens_BT1, scored_BT=scored_BT, agreed=agreed)

    def _state_tensors(self) -> Mapping[str, Tensor]:
        return _WithBiases(self._optimizer.state(), self._model.read(self._biases()))


class _WithBiases(LazyTensors):
    """A state that is collected, and the selection biases, which all ranks have."""

    def __init__(self, cut: Mapping[str, Tensor], biases: Mapping[str, Tensor]) -> None:
        self._cut = cut
        self._biases = {f"master.{name}": each for name, each in biases.items()}

    def forms(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """See `LazyTensors`; an operation of the ranks."""
        return {name: (each.dtype, tuple(each.shape)) for name, each in self.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._biases[name] if name in self._biases else self._cut[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._cut
        yield from self._biases

    def __len__(self) -> int:
        return len(self._cut) + len(self._biases)
