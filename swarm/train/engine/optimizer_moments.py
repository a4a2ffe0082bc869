"""The moments of one parameter, in fp32, bf16 or int8, and one update of a piece of it.

AdamW has two moments of each element, Muon has one of each element of a matrix.

Each machine chooses its format. Moments are sent to another peer in fp32.

Shapes: R rows (experts of a stack; 1 for other tensors), X elements of a row, x elements of a
piece, b blocks of a piece.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from swarm.config import OptimizerConfig
from swarm.experts import ADAMW_MOMENTS, MUON_MOMENTS
from swarm.train.engine import muon

MomentsFormat = Literal["fp32", "bf16", "int8"]
BLOCK = 256
"""Elements that share one scale in int8."""
MOMENT_BYTES: dict[MomentsFormat, float] = {"fp32": 4.0, "bf16": 2.0, "int8": 1 + 4 / BLOCK}
"""Bytes per parameter of one moment."""
SCALE = "_scale"
_SQUARE = ADAMW_MOMENTS[1]


@dataclass(frozen=True)
class Piece:
    """A run of elements of one row of a parameter: [start, stop).

    Attributes:
        offset: the start of the row in the flattened parameter.
        matrix: the shape of the row if Muon updates it; the piece is then the whole row.
    """

    name: str
    row: int
    start: int
    stop: int
    offset: int
    matrix: tuple[int, int] | None = None

    @property
    def in_row(self) -> slice:
        """The place of the piece in its row."""
        return slice(self.start, self.stop)

    @property
    def in_whole(self) -> slice:
        """The place of the piece in the flattened parameter."""
        return slice(self.offset + self.start, self.offset + self.stop)


@dataclass(frozen=True)
class Moments:
    """The moments of a parameter, as they are stored.

    Attributes:
        form: format of the moments.
        parts: storage [R, X] by name: "exp_avg" and "exp_avg_sq" of AdamW, or "momentum" of Muon.
            In int8 also the scales of each moment, such as "exp_avg_scale" [R, blocks].
    """

    form: MomentsFormat
    parts: dict[str, Tensor]

    @classmethod
    def zeros(
        cls,
        form: MomentsFormat,
        rows: int,
        size: int,
        device: torch.device,
        kinds: Sequence[str] = ADAMW_MOMENTS,
    ) -> Moments:
        """Moments of a parameter that was never updated."""
        if form != "int8":
            dtype = torch.float32 if form == "fp32" else torch.bfloat16
            return cls(
                form, {k: torch.zeros(rows, size, dtype=dtype, device=device) for k in kinds}
            )
        parts = {}
        for kind in kinds:
            dtype = torch.uint8 if kind == _SQUARE else torch.int8
            parts[kind] = torch.zeros(rows, size, dtype=dtype, device=device)
            parts[kind + SCALE] = torch.zeros(rows, -(-size // BLOCK), device=device)
        return cls(form, parts)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of these moments: `ADAMW_MOMENTS` or `MUON_MOMENTS`."""
        return MUON_MOMENTS if MUON_MOMENTS[0] in self.parts else ADAMW_MOMENTS

    @property
    def shape(self) -> tuple[int, int]:
        """R and X."""
        rows, size = self.parts[self.kinds[0]].shape
        return rows, size

    def flat(self) -> Moments:
        """All rows as one row, in the same memory; int8 moments and Muon's stay in their rows.

        So a piece can begin at any multiple of a vector register's width. At other places the fused
        kernel would round the last elements of a piece differently from elements in the middle of a
        parameter.
        """
        if self.form == "int8" or self.kinds == MUON_MOMENTS:
            return self
        return Moments(self.form, {name: part.view(1, -1) for name, part in self.parts.items()})

    def copy_row(self, row: int, old: Moments, old_row: int) -> None:
        """Copies a row of other moments, which may have another format."""
        if old.form == self.form:
            for name, part in self.parts.items():
                part[row] = old.parts[name][old_row]
            return
        size = self.shape[1]
        self.store(row, slice(0, size), old.load(old_row, slice(0, size)), seed=0)

    def load(self, row: int, part: slice) -> tuple[Tensor, ...]:
        """A piece of each moment in fp32 [x]: views if the format is fp32, otherwise copies."""
        if self.form != "int8":
            return tuple(self.parts[kind][row, part].float() for kind in self.kinds)
        found = []
        for kind in self.kinds:
            scale_b = self.parts[kind + SCALE][row, _blocks(part)]
            decode = _decode_square if kind == _SQUARE else _decode_mean
            found.append(decode(self.parts[kind][row, part], scale_b))
        return tuple(found)

    def store(
        self,
        row: int,
        part: slice,
        values: Sequence[Tensor],
        *,
        seed: int,
        among: tuple[int, int] | None = None,
    ) -> None:
        """Stores a piece, rounded to the format.

        Args:
            row: row of the piece.
            part: part of the row that the piece is.
            values: values of the piece, each fp32 [x].
            seed: seed of the random directions in which bf16 is rounded.
            among: for a part of a longer piece: the part's start in that piece, and the piece's
                length. Directions are drawn for the longer piece. None for a whole piece.
        """
        if self.form == "bf16":
            generator = torch.Generator(values[0].device).manual_seed(seed)
            values = [round_up_or_down(value, generator, among) for value in values]
        if self.form != "int8":
            for kind, value in zip(self.kinds, values, strict=True):
                self.parts[kind][row, part] = value
            return
        for kind, value in zip(self.kinds, values, strict=True):
            codes, scale = (_encode_square if kind == _SQUARE else _encode_mean)(value)
            self.parts[kind][row, part] = codes
            self.parts[kind + SCALE][row, _blocks(part)] = scale


