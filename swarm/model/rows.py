"""Sorting (token, expert) pairs by expert, and products of each expert's rows with its matrix.

Shapes: N tokens, K experts of a token, P = N * K pairs, M rows sorted by expert (P plus padding),
m rows of one block, E matrices of a stack.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

GROUPED_ROWS = 2**17
"""Rows of one grouped product, at most, unless one expert has more: enough to fill a GPU, while
their seven buffers stay a few GB however long a sequence is."""


@dataclass(frozen=True)
class Plan:
    """Where each (token, expert) pair lies once the rows are sorted by expert.

    Attributes:
        token_M: the token of each row; 0 for padding.
        pair_M: the flat pair of each row; P for padding.
        row_NK: the row of each pair; any row for a pair that is not computed.
        starts: first row of each expert's group, and last their total; owned experts come first.
        ends_E: int32, last row of each group plus one, on the device: reading `starts` from the
            host again would wait for everything that the device has been given.
        num_owned: how many of the groups belong to owned experts.
        kept_NK: which pairs are computed; None for all.
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
        group_NK: the group of each (token, expert) pair; owned experts have the low ones.
        num_groups: number of experts.
        num_owned: how many of them are owned.
        multiple: rows of a group are padded to a multiple of this; 1 does not pad.
        kept_NK: which pairs get a row, at least one of them; None for all.

    Cost: one wait for the device, since the group sizes are needed as integers; a second one to
    leave pairs out.
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
    """Rows that are computed together: those of one expert, or of a whole stack.

    Attributes:
        rows: where they lie among the sorted rows.
        owned: whether `matrices` counts within the owned stack, else within the frozen one.
        matrices: the experts of the block.
        ends: int32 ends of the groups within a grouped product; None for one expert.
    """

    rows: slice
    owned: bool
    matrices: slice
    ends: Tensor | None


def blocks(plan: Plan, *, grouped: bool) -> Iterator[Block]:
    """Cuts the sorted rows into blocks without empty ones.

    Args:
        plan: the sorted rows.
        grouped: one `grouped_mm` for `GROUPED_ROWS` of a stack, for a GPU in 16 bits. Otherwise
            one expert at a time: on a CPU `grouped_mm` is a loop too, and the rows then stay in the
            cache from one product to the next.
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
    """Cuts groups into runs of so many rows at most, but of one group at least."""
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

    A gather, so that the order of the sum depends neither on ownership nor on threads.
    """
    total = torch.zeros((), device=rows_M.device)
    for k in range(row_NK.shape[1]):
        term = rows_M.index_select(0, row_NK[:, k]).float()
        if weight_NK is not None:
            term = term.mul_(weight_NK[:, k, None])
        total = total.add_(term) if k else term
    return total
