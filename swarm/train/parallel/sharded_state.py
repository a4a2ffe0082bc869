"""Data and expert parallel with sharded state: masters and moments are cut over ranks."""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from swarm.config import OptimizerConfig
from swarm.experts import MUON_MOMENTS, Slice, is_matrix, stacked_tensors
from swarm.model.transformer import DTYPES
from swarm.train.engine.engine import StandIn, is_trained
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.guard import norm_of, square_sums
from swarm.train.engine.optimizer import (
    PIECE,
    PIECE_GPU,
    OwnedOptimizer,
    require_stored,
    stored_moments,
)
from swarm.train.engine.optimizer_moments import (
    BLOCK,
    SCALE,
    Moments,
    MomentsFormat,
    Piece,
    Update,
    seed_of,
    update_matrix_of,
    update_tensors,
)
from swarm.train.engine.ranks import Ranks
from swarm.train.engine.tensor_file import LazyTensors, forms_of
from swarm.train.parallel.data_parallel import RankEngine

STEP = 64
"""Runs begin at multiples of this many elements, since no processor has wider registers."""


def is_compute_copy(name: str) -> bool:
    """Whether every use casts a parameter, so that no rank needs its whole fp32 master.

    Attention, experts and an untied head are such parameters. A tied head is not: it is the
    embedding, whose fp32 values enter the residual stream.
    """
    return is_matrix(name) or name == "lm_head.weight"


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut over ranks.

    Attributes:
        rows: experts of a stack, else 1.
        size: elements of a row.
        bounds: where each rank's run of the flattened parameter begins, and the end.
        by_row: whether each row has pieces of its own, because blocks of moments begin with each
            row, or rows are matrices that Muon updates.
        matrix: the shape of a row if Muon updates it; such rows are not cut.
    """

    rows: int
    size: int
    bounds: tuple[int, ...]
    by_row: bool
    matrix: tuple[int, int] | None = None

    @classmethod
    def of(cls, rows: int, size: int, ways: int, form: MomentsFormat) -> Cut:
        """Cuts a parameter over a number of ranks.

        Args:
            rows: experts of a stack, else 1.
            size: elements of a row.
            ways: number of ranks.
            form: form of the moments.
        """
        by_row = form == "int8"
        step, unit = (BLOCK, size) if by_row else (STEP, rows * size)

        def begin(target: int) -> int:
            row, inner = divmod(target, unit)
            return row * unit + inner // step * step

        starts = [begin(rows * size * rank // ways) for rank in range(ways)]
        return cls(rows, size, (*starts, rows * size), by_row)

    @classmethod
    def of_matrices(cls, name: str, rows: int, shape: tuple[int, int], ways: int) -> Cut:
        """Deals whole matrices to the ranks; the name chooses the rank of a single matrix."""
        size, first = math.prod(shape), zlib.crc32(name.encode()) % ways
        whole = [rows * rank // ways if rows > 1 else int(rank > first) for rank in range(ways)]
        return cls(rows, size, (*(row * size for row in whole), rows * size), True, shape)

    def run(self, rank: int) -> slice:
        """A rank's elements of the flattened parameter."""
        return slice(self.bounds[rank], self.bounds[rank + 1])

    def in_row(self, rank: int, row: int) -> slice:
        """A rank's elements of a row, counted from the row's first; may be empty."""
        run, first = self.run(rank), row * self.size
        start = min(max(run.start - first, 0), self.size)
        return slice(start, max(start, min(run.stop - first, self.size)))

    def pieces(self, name: str, rank: int) -> Iterator[Piece]:
        """A rank's run: split at the rows with `by_row`, otherwise one piece."""
        if not self.by_row:
            run = self.run(rank)
            if run.stop > run.start:
                yield Piece(name, 0, run.start, run.stop, 0)
            return
        for row in range(self.rows):
            part = self.in_row(rank, row)
            if part.stop > part.start:
                yield Piece(name, row, part.start, part.stop, row * self.size, self.matrix)

    def together(self, piece: Piece, step: int) -> Iterator[tuple[Piece, Piece]]:
        """Splits a piece where an update of the whole parameter would split it.

        Args:
            piece: a piece from `pieces`.
            step: elements that the update takes at once.

        Yields:
            Each part of the piece, and the update's whole piece that contains it.
        """
        end = self.size if self.by_row else self.rows * self.size
        for start in range(piece.start // step * step, piece.stop, step):
            stop = min(start + step, end)
            part = Piece(
                piece.name, piece.row, max(start, piece.start), min(stop, piece.stop), piece.offset
            )
            yield part, Piece(piece.name, piece.row, start, stop, piece.offset)


MASTER = "master"


@dataclass(frozen=True)
class Held:
    """This rank's state of a piece of a parameter.

    Attributes:
        piece: which.
        master_x: fp32; a view of the parameter if that is fp32.
        moments: moments of the piece, as one row.
    """

    piece: Piece
    master_x: Tensor
    moments: Moments

    def common(self, flat: slice) -> slice:
        """The piece's part of a run of the flattened parameter; may be empty."""
        own = self.piece.in_whole
        start = max(own.start, flat.start)
        return slice(start, max(start, min(own.stop, flat.stop)))

    def part(self, kind: str, flat: slice) -> Tensor:
        """A view of the master or moment (`kind`) of a run of the flattened parameter."""
        if flat.stop <= flat.start:
            return self.master_x[:0]
        first = self.piece.in_whole.start
        local = slice(flat.start - first, flat.stop - first)
        if kind == MASTER:
            return self.master_x[local]
        return self.moments.parts[kind][0, places(kind, local)]


@dataclass(frozen=True)
class Row:
    """Where a tensor of the model is: parameter, row, and the tensor's shape."""

    name: str
    index: int
    shape: torch.Size


def take(held: Iterable[Held], cut: Cut, row: int, parts: Mapping[str, Tensor]) -> None:
    """Copies a row's whole parts [1, X] into the held pieces of the row."""
    first = row * cut.size
    for each in held:
        run = each.common(slice(first, first + cut.size))
        for kind, part in parts.items():
            own = part[0, places(kind, slice(run.start - first, run.stop - first))]
            each.part(kind, run).copy_(own)


def places(kind: str, elements: slice) -> slice:
    """The places of a row's elements in a kind of state. The elements begin with a block."""
    if not kind.endswith(SCALE) or elements.stop <= elements.start:
        return elements
    return slice(elements.start // BLOCK, -(-elements.stop // BLOCK))


class ShardedOptimizer(OwnedOptimizer):
    """`OwnedOptimizer` for ranks that get the same calls. To read a tensor takes an operation."""

    def __init__(
        self,
        settings: OptimizerConfig,
        form: MomentsFormat,
        compute: torch.dtype,
        ranks_of: Callable[[str], Ranks],
    ) -> None:
        """Like `OwnedOptimizer`.

        Args:
            settings: settings of the optimizer.
            form: form of the moments.
            compute: type of all matrix products.
            ranks_of: returns the ranks that hold the same parameter.
        """
        super().__init__(settings, form)
        self._compute, self._ranks_of = compute, ranks_of
        self._held: dict[str, list[Held]] = {}
        self._cuts: dict[str, Cut] = {}
        self._rows_by_name: dict[str, Row] = {}

    # ------------------------------------------------ who has what

    def follow(self, parameters: Mapping[str, nn.Parameter], owned: Sequence[int]) -> None:
        """See `OwnedOptimizer`; new parameters hold fp32 masters."""
        before, old, was_owned = self._parameters, self._held, self._owned
        held, cuts = dict[str, list[Held]](), dict[str, Cut]()
        for name, parameter in sorted(parameters.items()):
            if before.get(name) is parameter:
                held[name], cuts[name] = old[name], self._cuts[name]
                continue
            rows = len(owned) if stacked_tensors(name, owned) else 1
            cuts[name] = self._cut(name, parameter, rows)
            held[name] = self._new(name, parameter, cuts[name])
            for row, expert in enumerate(owned if name in old else ()):
                if expert in was_owned:
                    whole = self._moments_of(Row(name, was_owned.index(expert), torch.Size()))
                    take(held[name], cuts[name], row, whole.parts)
            if self.is_copy(name):
                self._cast(parameter)
        self._parameters, self._owned = dict(sorted(parameters.items())), tuple(owned)
        self._held, self._cuts = held, cuts
        self._rows_by_name = self._all_rows()

    def _cut(self, name: str, parameter: nn.Parameter, rows: int) -> Cut:
        ways = self._ranks_of(name).size
        if self.kinds_of(name) == MUON_MOMENTS:
            rows_of, columns = parameter.shape[-2:]
            return Cut.of_matrices(name, rows, (rows_of, columns), ways)
        return Cut.of(rows, parameter.numel() // rows, ways, self._form)

    def is_copy(self, name: str) -> bool:
        """Whether a parameter is a copy in the compute type, and no rank has its whole master."""
        wanted = self._compute is not torch.float32 and is_compute_copy(name)
        return wanted and self._ranks_of(name).size > 1

    @property
    def moment_bytes(self) -> int:
        """Bytes of the moments that this rank has."""
        moments = [held.moments for each in self._held.values() for held in each]
        return sum(part.nbytes for each in moments for part in each.parts.values())

    def _new(self, name: str, parameter: nn.Parameter, cut: Cut) -> list[Held]:
        flat_X, found = parameter.detach().view(-1), []
        for piece in cut.pieces(name, self._ranks_of(name).rank):
            master_x = flat_X[piece.in_whole]
            moments = self._zeros(name, len(master_x), parameter.device)
            found.append(Held(piece, master_x.clone() if self.is_copy(name) else master_x, moments))
        return found

    def _cast(self, parameter: nn.Parameter) -> None:
        parameter.data = parameter.data.to(self._compute)
        parameter.grad_dtype = torch.float32

    @contextlib.contextmanager
    def whole(self) -> Iterator[None]:
        """In the block, all parameters have their whole fp32 masters, in the bytes of gradients.

        Values written to the parameters in the block are lost. `follow` takes over new parameters.
        """
        kept, masters = dict[nn.Parameter, Tensor](), dict[str, Tensor]()
        for name, parameter in self._parameters.items():
            if self.is_copy(name):
                kept[parameter] = parameter.data
                masters[name] = torch.empty_like(parameter.data, dtype=torch.float32).view(-1)
                for held in self._held[name]:
                    masters[name][held.piece.in_whole] = held.master_x
        self._spread(masters)
        try:
            for name, master_X in masters.items():
                parameter = self._parameters[name]
                parameter.data = master_X.view(parameter.shape)
            masters.clear()
            yield
        finally:
            for parameter, copy in kept.items():
                parameter.data = copy

    def _spread(self, flat: Mapping[str, Tensor]) -> None:
        """Sends each rank's runs of flat tensors, laid out as the parameters, to all ranks."""
        groups = dict[tuple[Ranks, torch.dtype], list[str]]()
        for name, each in flat.items():
            groups.setdefault((self._ranks_of(name), each.dtype), []).append(name)
        for (ranks, _), names in groups.items():
            ranks.spread(
                [
                    [flat[name][self._cuts[name].run(rank)] for name in names]
                    for rank in range(ranks.size)
                ]
            )

    # ------------------------------------------------ a step

    def add_up(self) -> None:
        """Sums gradients over the ranks; each rank gets the sums of its own runs."""
        groups = dict[Ranks, list[str]]()
        for name in self._parameters:
            groups.setdefault(self._ranks_of(name), []).append(name)
        flat = {name: _gradient(each) for name, each in self._parameters.items()}
        for ranks, names in groups.items():
            ranks.add_up_shares(
                [
                    [flat[name][self._cuts[name].run(rank)] for name in names]
                    for rank in range(ranks.size)
                ]
            )

    def own_gradients(self) -> dict[str, Tensor]:
        """The gradients of this rank's runs [x], by parameter."""
        return {
            name: _gradient(each)[self._cuts[name].run(self._ranks_of(name).rank)]
            for name, each in self._parameters.items()
        }

    def update(self, lr: float) -> None:
        """See `OwnedOptimizer`; afterwards every rank has all new values."""
        update = self.next_update(lr)
        pairs = [
            (held, _gradient(self._parameters[name])[held.piece.in_whole])
            for name, each in self._held.items()
            for held in each
        ]
        together: list[tuple[Held, Tensor]] = []
        for held, gradient_x in pairs:
            if held.piece.matrix is not None:
                self._update_matrix(held, gradient_x, update)
            elif self._form != "fp32":
                self._update_rounded(held, gradient_x, update)
            else:
                together.append((held, gradient_x))
        if together:
            moments = [[part[0] for part in held.moments.parts.values()] for held, _ in together]
            masters, gradients = [held.master_x for held, _ in together], [g for _, g in together]
            update_tensors(masters, gradients, moments, update)
            gradients.clear()
        self.updates += 1
        pairs.clear()
        together.clear()
        self.free_gradients()
        values = {name: each.detach().view(-1) for name, each in self._parameters.items()}
        for held in (each for found in self._held.values() for each in found):
            if self.is_copy(held.piece.name):
                values[held.piece.name][held.piece.in_whole] = held.master_x.to(self._compute)
        self._spread(values)

    def _update_matrix(self, held: Held, gradient_x: Tensor, update: Update) -> None:
        """Muon's update of a matrix that this rank holds whole."""
        whole = slice(0, len(held.master_x))
        (momentum_x,) = held.moments.load(0, whole)
        update_matrix_of(held.piece, held.master_x, gradient_x, momentum_x, update)
        if self._form != "fp32":
            held.moments.store(0, whole, (momentum_x,), seed=seed_of(held.piece, update))

    def _update_rounded(self, held: Held, gradient_x: Tensor, update: Update) -> None:
        """Updates by the pieces of the whole parameter, with the random numbers of these pieces."""
        step = PIECE_GPU if gradient_x.is_cuda else PIECE
        for part, whole in self._cuts[held.piece.name].together(held.piece, step):
            here = slice(part.start - held.piece.start, part.stop - held.piece.start)
            values = held.moments.load(0, here)
            update_tensors([held.master_x[here]], [gradient_x[here]], [values], update)
            among = (part.start - whole.start, whole.stop - whole.start)
            held.moments.store(0, here, values, seed=seed_of(whole, update), among=among)

    # ------------------------------------------------ by tensor

    def master(self, name: str) -> Tensor:
        """A tensor's fp32 master: collected from the ranks, or a view if this rank has it whole."""
        row = self._rows_by_name[name]
        return self._collected(row, MASTER).view(row.shape)

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Overwrites this rank's part of a run of elements of a tensor's master."""
        row = self._rows_by_name[name]
        first = row.index * self._cuts[row.name].size + start
        for held in self._held[row.name]:
            run = held.common(slice(first, first + values.numel()))
            own = values.reshape(-1)[run.start - first : run.stop - first]
            held.part(MASTER, run).copy_(own)

    def stored(self, kind: str, name: str) -> Tensor:
        """A master or moment in the form of `state`, collected from the ranks."""
        row = self._rows_by_name[name]
        found = self._collected(row, kind)
        return found if kind.endswith(SCALE) else found.view(row.shape)

    def kinds(self, name: str) -> tuple[str, ...]:
        """The kinds of state of a tensor: master and moments."""
        return (MASTER, *self._zeros(name, 1, torch.device("meta")).parts)

    def state(self) -> Mapping[str, Tensor]:
        """See `OwnedOptimizer`; each tensor is collected when it is looked up."""
        return _State(self)

    def take(self, stored: Mapping[str, Tensor]) -> None:
        """See `OwnedOptimizer`; takes only this rank's parts."""
        rows = self._rows_by_name
        for name, tensor in stored.items():
            kind, _, of = name.partition(".")
            row = rows[of]
            take(self._held[row.name], self._cuts[row.name], row.index, {kind: tensor.view(1, -1)})

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `OwnedOptimizer`."""
        forms, views = forms_of(tensors), self.masters()
        for name, row in self._rows_by_name.items():
            require_stored(forms, name, row.shape, self.kinds_of(name))
        for name, row in self._rows_by_name.items():
            master, cut = tensors[f"{MASTER}.{name}"], self._cuts[row.name]
            views[name].copy_(master)
            self.write(name, 0, master)
            whole = self._zeros(row.name, cut.size, views[name].device)
            whole.copy_row(0, stored_moments(tensors, forms, name), 0)
            take(self._held[row.name], cut, row.index, whole.parts)

    def read_moments(self, names: Collection[str]) -> dict[str, Tensor]:
        """See `OwnedOptimizer`."""
        found = {}
        for name, row in self._rows_by_name.items():
            if name in names:
                whole = self._moments_of(row)
                values = whole.load(0, slice(0, math.prod(row.shape)))
                for kind, value in zip(whole.kinds, values, strict=True):
                    found[f"{kind}.{name}"] = value.to("cpu", copy=True).view(row.shape)
        return found

    def write_moments(self, values: Mapping[str, Tensor]) -> None:
        """See `OwnedOptimizer`."""
        for name, row in self._rows_by_name.items():
            kinds = self.kinds_of(name)
            if f"{kinds[0]}.{name}" in values:
                size, device = math.prod(row.shape), self._parameters[row.name].device
                whole = self._zeros(row.name, size, device)
                each = [values[f"{kind}.{name}"].reshape(-1).to(device) for kind in kinds]
                whole.store(0, slice(0, size), each, seed=0)
                take(self._held[row.name], self._cuts[row.name], row.index, whole.parts)

    def _all_rows(self) -> dict[str, Row]:
        rows = dict[str, Row]()
        for name, parameter in self._parameters.items():
            experts = stacked_tensors(name, self._owned)
            shape = parameter.shape[1:] if experts else parameter.shape
            rows |= {of: Row(name, index, shape) for index, of in enumerate(experts or (name,))}
        return rows

    def _zeros(self, name: str, size: int, device: torch.device) -> Moments:
        return Moments.zeros(self._form, 1, size, device, self.kinds_of(name))

    def _moments_of(self, row: Row) -> Moments:
        kinds = self.kinds(row.name)[1:]
        return Moments(self._form, {kind: self._collected(row, kind)[None] for kind in kinds})

    def _collected(self, row: Row, kind: str) -> Tensor:
        """All elements of one kind of a row, flat, collected from the ranks that share the row."""
        cut, parameter = self._cuts[row.name], self._parameters[row.name]
        first = row.index * cut.size
        if kind == MASTER and not self.is_copy(row.name):
            return parameter.detach().view(-1)[first : first + cut.size]
        if kind == MASTER:
            found = torch.empty(cut.size, device=parameter.device)
        else:
            like = self._zeros(row.name, cut.size, torch.device("meta")).parts[kind][0]
            found = torch.empty_like(like, device=parameter.device)
        for held in self._held[row.name]:
            run = held.common(slice(first, first + cut.size))
            found[places(kind, slice(run.start - first, run.stop - first))] = held.part(kind, run)
        ranks = self._ranks_of(row.name)
        ranks.spread(
            [[found[places(kind, cut.in_row(rank, row.index))]] for rank in range(ranks.size)]
        )
        return found


class _Collected(LazyTensors):
    """Tensors that a look-up collects from the ranks."""

    def forms(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """See `LazyTensors`; an operation of the ranks."""
        return {name: (each.dtype, tuple(each.shape)) for name, each in self.items()}


class _State(_Collected):
    """Masters and moments; a look-up collects one from the ranks."""

    def __init__(self, optimizer: ShardedOptimizer) -> None:
        self._optimizer = optimizer

    def __getitem__(self, name: str) -> Tensor:
        kind, _, of = name.partition(".")
        return self._optimizer.stored(kind, of)

    def __iter__(self) -> Iterator[str]:
        kinds = {name: self._optimizer.kinds(name) for name in self._optimizer.masters()}
        every = dict.fromkeys(kind for of_name in kinds.values() for kind in of_name)
        return (f"{kind}.{name}" for kind in every for name in kinds if kind in kinds[name])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad.view(-1)


# `Engine` documents the methods.
# ruff: disable[undocumented-public-method]


class ShardedEngine(RankEngine):
    """`RankEngine` with sharded state. To read a trained tensor, all its ranks must take part."""

    _optimizer: ShardedOptimizer

    def _new_optimizer(self, options: EngineOptions) -> OwnedOptimizer:
        compute = DTYPES[options.compute]
        return ShardedOptimizer(self._run.optimizer, options.moments, compute, self._alike)

    def _alike(self, name: str) -> Ranks:
        """The ranks that hold the same parameter."""
        is_dealt = self._mesh.ep > 1 and stacked_tensors(name, (0,))
        return self._replicas if is_dealt else self._same

    # ------------------------------------------------ who holds what

    def takes_part(self, name: str) -> bool:
        return self.holds(name) if self._is_cut(name) else self.answers(name)

    def _is_cut(self, name: str) -> bool:
        """Whether ranks share a tensor's state."""
        return is_trained(name, self.owned) and name not in self._biases()

    def own(self, experts: Sequence[int]) -> None:
        if tuple(sorted(experts)) != self.owned:
            with self._optimizer.whole():
                super().own(experts)

    # ------------------------------------------------ a step

    def _add_up(self) -> None:
        self._optimizer.add_up()

    def _gradients_by_name(self) -> dict[str, Tensor]:
        return self._optimizer.own_gradients()

    def _norms(self, scale: float) -> dict[str, Tensor]:
        names = self._trained_names()
        # Each rank has a row, so that the sum over the ranks has a fixed order.
        squares = torch.zeros(self._ranks.size, len(names), dtype=torch.float64)
        own = self._gradients_by_name()
        here = [k for k, name in enumerate(names) if name in own and self._speaks_for(name)]
        squares[self._ranks.rank, here] = square_sums([own[names[index]] for index in here]).cpu()
        total = self._ranks.united(squares).sum(0)
        values = norm_of(total, scale).to(self._device)
        return dict(zip(names, values.unbind(), strict=True))

    # ------------------------------------------------ values

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        found = {}
        for name in names:
            if self._is_cut(name):
                found[name] = self._optimizer.master(name).to("cpu", copy=True)
            else:
                found |= super().read([name])
        return found

    def read_part(self, part: Slice) -> Tensor:
        whole_X = self.read([part.name])[part.name].view(-1)
        return whole_X[part.start : part.stop].clone()

    def write(self, named: Mapping[str, Tensor]) -> None:
        super().write(named)
        for name in named:
            if self._is_cut(name) and self.holds(name):
                self._optimizer.write(name, 0, named[name])

    def write_part(self, part: Slice, values: Tensor) -> None:
        super().write_part(part, values)
        if self.holds(part.name):
            self._optimizer.write(part.name, part.start, values)

    def evaluate(
        self,
        tokens_BT1: Tensor,
        *,
        scored_BT: Tensor | None = None,
        agreed: StandIn | None = None,
    ) -> float:
        with self._optimizer.whole():
            return super().evaluate(tokens_BT1, scored_BT=scored_BT, agreed=agreed)

    def _state_tensors(self) -> Mapping[str, Tensor]:
        return _WithBiases(self._optimizer.state(), self._model.read(self._biases()))


# ruff: enable[undocumented-public-method]


class _WithBiases(_Collected):
    """A collected state, and the selection biases, which all ranks have."""

    def __init__(self, cut: Mapping[str, Tensor], biases: Mapping[str, Tensor]) -> None:
        self._cut = cut
        self._biases = {f"master.{name}": each for name, each in biases.items()}

    def __getitem__(self, name: str) -> Tensor:
        return self._biases[name] if name in self._biases else self._cut[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._cut
        yield from self._biases

    def __len__(self) -> int:
        return len(self._cut) + len(self._biases)