@dataclass(frozen=True)
class Update:
    """One update.

    Attributes:
        settings: settings of the optimizer.
        lr: the learning rate of AdamW's tensors.
        count: updates including this one, for bias correction.
    """

    settings: OptimizerConfig
    lr: float
    count: int

    @property
    def matrix_lr(self) -> float:
        """The learning rate of Muon's matrices."""
        settings = self.settings
        return self.lr if settings.matrix_lr is None else self.lr * settings.matrix_lr / settings.lr


def update_tensors(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    moments: Sequence[Sequence[Tensor]],
    update: Update,
) -> None:
    """Fused AdamW on fp32 tensors, in place.

    Source: Loshchilov and Hutter, arXiv 1711.05101; torch's fused kernel.
    """
    # The kernel counts in fp32, which is exact up to 2^24 updates.
    counts = torch.full((len(parameters),), float(update.count - 1), device=parameters[0].device)
    settings = update.settings
    adamw(
        list(parameters),
        list(gradients),
        [each[0] for each in moments],
        [each[1] for each in moments],
        [],
        list(counts.unbind()),
        fused=True,
        amsgrad=False,
        maximize=False,
        beta1=settings.betas[0],
        beta2=settings.betas[1],
        lr=update.lr,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
    )


def update_piece(
    master_x: Tensor,
    gradient_x: Tensor,
    moments: Moments,
    piece: Piece,
    update: Update,
    *,
    direction_RC: Tensor | None = None,
) -> None:
    """AdamW or Muon on a piece of a row, for any format of moments.

    AdamW needs about 8 bytes of memory per element, and Muon the bytes of `muon.update_bytes`.

    Args:
        master_x: the piece of the parameter.
        gradient_x: fp32 gradient of the piece.
        moments: moments of the parameter; see `Moments.flat`.
        piece: place of the piece. `start` is a multiple of `BLOCK`.
        update: lr and count.
        direction_RC: Muon's direction, from `direction_of`. None to compute it here.

    Raises:
        TrainingDiverged: see `update_matrix`.
    """
    values = moments.load(piece.row, piece.in_row)
    if piece.matrix is None:
        update_tensors([master_x], [gradient_x], [values], update)
    elif direction_RC is not None:
        muon.require_finite(direction_RC, piece.name)
        muon.advance(values[0], gradient_x)
        lr, decay = update.matrix_lr, update.settings.weight_decay
        master_RC = master_x.view(piece.matrix)
        muon.move(
            master_RC, direction_RC, lr=lr, weight_decay=decay, longest_side=max(piece.matrix)
        )
    else:
        update_matrix_of(piece, master_x, gradient_x, values[0], update)
    if moments.form != "fp32":
        moments.store(piece.row, piece.in_row, values, seed=seed_of(piece, update))


def update_matrix_of(
    piece: Piece, master_x: Tensor, gradient_x: Tensor, momentum_x: Tensor, update: Update
) -> None:
    """Muon's update of a piece that is a matrix, on fp32 values in place.

    Raises:
        TrainingDiverged: see `update_matrix`.
    """
    assert piece.matrix is not None, piece
    muon.update_matrix(
        master_x.view(piece.matrix),
        gradient_x.view(piece.matrix),
        momentum_x.view(piece.matrix),
        lr=update.matrix_lr,
        weight_decay=update.settings.weight_decay,
        name=piece.name,
    )


