"""Data and expert parallel: the engine of one rank.

Every rank holds the shared tensors and computes its block of the micro-batches (in a pipeline those
of its stage, see `staged.py`). It holds all
experts too, or, with `ep` > 1, its share of them (`mesh.py`). Sums are added up in the order of the
ranks, so that their bits depend on the cut alone, and with two ranks that hold everything, or one
micro-batch each, are those of one process. What is added up is whole on every rank that holds it;
norms of dealt experts are formed in fp64 and told to the group, so that clipping is the same
everywhere.

Shapes: B sequences, T tokens that a sequence predicts, L layers, E experts, P compared pairs of a
micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from swarm.config import RunConfig
from swarm.experts import (
    Slice,
    expert_of,
    selection_biases,
    stacked_tensors,
)
from swarm.model.attention import Attention
from swarm.model.losses import Losses
from swarm.model.moe import ExpertBank, MakeAttention, MakeBank
from swarm.model.routing import RoutingControls
from swarm.model.similarity import MAX_PAIRS
from swarm.model.stage import Stage
from swarm.train.engine import TERMS, is_trained, mean_over
from swarm.train.guard import norm_of
from swarm.train.micro_batches import MicroBatch
from swarm.train.optimizer import OwnedAdamW
from swarm.train.options import EngineOptions
from swarm.train.parallel.dispatch import DealtBank, dealt_square_sums
from swarm.train.parallel.forms import expert_moment_forms, state_forms
from swarm.train.parallel.heads import Heads, HeadsAdamW
from swarm.train.parallel.mesh import Mesh, Move
from swarm.train.parallel.moving import Form, moved
from swarm.train.parallel.ranks import Ranks
from swarm.train.parallel.tensor import HeadsAttention, SharedBank, shared_output_losses
from swarm.train.resident import ResidentEngine


class RankEngine(ResidentEngine):
    """The resident engine of one rank; all ranks are called alike and come to the same values.

    Where it holds a share of the experts, it can be asked for, and keeps, only that share of them.
    """

    def __init__(
        self, run: RunConfig, options: EngineOptions, ranks: Ranks, *, stage: Stage | None = None
    ) -> None:
        """As `ResidentEngine`.

        Raises:
            Disconnected: another rank is gone.
        """
        self._ranks, self._form = ranks, options.moments
        self._mesh = mesh = Mesh(ranks.size, options.ep, options.pp, options.tp)
        # Who shares the experts, has the same ones, and the same shared tensors.
        self._group, self._replicas = ranks.part(mesh.sharers), ranks.part(mesh.replicas)
        self._same = ranks.part(mesh.streams)
        sharers = self._group if mesh.tp > 1 else replace(ranks, rank=0, size=1)
        self._heads = Heads(sharers, run.model)
        bank: MakeBank = ExpertBank
        attention: MakeAttention = Attention
        if options.ep > 1:
            bank = functools.partial(DealtBank, group=self._group)
            if options.recompute == "layer":
                # Choosing experts anew would take another operation, and choose the same ones.
                options = replace(options, recompute="routing")
        if options.tp > 1:
            bank = functools.partial(SharedBank, group=self._group)
            attention = functools.partial(HeadsAttention, heads=self._heads)
            self._stage_ranks = ranks.part(mesh.stages)
        super().__init__(run, options, bank=bank, attention=attention, stage=stage)
        if options.tp > 1 and not run.model.tie_word_embeddings:
            self._model.output = functools.partial(shared_output_losses, group=self._group)

    def _adamw(self, options: EngineOptions) -> OwnedAdamW:
        if options.tp == 1:
            return super()._adamw(options)
        return HeadsAdamW(self._run.optimizer, options.moments, self._heads)

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
        if self._heads.cuts(name):
            return self._replicas.rank == 0 and self.holds(name)
        return self.answers(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, wherever it is; raises BadBlob as `read`."""
        return self._heads.whole_shape(name, self._model.shape(name))

    def whole(self, name: str, part: Tensor) -> Tensor:
        """A tensor, or moments of it, from what the ranks that take part have of it."""
        return self._heads.whole(name, part)

    def has_moments(self, name: str) -> bool:
        """Whether a tensor is trained by gradients, here or on another rank."""
        self.shape(name)
        return is_trained(name, self.owned) and name not in selection_biases(self._run.model)

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
        for layer in self._model.banks:
            found |= self._moved_moments(moves, layer)
        super().own(wanted)
        self._optimizer.take(found)

    def _moved_moments(self, moves: Sequence[Move], layer: int) -> dict[str, Tensor]:
        """Those of a layer that come to this rank, by their names in the private state."""
        views = self._optimizer.state()
        forms = {
            move.expert: expert_moment_forms(self._run, move.expert, layer, self._form)
            for move in moves
        }
        come = moved(
            self._group,
            moves,
            lambda expert: [views[name] for name in forms[expert]],
            lambda expert: list(forms[expert].values()),
        )
        named = (zip(forms[expert], tensors, strict=True) for expert, tensors in come.items())
        return {name: tensor for each in named for name, tensor in each}

    def write(self, named: Mapping[str, Tensor]) -> None:
        """See `Engine`; takes what this rank holds."""
        for name in named:
            self.shape(name)  # refuses names that nobody holds
        held = {name: named[name] for name in named if self.holds(name)}
        super().write(self._heads.parts(held, self.shape))

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """See `Engine`; an operation of the ranks that share heads, where a tensor is cut."""
        return {name: self.whole(name, part) for name, part in super().read(names).items()}

    def read_part(self, part: Slice) -> Tensor:
        """See `Engine`; likewise."""
        if not self._heads.cuts(part.name):
            return super().read_part(part)
        return self.read([part.name])[part.name].view(-1)[part.start : part.stop].clone()

    def write_part(self, part: Slice, values: Tensor) -> None:
        """See `Engine`; takes what this rank holds."""
        if self._heads.cuts(part.name) and self.holds(part.name):
            self._heads.put(part, values, self._model.read([part.name])[part.name])
        elif self.holds(part.name):
            super().write_part(part, values)

    def _gradients(self, parts: Sequence[MicroBatch], controls: RoutingControls) -> list[Losses]:
        mine = self._same.block(len(parts))
        found = [self._backward(parts, k, controls) for k in mine]
        for _ in range(self._idle(len(parts))):
            # Others of the group have a micro-batch, whose tokens need experts of this rank.
            self._model.model.without_tokens(controls).backward()
        for parameter in self._optimizer.parameters:
            if parameter.grad is None:
                # Without a micro-batch; a negative zero changes no bit of any sum.
                parameter.grad = torch.full_like(parameter, -0.0, dtype=torch.float32)
        self._add_up()
        form = LossesForm.of(self._run, controls)
        rows = self._told(mine, [form.row(each) for each in found], (len(parts), form.width))
        return [form.losses(row, self._device) for row in rows]

    def _told(self, mine: range, rows: Sequence[Sequence[float]], shape: tuple[int, int]) -> Tensor:
        """Rows of numbers of all micro-batches, fp64, from the ranks that have computed them."""
        # Ranks that share heads have the same ones.
        speaks = self._mesh.tp == 1 or self._group.rank == 0
        told = rows if speaks else ()
        return self._ranks.shared(told, *shape, mine[: len(told)])

    def _add_up(self) -> None:
        """Of shared tensors over all that have them, of dealt experts over those of this seat.

        Where heads are cut, some gradients are of the heads or tokens of one rank.
        """
        everywhere: list[Tensor] = []
        dealt: list[Tensor] = []
        partial: list[Tensor] = []
        for name, parameter in zip(self._optimizer.names, self._optimizer.parameters, strict=True):
            assert parameter.grad is not None
            is_dealt = self._mesh.ep > 1 and stacked_tensors(name, (0,))
            others = partial if self._heads.is_summed(name) else everywhere
            (dealt if is_dealt else others).append(parameter.grad)
        self._same.add_up(everywhere)
        self._replicas.add_up(dealt)
        if partial:
            self._stage_ranks.add_up(partial)

    def _norms(self, scale: float) -> dict[str, Tensor]:
        named = self._gradients_by_name()
        squares: dict[str, Tensor] = {}
        if self._mesh.tp > 1:
            shared = {n: each for n, each in named.items() if not stacked_tensors(n, (0,))}
            squares = self._heads.square_sums(shared)
        if self._mesh.ep > 1 and self.owned:
            squares |= dealt_square_sums(self._model, named, self._group)
        told = {name: norm_of(each, scale).to(self._device) for name, each in squares.items()}
        return told if self._mesh.tp > 1 else super()._norms(scale) | told

    # ------------------------------------------------ ranks without a micro-batch

    def _idle(self, count: int) -> int:
        """How often this rank accompanies micro-batches of others of its group."""
        if self._mesh.tp > 1:
            return 0  # all of them have the same micro-batches
        first = self._same.rank - self._group.rank
        blocks = [len(self._same.block(count, first + seat)) for seat in range(self._group.size)]
        return max(blocks) - len(self._same.block(count))

    def _mean(self, tokens_BT1: Tensor, scored_BT: Tensor | None) -> float:
        rows = self._run.train.micro_batch_sequences
        micro_batches = tokens_BT1.split(rows)
        mine = self._same.block(len(micro_batches))
        own = iter(range(len(micro_batches)))
        found: list[list[float]] = []

        def own_mean(micro_BT1: Tensor, scored_BT: Tensor) -> float:
            if next(own) in mine:
                found.append([self._mean_of(micro_BT1, scored_BT)])
            return 0.0

        mean_over(own_mean, tokens_BT1, scored_BT, rows)
        for _ in range(self._idle(len(micro_batches))):
            self._model.model.without_tokens()
        means = iter(self._told(mine, found, (len(micro_batches), 1))[:, 0].tolist())
        return mean_over(lambda *_: next(means), tokens_BT1, scored_BT, rows)


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
