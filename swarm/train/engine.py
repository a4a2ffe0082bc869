"""Engines: what runs the local steps of a peer. One interface, whatever holds the weights.

Legend: B sequences, T tokens that a sequence predicts.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from swarm.config import RunConfig
from swarm.errors import CorruptState, TrainingDiverged
from swarm.experts import Shape, expert_shapes, shared_shapes
from swarm.model.transformer import Transformer
from swarm.train.optimizer import OwnedAdamW

SKIPS_UNTIL_DIVERGED = 3
"""So many steps in a row without a finite loss and gradient end the training of a peer."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepStats:
    """What one local step found; losses are means over its micro-batches, before the update.

    Attributes:
        loss: what was minimised: cross-entropy plus the terms below times their weights.
        cross_entropy: nats per token.
        balance: load-balancing loss before its weight.
        router_z: router z-loss before its weight.
        output_z: output z-loss before its weight.
        grad_norm: global norm over everything this peer trains, before clipping.
        tokens: tokens predicted.
        expert_tokens: for each layer, the tokens that each expert got.
        skipped: whether loss or gradient was not finite, so that nothing was changed.
    """

    loss: float
    cross_entropy: float
    balance: float
    router_z: float
    output_z: float
    grad_norm: float
    tokens: int
    expert_tokens: tuple[tuple[int, ...], ...]
    skipped: bool


@dataclass(frozen=True)
class EngineState:
    """What an engine must keep to go on with the same bits; frozen experts are not part of it.

    Attributes:
        tensors: fp32, "master." and "exp_avg." and "exp_avg_sq." before Hugging Face names.
        owned: experts that this peer trains.
        updates: AdamW's common count.
        skipped: steps skipped so far.
        skipped_in_a_row: of these, the ones since the last update.
    """

    tensors: Mapping[str, Tensor]
    owned: tuple[int, ...]
    updates: int
    skipped: int
    skipped_in_a_row: int


class Engine(Protocol):
    """Holds a whole model, trains the shared tensors and the experts that a peer owns."""

    @property
    def owned(self) -> tuple[int, ...]:
        """The experts that are trained, ascending."""
        ...

    @property
    def skipped(self) -> int:
        """Steps skipped since the engine was made or its state first saved."""
        ...

    def own(self, experts: Sequence[int]) -> None:
        """Trains these experts from now on and freezes all others.

        Values stay; one that freezes is rounded to the frozen storage's type. Experts that stay
        keep their moments, those that come start with zero moments, those that go lose theirs.
        """
        ...

    def count_from(self, updates: int) -> None:
        """Sets AdamW's count of updates: a joiner's is the run's cumulative step."""
        ...

    def step(self, tokens_BT1: Tensor, *, lr: float) -> StepStats:
        """One optimizer step on the mean over the batch's micro-batches.

        A loss or gradient that is not finite changes nothing: the step is skipped and counted.

        Raises:
            TrainingDiverged: the third skipped step in a row.
        """
        ...

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Copies of tensors by Hugging Face name, fp32 on the CPU; masters of what is owned."""
        ...

    def write(self, named: Mapping[str, Tensor]) -> None:
        """Overwrites tensors by Hugging Face name; moments stay as they are."""
        ...

    def read_moments(self, expert: int) -> dict[str, Tensor]:
        """Copies of an owned expert's moments, fp32 on the CPU.

        Named "exp_avg." and "exp_avg_sq." before the Hugging Face names of its matrices.
        """
        ...

    def write_moments(self, expert: int, moments: Mapping[str, Tensor]) -> None:
        """Overwrites an owned expert's moments; named as in `read_moments`."""
        ...

    def evaluate(self, tokens_BT1: Tensor, *, replace: Mapping[str, Tensor] | None = None) -> float:
        """Mean cross-entropy in nats per token, always computed in fp32.

        Args:
            tokens_BT1: sequences to predict.
            replace: values that stand in for the engine's own while this runs, such as the agreed
                values of owned experts for their masters. Afterwards every bit is as before.
        """
        ...

    def state_dict(self) -> EngineState:
        """The private state, as views: the next step changes them. Copy or save at once."""
        ...

    def load_state_dict(self, state: EngineState) -> None:
        """Takes over a private state; frozen experts must be written besides.

        Raises:
            CorruptState: it belongs to another model.
        """
        ...


