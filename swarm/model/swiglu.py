"""The experts of one layer, forward and backward, over owned and frozen matrices.

(Token, expert) pairs are sorted by expert, and each expert's rows are multiplied with its matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

GROUPED_ROWS = 2**17
"""The most rows of one grouped product, unless one expert has more. This number of rows fills a
GPU, and limits the seven buffers of the rows to a few GB for every sequence length."""


GROUPING_GPUS = (9, 10)
"""Major compute capabilities of the GPUs on which `grouped_mm` is one kernel: Hopper, and Blackwell
of data centers. On others it is a loop that waits for the device at each call."""


def has_grouped_kernel(compute: torch.dtype) -> bool:
    """Whether this machine's GPU multiplies the rows of several experts in one kernel.

    PyTorch 2.13 has the kernel for bf16 alone. A merely described GPU, on a machine without one,
    has the kernel.
    """
    if compute is not torch.bfloat16 or torch.version.hip:
        return False
    return not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] in GROUPING_GPUS


@dataclass(frozen=True)
class Plan:
    """The places of (token, expert) pairs in rows sorted by expert.

    Attributes:
        token_M: the token of each row, 0 for padding.
        pair_M: the flat pair of each row, P for padding.
        row_NK: the row of each pair. Any row for a pair that is not computed.
        starts: first row of each expert's group, and finally the total. Owned experts come first.
        ends_E: int32, last row of each group plus one, on the device. Copying `starts` from the
            host again would wait for all queued work of the device.
        num_owned: number of groups of owned experts.
        kept_NK: the computed pairs. None: all pairs.
    """

    token_M: Tensor
    pair_M: Tensor
    row_NK: Tensor
    starts: tuple[int, ...]
    ends_E: Tensor
    num_owned: int
    kept_NK: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows of all groups, with padding."""
        return self.starts[-1]

    def idle_owned(self) -> list[int]:
        """Owned groups without a token."""
        return [g for g in range(self.num_owned) if self.starts[g] == self.starts[g + 1]]


def plan_rows(
    group_NK: Tensor,
    num_groups: int,
    num_owned: int,
    multiple: int,
    kept_NK: Tensor | None = None,
) -> Plan:
    """Sorts the pairs by group, stably, and pads every group to a multiple of rows.

    Args:
        group_NK: the group of each (token, expert) pair. Owned experts have the lowest numbers.
        num_groups: number of experts.
        num_owned: number of owned experts.
        multiple: rows of a group are padded to a multiple of this number. 1 does not pad.
        kept_NK: the pairs that get a row, at least one. None: all pairs.

    Cost: one wait for the device, because the group sizes are needed as integers. Leaving pairs out
    takes a second wait.
    """
    group_P = group_NK.flatten()
    sorted_P = torch.argsort(group_P, stable=True)
    if kept_NK is not None:
        sorted_P = sorted_P[kept_NK.flatten()[sorted_P]]
    count_E = torch.bincount(
        group_P if kept_NK is None else group_P[sorted_P], minlength=num_groups
    )
    padded_E = (count_E + multiple - 1).div(multiple, rounding_mode="floor") * multiple
    shift_E = (padded_E.cumsum(0) - padded_E) - (count_E.cumsum(0) - count_E)
    place = torch.arange(len(sorted_P), device=group_P.device) + shift_E[group_P[sorted_P]]
    ends_E = padded_E.cumsum(0)
    starts = tuple(F.pad(ends_E, (1, 0)).tolist())
    pair_M = torch.full((starts[-1],), len(group_P), device=group_P.device)
    pair_M[place] = sorted_P
    row_P = torch.empty_like(group_P) if kept_NK is None else torch.zeros_like(group_P)
    row_P[sorted_P] = place
    token_M = pair_M.div(group_NK.shape[1], rounding_mode="floor")
    token_M.masked_fill_(pair_M == len(group_P), 0)
    row_NK = row_P.view_as(group_NK)
    return Plan(token_M, pair_M, row_NK, starts, ends_E.int(), num_owned, kept_NK)


@dataclass(frozen=True)
class Block:
    """Rows that are computed together: the rows of one expert, or of a whole stack.

    Attributes:
        rows: range of the block in the sorted rows.
        owned: whether `matrices` refers to the owned stack or to the frozen stack.
        matrices: the experts of the block.
        ends: int32 ends of the groups in a grouped product. None for one expert.
    """

    rows: slice
    owned: bool
    matrices: slice
    ends: Tensor | None


def blocks(plan: Plan, *, grouped: bool) -> Iterator[Block]:
    """Cuts the sorted rows into blocks, none of them empty.

    Args:
        plan: the sorted rows.
        grouped: one `grouped_mm` for `GROUPED_ROWS` of a stack, where a GPU has a kernel for it.
            Otherwise one expert at a time. On a CPU `grouped_mm` is a loop too, and with single
            experts the rows stay in the cache between products.
    """
    num_groups = len(plan.starts) - 1
    for owned, low, high in ((True, 0, plan.num_owned), (False, plan.num_owned, num_groups)):
        for first, last in _runs(plan, low, high, GROUPED_ROWS if grouped else 0):
            rows = slice(plan.starts[first], plan.starts[last])
            if rows.start == rows.stop:
                continue
            ends = plan.ends_E[first:last] - rows.start if grouped else None
            yield Block(rows, owned, slice(first - low, last - low), ends)


def _runs(plan: Plan, low: int, high: int, most_rows: int) -> Iterator[tuple[int, int]]:
    """Cuts groups into runs. A run has at most `most_rows` rows, unless it is a single group."""
    first = low
    for group in range(low, high):
        if group > first and plan.starts[group + 1] - plan.starts[first] > most_rows:
            yield first, group
            first = group
    if first < high:
        yield first, high


