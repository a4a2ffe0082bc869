"""Fused AdamW, or Muon with AdamW, for a peer's changing set of tensors."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from swarm.config import OptimizerConfig
from swarm.errors import CorruptState
from swarm.experts import ADAMW_MOMENTS, MUON_MOMENTS, moments_of, stacked_tensors
from swarm.train.engine.optimizer_moments import (
    SCALE,
    Moments,
    MomentsFormat,
    Piece,
    Update,
    direction_of,
    update_piece,
    update_tensors,
)
from swarm.train.engine.tensor_file import Form, forms_of

PIECE = 2**21
"""Elements that a CPU thread updates at a time. The update of a piece takes some 5 ms, of which
Python needs 0.1 ms under its global lock.
"""
PIECE_GPU = 2**24
OPTIMIZERS = {ADAMW_MOMENTS: "AdamW", MUON_MOMENTS: "Muon"}
"""The name of the optimizer that has these moments."""


class OwnedOptimizer:
    """The optimizer of a changing set of parameters, with one common count of updates.

    With `optimizer.kind = "muon"` Muon updates matrices, and AdamW all else. Weight decay applies
    to all trained tensors (norms and embeddings too). It never applies to frozen experts, which
    have no parameters here. Source: Loshchilov and Hutter, arXiv 1711.05101; for Muon see `muon`.

    Attributes:
        updates: number of updates for bias correction, common to all parameters. A newly owned
            expert starts with zero moments under this count, so its first update is about half of
            the learning rate and needs no warm-up of its own.
    """

    def __init__(self, settings: OptimizerConfig, form: MomentsFormat = "fp32") -> None:
        self._settings, self._form = settings, form
        self._parameters: dict[str, nn.Parameter] = {}
        self._moments: dict[str, Moments] = {}
        self._owned: tuple[int, ...] = ()
        self.updates = 0

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The trained parameters, in the order of their names."""
        return list(self._parameters.values())

    @property
    def names(self) -> list[str]:
        """The names of `parameters`."""
        return list(self._parameters)

    @property
    def moment_bytes(self) -> int:
        """Bytes of all moments."""
        parts = [part for moments in self._moments.values() for part in moments.parts.values()]
        return sum(part.nbytes for part in parts)

    def follow(self, parameters: Mapping[str, nn.Parameter], owned: Sequence[int]) -> None:
        """Trains `parameters` from now on.

        Moments of shared tensors and of experts that stay keep every bit. Moments of experts that
        leave are freed. Moments of new experts are zero.

        Args:
            parameters: the parameters by name. Owned experts are stacks whose row k is expert
                `owned[k]`.
            owned: the experts behind the stacks' rows.
        """
        old, old_owned = self._moments, self._owned
        self._parameters = dict(sorted(parameters.items()))
        self._owned, self._moments = tuple(owned), {}
        for name, parameter in self._parameters.items():
            is_stack = bool(stacked_tensors(name, owned))
            rows = len(self._owned) if is_stack else 1
            kept = old.pop(name, None)
            if kept is not None and (not is_stack or old_owned == self._owned):
                self._moments[name] = kept
                continue
            size = parameter.numel() // rows
            moments = self._new_moments(name, rows, size, parameter.device)
            self._moments[name] = moments
            for row, expert in enumerate(self._owned):
                if kept is not None and expert in old_owned:
                    self._keep_row(moments, row, kept, old_owned.index(expert))

    def kinds_of(self, name: str) -> tuple[str, ...]:
        """The moments of a parameter, or of a tensor of the model."""
        return moments_of(name, self._settings.kind)

    def _new_moments(self, name: str, rows: int, size: int, device: torch.device) -> Moments:
        return Moments.zeros(self._form, rows, size, device, self.kinds_of(name))

    def _keep_row(self, new: Moments, row: int, old: Moments, old_row: int) -> None:
        new.copy_row(row, old, old_row)

    def update(self, lr: float) -> None:
        """Makes one update. All gradients must be there; they are freed after it.

        Raises:
            TrainingDiverged: a matrix's momentum is not finite; other tensors may already be
                updated.
        """
        assert self._parameters, "nothing to train: call follow first"
        update = self.next_update(lr)
        whole, rest = list[str](), list[str]()
        for name in self._parameters:
            together = self._form == "fp32" and self._moments[name].kinds == ADAMW_MOMENTS
            (whole if together else rest).append(name)
        if whole:
            values = [self._parameters[name].detach() for name in whole]
            moments = [
                [self._moments[name].parts[kind].view(value.shape) for kind in ADAMW_MOMENTS]
                for name, value in zip(whole, values, strict=True)
            ]
            update_tensors(values, [self._gradient(name) for name in whole], moments, update)
        for piece in self._pieces_of(rest):
            gradient_X = self._gradient(piece.name).view(-1)
            self.update_piece(piece, gradient_X[piece.in_whole], update)
        self.updates += 1
        self.free_gradients()

    def _gradient(self, name: str) -> Tensor:
        gradient = self._parameters[name].grad
        assert gradient is not None, f"{name} has no gradient"
        return gradient

    def next_update(self, lr: float) -> Update:
        """Settings, learning rate and count of the next update."""
        return Update(self._settings, lr, self.updates + 1)

    def pieces(self) -> list[Piece]:
        """All parameters in independently updated pieces; Muon's pieces are whole matrices."""
        return self._pieces_of(self._parameters)

    def _pieces_of(self, names: Iterable[str]) -> list[Piece]:
        pieces = []
        for name in names:
            parameter, moments = self._parameters[name], self._moments[name].flat()
            rows, size = moments.shape
            if moments.kinds == MUON_MOMENTS:
                shape = parameter.shape[-2], parameter.shape[-1]
                pieces += [Piece(name, row, 0, size, row * size, shape) for row in range(rows)]
                continue
            step = PIECE_GPU if parameter.is_cuda else PIECE
            for row in range(rows):
                cuts = range(0, size, step)
                pieces += [Piece(name, row, at, min(size, at + step), row * size) for at in cuts]
        return pieces

    def update_piece(
        self,
        piece: Piece,
        gradient_x: Tensor,
        update: Update,
        *,
        direction_RC: Tensor | None = None,
    ) -> None:
        """Updates a piece by its fp32 gradient. Threads may update different pieces in parallel.

        The caller raises `updates` once all pieces are updated.

        Raises:
            TrainingDiverged: see `update`.
        """
        master_x = self._parameters[piece.name].detach().view(-1)[piece.in_whole]
        moments = self._moments[piece.name].flat()
        update_piece(master_x, gradient_x, moments, piece, update, direction_RC=direction_RC)

    def direction_of(self, piece: Piece, gradient_x: Tensor) -> Tensor:
        """Muon's direction for a matrix by its gradient; see `optimizer_moments.direction_of`."""
        return direction_of(piece, gradient_x, self._moments[piece.name])

    def free_gradients(self) -> None:
        """Drops all gradients without an update."""
        for parameter in self.parameters:
            parameter.grad = None

    def count_from(self, updates: int) -> None:
        """Sets the common count of updates, as for a peer that joins a run at a later step."""
        self.updates = updates

    def masters(self) -> dict[str, Tensor]:
        """Views of all parameters by Hugging Face name, one for each matrix of an owned expert."""
        return self.by_tensor(self._parameters)

    def by_tensor(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Views of a buffer with the layout of the parameters; see `masters`."""
        views: dict[str, Tensor] = {}
        for name in self._parameters:
            rows = stacked_tensors(name, self._owned)
            value = values[name].detach()
            views.update(zip(rows, value, strict=True) if rows else [(name, value)])
        return views

    def read_moments(self, names: Collection[str]) -> dict[str, Tensor]:
        """Copies of the moments of those `names` that are here, in fp32 on the CPU.

        Returns:
            Named as in `state`: the kind of the moment and a dot before the tensor's name.
        """
        found = {}
        for name, (moments, row, shape) in self._rows().items():
            if name in names:
                values = moments.load(row, slice(0, math.prod(shape)))
                for kind, value in zip(moments.kinds, values, strict=True):
                    found[f"{kind}.{name}"] = value.to("cpu", copy=True).view(shape)
        return found

    def write_moments(self, values: Mapping[str, Tensor]) -> None:
        """Overwrites the moments of tensors that are here.

        `values` has the form of the result of `read_moments`.
        """
        for name, (moments, row, shape) in self._rows().items():
            kinds = moments.kinds
            if f"{kinds[0]}.{name}" in values:
                each = [
                    values[f"{kind}.{name}"].reshape(-1).to(moments.parts[kind].device)
                    for kind in kinds
                ]
                moments.store(row, slice(0, math.prod(shape)), each, seed=0)

    def _rows(self) -> dict[str, tuple[Moments, int, torch.Size]]:
        """Where each tensor's moments are: storage, row, and the tensor's shape."""
        rows = {}
        for name, parameter in self._parameters.items():
            experts = stacked_tensors(name, self._owned)
            shape = parameter.shape[1:] if experts else parameter.shape
            for row, of_row in enumerate(experts or (name,)):
                rows[of_row] = (self._moments[name], row, shape)
        return rows

    def state(self) -> Mapping[str, Tensor]:
        """Views of masters and moments, each named by its kind, a dot and the Hugging Face name.

        Kinds are "master", and "exp_avg" and "exp_avg_sq" of AdamW or "momentum" of Muon. In int8
        each moment also has its scales.
        """
        state = {f"master.{name}": value for name, value in self.masters().items()}
        for name, (moments, row, shape) in self._rows().items():
            for kind, part in moments.parts.items():
                whole = part[row] if kind.endswith(SCALE) else part[row].view(shape)
                state[f"{kind}.{name}"] = whole
        return state

    def take(self, stored: Mapping[str, Tensor]) -> None:
        """Overwrites some tensors, named as in `state`, in their stored form."""
        views = self.state()
        for name, tensor in stored.items():
            views[name].copy_(tensor)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Loads masters and moments, named as in `state`, in any format.

        Each tensor is looked up once, so `tensors` may read it from disk at the look-up.

        Raises:
            CorruptState: a tensor is missing or has another shape; then nothing is changed.
        """
        forms, masters = forms_of(tensors), self.masters()
        for name, master in masters.items():
            require_stored(forms, name, master.shape, self.kinds_of(name))
        for name, master in masters.items():
            master.copy_(tensors[f"master.{name}"])
        for name, moments in self._moments.items():
            for row, of_row in enumerate(stacked_tensors(name, self._owned) or (name,)):
                moments.copy_row(row, stored_moments(tensors, forms, of_row), 0)


def require_stored(
    forms: Mapping[str, Form], name: str, shape: Sequence[int], kinds: Sequence[str]
) -> None:
    """Raises CorruptState unless a private state has a tensor of this shape, and its moments.

    `forms` are those of the private state. `kinds` are the moments that the present optimizer keeps
    of the tensor.
    """
    there = stored_kinds(forms, name)
    if there and there != tuple(kinds):
        used, saved = (OPTIMIZERS[tuple(each)] for each in (kinds, there))
        raise CorruptState(
            f"the private state has {saved}'s moments of {name}, and this run trains it with {used}"
        )
    found = [forms.get(f"{kind}.{name}") for kind in ("master", *kinds)]
    scales = [f"{kind}{SCALE}.{name}" in forms for kind in kinds if is_coded(forms, name)]
    if not all(scales) or any(each is None or each[1] != tuple(shape) for each in found):
        raise CorruptState(f"the private state belongs to another model: {name}")


def stored_kinds(forms: Mapping[str, Form], name: str) -> tuple[str, ...]:
    """The moments that a private state has of a tensor; none for a tensor of another model."""
    each = (kinds for kinds in OPTIMIZERS if f"{kinds[0]}.{name}" in forms)
    return next(each, ())


def is_coded(forms: Mapping[str, Form], name: str) -> bool:
    """Whether a private state has int8 moments, and so scales, of a tensor."""
    kind = next(iter(stored_kinds(forms, name)), "")
    dtype, _ = forms.get(f"{kind}.{name}", (torch.float32, ()))
    return dtype.itemsize == 1


def stored_moments(tensors: Mapping[str, Tensor], forms: Mapping[str, Form], name: str) -> Moments:
    """Moments of one tensor from a private state; see `require_stored`."""
    formats: dict[int, MomentsFormat] = {4: "fp32", 2: "bf16", 1: "int8"}
    whole = stored_kinds(forms, name)
    kinds = [*whole, *(kind + SCALE for kind in whole if is_coded(forms, name))]
    parts = {kind: tensors[f"{kind}.{name}"].reshape(1, -1) for kind in kinds}
    return Moments(formats[parts[whole[0]].element_size()], parts)