class ResidentEngine:
    """An engine that keeps the whole model in the memory of one device; see `Engine`."""

    def __init__(self, run: RunConfig, *, device: str | torch.device = "cpu") -> None:
        """Builds a model that owns nothing; its tensors hold nothing until they are written."""
        self._run = run
        self._device = torch.device(device)
        self._model = Transformer(
            run.model,
            frozen=run.train.frozen,
            compute=run.train.compute,
            device=self._device,
        )
        self._optimizer = OwnedAdamW(run.optimizer)
        self._optimizer.follow(self._model.trained_parameters(), self.owned)
        self._skipped = 0
        self._skipped_in_a_row = 0

    @property
    def owned(self) -> tuple[int, ...]:
        """See `Engine`."""
        return self._model.owned

    @property
    def skipped(self) -> int:
        """See `Engine`."""
        return self._skipped

    def own(self, experts: Sequence[int]) -> None:
        """See `Engine`."""
        if tuple(sorted(experts)) != self.owned:
            self._model.own(sorted(experts))
            self._optimizer.follow(self._model.trained_parameters(), self.owned)

    def count_from(self, updates: int) -> None:
        """See `Engine`."""
        self._optimizer.count_from(updates)

    def step(self, tokens_BT1: Tensor, *, lr: float) -> StepStats:
        """See `Engine`."""
        means, tokens_LE = self._accumulate(tokens_BT1)
        parameters, settings = self._optimizer.parameters, self._run.optimizer
        norm = torch.nn.utils.clip_grad_norm_(parameters, settings.clip_norm).item()
        stats = StepStats(
            **means,
            grad_norm=norm,
            tokens=tokens_BT1.shape[0] * (tokens_BT1.shape[1] - 1),
            expert_tokens=tuple(tuple(layer) for layer in tokens_LE.tolist()),
            skipped=not (math.isfinite(means["loss"]) and math.isfinite(norm)),
        )
        if stats.skipped:
            self._skip(stats)
        else:
            self._optimizer.update(lr)
            self._skipped_in_a_row = 0
        return stats

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """See `Engine`."""
        return {
            name: tensor.to("cpu", torch.float32, copy=True)
            for name, tensor in self._model.read(names).items()
        }

    def write(self, named: Mapping[str, Tensor]) -> None:
        """See `Engine`."""
        self._model.write(named)

    def read_moments(self, expert: int) -> dict[str, Tensor]:
        """See `Engine`."""
        return {
            name: tensor.to("cpu", torch.float32, copy=True)
            for name, tensor in self._moments_of(expert).items()
        }

    @torch.no_grad()
    def write_moments(self, expert: int, moments: Mapping[str, Tensor]) -> None:
        """See `Engine`."""
        for name, tensor in self._moments_of(expert).items():
            tensor.copy_(moments[name])

    def _moments_of(self, expert: int) -> dict[str, Tensor]:
        assert expert in self.owned, f"expert {expert} is not trained here"
        kinds = zip(("exp_avg", "exp_avg_sq"), self._optimizer.moments(), strict=True)
        names = expert_shapes(self._run.model, expert)
        return {f"{kind}.{name}": named[name] for kind, named in kinds for name in names}

    @torch.no_grad()
    def evaluate(self, tokens_BT1: Tensor, *, replace: Mapping[str, Tensor] | None = None) -> float:
        """See `Engine`."""
        replace = replace or {}
        kept = {name: tensor.clone() for name, tensor in self._model.read(replace).items()}
        try:
            self._model.write(replace)
            with _computing_fp32(self._model):
                nats = 0.0
                for micro_BT1 in tokens_BT1.split(self._run.train.micro_batch_sequences):
                    losses = self._model.losses(micro_BT1.to(self._device), self._run.loss)
                    nats += losses.cross_entropy.item() * len(micro_BT1)
        finally:
            self._model.write(kept)
        return nats / len(tokens_BT1)

    def state_dict(self) -> EngineState:
        """See `Engine`."""
        means, squares = self._optimizer.moments()
        kinds = {"master": self._optimizer.masters(), "exp_avg": means, "exp_avg_sq": squares}
        return EngineState(
            tensors={
                f"{kind}.{name}": each for kind in kinds for name, each in kinds[kind].items()
            },
            owned=self.owned,
            updates=self._optimizer.updates,
            skipped=self._skipped,
            skipped_in_a_row=self._skipped_in_a_row,
        )

    @torch.no_grad()
    def load_state_dict(self, state: EngineState) -> None:
        """See `Engine`."""
        if {name: tuple(each.shape) for name, each in state.tensors.items()} != self._shapes(state):
            raise CorruptState("the private state belongs to another model")
        self.own(state.owned)
        mine = self.state_dict().tensors
        for name, tensor in mine.items():
            tensor.copy_(state.tensors[name])
        self._optimizer.count_from(state.updates)
        self._skipped = state.skipped
        self._skipped_in_a_row = state.skipped_in_a_row

    def _shapes(self, state: EngineState) -> dict[str, Shape]:
        """What the tensors of a private state with its owned experts are called and shaped."""
        shapes = shared_shapes(self._run.model)
        for expert in state.owned:
            shapes |= expert_shapes(self._run.model, expert)
        kinds = ("master", "exp_avg", "exp_avg_sq")
        return {f"{kind}.{name}": shape for kind in kinds for name, shape in shapes.items()}

    def _accumulate(self, tokens_BT1: Tensor) -> tuple[dict[str, float], Tensor]:
        """Forms the gradient of the mean loss over micro-batches.

        Returns:
            The mean of each term of the loss, and the tokens [L, E] that each expert got.
        """
        micro_batches = tokens_BT1.split(self._run.train.micro_batch_sequences)
        terms, tokens_LE = [], torch.zeros((), dtype=torch.int64, device=self._device)
        for micro_BT1 in micro_batches:
            losses = self._model.losses(
                micro_BT1.to(self._device, non_blocking=True), self._run.loss
            )
            (losses.total / len(micro_batches)).backward()
            terms.append(torch.stack([term.detach() for term in losses[:5]]))
            tokens_LE = tokens_LE + losses.expert_tokens
        # One wait for the device per step, not one per term.
        means = torch.stack(terms).mean(dim=0).tolist()
        names = ("loss", "cross_entropy", "balance", "router_z", "output_z")
        return dict(zip(names, means, strict=True)), tokens_LE

    def _skip(self, stats: StepStats) -> None:
        self._optimizer.free_gradients()
        self._skipped += 1
        self._skipped_in_a_row += 1
        found = f"loss {stats.loss}, gradient norm {stats.grad_norm}"
        if self._skipped_in_a_row >= SKIPS_UNTIL_DIVERGED:
            raise TrainingDiverged(
                f"{self._skipped_in_a_row} steps in a row were not finite, the last with {found}; "
                "nothing of them was offered to the swarm",
                hint="lower optimizer.lr, or look at the text this peer trains on",
            )
        logger.warning("step skipped: %s; %d so far", found, self._skipped)


@contextlib.contextmanager
def _computing_fp32(model: Transformer) -> Iterator[None]:
    """Lets every module of a model that has a compute type use fp32."""
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "compute")]
    before = [module.compute for module in modules]
    try:
        for module in modules:
            module.compute = torch.float32
        yield
    finally:
        for module, compute in zip(modules, before, strict=True):
            module.compute = compute
