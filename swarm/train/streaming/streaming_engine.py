"""The streaming engine: fetches a layer's weights for all micro-batches of a pass together."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from swarm.config import RunConfig
from swarm.data.masks import Masks
from swarm.experts import Slice
from swarm.model.attention import Positions, rotary_tables
from swarm.model.losses import Losses, output_losses
from swarm.model.routing import RoutingControls
from swarm.train.engine import engine
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.guard import Guard, clip_factors, total_norm, unit_factors
from swarm.train.engine.host_memory import HostMemory
from swarm.train.engine.micro_batches import MicroBatch, Routed, micro_batches, num_masked
from swarm.train.engine.optimizer_moments import Update
from swarm.train.engine.ranks import Ranks
from swarm.train.streaming.device import DeviceSide
from swarm.train.streaming.gradients import Accumulator, GradientOffload, HostOptimizer, tell
from swarm.train.streaming.host_model import HostStore
from swarm.train.streaming.streaming_step import ActivationCheckpointStore, Pass


class Evaluation:
    """Computes held-out losses with two places for layers and one for the head on the device.

    Args:
        run: the model.
        options: options of the engine.
        store: the source of units; no update may be running.
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
    def means(self, agreed: engine.StandIn | None, parts: Sequence[engine.Part]) -> list[float]:
        """The mean cross-entropy of each micro-batch; for `agreed` see `Engine.evaluate`."""
        starts = range(0, len(parts), self._together)
        passes = [parts[start : start + self._together] for start in starts]
        return [mean for one in passes for mean in self._means(one, agreed)]

    def _means(self, parts: Sequence[engine.Part], agreed: engine.StandIn | None) -> list[float]:
        """The means of one pass."""
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


ALONE = Ranks(0, 1, torch.device("cpu"))

# `Engine` documents the methods.
# ruff: disable[undocumented-public-method]


