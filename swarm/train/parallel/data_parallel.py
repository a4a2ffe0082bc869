"""Data and expert parallel: the engine of one rank."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swarm.config import ModelConfig, RunConfig
from swarm.experts import (
    PROJECTIONS,
    Shape,
    Slice,
    expert_of,
    expert_shapes,
    layer_of,
    moments_of,
    owned_stack,
    selection_biases,
    shared_shapes,
    stacked_tensors,
)
from swarm.model.losses import Losses
from swarm.model.moe import WHOLE, Pieces
from swarm.model.routing import RoutingControls
from swarm.model.similarity import MAX_PAIRS
from swarm.model.stage import Stage
from swarm.train.engine.engine import TERMS, Part, moments_in
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.guard import norm_of
from swarm.train.engine.mesh import Mesh, Move
from swarm.train.engine.micro_batches import MicroBatch
from swarm.train.engine.optimizer_moments import SCALE, Moments, MomentsFormat
from swarm.train.engine.rank_figures import RankFigures
from swarm.train.engine.ranks import PIPELINE, STAGE, Ranks
from swarm.train.engine.resident import ResidentEngine
from swarm.train.engine.tensor_file import Form
from swarm.train.parallel.dispatch import DealtBank, dealt_square_sums, moved


def state_forms(run: RunConfig, owned: Sequence[int], form: MomentsFormat) -> dict[str, Form]:
    """Forms of all tensors of a private state with these experts, by name."""
    shapes = shared_shapes(run.model)
    for expert in owned:
        shapes |= expert_shapes(run.model, expert)
    forms: dict[str, Form] = {}
    biases = selection_biases(run.model)
    for name, shape in shapes.items():
        forms[f"master.{name}"] = (torch.float32, shape)
        if name not in biases:
            forms |= _moment_forms(run, form, name, shape)
    return forms


def forms_in(
    layer: int, run: RunConfig, shapes: Mapping[str, Shape], form: MomentsFormat
) -> dict[str, Form]:
    """Forms of the moments of one layer's tensors, by name."""
    forms: dict[str, Form] = {}
    for name, shape in shapes.items():
        if layer_of(name) == layer:
            forms |= _moment_forms(run, form, name, shape)
    return forms


def _moment_forms(run: RunConfig, form: MomentsFormat, name: str, shape: Shape) -> dict[str, Form]:
    """Forms of the moments of a tensor."""
    kinds = moments_of(name, run.optimizer.kind)
    parts = Moments.zeros(form, 1, math.prod(shape), torch.device("meta"), kinds).parts
    return {
        f"{kind}.{name}": (part.dtype, tuple(part.shape[1:]) if kind.endswith(SCALE) else shape)
        for kind, part in parts.items()
    }