def write_times(x_m: Tensor, matrices_E: Tensor, block: Block, out_M: Tensor) -> Tensor:
    """Writes each group's rows [m, in] times its matrix [E, in, out] to the block's rows.

    Returns:
        These rows of `out_M`, [m, out].
    """
    out_m = out_M[block.rows]
    if block.ends is None:
        return torch.mm(x_m, matrices_E[0], out=out_m)
    return out_m.copy_(F.grouped_mm(x_m, matrices_E, offs=block.ends))


def times(x_m: Tensor, matrices_E: Tensor, block: Block) -> Tensor:
    """Each group's rows [m, in] times its matrix [E, in, out]: [m, out]."""
    if block.ends is None:
        return torch.mm(x_m, matrices_E[0])
    return F.grouped_mm(x_m, matrices_E, offs=block.ends)


def add_times(total_m: Tensor, x_m: Tensor, matrices_E: Tensor, block: Block) -> None:
    """Adds each group's rows [m, in] times its matrix [E, in, out] to [m, out]."""
    if block.ends is None:
        total_m.addmm_(x_m, matrices_E[0])
    else:
        total_m.add_(F.grouped_mm(x_m, matrices_E, offs=block.ends))


def write_outer(left_m: Tensor, right_m: Tensor, block: Block, gradient_E: Tensor) -> None:
    """Writes each group's `left.T @ right` to the block's matrices of an fp32 gradient."""
    if block.ends is not None:
        gradient_E[block.matrices] = F.grouped_mm(left_m.t(), right_m, offs=block.ends)
        return
    matrix = gradient_E[block.matrices.start]
    if left_m.dtype == matrix.dtype:
        torch.mm(left_m.t(), right_m, out=matrix)
    else:
        matrix.copy_(torch.mm(left_m.t(), right_m))


def sum_pairs(rows_M: Tensor, row_NK: Tensor, weight_NK: Tensor | None = None) -> Tensor:
    """Sums the (weighted) rows of each token in fp32, in the order of k: [N, ...].

    It gathers rows, so that the order of the sum depends neither on ownership nor on threads.
    """
    total = torch.zeros((), device=rows_M.device)
    for k in range(row_NK.shape[1]):
        term = rows_M.index_select(0, row_NK[:, k]).float()
        if weight_NK is not None:
            term = term.mul_(weight_NK[:, k, None])
        total = total.add_(term) if k else term
    return total


PAD_ROWS_BF16 = 32
"""On a CPU a bf16 product makes a new primitive for every new number of rows, which takes some 0.7
ms once. Padding to 64 rows costs more: 3 % of a step with the same tokens, 6 % with new tokens in
each step."""


class Stack(Protocol):
    """The same matrix of several experts, in any stored form."""

    def dense(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """The matrices of some experts as a [E, out, in] tensor of `dtype`."""


@dataclass(frozen=True)
class Setting:
    """The inputs of an expert layer other than its tokens and owned matrices.

    Attributes:
        plan: rows sorted by expert.
        frozen: the gate, up and down matrices of the frozen experts.
        compute: type of all products.
    """

    plan: Plan
    frozen: tuple[Stack, Stack, Stack]
    compute: torch.dtype

    def grouped(self, x_ND: Tensor, inner: int) -> bool:
        """Whether `grouped_mm` is used, which needs rows of multiples of 16 bytes.

        Where it is a loop over experts, it would convert a whole frozen stack of another type.
        """
        sizes = (x_ND.shape[-1] * self.compute.itemsize, inner * self.compute.itemsize)
        is_aligned = all(size % 16 == 0 for size in sizes)
        return x_ND.is_cuda and is_aligned and has_grouped_kernel(self.compute)

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
            have a constant 0, because the returned gradient of their weight is meaningless.
        owned: matrices of the owned experts, fp32 or in the compute type, gate and up [E, I, D],
            down [E, D, I]. Only these matrices, in fp32, and the two arguments before get
            gradients. An expert without tokens gets zeros.
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
        # A pair without a row reads row 0. Its weight is a constant 0, so it adds nothing here.
        kept_NK = None if plan.kept_NK is None else plan.kept_NK.float()
        dx_ND = sum_pairs(backward.x_MD, plan.row_NK, kept_NK)
        return dx_ND, backward.weight_M[plan.row_NK], None, *backward.matrices


def rows_through(
    x_ND: Tensor, owned: Sequence[Tensor], setting: Setting
) -> tuple[Tensor, Tensor, Tensor]:
    """Takes the rows of a plan through their experts.

    The tokens are in the compute type. All other arguments are as in `mix_experts`.

    Returns:
        The inputs of backward, gate(x) and up(x), both [M, I], and the unweighted outputs of the
        experts, [M, D]. All are in the compute type and in the order of the plan's rows.
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
    """Backward pass of the rows of a plan.

    Args:
        dout_ND: gradient of the mixed outputs.
        kept: the tokens and their routing weights, gate(x) and up(x) from `rows_through`, and the
            owned masters.
        setting: the same setting as in forward.
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
        x_MD: gradient of the rows, in the compute type.
        weight_M: gradient of the routing weight of each row, fp32. Undefined for padding.
        matrices: gradients of the owned gate, up and down matrices, fp32.
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
        """Adds the backward pass of the rows of one block."""
        gate, up, down = self.setting.matrices(self.owned, block)
        token_m = self.setting.plan.token_M[block.rows]
        scale_m = self.scale_M[block.rows, None]
        dout_mD = self.dout_ND.index_select(0, token_m)
        silu_mI = F.silu(gate_mI)
        inner_mI = silu_mI * up_mI
        # The routing weight is applied here, at I columns, and not at the output. The weight's
        # gradient, out . dout, is then inner . (dout @ down), so the output need not be kept.
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