class StreamingEngine:
    """An engine that keeps the model in host memory; see `Engine`.

    With `optimizer.clip = "global"` the updates wait for the norm of all gradients and then overlap
    the next step. With "unit", a unit is updated as soon as its gradients are on the host. Then a
    unit whose gradient is not finite is unchanged, while units above it may have been updated
    already.
    """

    def __init__(
        self,
        run: RunConfig,
        options: EngineOptions,
        ranks: Ranks = ALONE,
        memory: HostMemory | None = None,
    ) -> None:
        """Allocates memory. No expert is owned, and tensors have no values until written.

        Args:
            run: the model.
            options: options of the engine.
            ranks: processes that share the micro-batches.
            memory: shared by these processes; None for memory of its own.
        """
        self._run, self._options, self._ranks = run, options, ranks
        self._store = HostStore(run, options, memory)
        self._device = DeviceSide(run, options, self._store, ranks)
        self._checkpoints = ActivationCheckpointStore(
            self._device.bus, options.activation_checkpoints
        )
        self._host = HostOptimizer(options.host_threads, self._device.bus.enter)
        self._guard = Guard(options.compute)
        self._updates = 0
        self.orthogonalises = options.device == "cuda"
        """Whether the device computes Muon's directions; else the host's threads do."""
        self._early, self._whole = run.optimizer.clip == "unit", True
        self._wait: Callable[[], None] = lambda: None

    @property
    def owned(self) -> tuple[int, ...]:
        return self._store.owned

    @property
    def skipped(self) -> int:
        return self._guard.skipped

    @property
    def intact(self) -> bool:
        return self._whole and not self._host.failed

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes copied to the device and from it so far."""
        return self._device.bus.bytes_in, self._device.bus.bytes_out

    @property
    def device_bytes(self) -> int:
        """Weights and gradients on the device, without activations."""
        return self._device.num_bytes

    @property
    def host_bytes(self) -> int:
        """Masters, moments, frozen experts, gradients, activation checkpoints, and mapped files."""
        return self._store.num_bytes + self._device.host_bytes + self._checkpoints.num_bytes

    def own(self, experts: Sequence[int]) -> None:
        owned = tuple(sorted(set(experts)))
        if owned != self.owned:
            self._drain()
            self._device.release()
            self._whole = False
            self._store.own(owned)
            self._whole = True  # even if the device lacks memory for `build`
            self._device.build()

    def count_from(self, updates: int) -> None:
        self._updates = updates

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        self._drain()
        found = self._store.read(names)
        return {name: tensor.to(torch.float32, copy=True) for name, tensor in found.items()}

    def write(self, named: Mapping[str, Tensor]) -> None:
        self._drain()
        self._store.write(named)

    def read_part(self, part: Slice) -> Tensor:
        self._drain()
        whole_X = self._store.read([part.name])[part.name].view(-1)
        return whole_X[part.start : part.stop].to(torch.float32, copy=True)

    def write_part(self, part: Slice, values: Tensor) -> None:
        assert engine.is_trained(part.name, self.owned), part
        self._drain()
        self._store.write_part(part, values)

    @property
    def borrows(self) -> bool:
        return self._options.frozen_lent

    def lend(self, named: Mapping[str, Tensor]) -> None:
        self._drain()
        self._store.lend(named)

    def read_moments(self, names: Collection[str]) -> dict[str, Tensor]:
        self._drain()
        return self._store.read_moments(names)

    def write_moments(self, moments: Mapping[str, Tensor]) -> None:
        self._drain()
        self._store.write_moments(moments)

    def state_dict(self) -> engine.EngineState:
        self._drain()
        guard = self._guard
        return engine.EngineState(
            tensors=self._store.state(),
            owned=self.owned,
            updates=self._updates,
            skipped=guard.skipped,
            skipped_in_a_row=guard.skipped_in_a_row,
            scale=guard.scale,
        )

    def load_state_dict(self, state: engine.EngineState) -> None:
        state.require(self._run)
        self.own(state.owned)
        self._drain()
        self._store.load(state.tensors)
        self._updates = state.updates
        self._guard.resume(state.skipped, state.skipped_in_a_row, state.scale)

    def close(self) -> None:
        """Ends the threads and gives all memory back."""
        self._host.close()
        self._device.release()
        self._checkpoints.close()
        self._store.close()

    # ------------------------------------------------ a step

    def before_update(self, wait: Callable[[], None]) -> bool:
        """See `Engine`; False with clip "unit", where units change while lower layers compute."""
        if not self._options.is_read_beside(self._run):
            return False
        self._drain()
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
        self._whole, scale = True, self._guard.scale.value
        rows, there = self._run.train.micro_batch_sequences, self._device.bus.device
        parts = micro_batches(tokens_BT1, masks, rows, there)
        update = Update(self._run.optimizer, lr, self._updates + 1)
        controls = controls or RoutingControls()
        mine, most = self._ranks.block(len(parts)), -(-len(parts) // self._ranks.size)
        together = self._options.pass_micro_batches or most
        found: list[Losses] = []
        gone: dict[str, GradientOffload] = {}
        for first in range(0, most, together):
            here = mine[first : first + together]
            each = [controls.part(k) for k in here]
            one = self._begin([parts[k] for k in here], each, len(parts), gone)
            last = first + together >= most
            gone = self._go(one, update if last and self._early else None, last=last)
            found += one.losses
        if not self._early:
            tell(self._ranks, list(gone.values()))
        found = self._of_all(found, len(parts), controls)
        norms, routed = _norms(gone.values(), scale), Routed(there)
        for losses in found:
            routed.add(losses)
        loss, norm = _mean_terms(found), total_norm(norms).item()
        finite = self._guard.finite(loss["loss"], norm)
        self._wait()
        if finite:
            self._updates += 1
            if not self._early:
                factors = clip_factors(norms, self._run.optimizer, scale)
                for offload in gone.values():
                    self._host.submit(offload, lambda _: factors, update)
            self._store.balance(routed.tokens_LE)
        self._whole = True
        return engine.StepStats(
            grad_norm=norm,
            tokens=tokens_BT1[:, 1:].numel(),
            skipped=not finite,
            masked=num_masked(masks),
            spike=self._guard.spiked,
            **(loss | routed.fields()),
        )

    def rehearse(self, tokens_BT1: Tensor) -> None:
        """See `Engine`; gradients are sent to the host and then ignored."""
        gone = self._go(
            self._begin([MicroBatch(tokens_BT1)], [RoutingControls().part(0)], 1, {}),
            None,
            last=False,
        )
        for offload in gone.values():
            offload.arrived.wait()

    def _begin(
        self,
        parts: Sequence[MicroBatch],
        controls: Sequence[RoutingControls],
        divisor: int,
        before: Mapping[str, GradientOffload],
    ) -> Pass:
        self._checkpoints.clear()
        if parts:
            self._device.prefetch_layer(0)
        return Pass(
            self._run,
            self._device,
            self._checkpoints,
            parts,
            controls=controls,
            divisor=divisor,
            scale=self._guard.scale.value,
            before=before,
        )

    def _go(self, one: Pass, update: Update | None, *, last: bool) -> dict[str, GradientOffload]:
        """Runs one pass; with `update`, a unit is updated as soon as its gradients have arrived.

        `last`: whether the pass completes the gradients of the whole step.
        """
        device, gone, scale = self._device, {}, self._guard.scale.value
        is_here = last and self._run.optimizer.kind == "muon" and self.orthogonalises

        def offload(name: str, gradients: Accumulator) -> None:
            assert device.buffers is not None
            gone[name] = device.buffers.offload(name, gradients, scale if is_here else None)
            if update is not None:
                tell(self._ranks, [gone[name]])
                self._whole = False
                self._host.submit(
                    gone[name], functools.partial(self._factors_of_unit, scale), update
                )

        x = [device.embedded(each.tokens_BT1[:, :-1]) for each in one.micro_batches]
        positions = self._positions(x[0].shape[1] if x else 1)
        dx = one.head(one.forward(x, positions))
        offload("head", device.head_gradients)
        for layer in reversed(range(self._run.model.num_hidden_layers)):
            offload(f"layer.{layer}", one.layer_backward(layer, dx, positions))
        offload("embedding", one.embedding_backward(dx))
        return gone

    def _factors_of_unit(
        self, scale: float, norms: Mapping[str, Tensor]
    ) -> dict[str, Tensor] | None:
        """Clipping factors of one unit; None if its gradient is not finite.

        `scale` is the loss's scale in this step. The guard may have a new scale for the next step.
        """
        num_units = len(self._store.units)
        scaled = {name: norm / scale for name, norm in norms.items()}
        if not total_norm(scaled).isfinite():
            return None
        return unit_factors(scaled, self._run.optimizer, num_units, scale)

    def evaluate(
        self,
        tokens_BT1: Tensor,
        *,
        scored_BT: Tensor | None = None,
        agreed: engine.StandIn | None = None,
    ) -> float:
        """See `Engine`; computes with fp32 masters instead of the compute type."""
        self._drain()
        self._device.make_room()
        try:
            evaluation = Evaluation(self._run, self._options, self._store, self._ranks)
            with contextlib.closing(evaluation):
                means_of = functools.partial(evaluation.means, agreed)
                rows = self._run.train.micro_batch_sequences
                return engine.mean_over(
                    functools.partial(self._of_each, means_of), tokens_BT1, scored_BT, rows
                )
        finally:
            self._device.build()

    def _positions(self, num_tokens: int) -> Positions:
        model = self._run.model
        device = self._device.bus.device
        return rotary_tables(num_tokens, model.dim_per_head, model.rope_theta, device)

    def _drain(self) -> None:
        """Waits until the host has made all updates; raises the errors of its threads."""
        self._store.wait()

    # ------------------------------------------------ among several processes

    def _of_all(self, mine: list[Losses], _count: int, _controls: RoutingControls) -> list[Losses]:
        """The losses of all micro-batches of a step."""
        return mine

    def _of_each(
        self, means_of: Callable[[Sequence[engine.Part]], list[float]], parts: Sequence[engine.Part]
    ) -> list[float]:
        """The means of the micro-batches of all processes."""
        return means_of(parts)


# ruff: enable[undocumented-public-method]


def _norms(offloads: Iterable[GradientOffload], scale: float) -> dict[str, Tensor]:
    """Norms of all gradients by name, without the loss's scale; waits until they have arrived."""
    norms: dict[str, Tensor] = {}
    for offload in offloads:
        offload.arrived.wait()
        norms |= {name: norm / scale for name, norm in offload.norms.items()}
    return norms


def _mean_terms(found: Sequence[Losses]) -> dict[str, float]:
    """The mean of each term of the loss over all micro-batches."""
    terms = torch.stack([torch.stack(losses[:5]) for losses in found])
    return dict(zip(engine.TERMS, terms.mean(dim=0).tolist(), strict=True))
