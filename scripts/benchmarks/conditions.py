"""Settings of small trainings that no run file has, and the engine that follows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from unittest import mock

import torch
from torch import Tensor

from swarm.config import OptimizerConfig, RunConfig
from swarm.experts import stacked_tensors
from swarm.model.losses import Losses
from swarm.model.routing import RoutingControls
from swarm.train.engine import muon
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.micro_batches import MicroBatch
from swarm.train.engine.optimizer import OwnedOptimizer
from swarm.train.engine.optimizer_moments import MomentsFormat, Piece, Update
from swarm.train.engine.resident import ResidentEngine


@dataclass(frozen=True)
class Conditions:
    """Settings of a training that no run file has.

    Attributes:
        delay: local steps of a peer until it has the result of a round without waiting for it, at
            most those of a round. 0: it waits.
        own_texts: each peer reads a part of the text of its own. The parts follow the order of the
            files, so each has other packages.
        keeps_remainder: reducers add what the coding of a mean left out to the next mean. Policy:
            delta means.
        readers: an expert learns from one of so many equal parts of each batch. 1: from all.
        held: experts that a peer has in memory, its own among them. 0: all.
        absent: what happens to tokens of an absent expert. "skip": it adds nothing. "mask": the
            router chooses among the experts held. "balance": so it does, and balances their loads.
        rotates: the foreign experts held are others in each cycle.
        expert_decay: of Muon's momentum of experts. They learn from fewer tokens than the rest.
        expert_lr: learning rate of the matrices of experts, in units of the run's.
    """

    delay: int = 0
    own_texts: bool = False
    keeps_remainder: bool = True
    readers: int = 1
    held: int = 0
    absent: str = "skip"
    rotates: bool = False
    expert_decay: float = muon.MOMENTUM_DECAY
    expert_lr: float = 1


WAITING = Conditions()
"""Peers wait for the result of a round, and all read one text."""


class _ExpertOptimizer(OwnedOptimizer):
    """Muon with a momentum and a learning rate of their own for experts."""

    def __init__(
        self, settings: OptimizerConfig, form: MomentsFormat, conditions: Conditions
    ) -> None:
        super().__init__(settings, form)
        self._conditions = conditions

    def update_piece(
        self,
        piece: Piece,
        gradient_x: Tensor,
        update: Update,
        *,
        direction_RC: Tensor | None = None,
    ) -> None:
        if piece.matrix is None or not stacked_tensors(piece.name, (0,)):
            super().update_piece(piece, gradient_x, update, direction_RC=direction_RC)
            return
        update = replace(update, lr=update.lr * self._conditions.expert_lr)
        with mock.patch.object(muon, "MOMENTUM_DECAY", self._conditions.expert_decay):
            super().update_piece(piece, gradient_x, update, direction_RC=direction_RC)


class LimitedEngine(ResidentEngine):
    """Trains experts on a part of the text, in other ways, or without some foreign ones.

    With several readers, each expert learns from one of as many equal parts of every batch. All
    other tensors learn from the whole batch, without any exchange. The loss above that of a usual
    engine is the price of experts that see only their owner's tokens.
    """

    def __init__(self, run: RunConfig, conditions: Conditions) -> None:
        self._conditions, self._reader = conditions, 0
        self.held: set[int] = set()
        super().__init__(run)

    def _new_optimizer(self, options: EngineOptions) -> OwnedOptimizer:
        conditions = self._conditions
        if (conditions.expert_decay, conditions.expert_lr) == (muon.MOMENTUM_DECAY, 1):
            return super()._new_optimizer(options)
        return _ExpertOptimizer(self._run.optimizer, options.moments, conditions)

    def own(self, experts: Sequence[int]) -> None:
        super().own(experts)
        readers = self._conditions.readers
        if readers == 1:
            return
        reader_of_row = torch.arange(len(self.owned)) % readers
        for name, parameter in self._model.trained_parameters().items():
            if stacked_tensors(name, (0,)):
                parameter.register_hook(
                    lambda gradient: gradient * (reader_of_row == self._reader)[:, None, None]
                )

    def _backward(
        self, parts: Sequence[MicroBatch], index: int, controls: RoutingControls
    ) -> Losses:
        self._reader = index * self._conditions.readers // len(parts)
        if self._conditions.absent != "skip":
            balances = self._conditions.absent == "balance"
            held = tuple(sorted(self.held))
            controls = _AmongHeld(**vars(controls), held=held, balances=balances)
        return super()._backward(parts, index, controls)


@dataclass(frozen=True)
class _AmongHeld(RoutingControls):
    """Routes tokens to the experts that a peer holds."""

    held: tuple[int, ...] = ()
    balances: bool = False

    def own_bias(self, owned: Sequence[int], logits_NE: Tensor) -> Tensor | None:  # noqa: ARG002
        bias_E = logits_NE.new_full(logits_NE.shape[1:], -1e9)
        bias_E[list(self.held)] = 0
        return bias_E

    def count_weights(self, owned: Sequence[int], like_NE: Tensor) -> Tensor | None:  # noqa: ARG002
        if not self.balances:
            return None
        weight_E = like_NE.new_zeros(like_NE.shape[1])
        weight_E[list(self.held)] = 1
        return weight_E
