"""The whole model in host memory: trained tensors by unit, frozen experts by layer."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor, nn

from swarm.config import OptimizerConfig, RunConfig
from swarm.errors import BadBlob
from swarm.experts import (
    Shape,
    Slice,
    all_shapes,
    expert_tensor,
    is_matrix,
    misfit,
    owned_stack,
    selection_biases,
    unknown,
)
from swarm.model.frozen import DENSE_TYPES, FrozenFormat, FrozenStack, stack_of, stack_parts
from swarm.model.moe import PROJECTIONS, Storage, matrix_shapes
from swarm.model.routing import bias_update
from swarm.model.transformer import DTYPES, DecoderLayer
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.guard import unit_of
from swarm.train.engine.host_memory import Arena, HostMemory, Packing
from swarm.train.engine.optimizer import OwnedOptimizer
from swarm.train.engine.optimizer_moments import Moments, MomentsFormat, Piece, Update


def begin_of(piece: Piece, packing: Packing) -> int:
    """The byte of a packed fp32 buffer where a piece begins."""
    (field,) = (field for field in packing.fields if field.name == piece.name)
    return field.offset + 4 * (piece.offset + piece.start)


def runs_of(begins: Sequence[int], num_bytes: int, ways: int) -> tuple[slice, ...]:
    """Cuts a buffer into runs of bytes of about equal length, some perhaps empty.

    Args:
        begins: where a run may begin; one of them is 0.
        num_bytes: bytes of the buffer.
        ways: number of runs.
    """
    places = sorted({*begins, num_bytes})

    def nearest(target: float) -> int:
        return min(places, key=lambda place: abs(place - target))

    bounds = [nearest(num_bytes * way / ways) for way in range(ways + 1)]
    return tuple(slice(start, stop) for start, stop in itertools.pairwise(bounds))


class CommonOptimizer(OwnedOptimizer):
    """An `OwnedOptimizer` of several processes with equal calls, one of which loads the values."""

    def __init__(self, settings: OptimizerConfig, form: MomentsFormat, memory: HostMemory) -> None:
        """Like `OwnedOptimizer`; moments are allocated in `memory`."""
        super().__init__(settings, form)
        self._memory = memory

    def _new_moments(self, name: str, rows: int, size: int, device: torch.device) -> Moments:
        if self._memory.size == 1:
            return super()._new_moments(name, rows, size, device)
        like = super()._new_moments(name, rows, size, torch.device("meta")).parts
        packing = Packing.of((kind, tuple(part.shape), part.dtype) for kind, part in like.items())
        # Shared memory is zero when it is allocated.
        return Moments(self._form, packing.views(self._memory.take(packing.num_bytes).buffer))

    def _keep_row(self, new: Moments, row: int, old: Moments, old_row: int) -> None:
        if self._memory.writes:
            super()._keep_row(new, row, old, old_row)

    def write_moments(self, values: Mapping[str, Tensor]) -> None:
        """See `OwnedOptimizer`."""
        if self._memory.writes:
            super().write_moments(values)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `OwnedOptimizer`."""
        if self._memory.writes:
            super().load(tensors)