class RankEngine(ResidentEngine):
    """The resident engine of one rank. All ranks get the same calls and reach the same values.

    A rank with a share of the experts keeps, reads and writes only that share.
    """

    def __init__(
        self, run: RunConfig, options: EngineOptions, ranks: Ranks, *, stage: Stage | None = None
    ) -> None:
        """Like `ResidentEngine`.

        Raises:
            Disconnected: another rank has ended.
        """
        self._ranks, self._form = ranks, options.moments
        self._mesh = mesh = Mesh(ranks.size, options.ep, options.pp, options.tp)
        # Sets of ranks: with shared experts, with the same experts, with the same shared tensors.
        self._group, self._replicas = ranks.part(mesh.sharers), ranks.part(mesh.replicas)
        self._same = ranks.part(mesh.streams)
        if options.ep > 1 and options.recompute == "layer":
            # To route again would need another operation, and would choose the same experts.
            options = replace(options, recompute="routing")
        super().__init__(run, options, pieces=self._pieces(run.model), stage=stage)

    def _pieces(self, _model: ModelConfig) -> Pieces:
        """The modules of its model."""
        if self._mesh.ep == 1:
            return WHOLE
        return Pieces(functools.partial(DealtBank, group=self._group))

    # ------------------------------------------------ who holds what

    def holds(self, name: str) -> bool:
        """Whether this rank keeps a tensor; True for all tensors that are not an expert's."""
        expert = expert_of(name)
        bank = self._bank
        return expert is None or bank is None or expert in bank.row_of

    def answers(self, name: str) -> bool:
        """Whether this rank alone sends a tensor's value to the controller."""
        alone = expert_of(name) is not None or self._group.rank == 0
        return self._replicas.rank == 0 and alone and self.holds(name)

    def takes_part(self, name: str) -> bool:
        """Whether this rank must take part in a read, so that the answering rank has the tensor."""
        return self.answers(name)

    def whole(self, _name: str, part: Tensor) -> Tensor:
        """A whole tensor, or its moments, from the parts of the ranks that take part."""
        return part

    def _speaks_for(self, name: str) -> bool:
        """Whether this rank alone, of its pipeline, counts a tensor's values in sums."""
        return self.holds(name)

    def _trained_names(self) -> list[str]:
        """Names of the parameters with gradients at all ranks, as in `trained_parameters`."""
        model = self._run.model
        names = [name for name in shared_shapes(model) if name not in selection_biases(model)]
        layers = range(model.num_hidden_layers) if self.owned else ()
        return names + [owned_stack(layer, kind) for layer in layers for kind in PROJECTIONS]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, wherever it is; raises BadBlob as `read`."""
        return self._model.shape(name)

    def moments_of(self, name: str) -> tuple[str, ...]:
        """Kinds of moments of a tensor, here or on another rank; none of a frozen tensor."""
        self.shape(name)
        return moments_in(self._run, self.owned, name)

    def state_forms(self) -> dict[str, Form]:
        """Type and shape of every tensor of the private state, wherever it is."""
        return state_forms(self._run, self.owned, self._form)

    @property
    def _bank(self) -> DealtBank | None:
        """The experts of the first layer; None if ranks do not share experts.

        All layers deal the experts alike.
        """
        bank = next(iter(self._model.banks.values()))
        return bank if isinstance(bank, DealtBank) else None

    # ------------------------------------------------ as `Engine`

    def own(self, experts: Sequence[int]) -> None:
        """See `Engine`; masters and moments move with experts that change their rank."""
        bank, wanted = self._bank, tuple(sorted(experts))
        if bank is None or wanted == self.owned:
            super().own(experts)
            return
        after = bank.dealing_for(wanted)
        staying = set(wanted) & set(self.owned)
        moves = [move for move in bank.dealing.moves(after) if move.expert in staying]
        found: dict[str, Tensor] = {}
        shapes = {move.expert: expert_shapes(self._run.model, move.expert) for move in moves}
        for layer in self._model.banks:
            forms = {
                expert: forms_in(layer, self._run, of, self._form) for expert, of in shapes.items()
            }
            found |= _moved_moments(self._group, moves, self._optimizer.state(), forms)
        super().own(wanted)
        self._optimizer.take(found)

    def write(self, named: Mapping[str, Tensor]) -> None:
        """See `Engine`; writes only what this rank holds."""
        for name in named:
            self.shape(name)  # refuses names that nobody holds
        super().write({name: named[name] for name in named if self.holds(name)})

    def write_part(self, part: Slice, values: Tensor) -> None:
        """See `Engine`; writes only what this rank holds."""
        if self.holds(part.name):
            super().write_part(part, values)

    def _gradients(self, parts: Sequence[MicroBatch], controls: RoutingControls) -> list[Losses]:
        mine = self._same.block(len(parts))
        found = [self._backward(parts, k, controls) for k in mine]
        for _ in range(self._idle(len(parts))):
            # Other ranks of the group have a micro-batch whose tokens need this rank's experts.
            self._model.model.without_tokens(controls).backward()
        return self._of_all(mine, found, len(parts), controls)

    def _of_all(
        self, mine: range, found: Sequence[Losses], count: int, controls: RoutingControls
    ) -> list[Losses]:
        """Adds up the gradients, and returns the losses of the micro-batches."""
        for parameter in self._optimizer.parameters:
            if parameter.grad is None:
                # This rank had no micro-batch. Adding a negative zero changes no bit of a sum.
                parameter.grad = torch.full_like(parameter, -0.0, dtype=torch.float32)
        self._add_up()
        form = LossesForm.of(self._run, controls)
        rows = self._told(mine, [form.row(each) for each in found], (count, form.width))
        return [form.losses(row, self._device) for row in rows]

    def _told(self, mine: range, rows: Sequence[Sequence[float]], shape: tuple[int, int]) -> Tensor:
        """One row of numbers for each micro-batch, fp64, from the ranks that computed them."""
        return self._ranks.shared(rows, *shape, mine[: len(rows)])

    def _add_up(self) -> None:
        """Adds up gradients: of shared tensors over their ranks, of experts over the seat's."""
        everywhere: list[Tensor] = []
        dealt: list[Tensor] = []
        for name, gradient in self._gradients_by_name().items():
            is_dealt = self._mesh.ep > 1 and stacked_tensors(name, (0,))
            (dealt if is_dealt else everywhere).append(gradient)
        self._same.add_up(everywhere)
        self._replicas.add_up(dealt)

    def _norms(self, scale: float) -> dict[str, Tensor]:
        return super()._norms(scale) | self._dealt_norms(scale)

    def _dealt_norms(self, scale: float) -> dict[str, Tensor]:
        """Norms of the stacks of experts that ranks share."""
        if self._mesh.ep == 1 or not self.owned:
            return {}
        squares = dealt_square_sums(self._model, self._gradients_by_name(), self._group)
        return {name: norm_of(each, scale).to(self._device) for name, each in squares.items()}

    # ------------------------------------------------ ranks without a micro-batch

    def figures(self, sequences: int, seconds: float) -> RankFigures:
        """Figures of this rank in a step with this number of sequences and seconds."""
        count = -(-sequences // self._run.train.micro_batch_sequences)
        took_s = self._ranks.traffic.watch.take()
        pipeline_s, stage_s = took_s.pop(PIPELINE, 0.0), took_s.pop(STAGE, 0.0)
        return replace(
            figures_of(self._ranks, self._same, count, took_s),
            seconds=seconds,
            stage=self._mesh.stage(self._ranks.rank),
            stages=self._mesh.pp,
            chunks=len(self._model.stage.chunks),
            pipeline_s=pipeline_s,
            stage_s=stage_s,
        )

    def _idle(self, count: int) -> int:
        """How often this rank takes part without a micro-batch, for other ranks of its group."""
        first = self._same.rank - self._group.rank
        blocks = [len(self._same.block(count, first + seat)) for seat in range(self._group.size)]
        return max(blocks) - len(self._same.block(count))

    def _means_of(self, parts: Sequence[Part]) -> list[float]:
        def told(found: Sequence[Sequence[float]], count: int) -> Tensor:
            for _ in range(self._idle(count)):
                self._model.model.without_tokens()
            return self._told(self._same.block(count), found, (count, 1))

        return dealt_means(self._same, super()._means_of, parts, told)


def figures_of(ranks: Ranks, same: Ranks, count: int, took_s: dict[str, float]) -> RankFigures:
    """The figures of a rank in a step.

    Args:
        ranks: all ranks of the peer.
        same: the ranks that share the micro-batches.
        count: number of micro-batches.
        took_s: seconds of its operations, by kind.
    """
    most = max(len(same.block(count, rank)) for rank in range(same.size))
    own, moved = len(same.block(count)), ranks.traffic.take()
    return RankFigures(
        micro_batches=own,
        idle=most - own,
        operations={kind: number for kind, (number, _) in moved.items()},
        num_bytes={kind: num_bytes for kind, (_, num_bytes) in moved.items()},
        waited_s=took_s,
    )


def dealt_means(
    ranks: Ranks,
    means_of: Callable[[Sequence[Part]], Sequence[float]],
    parts: Sequence[Part],
    told: Callable[[Sequence[Sequence[float]], int], Tensor] | None = None,
) -> list[float]:
    """The mean of each micro-batch, equal on all ranks, if ranks share the micro-batches.

    Args:
        ranks: that share the micro-batches.
        means_of: computes the means of a rank's micro-batches.
        parts: all micro-batches.
        told: gets a rank's own means and the number of micro-batches, and returns the means of all
            micro-batches, [count, 1]. None: `ranks` exchange the means.

    Raises:
        Disconnected: another rank has ended.
    """
    count = len(parts)
    found = [[mean] for mean in means_of([parts[k] for k in ranks.block(count)])]
    table = told(found, count) if told else ranks.shared(found, count, 1)
    means: list[float] = table[:, 0].tolist()
    return means


def _moved_moments(
    group: Ranks,
    moves: Sequence[Move],
    views: Mapping[str, Tensor],
    forms: Mapping[int, Mapping[str, Form]],
) -> dict[str, Tensor]:
    """Moments of a layer that move to this rank, by their names in the private state."""
    come = moved(
        group,
        moves,
        lambda expert: [views[name] for name in forms[expert]],
        lambda expert: list(forms[expert].values()),
    )
    named = (zip(forms[expert], tensors, strict=True) for expert, tensors in come.items())
    return {name: tensor for each in named for name, tensor in each}


@dataclass(frozen=True)
class LossesForm:
    """The layout of a micro-batch's losses as one row of numbers.

    Attributes:
        loads: shape [L, E] of the experts' loads.
        pairs: the most compared pairs of experts.
    """

    loads: tuple[int, int]
    pairs: int

    @classmethod
    def of(cls, run: RunConfig, controls: RoutingControls) -> LossesForm:
        """The form in a step with these controls."""
        measured = controls.probe or controls.draw_apart
        layers = run.model.num_hidden_layers
        return cls((layers, run.model.num_experts), layers * MAX_PAIRS if measured else 0)

    @property
    def width(self) -> int:
        """How many numbers a row has."""
        return len(TERMS) + self.loads[0] * self.loads[1] + 4 + 3 * self.pairs

    def row(self, losses: Losses) -> list[float]:
        """The losses as numbers."""
        row = [float(term) for term in torch.stack(losses[:5]).tolist()]
        row += [float(load) for load in losses.expert_tokens.flatten().tolist()]
        alike, pair_P2, alike_P = losses.similarity, losses.pair_P2, losses.alike_P
        row += [float(losses.dropped), float(alike is not None), float(alike or 0.0)]
        if pair_P2 is None or alike_P is None:
            return [*row, -1.0] + [0.0] * (3 * self.pairs)
        flat = torch.cat([pair_P2.cpu().double(), alike_P.cpu().double()[:, None]], 1).flatten()
        return [*row, float(len(pair_P2)), *flat.tolist()] + [0.0] * (3 * self.pairs - len(flat))

    def losses(self, row: Tensor, device: torch.device) -> Losses:
        """The losses of such a row."""
        layers, experts = self.loads
        sizes = [len(TERMS), layers * experts, 1, 2, 1, 3 * self.pairs]
        terms, loads, dropped, alike, count, pairs = row.split(sizes)
        is_measured, similarity = alike.tolist()
        found = int(count)
        pairs_P3 = pairs[: 3 * max(found, 0)].view(-1, 3)
        total, cross_entropy, balance, router_z, output_z = terms.float().to(device).unbind()
        return Losses(
            total,
            cross_entropy,
            balance,
            router_z,
            output_z,
            expert_tokens=loads.long().view(layers, experts).to(device),
            dropped=dropped[0].long().to(device),
            similarity=torch.tensor(similarity, device=device) if is_measured else None,
            pair_P2=pairs_P3[:, :2].long() if found >= 0 else None,
            alike_P=pairs_P3[:, 2].float().to(device) if found >= 0 else None,
        )
