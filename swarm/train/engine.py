"""Engines: what runs the local steps of a peer. One interface, whatever holds the weights.

Legend: B sequences, T tokens that a sequence predicts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from swarm.config import RunConfig
from swarm.errors import CorruptState
from swarm.experts import expert_shapes, selection_biases, shared_shapes
from swarm.model.routing import Guidance
from swarm.model.transformer import Transformer
from swarm.train.guard import UNSCALED, Guard, LossScale, clip_factors, total_norm
from swarm.train.optimizer import OwnedAdamW
from swarm.train.options import EngineOptions
from swarm.train.routed import Routed

TERMS = ("loss", "cross_entropy", "balance", "router_z", "output_z")
"""The first fields of `Losses`, as `StepStats` names them."""


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
        dropped: choices of experts, in all layers, that exceeded a capacity.
        similarity: mean CKA of experts that got the same tokens; None where not measured.
        spike: whether the norm stood out from those before; see `Guard`.
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
    dropped: int = 0
    similarity: float | None = None
    spike: bool = False


@dataclass(frozen=True)
class EngineState:
    """What an engine must keep to go on with the same bits; frozen experts are not part of it.

    Attributes:
        tensors: "master." and "exp_avg." and "exp_avg_sq." before Hugging Face names; masters
            are fp32, moments as they are stored, in int8 with "exp_avg_scale." and so on.
        owned: experts that this peer trains.
        updates: AdamW's common count.
        skipped: steps skipped so far.
        skipped_in_a_row: of these, the ones since the last update.
        scale: of the loss, in fp16.
    """

    tensors: Mapping[str, Tensor]
    owned: tuple[int, ...]
    updates: int
    skipped: int
    skipped_in_a_row: int
    scale: LossScale = UNSCALED

    def require(self, run: RunConfig) -> None:
        """Raises CorruptState if it is not a state of this run's model."""
        shapes = shared_shapes(run.model)
        for expert in self.owned:
            shapes |= expert_shapes(run.model, expert)
        masters = {
            name.removeprefix("master."): tuple(each.shape)
            for name, each in self.tensors.items()
            if name.startswith("master.")
        }
        names = {name.partition(".")[2] for name in self.tensors}
        if masters != shapes or names != set(shapes):
            raise CorruptState("the private state belongs to another model")


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

    @property
    def intact(self) -> bool:
        """Whether all masters are those after a whole number of steps, also after an error."""
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

    def step(self, tokens_BT1: Tensor, *, lr: float, guidance: Guidance | None = None) -> StepStats:
        """One optimizer step on the mean over the batch's micro-batches.

        `guidance` leads the routing; each micro-batch has its `part`.

        A loss or gradient that is not finite changes nothing: the step is skipped and counted.

        Raises:
            TrainingDiverged: the third skipped step in a row.
        """
        ...

    def rehearse(self, tokens_BT1: Tensor) -> None:
        """Computes the gradients of a micro-batch or less and drops them, to see how long it takes.

        No value, moment, count or random state changes, and no more memory is taken than by `step`.
        """
        ...

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Copies of tensors by Hugging Face name, fp32 on the CPU; masters of what is owned."""
        ...

    def write(self, named: Mapping[str, Tensor]) -> None:
        """Overwrites tensors by Hugging Face name; moments stay as they are."""
        ...

    @property
    def borrows(self) -> bool:
        """Whether frozen experts stay where `lend` shows them, which should be a mapped file."""
        ...

    def lend(self, named: Mapping[str, Tensor]) -> None:
        """As `write`, of tensors that nobody changes as long as they live."""
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

    def close(self) -> None:
        """Ends what works beside the caller and gives memory back; nothing may follow."""
        ...


class ResidentEngine:
    """An engine that keeps the whole model in the memory of one device; see `Engine`."""

    def __init__(self, run: RunConfig, options: EngineOptions | None = None) -> None:
        """Builds a model that owns nothing; its tensors hold nothing until they are written."""
        options = options or EngineOptions.of(run)
        self._run = run
        self._device = torch.device(options.device)
        self._model = Transformer(
            run.model,
            frozen=options.frozen,
            compute=options.compute,
            recompute=options.recompute,
            device=self._device,
        )
        self._optimizer = OwnedAdamW(run.optimizer, options.moments)
        self._optimizer.follow(self._model.trained_parameters(), self.owned)
        self._guard = Guard(options.compute)
        self._intact = True

    @property
    def owned(self) -> tuple[int, ...]:
        """See `Engine`."""
        return self._model.owned

    @property
    def skipped(self) -> int:
        """See `Engine`."""
        return self._guard.skipped

    @property
    def intact(self) -> bool:
        """See `Engine`."""
        return self._intact

    def own(self, experts: Sequence[int]) -> None:
        """See `Engine`."""
        if tuple(sorted(experts)) != self.owned:
            self._model.own(sorted(experts))
            self._optimizer.follow(self._model.trained_parameters(), self.owned)

    def count_from(self, updates: int) -> None:
        """See `Engine`."""
        self._optimizer.count_from(updates)

    def step(self, tokens_BT1: Tensor, *, lr: float, guidance: Guidance | None = None) -> StepStats:
        """See `Engine`."""
        means, routed = self._accumulate(tokens_BT1, guidance or Guidance())
        optimizer, scale = self._optimizer, self._guard.scale.value
        gradients = [p.grad for p in optimizer.parameters if p.grad is not None]
        each = [torch.linalg.vector_norm(gradient) / scale for gradient in gradients]
        norms = dict(zip(optimizer.names, each, strict=True))
        norm = total_norm(norms).item()
        skipped = not self._guard.finite(means["loss"], norm)
        if skipped:
            optimizer.free_gradients()
        else:
            factors = clip_factors(norms, self._run.optimizer)
            for name, gradient in zip(optimizer.names, gradients, strict=True):
                gradient.mul_(factors[name] / scale)
            self._intact = False
            optimizer.update(lr)
            if self._run.routing.bias_update_rate:
                self._model.balance(routed.tokens_LE, self._run.routing.bias_update_rate)
            self._intact = True
        return StepStats(
            grad_norm=norm,
            tokens=tokens_BT1.shape[0] * (tokens_BT1.shape[1] - 1),
            skipped=skipped,
            spike=self._guard.spiked,
            **(means | routed.fields()),
        )

    def rehearse(self, tokens_BT1: Tensor) -> None:
        """See `Engine`."""
        try:
            self._accumulate(tokens_BT1, Guidance())
        finally:
            self._optimizer.free_gradients()

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """See `Engine`."""
        return {
            name: tensor.to("cpu", torch.float32, copy=True)
            for name, tensor in self._model.read(names).items()
        }

    def write(self, named: Mapping[str, Tensor]) -> None:
        """See `Engine`."""
        self._model.write(named)

    @property
    def borrows(self) -> bool:
        """See `Engine`."""
        return False

    def lend(self, named: Mapping[str, Tensor]) -> None:
        """See `Engine`; copies them."""
        self.write(named)

    def read_moments(self, expert: int) -> dict[str, Tensor]:
        """See `Engine`."""
        assert expert in self.owned, f"expert {expert} is not trained here"
        return self._optimizer.read_moments(expert_shapes(self._run.model, expert))

    def write_moments(self, expert: int, moments: Mapping[str, Tensor]) -> None:
        """See `Engine`."""
        assert expert in self.owned, f"expert {expert} is not trained here"
        self._optimizer.write_moments(moments)

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
        biases = self._model.read(selection_biases(self._run.model))
        return EngineState(
            tensors=self._optimizer.state() | {f"master.{n}": each for n, each in biases.items()},
            owned=self.owned,
            updates=self._optimizer.updates,
            skipped=self._guard.skipped,
            skipped_in_a_row=self._guard.skipped_in_a_row,
            scale=self._guard.scale,
        )

    @torch.no_grad()
    def load_state_dict(self, state: EngineState) -> None:
        """See `Engine`."""
        state.require(self._run)
        self.own(state.owned)
        self._optimizer.load(state.tensors)
        biases = selection_biases(self._run.model)
        self._model.write({name: state.tensors[f"master.{name}"] for name in biases})
        self._optimizer.count_from(state.updates)
        self._guard.resume(state.skipped, state.skipped_in_a_row, state.scale)

    def close(self) -> None:
        """See `Engine`; there is nothing beside."""

    def _accumulate(self, tokens_BT1: Tensor, guidance: Guidance) -> tuple[dict[str, Any], Routed]:
        """Forms the gradient of the mean loss over micro-batches.

        Returns:
            The mean of each term of the loss, and where the tokens went.
        """
        micro_batches = tokens_BT1.split(self._run.train.micro_batch_sequences)
        terms, routed = [], Routed(self._device)
        for index, micro_BT1 in enumerate(micro_batches):
            losses = self._model.losses(
                micro_BT1.to(self._device, non_blocking=True),
                self._run.loss,
                guidance.part(index),
            )
            (losses.total / len(micro_batches) * self._guard.scale.value).backward()
            terms.append(torch.stack([term.detach() for term in losses[:5]]))
            routed.add(losses)
        # One wait for the device per step, not one per term.
        means = torch.stack(terms).mean(dim=0).tolist()
        return dict(zip(TERMS, means, strict=True)), routed


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