def unit_shapes(run: RunConfig, layer_shapes: Mapping[str, Shape]) -> dict[str, dict[str, Shape]]:
    """Shapes of the shared tensors, by unit and name, in the order of the forward pass.

    `layer_shapes` are those of a layer, named without the layer's prefix.
    """
    model = run.model
    table = (model.vocab_size, model.hidden_size)
    units: dict[str, dict[str, Shape]] = {"embedding": {"model.embed_tokens.weight": table}}
    for layer in range(model.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        units[f"layer.{layer}"] = {prefix + name: shape for name, shape in layer_shapes.items()}
    units["head"] = {"model.norm.weight": (model.hidden_size,)}
    if not model.tie_word_embeddings:
        units["head"]["lm_head.weight"] = table
    return units


class HostUnit:
    """The trained tensors of one unit: flat fp32 masters, their moments, the copy for the device.

    Attributes:
        name: "embedding", "layer.3" or "head".
        packing: packing of the masters.
        masters: fp32 views by parameter name; owned experts as stacks.
        wire_packing: packing of the copy for the device, whose matrices have the compute type.
        version: rises with every submitted change, before that is made.
        pending: the unfinished update of this process's share.
    """

    def __init__(
        self,
        name: str,
        run: RunConfig,
        compute: torch.dtype,
        *,
        form: MomentsFormat,
        pinned: bool,
        memory: HostMemory,
        finished_R: Tensor,
    ) -> None:
        """Holds nothing yet.

        Args:
            name: see above.
            run: the model and the optimizer's settings.
            compute: type of matrices in the copy for the device.
            form: form of the moments.
            pinned: whether the memory is pinned, for a GPU.
            memory: memory for everything that the unit allocates.
            finished_R: int64, in that memory: the number of updates that each process has finished.
        """
        self.name, self._run, self._compute, self._pinned = name, run, compute, pinned
        self._memory, self._finished_R, self._decided = memory, finished_R, 0
        self.optimizer = CommonOptimizer(run.optimizer, form, memory)
        self.masters: dict[str, nn.Parameter] = {}
        self.version = 0
        self.pending: Future[bool] | None = None
        self._arenas: list[Arena] = []
        self._directions: dict[Piece, Tensor] = {}
        """Muon's directions for the next update, which computes missing ones itself."""

    @property
    def layer(self) -> int | None:
        """The layer's index, or None."""
        kind, _, index = self.name.partition(".")
        return int(index) if kind == "layer" else None

    def hold(self, shapes: Mapping[str, Shape], values: Mapping[str, Tensor]) -> None:
        """Allocates these tensors; `values` has the values of some of them."""
        old = self._arenas
        dtypes = {name: self._compute if is_matrix(name) else torch.float32 for name in shapes}
        self.packing = Packing.of((name, shape, torch.float32) for name, shape in shapes.items())
        self.wire_packing = self.packing.as_type(dtypes)
        same = all(dtype is torch.float32 for dtype in dtypes.values())
        take, pinned = self._memory.take, self._pinned
        masters = take(self.packing.num_bytes, pinned=pinned and same)
        wire = masters if same else take(self.wire_packing.num_bytes, pinned=pinned)
        self._arenas = [masters, wire]
        self.master_buffer, self.wire_buffer = masters.buffer, wire.buffer
        self._wire = self.wire_packing.views(wire.buffer)
        views = self.packing.views(masters.buffer)
        for name, value in values.items() if self._memory.writes else ():
            views[name].copy_(value)
        self.masters = {name: nn.Parameter(view) for name, view in views.items()}
        for arena in dict.fromkeys(old):
            arena.close()
        self.refresh()

    @property
    def num_bytes(self) -> int:
        """Bytes of masters, of the copy for the device, and of moments."""
        wire = 0 if self.wire_buffer is self.master_buffer else self.wire_buffer.nbytes
        return self.master_buffer.nbytes + wire + self.optimizer.moment_bytes

    def close(self) -> None:
        """Unpins the memory."""
        for arena in self._arenas:
            arena.close()

    def refresh(self) -> None:
        """Copies the masters to the copy for the device."""
        self.version += 1
        if self.wire_buffer is not self.master_buffer and self._memory.writes:
            for name, wire in self._wire.items():
                wire.copy_(self.masters[name].detach())

    def write(self, part: Slice, values: Tensor) -> None:
        """Overwrites a run of elements of one of its tensors, and of the copy for the device."""
        self.version += 1
        if not self._memory.writes:
            return
        master_x = _run_of(self.optimizer.by_tensor(self.masters), part)
        master_x.copy_(values)
        if self.wire_buffer is not self.master_buffer:
            _run_of(self.optimizer.by_tensor(self._wire), part).copy_(master_x)

    # ------------------------------------------------ updates

    def runs(self) -> tuple[slice, ...]:
        """The bytes of `packing` that each process adds up and updates."""
        if self._memory.size == 1:
            return (slice(0, self.packing.num_bytes),)
        begins = [begin_of(piece, self.packing) for piece in self.optimizer.pieces()]
        return runs_of(begins, self.packing.num_bytes, self._memory.size)

    def own_pieces(self) -> list[Piece]:
        """The pieces that this process updates."""
        pieces = self.optimizer.pieces()
        if self._memory.size == 1:
            return pieces
        run = self.runs()[self._memory.rank]
        return [p for p in pieces if run.start <= begin_of(p, self.packing) < run.stop]

    def update_piece(self, piece: Piece, gradient: Tensor, factor: float, update: Update) -> None:
        """Updates a piece of the masters, and of the copy for the device.

        `gradient` is the whole parameter's; this piece of it is multiplied by `factor` in place.
        """
        gradient_x = gradient.view(-1)[piece.in_whole]
        if factor != 1:
            gradient_x.mul_(factor)
        direction_RC = self._directions.pop(piece, None)
        self.optimizer.update_piece(piece, gradient_x, update, direction_RC=direction_RC)
        if self.wire_buffer is not self.master_buffer:
            master_x = self.masters[piece.name].detach().view(-1)[piece.in_whole]
            self._wire[piece.name].view(-1)[piece.in_whole].copy_(master_x)

    def orthogonalise(self, gradients: Mapping[str, Tensor], scale: float) -> None:
        """Computes Muon's directions for the matrices of this process, for the next update.

        Args:
            gradients: gradients of all parameters of the unit, on the device that computes.
            scale: the factor that the gradients still contain.
        """
        self.settle()
        self._directions.clear()  # left over from a skipped step
        for piece in self.own_pieces():
            if piece.matrix is not None:
                gradient_x = gradients[piece.name].view(-1)[piece.in_whole]
                gradient_x = gradient_x if scale == 1 else gradient_x / scale
                self._directions[piece] = self.optimizer.direction_of(piece, gradient_x).cpu()

    def decide(self, done: Future[bool]) -> None:
        """Announces an update by all processes; `done` completes with this process's share."""
        self.version += 1
        self._decided += 1
        self.pending = done

    def finish(self) -> None:
        """Informs all processes that this process has made its oldest unfinished update."""
        self._finished_R[self._memory.rank] += 1

    def settle(self) -> None:
        """Waits for unfinished updates of all processes; raises the error of this process's."""
        pending = self.pending
        if pending is not None:
            pending.result()
        self._memory.wait_until(self._finished_R, self._decided)

    def wait(self) -> None:
        """Like `settle`, but a second call does not raise the same error again."""
        try:
            self.settle()
        finally:
            self.pending = None

    def own(self, shared: Mapping[str, Shape], owned: Sequence[int], frozen: FrozenUnit) -> None:
        """Trains the shared tensors and these experts; `frozen` has the values of new experts."""
        shapes = dict(shared)
        values = {name: self.masters[name].detach() for name in shared if name in self.masters}
        if self.layer is not None and owned:
            mine = self.optimizer.masters()
            for projection, matrix in matrix_shapes(self._run.model).items():
                kind = projection.removesuffix("_proj")
                stack = owned_stack(self.layer, kind)
                shapes[stack] = (len(owned), *matrix)
                if not self._memory.writes:
                    continue
                rows = []
                for expert in owned:
                    name = expert_tensor(self.layer, expert, kind)
                    row = mine[name] if name in mine else frozen.get(expert, projection)
                    rows.append(row.float())
                values[stack] = torch.stack(rows)
        self.hold(shapes, values)
        self.optimizer.follow(self.masters, owned)


class FrozenUnit:
    """The frozen experts of one layer, in host memory or in memory-mapped files.

    On disk, lent experts stay in their original files. The unit's own file has the other experts.
    It is sparse: elements that were never written take no space, except one block.

    Attributes:
        packing: packing of the stacks' parts.
        buffer: the copy for the device. On disk it lacks lent experts, which only `fill` gives.
        version: rises with every change.
    """

    def __init__(
        self,
        layer: int,
        run: RunConfig,
        form: FrozenFormat,
        *,
        pinned: bool,
        folder: Path | None,
        memory: HostMemory,
    ) -> None:
        self.layer, self._run, self._form, self._pinned = layer, run, form, pinned
        self._folder, self._memory, self.version = folder, memory, 0
        self._arena: Arena | None = None
        self._stacks: dict[str, FrozenStack] = {}
        self._row_of: dict[int, int] = {}
        self._lent: dict[tuple[int, str], Tensor] = {}
        self._written = False
        """Whether anything was written to the unit's own file."""

    def own(self, owned: Sequence[int], masters: Mapping[str, Tensor]) -> None:
        """Holds all experts except the owned ones; `masters` has values of newly frozen experts."""
        experts = [e for e in range(self._run.model.num_experts) if e not in owned]
        if self._arena is not None and experts == list(self._row_of):
            return
        arena, stacks = self._new_arena(len(experts))
        self._lent = {key: lent for key, lent in self._lent.items() if key[0] in experts}
        written = False
        for row, expert in enumerate(experts if self._memory.writes else ()):
            for projection in PROJECTIONS:
                name = expert_tensor(self.layer, expert, projection.removesuffix("_proj"))
                if name in masters:
                    stacks[projection].put(row, masters[name])
                    written = True
                elif expert in self._row_of and (expert, projection) not in self._lent:
                    stacks[projection].put(row, self.get(expert, projection))
                    written = True
        self._row_of = {expert: row for row, expert in enumerate(experts)}
        self._use(arena, stacks, written=written)

    def _new_arena(self, num_frozen: int) -> tuple[Arena, dict[str, FrozenStack]]:
        self.packing = frozen_packing(self._run, self._form, num_frozen)
        file = None
        if self._folder is not None:
            # The old file is only unlinked, so that mapped parts of it can still be read.
            file = self._folder / f"frozen-{self.layer}"
        arena = self._memory.take(self.packing.num_bytes, pinned=self._pinned, file=file)
        return arena, stacks_of(self._form, self.packing.views(arena.buffer))

    def _use(self, arena: Arena, stacks: dict[str, FrozenStack], *, written: bool) -> None:
        if self._arena is not None:
            self._arena.close()
        self._arena, self._stacks, self._written = arena, stacks, written
        self.buffer, self.version = arena.buffer, self.version + 1

    def close(self) -> None:
        """Unpins the memory."""
        if self._arena is not None:
            self._arena.close()

    @property
    def on_disk(self) -> bool:
        """Whether the buffer is a mapped file."""
        return self._folder is not None

    def get(self, expert: int, projection: str) -> Tensor:
        """One matrix, read-only, in the same form as from `FrozenStack.get`."""
        lent = self._lent.get((expert, projection))
        return self._stacks[projection].get(self._row_of[expert]) if lent is None else lent

    def put(self, expert: int, projection: str, matrix: Tensor) -> None:
        """Overwrites one matrix."""
        self._stacks[projection].put(self._row_of[expert], matrix)
        self._lent.pop((expert, projection), None)
        self._written = True
        self.version += 1

    def may_keep(self, matrix: Tensor) -> bool:
        """Whether a lent matrix can replace a copy on disk."""
        return self.on_disk and matrix.dtype is DENSE_TYPES.get(self._form)

    def keep(self, expert: int, projection: str, matrix: Tensor) -> None:
        """Uses a lent matrix from now on; empties the unit's own file once all are lent."""
        self._lent[expert, projection] = matrix
        self.version += 1
        if self._written and len(self._lent) == len(PROJECTIONS) * len(self._row_of):
            self._use(*self._new_arena(len(self._row_of)), written=False)

    def fill(self, target: Tensor) -> None:
        """Reads all experts into memory with the layout of `buffer`."""
        if not self._lent:
            target.copy_(self.buffer)
            return
        for projection, stack in stacks_of(self._form, self.packing.views(target)).items():
            for expert, row in self._row_of.items():
                stack.put(row, self.get(expert, projection))


def _run_of(tensors: Mapping[str, Tensor], part: Slice) -> Tensor:
    return tensors[part.name].view(-1)[part.start : part.stop]


def frozen_packing(run: RunConfig, form: FrozenFormat, num_frozen: int) -> Packing:
    """The layout of the stacks of a layer's frozen experts: "gate_proj.tensor" and so on."""
    tensors = []
    for projection, matrix in matrix_shapes(run.model).items():
        for part, (shape, dtype) in stack_parts(form, (num_frozen, *matrix)).items():
            tensors.append((f"{projection}.{part}", shape, dtype))
    return Packing.of(tensors)


def stacks_of(form: FrozenFormat, views: Mapping[str, Tensor]) -> dict[str, FrozenStack]:
    """The stacks over views of a `frozen_packing`."""
    stacks = {}
    for projection in PROJECTIONS:
        prefix = projection + "."
        parts = {n.removeprefix(prefix): t for n, t in views.items() if n.startswith(prefix)}
        stacks[projection] = stack_of(form, parts)
    return stacks


class HostStore:
    """Masters, moments and frozen experts in host memory.

    Attributes:
        units: trained tensors by unit, in the order of the forward pass.
        frozen: frozen experts by layer.
        biases: selection bias of each layer's router; none for a softmax router.
        owned: experts that are trained.
        memory: memory for everything except the biases; each process has its own biases.
        tied: whether the head is the embedding.
    """

    def __init__(
        self, run: RunConfig, options: EngineOptions, memory: HostMemory | None = None
    ) -> None:
        self._run, self.memory = run, memory or HostMemory()
        self.tied = run.model.tie_word_embeddings
        self.owned: tuple[int, ...] = ()
        self._bias_names = selection_biases(run.model)
        self.biases = [torch.empty(run.model.num_experts) for _ in self._bias_names]
        self._shared = unit_shapes(run, layer_shapes(run))
        pinned = options.device == "cuda"
        compute = DTYPES[options.compute]
        finished = self.memory.take(8 * self.memory.size * len(self._shared)).buffer
        finished.zero_()
        table = finished.view(torch.int64).view(len(self._shared), -1)
        self.units = {
            name: HostUnit(
                name,
                run,
                compute,
                form=options.moments,
                pinned=pinned,
                memory=self.memory,
                finished_R=finished_R,
            )
            for name, finished_R in zip(self._shared, table, strict=True)
        }
        folder = options.frozen_folder
        self.frozen = [
            FrozenUnit(layer, run, options.frozen, pinned=pinned, folder=folder, memory=self.memory)
            for layer in range(run.model.num_hidden_layers)
        ]
        self._shapes = all_shapes(run.model)
        self._places = {
            expert_tensor(layer, expert, kind.removesuffix("_proj")): (layer, expert, kind)
            for layer in range(run.model.num_hidden_layers)
            for expert in range(run.model.num_experts)
            for kind in PROJECTIONS
        }
        self._move(())

    def own(self, owned: Sequence[int]) -> None:
        """Moves experts between masters and frozen storage; see `Engine.own`.

        Needs memory for a second copy of one layer.
        """
        self._move(tuple(owned))

    def _move(self, owned: tuple[int, ...]) -> None:
        for name, unit in self.units.items():
            if unit.layer is None:
                if not unit.masters:
                    unit.hold(self._shared[name], {})
                    unit.optimizer.follow(unit.masters, ())
                continue
            frozen = self.frozen[unit.layer]
            masters = unit.optimizer.masters()
            # Newly owned experts come from frozen storage, newly frozen ones from the masters.
            unit.own(self._shared[name], owned, frozen)
            frozen.own(owned, masters)
        self.owned = owned
        self.memory.settle()

    def shape(self, name: str) -> Shape:
        """The shape of a tensor; raises BadBlob as `read`."""
        if name not in self._shapes:
            raise BadBlob("name", unknown(name))
        return self._shapes[name]

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors by Hugging Face name, in their stored type, but int8 tensors as fp32 copies.

        Raises:
            BadBlob: the model has no such name.
        """
        read = {}
        for name in names:
            self.shape(name)
            if self._is_master(name):
                read[name] = self._master(name)
            else:
                layer, expert, projection = self._places[name]
                read[name] = self.frozen[layer].get(expert, projection)
        return read

    @torch.no_grad()
    def write(self, named: Mapping[str, Tensor]) -> None:
        """Copies tensors in, rounded to their stored type.

        Raises:
            BadBlob: an unknown name or a wrong shape; nothing has been written then.
        """
        with self.memory.writing():
            if not self.memory.writes:
                named = self._seen(named)
            self._check(named)
            for name, tensor in named.items():
                if self._is_master(name):
                    self._write_part(Slice(name, 0, tensor.numel()), tensor.reshape(-1))
                else:
                    layer, expert, projection = self._places[name]
                    self.frozen[layer].put(expert, projection, tensor)

    def _seen(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Raises versions for writes by another process; returns the biases, which are local."""
        for name in named:
            self.shape(name)
            if not self._is_master(name):
                self.frozen[self._places[name][0]].version += 1
            elif name not in self._bias_names:
                self.units[unit_of(name)].version += 1
        return {name: named[name] for name in named if name in self._bias_names}

    def write_part(self, part: Slice, values: Tensor) -> None:
        """Overwrites a run of elements of a master, and of its copy for the device."""
        with self.memory.writing():
            self._write_part(part, values)

    def _write_part(self, part: Slice, values: Tensor) -> None:
        if part.name in self._bias_names:
            self._master(part.name)[part.start : part.stop].copy_(values)
        else:
            self.units[unit_of(part.name)].write(part, values)

    def lend(self, named: Mapping[str, Tensor]) -> None:
        """Like `write`, but without copies of frozen experts on disk if their type fits."""
        self._check(named)
        copied = {}
        for name, tensor in named.items():
            if self._is_master(name) or not self.frozen[self._places[name][0]].may_keep(tensor):
                copied[name] = tensor
                continue
            layer, expert, projection = self._places[name]
            self.frozen[layer].keep(expert, projection, tensor)
        self.write(copied)

    def _check(self, named: Mapping[str, Tensor]) -> None:
        for name, tensor in named.items():
            if why := misfit(name, (*tensor.shape,), self.shape(name)):
                raise BadBlob("shape", why)

    def read_moments(self, names: Collection[str]) -> dict[str, Tensor]:
        """See `OwnedOptimizer.read_moments`."""
        found: dict[str, Tensor] = {}
        for unit in self.units.values():
            found |= unit.optimizer.read_moments(names)
        return found

    def write_moments(self, values: Mapping[str, Tensor]) -> None:
        """See `OwnedOptimizer.write_moments`."""
        with self.memory.writing():
            for unit in self.units.values():
                unit.optimizer.write_moments(values)

    def state(self) -> dict[str, Tensor]:
        """Masters and moments of everything trained; see `OwnedOptimizer.state`."""
        state: dict[str, Tensor] = {}
        for unit in self.units.values():
            state |= unit.optimizer.state()
        named = zip(self._bias_names, self.biases, strict=True)
        return state | {f"master.{name}": bias_E for name, bias_E in named}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads a result of `state`; raises CorruptState."""
        with self.memory.writing():
            for unit in self.units.values():
                unit.optimizer.load(tensors)
                unit.refresh()
        for name, bias_E in zip(self._bias_names, self.biases, strict=True):
            bias_E.copy_(tensors[f"master.{name}"])

    def balance(self, tokens_LE: Tensor) -> None:
        """Moves the selection biases after a step, by the run's settings; see `bias_update`."""
        if rate := self._run.routing.bias_update_rate:
            for bias_E, update_E in zip(
                self.biases, bias_update(tokens_LE.cpu(), rate), strict=True
            ):
                bias_E.add_(update_E)

    def wait(self) -> None:
        """Waits for all unfinished updates; raises the error of one of them."""
        for unit in self.units.values():
            unit.wait()

    @property
    def num_bytes(self) -> int:
        """Bytes of everything here, files included."""
        units = sum(unit.num_bytes for unit in self.units.values())
        return units + sum(frozen.buffer.nbytes for frozen in self.frozen)

    def close(self) -> None:
        """Unpins the memory."""
        for unit in self.units.values():
            unit.close()
        for frozen in self.frozen:
            frozen.close()

    def _is_master(self, name: str) -> bool:
        return name not in self._places or self._places[name][1] in self.owned

    def _master(self, name: str) -> Tensor:
        if name in self._bias_names:
            return self.biases[self._bias_names.index(name)]
        return self.units[unit_of(name)].optimizer.masters()[name]


def layer_shapes(run: RunConfig) -> dict[str, Shape]:
    """Shapes of a layer's shared tensors with gradients, by name within the layer, in its order."""
    layer = DecoderLayer(run.model, Storage("fp32", torch.float32, torch.device("meta")))
    return {
        name: tuple(parameter.shape)
        for name, parameter in layer.named_parameters()
        if parameter.requires_grad and ".experts.owned." not in name
    }
