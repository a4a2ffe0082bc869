"""The experts of one layer, forward and backward, over owned and frozen matrices.

One autograd function, because no weight gradient of a frozen expert may ever be computed or
stored, because a frozen matrix is dense in the compute type only while it is used, and because
backward then needs two activations per row.

Shapes: N tokens, K experts of a token, M rows sorted by expert, m rows of one block, D hidden
size, I inner size of an expert, E experts of a stack.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from swarm.model.rows import (
    Block,
    Plan,
    add_times,
    blocks,
    sum_pairs,
    times,
    write_outer,
    write_times,
)

PAD_ROWS_BF16 = 32
"""On a CPU every new number of rows costs a bf16 product its primitive, some 0.7 ms once. Padding
to 64 costs more than that: 3 % of a step of the same tokens, 6 % with others each step."""


class Stack(Protocol):
    """One matrix of each of several experts, in whatever form it is stored."""

    def dense(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """The matrices of some experts as a [E, out, in] tensor of `dtype`."""


@dataclass(frozen=True)
class Setting:
    """All that an expert layer computes with besides its inputs and owned matrices.

    Attributes:
        plan: rows sorted by expert.
        frozen: the gate, up and down matrices of the frozen experts.
        compute: type of all products.
    """

    plan: Plan
    frozen: tuple[Stack, Stack, Stack]
    compute: torch.dtype

    def grouped(self, x_ND: Tensor, inner: int) -> bool:
        """Whether `grouped_mm` is used; it wants rows that are multiples of 16 bytes.

        In fp32 it is a loop over experts on a GPU too, for which a stack that is frozen in another
        type would be converted as a whole.
        """
        sizes = (x_ND.shape[-1] * self.compute.itemsize, inner * self.compute.itemsize)
        return x_ND.is_cuda and self.compute.itemsize < 4 and all(size % 16 == 0 for size in sizes)

    def matrices(self, owned: Sequence[Tensor], block: Block) -> list[Tensor]:
        """The gate, up and down matrices of a block in the compute type."""
        if block.owned:
            return [stack[block.matrices].to(self.compute) for stack in owned]
        return [stack.dense(block.matrices, self.compute) for stack in self.frozen]


def mix_experts(
    x_ND: Tensor, weight_NK: Tensor, owned: Sequence[Tensor], setting: Setting
) -> Tensor:
    """Sums over a token's experts: weight * down(silu(gate(x)) * up(x)).

    Args:
        x_ND: the tokens.
        weight_NK: fp32 weight of each of a token's experts. Pairs that the plan leaves out must
            have a constant 0: the gradient that comes back for it means nothing.
        owned: matrices of the owned experts, fp32 or in the compute type, gate and up [E, I, D],
            down [E, D, I]. Only these, in fp32, and the two arguments before get gradients; an
            expert without tokens gets zeros.
        setting: the plan, the frozen experts and the compute type.

    Returns:
        fp32 [N, D].
    """
    mixed: Tensor = _Experts.apply(x_ND, weight_NK, setting, *owned)  # type: ignore[no-untyped-call]
    return mixed


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_NK: Tensor, setting: Setting, *owned: Tensor
    ) -> Tensor:
        x_ND = x_ND.to(setting.compute)
        gate_MI, up_MI, out_MD = rows_through(x_ND, owned, setting)
        ctx.setting = setting
        ctx.save_for_backward(x_ND, weight_NK, gate_MI, up_MI, *owned)
        return sum_pairs(out_MD, setting.plan.row_NK, weight_NK)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        plan: Plan = ctx.setting.plan
        backward = rows_back(gradients[0], ctx.saved_tensors, ctx.setting)
        # A pair without a row reads row 0: its weight is a constant 0, and here it counts nothing.
        kept_NK = None if plan.kept_NK is None else plan.kept_NK.float()
        dx_ND = sum_pairs(backward.x_MD, plan.row_NK, kept_NK)
        return dx_ND, backward.weight_M[plan.row_NK], None, *backward.matrices


def rows_through(
    x_ND: Tensor, owned: Sequence[Tensor], setting: Setting
) -> tuple[Tensor, Tensor, Tensor]:
    """Takes the rows of a plan through their experts.

    The tokens are in the compute type; all else is as in `mix_experts`.

    Returns:
        What backward needs, gate(x) and up(x), both [M, I], and the experts' outputs [M, D], not
        weighted, all in the compute type and the order of the plan's rows.
    """
    plan, inner = setting.plan, owned[0].shape[1]
    gate_MI = x_ND.new_empty(plan.num_rows, inner)
    up_MI = torch.empty_like(gate_MI)
    out_MD = x_ND.new_empty(plan.num_rows, x_ND.shape[1])
    for block in blocks(plan, grouped=setting.grouped(x_ND, inner)):
        gate, up, down = setting.matrices(owned, block)
        x_mD = x_ND.index_select(0, plan.token_M[block.rows])
        gate_mI = write_times(x_mD, gate.mT, block, gate_MI)
        up_mI = write_times(x_mD, up.mT, block, up_MI)
        write_times(F.silu(gate_mI).mul_(up_mI), down.mT, block, out_MD)
    return gate_MI, up_MI, out_MD


def rows_back(dout_ND: Tensor, kept: Sequence[Tensor], setting: Setting) -> RowGradients:
    """Goes back through the rows of a plan.

    Args:
        dout_ND: gradient of the mixed outputs.
        kept: the tokens and their routing weights, of `rows_through` gate(x) and up(x), and the
            owned masters.
        setting: as in forward.
    """
    x_ND, weight_NK, gate_MI, up_MI, *owned = kept
    found = RowGradients(setting, x_ND, dout_ND, weight_NK, owned)
    for block in blocks(setting.plan, grouped=setting.grouped(x_ND, gate_MI.shape[1])):
        found.add(block, gate_MI[block.rows], up_MI[block.rows])
    for gradient_E in found.matrices:
        gradient_E[setting.plan.idle_owned()] = 0
    return found


class RowGradients:
    """Gradients of the rows, of the routing weights and of the owned matrices.

    Attributes:
        x_MD: of the rows, in the compute type.
        weight_M: of the routing weight of each row, fp32; nothing where a row is padding.
        matrices: of the owned gate, up and down matrices, fp32.
    """

    def __init__(
        self,
        setting: Setting,
        x_ND: Tensor,
        dout_ND: Tensor,
        weight_NK: Tensor,
        owned: Sequence[Tensor],
    ) -> None:
        plan = setting.plan
        self.setting, self.owned, self.input_ND = setting, owned, x_ND
        self.dout_ND = dout_ND.to(setting.compute)
        # Padding has the weight 0, and so nothing flows back through it.
        self.scale_M = F.pad(weight_NK.flatten(), (0, 1))[plan.pair_M].to(setting.compute)
        self.x_MD = x_ND.new_empty(plan.num_rows, x_ND.shape[1])
        self.weight_M = weight_NK.new_empty(plan.num_rows)
        self.matrices = [torch.empty_like(stack, dtype=torch.float32) for stack in owned]

    def add(self, block: Block, gate_mI: Tensor, up_mI: Tensor) -> None:
        """Goes back through the rows of one block."""
        gate, up, down = self.setting.matrices(self.owned, block)
        token_m = self.setting.plan.token_M[block.rows]
        scale_m = self.scale_M[block.rows, None]
        dout_mD = self.dout_ND.index_select(0, token_m)
        silu_mI = F.silu(gate_mI)
        inner_mI = silu_mI * up_mI
        # The routing weight is applied here, at I columns, and not at the output: its own
        # gradient, out . dout, is then inner . (dout @ down), and the output need not be kept.
        dinner_mI = times(dout_mD, down, block)
        self.weight_M[block.rows] = (dinner_mI * inner_mI).sum(-1, dtype=self.weight_M.dtype)
        dinner_mI.mul_(scale_m)
        dup_mI = silu_mI.mul_(dinner_mI)
        dgate_mI = torch.ops.aten.silu_backward(dinner_mI.mul_(up_mI), gate_mI)
        dx_mD = write_times(dgate_mI, gate, block, self.x_MD)
        add_times(dx_mD, dup_mI, up, block)
        if block.owned:
            x_mD = self.input_ND.index_select(0, token_m)
            write_outer(dgate_mI, x_mD, block, self.matrices[0])
            write_outer(dup_mI, x_mD, block, self.matrices[1])
            write_outer(dout_mD, inner_mI.mul_(scale_m), block, self.matrices[2])