def direction_of(piece: Piece, gradient_x: Tensor, moments: Moments) -> Tensor:
    """Muon's direction for a matrix, computed on the gradient's device; changes nothing.

    Args:
        piece: the matrix.
        gradient_x: gradient of the matrix, on any device.
        moments: moments of the parameter, perhaps on another device.
    """
    assert piece.matrix is not None, piece
    there = gradient_x.device
    row = {kind: part[piece.row, None] for kind, part in moments.parts.items()}
    copied = {kind: part.to(there, copy=True) for kind, part in row.items()}
    (momentum_x,) = Moments(moments.form, copied).load(0, piece.in_row)
    return muon.direction(muon.nesterov(gradient_x, momentum_x).view(piece.matrix))


def seed_of(piece: Piece, update: Update) -> int:
    """A seed that depends only on place and count, so that a resumed peer draws equal numbers."""
    place = f"{update.count} {piece.name} {piece.row} {piece.start}"
    return zlib.crc32(place.encode())


def round_up_or_down(
    values: Tensor, generator: torch.Generator, among: tuple[int, int] | None = None
) -> Tensor:
    """fp32 to bf16, up or down with the probability that keeps the mean.

    An update below half a unit in the last place, which rounding to nearest would always lose,
    survives on average. Values that are not finite are unchanged. `among` is as in `Moments.store`.

    Source: Gupta et al., arXiv 1502.02551 (stochastic rounding); the carry trick on the bits of
    fp32 is common practice.
    """
    first, count = among or (0, len(values))
    noise = torch.empty(count, dtype=torch.int32, device=values.device)
    noise = noise.random_(0, 2**16, generator=generator)[first : first + len(values)]
    raised = (values.view(torch.int32) + noise).bitwise_and_(-(2**16)).view(torch.float32)
    return torch.where(values.isfinite(), raised, values).bfloat16()


def _blocks(part: slice) -> slice:
    return slice(part.start // BLOCK, -(-part.stop // BLOCK))


def _in_blocks(values_x: Tensor) -> Tensor:
    """[b, BLOCK], the last one filled up with zeros."""
    padding = -len(values_x) % BLOCK
    return torch.nn.functional.pad(values_x, (0, padding)).view(-1, BLOCK)


# int8 codes lie on a curve, because moments of one block differ by orders of magnitude. A mean of
# gradients is its code squared, with the code's sign. A mean of squared gradients is its code to
# the fourth power. It is always rounded up, because 0 would make the update enormous. Source: the
# idea of Dettmers et al., arXiv 2110.02861 (blockwise, non-linear codes); the curves are our own,
# without a table.


def _encode_mean(mean_x: Tensor) -> tuple[Tensor, Tensor]:
    mean_bX = _in_blocks(mean_x)
    scale_b = mean_bX.abs().amax(-1)
    share_bX = mean_bX.abs().div_(scale_b.clamp_min(1e-38)[:, None]).sqrt_()
    codes_bX = share_bX.mul_(127).round_().copysign_(mean_bX)
    return codes_bX.flatten()[: len(mean_x)].to(torch.int8), scale_b


def _decode_mean(codes_x: Tensor, scale_b: Tensor) -> Tensor:
    codes_bX = _in_blocks(codes_x.float())
    codes_bX = codes_bX.mul(codes_bX.abs()).mul_(scale_b[:, None] / 127**2)
    return codes_bX.flatten()[: len(codes_x)]


def _encode_square(square_x: Tensor) -> tuple[Tensor, Tensor]:
    square_bX = _in_blocks(square_x)
    scale_b = square_bX.amax(-1)
    share_bX = square_bX.div(scale_b.clamp_min(1e-38)[:, None]).sqrt_().sqrt_()
    codes_bX = share_bX.mul_(255).sub_(1e-3).ceil_().clamp_(0, 255)
    return codes_bX.flatten()[: len(square_x)].to(torch.uint8), scale_b


def _decode_square(codes_x: Tensor, scale_b: Tensor) -> Tensor:
    codes_bX = _in_blocks(codes_x.float()).div_(255).square_().square_()
    return codes_bX.mul_(scale_b[:, None]).flatten()[: len(codes_x)]
