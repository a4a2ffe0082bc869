"""The engine that keeps the whole model in the memory of one device.

Legend: B sequences, T predicted tokens of a sequence.
"""

# `Engine` documents the methods.
# ruff: noqa: D102

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from swarm.config import RunConfig
from swarm.data.masks import Masks
from swarm.experts import PROJECTIONS, Slice, expert_tensor, selection_biases
from swarm.model.losses import Losses
from swarm.model.masking import Masked
from swarm.model.moe import WHOLE, Pieces
from swarm.model.routing import RoutingControls
from swarm.model.stage import Stage
from swarm.model.transformer import Transformer
from swarm.train.engine import engine
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.guard import Guard, clip_factors, norm_of, square_sums, total_norm
from swarm.train.engine.micro_batches import MicroBatch, Routed, micro_batches, num_masked
from swarm.train.engine.optimizer import OwnedOptimizer


class ResidentEngine:
    """An `Engine` that keeps the whole model in the memory of one device."""

    def __init__(
        self,
        run: RunConfig,
        options: EngineOptions | None = None,
        *,
        pieces: Pieces = WHOLE,
        stage: Stage | None = None,
    ) -> None:
        """Builds a model without owned experts, whose tensors are uninitialized until written.

        Args:
            run: the model.
            options: None for the run's settings.
            pieces: the modules of the model.
            stage: the part of the model that this engine holds. None for all.
        """
        options = options or EngineOptions.of(run)
        self._run = run
        self._device = torch.device(options.device)
        self._model = Transformer(
            run.model,
            frozen=options.frozen,
            compute=options.compute,
            recompute=options.recompute,
            device=self._device,
            pieces=pieces,
            stage=stage,
        )
        self._optimizer = self._new_optimizer(options)
        self._optimizer.follow(self._model.trained_parameters(), self._model.owned_here)
        self._guard = Guard(options.compute)
        self._owned, self._intact = self._model.owned, True
        self._wait: Callable[[], None] = lambda: None

    def _new_optimizer(self, options: EngineOptions) -> OwnedOptimizer:
        """The optimizer of the trained tensors."""
        return OwnedOptimizer(self._run.optimizer, options.moments)

    @property
    def owned(self) -> tuple[int, ...]:
        return self._owned

    @property
    def skipped(self) -> int:
        return self._guard.skipped

    @property
    def intact(self) -> bool:
        return self._intact

    def own(self, experts: Sequence[int]) -> None:
        wanted = tuple(sorted(set(experts)))
        if wanted != self.owned:
            # If memory runs out here, the optimizer still has all earlier masters and moments.
            self._model.own(wanted)
            self._intact = False
            self._optimizer.follow(self._model.trained_parameters(), self._model.owned_here)
            self._owned, self._intact = wanted, True

    def count_from(self, updates: int) -> None:
        self._optimizer.count_from(updates)

    def before_update(self, wait: Callable[[], None]) -> bool:
        self._wait = wait
        return True

    def step(
        self,
        tokens_BT1: Tensor,
        *,
        lr: float,
        controls: RoutingControls | None = None,
        masks: Masks | None = None,
    ) -> engine.StepStats:
        means, routed = self._accumulate(tokens_BT1, controls or RoutingControls(), masks)
        optimizer, scale = self._optimizer, self._guard.scale.value
        norms = self._norms(scale)
        norm = total_norm(norms).item()
        skipped = not self._guard.finite(means["loss"], norm)
        if skipped:
            optimizer.free_gradients()
            self._wait()
        else:
            self._multiply_gradients(clip_factors(norms, self._run.optimizer, scale))
            self._wait()
            self._intact = False
            optimizer.update(lr)
            if self._run.routing.bias_update_rate:
                self._model.balance(routed.tokens_LE, self._run.routing.bias_update_rate)
            self._intact = True
        return engine.StepStats(
            grad_norm=norm,
            tokens=tokens_BT1.shape[0] * (tokens_BT1.shape[1] - 1),
            skipped=skipped,
            masked=num_masked(masks),
            spike=self._guard.spiked,
            **(means | routed.fields()),
        )

    def _gradients_by_name(self) -> dict[str, Tensor]:
        gradients = [p.grad for p in self._optimizer.parameters if p.grad is not None]
        return dict(zip(self._optimizer.names, gradients, strict=True))

    def _norms(self, scale: float) -> dict[str, Tensor]:
        """The norm of the gradient of each parameter of the peer, by name."""
        gradients = self._gradients_by_name()
        squares = square_sums(list(gradients.values()))
        return dict(zip(gradients, norm_of(squares, scale).unbind(), strict=True))

    def _multiply_gradients(self, factors: Mapping[str, Tensor]) -> None:
        """Multiplies gradients in place, those with one factor together."""
        alike: dict[int, list[str]] = {}
        for name, factor in factors.items():
            alike.setdefault(id(factor), []).append(name)
        gradients = self._gradients_by_name()
        for names in alike.values():
            here = [gradients[name] for name in names if name in gradients]
            if here:
                torch._foreach_mul_(here, factors[names[0]])

    def rehearse(self, tokens_BT1: Tensor) -> None:
        try:
            self._accumulate(tokens_BT1, RoutingControls())
        finally:
            self._optimizer.free_gradients()

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {
            name: tensor.to("cpu", torch.float32, copy=True)
            for name, tensor in self._model.read(names).items()
        }

    def write(self, named: Mapping[str, Tensor]) -> None:
        self._model.write(named)

    def read_part(self, part: Slice) -> Tensor:
        whole_X = self._model.read([part.name])[part.name].view(-1)
        return whole_X[part.start : part.stop].to("cpu", torch.float32, copy=True)

    def write_part(self, part: Slice, values: Tensor) -> None:
        assert engine.is_trained(part.name, self.owned), part
        whole_X = self._model.read([part.name])[part.name].view(-1)
        whole_X[part.start : part.stop].copy_(values)

    @property
    def borrows(self) -> bool:
        return False

    def lend(self, named: Mapping[str, Tensor]) -> None:
        """See `Engine`. Copies the tensors."""
        self.write(named)

    def read_moments(self, names: Collection[str]) -> dict[str, Tensor]:
        return self._optimizer.read_moments(names)

    def write_moments(self, moments: Mapping[str, Tensor]) -> None:
        self._optimizer.write_moments(moments)

    @torch.no_grad()
    def evaluate(
        self,
        tokens_BT1: Tensor,
        *,
        scored_BT: Tensor | None = None,
        agreed: engine.StandIn | None = None,
    ) -> float:
        with _computing_fp32(self._model), _standing_in(self._model, agreed):
            rows = self._run.train.micro_batch_sequences
            return engine.mean_over(self._means_of, tokens_BT1, scored_BT, rows)

    def _means_of(self, parts: Sequence[engine.Part]) -> list[float]:
        """The mean cross-entropy of each micro-batch."""
        return [self._mean_of(*part) for part in parts]

    def _mean_of(self, micro_BT1: Tensor, scored_BT: Tensor) -> float:
        masked = Masked(scored_BT=scored_BT.to(self._device))
        losses = self._model.losses(micro_BT1.to(self._device), self._run.loss, masked=masked)
        return losses.cross_entropy.item()

    def state_dict(self) -> engine.EngineState:
        return engine.EngineState(
            tensors=self._state_tensors(),
            owned=self.owned,
            updates=self._optimizer.updates,
            skipped=self._guard.skipped,
            skipped_in_a_row=self._guard.skipped_in_a_row,
            scale=self._guard.scale,
        )

    def _state_tensors(self) -> Mapping[str, Tensor]:
        biases = self._model.read(self._biases())
        return {**self._optimizer.state(), **{f"master.{n}": each for n, each in biases.items()}}

    @torch.no_grad()
    def load_state_dict(self, state: engine.EngineState) -> None:
        state.require(self._run)
        self.own(state.owned)
        self._optimizer.load(state.tensors)
        self._model.write({name: state.tensors[f"master.{name}"] for name in self._biases()})
        self._optimizer.count_from(state.updates)
        self._guard.resume(state.skipped, state.skipped_in_a_row, state.scale)

    def close(self) -> None:
        """See `Engine`. There is no background work."""

    def _biases(self) -> Sequence[str]:
        """Names of the selection biases of the layers here."""
        return selection_biases(self._run.model)

    def _accumulate(
        self, tokens_BT1: Tensor, controls: RoutingControls, masks: Masks | None = None
    ) -> tuple[dict[str, Any], Routed]:
        """Computes the gradient of the mean loss over micro-batches.

        Returns:
            The mean of each term of the loss, and the routing of the tokens.
        """
        rows = self._run.train.micro_batch_sequences
        found = self._gradients(micro_batches(tokens_BT1, masks, rows, self._device), controls)
        # So there is one wait for the device per step, not one per term.
        means = torch.stack([torch.stack(losses[:5]) for losses in found]).mean(dim=0).tolist()
        routed = Routed(self._device)
        for losses in found:
            routed.add(losses)
        return dict(zip(engine.TERMS, means, strict=True)), routed

    def _gradients(self, parts: Sequence[MicroBatch], controls: RoutingControls) -> list[Losses]:
        """Adds up the gradients of all micro-batches. Returns the detached losses of each."""
        return [self._backward(parts, index, controls) for index in range(len(parts))]

    def _backward(
        self, parts: Sequence[MicroBatch], index: int, controls: RoutingControls
    ) -> Losses:
        micro_BT1, masked = parts[index]
        losses = self._model.losses(
            micro_BT1.to(self._device, non_blocking=True),
            self._run.loss,
            controls.part(index),
            masked,
        )
        (losses.total / len(parts) * self._guard.scale.value).backward()
        return losses._replace(total=losses.total.detach())


