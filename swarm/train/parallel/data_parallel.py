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
from swarm.train.engine.engine import TERMS, Part, is_trained
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.guard import norm_of
from swarm.train.engine.mesh import Mesh, Move
from swarm.train.engine.micro_batches import MicroBatch
from swarm.train.engine.moments import SCALE, Moments, MomentsFormat
from swarm.train.engine.rank_figures import RankFigures
from swarm.train.engine.ranks import PIPELINE, STAGE, Ranks
from swarm.train.engine.resident import ResidentEngine
from swarm.train.engine.tensor_file import Form
from swarm.train.parallel.dispatch import DealtBank, dealt_square_sums, moved


def state_forms(run: RunConfig, owned: Sequence[int], form: MomentsFormat) -> dict[str, Form]:
    """Of all tensors of a private state with these experts, by name."""
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
    """Of the moments of those tensors that are in a layer, by name."""
    forms: dict[str, Form] = {}
    for name, shape in shapes.items():
        if layer_of(name) == layer:
            forms |= _moment_forms(run, form, name, shape)
    return forms


def _moment_forms(run: RunConfig, form: MomentsFormat, name: str, shape: Shape) -> dict[str, Form]:
    """Of the moments of a tensor."""
    kinds = moments_of(name, run.optimizer.kind)
    parts = Moments.zeros(form, 1, math.prod(shape), torch.device("meta"), kinds).parts
    return {
        f"{kind}.{name}": (part.dtype, tuple(part.shape[1:]) if kind.endswith(SCALE) else shape)
        for kind, part in parts.items()
    }


