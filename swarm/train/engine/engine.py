"""Engines run the local steps of a peer: one interface, wherever the weights are.

Legend: B sequences, T tokens that a sequence predicts.
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
from swarm.experts import Slice, expert_of, expert_shapes, shared_shapes
from swarm.model.routing import RoutingControls
from swarm.train.engine.guard import UNSCALED, LossScale
from swarm.train.engine.rank_figures import RankFigures
from swarm.train.engine.tensor_file import forms_of

StandIn = Callable[[str], Tensor]
"""The value of a tensor, by its Hugging Face name."""
Part = tuple[Tensor, Tensor]
"""The sequences of a micro-batch that is evaluated, and which of their predictions count."""
Counts = tuple[tuple[int, ...], int, int, int]
"""Owned experts, updates, skipped steps, and of these the ones since the last update."""
TERMS = ("loss", "cross_entropy", "balance", "router_z", "output_z")
"""The first fields of `Losses`, as `StepStats` names them."""


@dataclass(frozen=True)
class StepStats:
    """Findings of one local step; losses are means over its micro-batches, before the update.

    Attributes:
        loss: the minimised sum: cross-entropy plus the terms below times their weights.
        cross_entropy: nats per token.
        balance: load-balancing loss before its weight.
        router_z: router z-loss before its weight.
        output_z: output z-loss before its weight.
        grad_norm: global norm over everything this peer trains, before clipping.
        tokens: tokens read, one prediction each; masked predictions count too.
        masked: predictions that are not in the loss.
        expert_tokens: for each layer, the tokens that each expert got.
        skipped: whether loss or gradient was not finite, so that nothing was changed.
        dropped: choices of experts, in all layers, that exceeded a capacity.
        similarity: mean CKA of experts that got the same tokens; None where not measured.
        pairs: these experts and their CKA, the most alike first.
        spike: whether the norm stood out from those before; see `Guard`.
        workers: what each of several worker processes did, by rank; two steps with the same
            findings are equal whatever it was.
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
    """All that an engine must keep to go on with the same bits; frozen experts are not part of it.

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

    @property
    def counts(self) -> Counts:
        """What tells the states of one engine apart, unless something was written between them."""
        return self.owned, self.updates, self.skipped, self.skipped_in_a_row

    def require(self, run: RunConfig) -> None:
        """Raises CorruptState if it is not a state of this run's model."""
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
    """Holds a whole model, trains the shared tensors and the experts that a peer owns."""

    @property
    def owned(self) -> tuple[int, ...]:
        """The experts that are trained, ascending."""

    @property
    def skipped(self) -> int:
        """Steps skipped since the engine was made or its state first saved."""

    @property
    def intact(self) -> bool:
        """Whether all masters are those after a whole number of steps, also after an error.

        And whether state and values are those of the experts in `owned`.
        """

    def own(self, experts: Sequence[int]) -> None:
        """Trains these experts from now on and freezes all others.

        Values stay; one that freezes is rounded to the frozen storage's type. Experts that stay
        keep their moments, those that come start with zero moments, those that go lose theirs.
        """

    def count_from(self, updates: int) -> None:
        """Sets AdamW's count of updates: a joiner's is the run's cumulative step."""

    def before_update(self, wait: Callable[[], None]) -> bool:
        """Has this called, by the thread that steps, before a step changes the first value.

        A skipped step calls it too, before it returns: the caller may change values then. Until
        then another thread may read values and states. What earlier steps have changed is
        all there when this returns.

        Args:
            wait: for that thread. It raises MemoryError where that thread itself calls it, since
                it lacks memory: the engine cannot make room then, and fails with that.

        Returns:
            False: this engine cannot be read while it steps, and calls nothing.
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

        `controls` lead the routing; each micro-batch has its `part`. With `masks` cross-entropy
        and output z-loss are means over what is scored in the batch; the router's terms stay means
        over all tokens.

        A loss or gradient that is not finite changes nothing: the step is skipped and counted.

        Raises:
            TrainingDiverged: the third skipped step in a row.
        """

    def rehearse(self, tokens_BT1: Tensor) -> None:
        """Computes the gradients of a micro-batch or less and drops them, to see how long it takes.

        No value, moment, count or random state changes, and no more memory is taken than by `step`.
        """

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Copies of tensors by Hugging Face name, fp32 on the CPU; masters of what is owned."""

    def write(self, named: Mapping[str, Tensor]) -> None:
        """Overwrites tensors by Hugging Face name; moments stay as they are."""

    def read_part(self, part: Slice) -> Tensor:
        """A copy of a run of elements of a tensor, flat, fp32 on the CPU; of nothing else."""

    def write_part(self, part: Slice, values: Tensor) -> None:
        """Overwrites a run of elements of a shared tensor or of an owned expert's matrix."""

    @property
    def borrows(self) -> bool:
        """Whether frozen experts stay where `lend` shows them, which should be a mapped file."""

    def lend(self, named: Mapping[str, Tensor]) -> None:
        """As `write`, of tensors that nobody changes as long as they live."""

    def read_moments(self, names: Collection[str]) -> dict[str, Tensor]:
        """Copies of the moments of some trained tensors, fp32 on the CPU.

        Named "exp_avg." and "exp_avg_sq." before the Hugging Face names that were asked for.
        """

    def write_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Overwrites the moments of some trained tensors; named as in `read_moments`."""

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
            scored_BT: bool, which of the T predictions of each sequence count, one at least; None
                for all.
            agreed: values of the owned experts' matrices, by name, that stand in for their
                masters; asked for layer by layer, more than once. Afterwards every bit is as
                before.

        On top of the computation, this holds at most one layer's owned masters and one matrix.
        """

    def state_dict(self) -> EngineState:
        """The private state, as views: the next step changes them. Copy or save at once."""

    def load_state_dict(self, state: EngineState) -> None:
        """Takes over a private state; frozen experts must be written besides.

        Raises:
            CorruptState: it belongs to another model.
        """

    def close(self) -> None:
        """Ends all background work and frees memory; the engine cannot be used afterwards."""


def mean_over(
    means_of: Callable[[Sequence[Part]], Sequence[float]],
    tokens_BT1: Tensor,
    scored_BT: Tensor | None,
    rows: int,
) -> float:
    """Mean over all predictions that count, from those of micro-batches.

    Args:
        means_of: of each micro-batch.
        tokens_BT1: sequences to predict.
        scored_BT: which predictions count, at least one of each sequence; None for all.
        rows: sequences of a micro-batch.
    """
    if scored_BT is None:
        scored_BT = torch.ones_like(tokens_BT1[:, 1:], dtype=torch.bool)
    parts = list(zip(tokens_BT1.split(rows), scored_BT.split(rows), strict=True))
    total = 0.0
    for mean, (_, counts_BT) in zip(means_of(parts), parts, strict=True):
        total += mean * int(counts_BT.sum())
    return total / int(scored_BT.sum())


def is_trained(name: str, owned: Collection[int]) -> bool:
    """Whether a tensor is a shared one or of an owned expert."""
    expert = expert_of(name)
    return expert is None or expert in owned
