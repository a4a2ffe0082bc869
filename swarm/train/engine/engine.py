"""Engines, which run a peer's local steps. Their interface hides where the weights are.

Legend: B sequences, T predicted tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from swarm.config import RunConfig
from swarm.data.masks import Masks
from swarm.errors import CorruptState
from swarm.experts import Slice, expert_of, expert_shapes, moments_of, moved_by_rule, shared_shapes
from swarm.model.routing import RoutingControls
from swarm.train.engine.guard import UNSCALED, LossScale
from swarm.train.engine.rank_figures import RankFigures
from swarm.train.engine.tensor_file import forms_of

StandIn = Callable[[str], Tensor]
"""The value of a tensor, by its Hugging Face name."""
Part = tuple[Tensor, Tensor]
"""The sequences of an evaluated micro-batch, and the mask of the predictions that count."""
Counts = tuple[tuple[int, ...], int, int, int]
"""Owned experts, updates, skipped steps, and skipped steps since the last update."""
TERMS = ("loss", "cross_entropy", "balance", "router_z", "output_z")
"""The first fields of `Losses`, as `StepStats` names them."""


@dataclass(frozen=True)
class StepStats:
    """Statistics of one local step. Losses are means over its micro-batches, before the update.

    Attributes:
        loss: the minimized sum: cross-entropy plus the terms below times their weights.
        cross_entropy: nats per token.
        balance: load-balancing loss before its weight.
        router_z: router z-loss before its weight.
        output_z: output z-loss before its weight.
        grad_norm: global norm over everything this peer trains, before clipping.
        tokens: tokens read, one prediction each. Masked predictions count too.
        masked: predictions that are not in the loss.
        expert_tokens: for each layer, the tokens that each expert got.
        skipped: whether loss or gradient was not finite. Such a step changes nothing.
        dropped: choices of experts, in all layers, that exceeded a capacity.
        similarity: mean CKA of experts that got the same tokens. None if not measured.
        pairs: the experts behind `similarity` and their CKA, the most similar pair first.
        spike: whether the norm was far above the running mean; see `Guard`.
        workers: figures of each worker process, by rank. Comparisons of two `StepStats` ignore
            them.
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
    masked: int = 0
    dropped: int = 0
    similarity: float | None = None
    pairs: tuple[tuple[int, int, float], ...] = ()
    spike: bool = False
    workers: tuple[RankFigures, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class EngineState:
    """The state with which an engine continues bit for bit. Frozen experts are not part of it.

    Attributes:
        tensors: by Hugging Face name, with "master." or a moment's kind before it: "exp_avg." and
            "exp_avg_sq." of AdamW, "momentum." of Muon. Masters are fp32. Moments have their stored
            format, in int8 with scales ("exp_avg_scale." and so on).
        owned: experts that this peer trains.
        updates: the optimizer's common count of updates.
        skipped: steps skipped so far.
        skipped_in_a_row: steps skipped since the last update.
        scale: scale of the loss, in fp16.
    """

    tensors: Mapping[str, Tensor]
    owned: tuple[int, ...]
    updates: int
    skipped: int
    skipped_in_a_row: int
    scale: LossScale = UNSCALED

    @property
    def counts(self) -> Counts:
        """Counts that differ between two states of one engine if there was a step between them."""
        return self.owned, self.updates, self.skipped, self.skipped_in_a_row

    def require(self, run: RunConfig) -> None:
        """Raises CorruptState if this is not a state of the run's model."""
        shapes = shared_shapes(run.model)
        for expert in self.owned:
            shapes |= expert_shapes(run.model, expert)
        masters = {
            name.removeprefix("master."): shape
            for name, (_, shape) in forms_of(self.tensors).items()
            if name.startswith("master.")
        }
        names = {name.partition(".")[2] for name in self.tensors}
        if masters != shapes or names != set(shapes):
            raise CorruptState("the private state belongs to another model")


class Engine(Protocol):
    """Holds a whole model, and trains the shared tensors and the owned experts of a peer."""

    @property
    def owned(self) -> tuple[int, ...]:
        """The experts that are trained, ascending."""

    @property
    def skipped(self) -> int:
        """Steps skipped so far; a loaded state brings its count."""

    @property
    def intact(self) -> bool:
        """Whether all masters are those after a whole number of steps, even after an error.

        State and values must also belong to the experts in `owned`.
        """

    def own(self, experts: Sequence[int]) -> None:
        """Trains these experts from now on and freezes all others.

        Values do not change, except that newly frozen experts are rounded to the type of frozen
        storage. Experts that stay owned keep their moments. Newly owned experts start with zero
        moments, and newly frozen experts lose theirs.
        """

    def count_from(self, updates: int) -> None:
        """Sets the optimizer's count of updates; a joiner starts at the run's cumulative step."""

    def before_update(self, wait: Callable[[], None]) -> bool:
        """Registers a call that the stepping thread makes just before a step changes values.

        A skipped step makes the call too, before it returns; after that the caller may change
        values. Until the call another thread may read values and states. All changes of earlier
        steps are complete when this method returns.

        Args:
            wait: the registered call, which waits for the reading thread. If the reading thread
                itself calls it, for lack of memory, it raises MemoryError. Then the engine cannot
                make room, and fails with this error.

        Returns:
            False: this engine cannot be read while it steps, and makes no call.
        """

    def step(
        self,
        tokens_BT1: Tensor,
        *,
        lr: float,
        controls: RoutingControls | None = None,
        masks: Masks | None = None,
    ) -> StepStats:
        """One optimizer step on the mean over the batch's micro-batches.

        `controls` influence the routing; each micro-batch uses its `part` of them. With `masks`,
        cross-entropy and output z-loss are means over the scored predictions of the batch. The
        router's terms stay means over all tokens.

        If loss or gradient is not finite, the step changes nothing and counts as skipped.

        Raises:
            TrainingDiverged: the third skipped step in a row.
        """

    def rehearse(self, tokens_BT1: Tensor) -> None:
        """Computes, to measure the time, gradients of at most a micro-batch, and drops them.

        No value, moment, count or random state changes. At most the memory of `step` is needed.
        """

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Copies of tensors by Hugging Face name, fp32 on the CPU.

        Tensors of owned experts are copies of the masters.
        """

    def write(self, named: Mapping[str, Tensor]) -> None:
        """Overwrites tensors by Hugging Face name. Moments do not change."""

    def read_part(self, part: Slice) -> Tensor:
        """A flat copy of a run of elements of a tensor, fp32 on the CPU. Copies nothing else."""

    def write_part(self, part: Slice, values: Tensor) -> None:
        """Overwrites a run of elements of a shared tensor or of an owned expert's matrix."""

    @property
    def borrows(self) -> bool:
        """Whether `lend` makes no copy of frozen experts, which should then be in a mapped file."""

    def lend(self, named: Mapping[str, Tensor]) -> None:
        """Like `write`, for tensors that never change as long as they exist."""

    def read_moments(self, names: Collection[str]) -> dict[str, Tensor]:
        """Copies of the moments of some trained tensors, fp32 on the CPU.

        A moment's name is its kind ("exp_avg." and "exp_avg_sq.", or "momentum."), then the
        requested Hugging Face name.
        """

    def write_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Overwrites the moments of some trained tensors, named as in `read_moments`."""

    def evaluate(
        self,
        tokens_BT1: Tensor,
        *,
        scored_BT: Tensor | None = None,
        agreed: StandIn | None = None,
    ) -> float:
        """Mean cross-entropy in nats per token, always computed in fp32.

        Args:
            tokens_BT1: sequences to predict.
            scored_BT: bool, the predictions of each sequence that count, at least one. None for
                all.
            agreed: gives values of the owned experts' matrices, by name, that replace the masters
                during the evaluation. It is called layer by layer, and more than once per matrix.
                After the evaluation every bit of the engine is as before. The replacement needs
                memory for at most one layer's owned masters and one matrix.
        """

    def state_dict(self) -> EngineState:
        """The private state, as views that the next step changes; copy or save them at once."""

    def load_state_dict(self, state: EngineState) -> None:
        """Loads a private state. Frozen experts must be written separately.

        Raises:
            CorruptState: it belongs to another model.
        """

    def close(self) -> None:
        """Ends all background work and frees memory. The engine must not be used after that."""


def mean_over(
    means_of: Callable[[Sequence[Part]], Sequence[float]],
    tokens_BT1: Tensor,
    scored_BT: Tensor | None,
    rows: int,
) -> float:
    """Mean over all predictions that count, from the means of micro-batches.

    Args:
        means_of: gives the mean of each micro-batch.
        tokens_BT1: sequences to predict.
        scored_BT: the predictions that count, at least one of each sequence. None for all.
        rows: sequences of a micro-batch.
    """
    if scored_BT is None:
        scored_BT = torch.ones_like(tokens_BT1[:, 1:], dtype=torch.bool)
    parts = list(zip(tokens_BT1.split(rows), scored_BT.split(rows), strict=True))
    total = 0.0
    for mean, (_, counts_BT) in zip(means_of(parts), parts, strict=True):
        total += mean * int(counts_BT.sum())
    return total / int(scored_BT.sum())


def moments_in(run: RunConfig, owned: Collection[int], name: str) -> tuple[str, ...]:
    """The moments of a tensor in the private state of a peer; none of a frozen one."""
    if not is_trained(name, owned) or moved_by_rule(name):
        return ()
    return moments_of(name, run.optimizer.kind)


def is_trained(name: str, owned: Collection[int]) -> bool:
    """Whether a tensor is shared or belongs to an owned expert."""
    expert = expert_of(name)
    return expert is None or expert in owned