class RankEngine(ResidentEngine):
    """The resident engine of one rank; all ranks are called alike and come to the same values.

    Where it holds a share of the experts, it can be asked for, and keeps, only that share of them.
    """

    def __init__(
        self, run: RunConfig, options: EngineOptions, ranks: Ranks, *, stage: Stage | None = None
    ) -> None:
        """As `ResidentEngine`.

        Raises:
            Disconnected: another rank has ended.
        """
        self._ranks, self._form = ranks, options.moments
        self._mesh = mesh = Mesh(ranks.size, options.ep, options.pp, options.tp)
        # Who shares the experts, has the same ones, and the same shared tensors.
        self._group, self._replicas = ranks.part(mesh.sharers), ranks.part(mesh.replicas)
        self._same = ranks.part(mesh.streams)
        if options.ep > 1 and options.recompute == "layer":
            # Choosing experts again would need another operation, and give the same ones.
            options = replace(options, recompute="routing")
        super().__init__(run, options, pieces=self._pieces(run.model), stage=stage)

    def _pieces(self, _model: ModelConfig) -> Pieces:
        """What its model is made of."""
        if self._mesh.ep == 1:
            return WHOLE
        return Pieces(functools.partial(DealtBank, group=self._group))

    # ------------------------------------------------ who holds what

    def holds(self, name: str) -> bool:
        """Whether a tensor is one that this rank keeps; any name that is no expert's is."""
        expert = expert_of(name)
        bank = self._bank
        return expert is None or bank is None or expert in bank.row_of

    def answers(self, name: str) -> bool:
        """Whether this rank, and no other one, tells the controller a tensor's value."""
        alone = expert_of(name) is not None or self._group.rank == 0
        return self._replicas.rank == 0 and alone and self.holds(name)

    def takes_part(self, name: str) -> bool:
        """Whether this rank has to be asked for a tensor, so that the one that answers has it."""
        return self.answers(name)

    def whole(self, _name: str, part: Tensor) -> Tensor:
        """A tensor, or moments of it, from what the ranks that take part have of it."""
        return part

    def _speaks_for(self, name: str) -> bool:
        """Whether this rank counts a tensor's values, and no other one of its pipeline."""
        return self.holds(name)

    def _trained_names(self) -> list[str]:
        """The parameters of all ranks that get gradients, as `trained_parameters` names them."""
        model = self._run.model
        names = [name for name in shared_shapes(model) if name not in selection_biases(model)]
        layers = range(model.num_hidden_layers) if self.owned else ()
        return names + [owned_stack(layer, kind) for layer in layers for kind in PROJECTIONS]

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, wherever it is; raises BadBlob as `read`."""
        return self._model.shape(name)

    def moments_of(self, name: str) -> tuple[str, ...]:
        """What the optimizer has of a tensor, here or on another rank; nothing of a frozen one."""
        self.shape(name)
        if not is_trained(name, self.owned) or name in selection_biases(self._run.model):
            return ()
        return moments_of(name, self._run.optimizer.kind)

    def state_forms(self) -> dict[str, Form]:
        """Type and shape of every tensor of the private state, wherever it is."""
        return state_forms(self._run, self.owned, self._form)

    @property
    def _bank(self) -> DealtBank | None:
        """The experts of the first layer, as those of each; None where nothing is dealt out."""
        bank = next(iter(self._model.banks.values()))
        return bank if isinstance(bank, DealtBank) else None

    # ------------------------------------------------ as `Engine`

    def own(self, experts: Sequence[int]) -> None:
        """See `Engine`; experts that change their rank take masters and moments along."""
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
        """See `Engine`; takes what this rank holds."""
        for name in named:
            self.shape(name)  # refuses names that nobody holds
        super().write({name: named[name] for name in named if self.holds(name)})

    def write_part(self, part: Slice, values: Tensor) -> None:
        """See `Engine`; takes what this rank holds."""
        if self.holds(part.name):
            super().write_part(part, values)

    def _gradients(self, parts: Sequence[MicroBatch], controls: RoutingControls) -> list[Losses]:
        mine = self._same.block(len(parts))
        found = [self._backward(parts, k, controls) for k in mine]
        for _ in range(self._idle(len(parts))):
            # Others of the group have a micro-batch, whose tokens need experts of this rank.
            self._model.model.without_tokens(controls).backward()
        return self._of_all(mine, found, len(parts), controls)

    def _of_all(
        self, mine: range, found: Sequence[Losses], count: int, controls: RoutingControls
    ) -> list[Losses]:
        """Adds up the gradients, and tells the losses of so many micro-batches."""
        for parameter in self._optimizer.parameters:
            if parameter.grad is None:
                # Without a micro-batch; a negative zero changes no bit of any sum.
                parameter.grad = torch.full_like(parameter, -0.0, dtype=torch.float32)
        self._add_up()
        form = LossesForm.of(self._run, controls)
        rows = self._told(mine, [form.row(each) for each in found], (count, form.width))
        return [form.losses(row, self._device) for row in rows]

    def _told(self, mine: range, rows: Sequence[Sequence[float]], shape: tuple[int, int]) -> Tensor:
        """Rows of numbers of all micro-batches, fp64, from the ranks that have computed them."""
        return self._ranks.shared(rows, *shape, mine[: len(rows)])

    def _add_up(self) -> None:
        """Of shared tensors over all that have them, of dealt experts over those of this seat."""
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
        """Of the stacks of experts that are dealt out."""
        if self._mesh.ep == 1 or not self.owned:
            return {}
        squares = dealt_square_sums(self._model, self._gradients_by_name(), self._group)
        return {name: norm_of(each, scale).to(self._device) for name, each in squares.items()}

    # ------------------------------------------------ ranks without a micro-batch

    def figures(self, sequences: int, seconds: float) -> RankFigures:
        """What this rank did in a step of so many sequences that took so long."""
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
        """How often this rank accompanies micro-batches of others of its group."""
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
    """What a rank computed and moved in a step.

    Args:
        ranks: all of the peer.
        same: those that share the micro-batches with this one.
        count: micro-batches.
        took_s: seconds of its operations.
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
    """The mean of each micro-batch, where they are dealt to ranks; all come to the same ones.

    Args:
        ranks: to which they are dealt.
        means_of: of each micro-batch of a rank.
        parts: all micro-batches.
        told: called once a rank has computed its own, with their means and the number of all; it
            gives the means of all, [count, 1]. None for those of these ranks.

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
    """Those of a layer that come to this rank, by their names in the private state."""
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
    """How the losses of a micro-batch are laid out as one row of numbers.

    Attributes:
        loads: shape [L, E] of the experts' loads.
        pairs: compared pairs of experts that there is room for.
    """

    loads: tuple[int, int]
    pairs: int

    @classmethod
    def of(cls, run: RunConfig, controls: RoutingControls) -> LossesForm:
        """The form in a step with this controls."""
        measured = controls.probe or controls.draw_apart
        layers = run.model.num_hidden_layers
        return cls((layers, run.model.num_experts), layers * MAX_PAIRS if measured else 0)

    @property
    def width(self) -> int:
        """Numbers of a row."""
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