@contextlib.contextmanager
def _computing_fp32(model: Transformer) -> Iterator[None]:
    """Makes all modules with a compute type use fp32."""
    modules: list[Any] = [module for module in model.modules() if hasattr(module, "compute")]
    before = [module.compute for module in modules]
    try:
        for module in modules:
            module.compute = torch.float32
        yield
    finally:
        for module, compute in zip(modules, before, strict=True):
            module.compute = compute


@contextlib.contextmanager
def _standing_in(model: Transformer, agreed: engine.StandIn | None) -> Iterator[None]:
    """Replaces the values of the owned experts while each layer computes, one layer at a time."""
    kept: dict[str, Tensor] = {}

    def restore(*_: Any) -> None:
        model.write(kept)
        kept.clear()

    def put_in(layer: int, give: engine.StandIn) -> None:
        owned = model.owned_here
        names = [expert_tensor(layer, e, kind) for e in owned for kind in PROJECTIONS]
        kept.update({name: each.clone() for name, each in model.read(names).items()})
        for name in names:
            model.write({name: give(name)})

    hooks = []
    for index, experts in model.banks.items() if agreed else ():
        assert agreed is not None
        before = functools.partial(put_in, index, agreed)
        hooks.append(experts.register_forward_pre_hook(lambda *_, before=before: before()))
        hooks.append(experts.register_forward_hook(restore))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        restore()  # of a layer that failed
