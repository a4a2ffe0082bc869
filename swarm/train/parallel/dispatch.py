"""Expert parallel: tokens are sent to the ranks with their experts, and outputs come back.

Every rank of a group takes part in every operation, in the same order, with any number of rows. A
layer and micro-batch has at most seven operations:

- forward: counts, tokens, outputs;
- backward: gradients of outputs with the routing weights, gradients of tokens with those of the
  weights;
- in a recomputed layer: tokens and outputs once more.

If experts are compared, the tokens of the pairs need similar operations: counts, tokens and outputs
forward, and one operation backward.

The rows of an expert are sorted by the rank of their token, then by token, so that sums do not
depend on timing.

Shapes: N tokens of this rank, K experts of a token, S rows that this rank sends, sorted by seat and
expert, R rows that it receives, sorted by seat and expert too, M the same rows sorted by expert, P
tokens of compared pairs, E experts, D hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from swarm.config import ModelConfig
from swarm.experts import PROJECTIONS, owned_stack
from swarm.model.frozen import DENSE_TYPES
from swarm.model.moe import ExpertBank, Recall, Routing, Storage
from swarm.model.similarity import Pair, similarity
from swarm.model.swiglu import Plan, Setting, plan_rows, rows_back, rows_through, sum_pairs
from swarm.model.transformer import Transformer
from swarm.train.engine.guard import square_sums
from swarm.train.engine.mesh import Dealing, Move, deal
from swarm.train.engine.ranks import Ranks
from swarm.train.engine.tensor_file import Form


def moved(
    group: Ranks,
    moves: Sequence[Move],
    give: Callable[[int], Sequence[Tensor]],
    forms: Callable[[int], Sequence[Form]],
) -> dict[int, list[Tensor]]:
    """Sends tensors of experts that leave this rank, and receives tensors of arriving experts.

    This is one operation, or none.

    Args:
        group: the ranks, which all pass the same `moves`.
        moves: experts that change their seat.
        give: returns the tensors of an expert that leaves.
        forms: returns the forms of the tensors of an arriving expert.

    Returns:
        The tensors of each arriving expert, on the device of the sent tensors, or of the group.

    Raises:
        Disconnected: another rank has ended.
    """
    if not moves:
        return {}
    sent, received = [0] * group.size, [0] * group.size
    device, pieces = group.device, []
    for move in sorted(moves, key=lambda move: (move.taker, move.expert)):
        if move.giver == group.rank:
            for tensor in give(move.expert):
                device = tensor.device
                pieces.append(tensor.detach().contiguous().view(-1).view(torch.uint8))
                sent[move.taker] += len(pieces[-1])
    coming = [move for move in moves if move.taker == group.rank]
    coming.sort(key=lambda move: (move.giver, move.expert))
    for move in coming:
        received[move.giver] += sum(_num_bytes(form) for form in forms(move.expert))
    flat = torch.cat([*pieces, torch.empty(0, dtype=torch.uint8, device=device)])
    rest = group.exchange(flat[:, None], sent, received, "moves")[:, 0]
    found: dict[int, list[Tensor]] = {}
    for move in coming:
        for form in forms(move.expert):
            # A copy is aligned for any type.
            piece, rest = rest[: _num_bytes(form)].clone(), rest[_num_bytes(form) :]
            found.setdefault(move.expert, []).append(piece.view(form[0]).view(form[1]))
    return found


def _num_bytes(form: Form) -> int:
    return math.prod(form[1]) * form[0].itemsize


@dataclass(frozen=True, kw_only=True)
class Trip(Plan):
    """How the rows of a rank are sorted, and their destinations.

    Attributes:
        sent: number of rows to each rank of the group.
        received: number of rows from each rank.
        there: the plan of the received rows, each a token with one expert.
    """

    sent: tuple[int, ...]
    received: tuple[int, ...]
    there: Plan


@dataclass(frozen=True)
class Way:
    """Moves rows to their experts and back.

    Attributes:
        group: the ranks that hold the experts.
        trip: the destinations of the rows.
        setting: setting for the computation of the received rows.
    """

    group: Ranks
    trip: Trip
    setting: Setting

    def go(self, rows_SX: Tensor, kind: str) -> Tensor:
        """Sends rows to the experts. Returns the received rows, [R, X]."""
        return self.group.exchange(rows_SX, self.trip.sent, self.trip.received, kind)

    def come(self, rows_MX: Tensor, kind: str) -> Tensor:
        """Sends rows of the experts back. Returns the rows of this rank, [S, X]."""
        rows_RX = rows_MX.index_select(0, self.trip.there.row_NK[:, 0])
        return self.group.exchange(rows_RX, self.trip.received, self.trip.sent, kind)


class DealtBank(ExpertBank):
    """One rank's experts of one layer; computes with the experts of the whole group.

    Attributes:
        dealing: the experts that each rank holds.
    """

    def __init__(self, model: ModelConfig, storage: Storage, *, group: Ranks) -> None:
        """`group`: the ranks that share the experts."""
        self._group = group
        self._probed: Tensor | None = None
        dealing = deal((), model.num_experts, group.size)
        super().__init__(model, storage, here=dealing.frozen[group.rank])
        self._deal(dealing)

    def _deal(self, dealing: Dealing) -> None:
        self.dealing = dealing
        owned = tuple(sorted(expert for experts in dealing.owned for expert in experts))
        seat = self._group.rank
        self._number(owned, (dealing.owned[seat], dealing.frozen[seat]), dealing.order)

    @torch.no_grad()
    def own(self, owned: tuple[int, ...]) -> None:
        """See `ExpertBank.own`; experts that change their rank move, one projection at a time.

        Raises:
            Disconnected: another rank has ended.
        """
        if owned == self.owned_experts:
            return
        after = self.dealing_for(owned)
        moves, seat = self.dealing.moves(after), self._group.rank
        here = (after.owned[seat], after.frozen[seat])
        self._rearrange(here, lambda projection: self._moved(moves, projection))
        self._deal(after)

    def dealing_for(self, owned: Sequence[int]) -> Dealing:
        """Which rank will hold which experts if these are owned."""
        return deal(owned, self.num_experts, self._group.size, self.dealing)

    def _moved(self, moves: Sequence[Move], projection: str) -> dict[int, Tensor]:
        shape = tuple(self.get_parameter(f"owned.{projection}").shape[1:])

        def give(expert: int) -> list[Tensor]:
            stack, row = self.place(expert, projection)
            return [stack.get(row)]

        def forms(expert: int) -> list[Form]:
            owned = expert in self.owned_experts
            return [(torch.float32 if owned else DENSE_TYPES.get(self.form, torch.float32), shape)]

        return {expert: one for expert, (one,) in moved(self._group, moves, give, forms).items()}

    def forward(self, x_ND: Tensor, routing: Routing, recall: Recall | None = None) -> Tensor:
        """See `ExpertBank`."""
        trip = recall.plan if recall else None
        if not isinstance(trip, Trip):
            trip = self._trip(x_ND, routing.expert_NK, routing.kept_NK)
        if recall:
            recall.expert_NK, recall.plan = routing.expert_NK, trip
        probed, self._probed = self._probed, None
        mixed: Tensor = _Mixed.apply(  # type: ignore[no-untyped-call]
            x_ND, routing.weight_NK, probed, self._way(trip), *self.masters()
        )
        return mixed

    def alike(self, x_ND: Tensor, pairs: list[Pair]) -> Tensor:
        """See `ExpertBank`; an operation of all ranks, including ranks without pairs."""
        experts = [expert for pair in pairs for expert in pair.experts]
        tokens = [pair.tokens for pair in pairs for _ in pair.experts]
        sizes = [len(each) for each in tokens]
        nothing_P = torch.empty(0, dtype=torch.int64, device=x_ND.device)
        token_P = torch.cat([*tokens, nothing_P])
        size_P = torch.tensor(sizes, dtype=torch.int64)
        expert_P = torch.tensor(experts, dtype=torch.int64).repeat_interleave(size_P)
        trip = self._trip(x_ND, expert_P[:, None].to(x_ND.device), None)
        out_PD: Tensor = _Probed.apply(  # type: ignore[no-untyped-call]
            x_ND, token_P, self._way(trip), *self.masters()
        )
        self._probed = out_PD if out_PD.requires_grad else None
        outputs = iter(out_PD.split(sizes))
        return similarity(x_ND, pairs, lambda *_: next(outputs))

    def _way(self, trip: Trip) -> Way:
        return Way(self._group, trip, self.setting(trip.there))

    def _trip(self, x_ND: Tensor, expert_NK: Tensor, kept_NK: Tensor | None) -> Trip:
        """Sorts pairs by seat and expert, and exchanges the numbers of rows.

        Cost: one operation between the ranks, and two waits for the device.
        """
        group_NK = self.get_buffer("group_of")[expert_NK]
        plan = plan_rows(group_NK, self.num_experts, 0, 1, kept_NK)
        held = self.dealing.counts
        mine, seats = held[self._group.rank], self._group.size
        count_E = torch.tensor(plan.starts).diff()
        count_X = self._group.exchange(count_E[:, None], held, [mine] * seats, "counts")[:, 0]
        expert_R = torch.arange(mine).repeat(seats).repeat_interleave(count_X).to(x_ND.device)
        return Trip(
            **vars(plan),
            sent=tuple(int(each.sum()) for each in count_E.split(held)),
            received=tuple(count_X.view(seats, mine).sum(1).tolist()),
            there=plan_rows(expert_R[:, None], mine, len(self.owned_here), self.multiple(x_ND)),
        )


def dealt_square_sums(
    model: Transformer, gradients: Mapping[str, Tensor], group: Ranks
) -> dict[str, Tensor]:
    """The fp64 sum of squares of each stack of owned experts, over all ranks.

    Squares are added up in the order of the experts, so the sum does not depend on their ranks.

    Args:
        model: model with the experts of this rank.
        gradients: gradients of the model's parameters, by name.
        group: the ranks that share the experts; all of them call it.

    Raises:
        Disconnected: another rank has ended.
    """
    stacks = [owned_stack(layer, kind) for layer in model.banks for kind in PROJECTIONS]
    device = next(iter(gradients.values())).device
    table = torch.zeros(len(stacks), len(model.owned), dtype=torch.float64, device=device)
    columns = [model.owned.index(expert) for expert in model.owned_here]
    for row, name in enumerate(stacks if columns else ()):
        table[row, columns] = square_sums(list(gradients[name]))
    return dict(zip(stacks, group.united(table.cpu()).sum(1).unbind(), strict=True))


class _Mixed(torch.autograd.Function):
    """Like `mix_experts`, with the same bits except in sums over the rows of several ranks.

    `probed` is an input so that its backward runs on every rank, with or without pairs.
    """

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, weight_NK: Tensor, probed: Tensor | None, way: Way, *owned: Tensor
    ) -> Tensor:
        x_SD = x_ND.to(way.setting.compute).index_select(0, way.trip.token_M)
        x_RD = way.go(x_SD, "tokens")
        gate_MI, up_MI, out_MD = rows_through(x_RD, owned, way.setting)
        out_SD = way.come(out_MD, "outputs")
        ctx.way, ctx.probed = way, None if probed is None else probed.shape
        ctx.save_for_backward(weight_NK, x_RD, gate_MI, up_MI, *owned)
        return sum_pairs(out_SD, way.trip.row_NK, weight_NK)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight_NK, x_RD, *kept = ctx.saved_tensors
        way: Way = ctx.way
        trip, hidden = way.trip, x_RD.shape[1]
        dout_SD = gradients[0].to(way.setting.compute).index_select(0, trip.token_M)
        weight_S = weight_NK.flatten()[trip.pair_M]
        dout_RX = way.go(_beside(dout_SD, weight_S), "output gradients")
        dout_RD, weight_R = _apart(dout_RX, hidden)
        found = rows_back(dout_RD, [x_RD, weight_R[:, None], *kept], way.setting)
        dx_SX = way.come(_beside(found.x_MD, found.weight_M), "token gradients")
        dx_SD, dweight_S = _apart(dx_SX, hidden)
        kept_NK = None if trip.kept_NK is None else trip.kept_NK.float()
        dx_ND = sum_pairs(dx_SD, trip.row_NK, kept_NK)
        probed = None if ctx.probed is None else x_RD.new_zeros(ctx.probed)
        return dx_ND, dweight_S[trip.row_NK], probed, None, *found.matrices


class _Probed(torch.autograd.Function):
    """The outputs of experts for tokens of compared pairs, [P, D] in the compute type.

    The tokens get no gradient. They are inputs so that backward of earlier layers runs later.
    """

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, token_P: Tensor, way: Way, *owned: Tensor) -> Tensor:
        x_PD = x_ND.to(way.setting.compute).index_select(0, token_P)
        x_RD = way.go(x_PD.index_select(0, way.trip.token_M), "compared tokens")
        gate_MI, up_MI, out_MD = rows_through(x_RD, owned, way.setting)
        ctx.way = way
        ctx.save_for_backward(x_RD, gate_MI, up_MI, *owned)
        out_SD = way.come(out_MD, "compared outputs")
        return out_SD.index_select(0, way.trip.row_NK[:, 0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_RD, *kept = ctx.saved_tensors
        way: Way = ctx.way
        dout_SD = gradients[0].to(way.setting.compute).index_select(0, way.trip.token_M)
        dout_RD = way.go(dout_SD, "compared gradients")
        weight_R1 = torch.ones(len(x_RD), 1, device=x_RD.device)
        found = rows_back(dout_RD, [x_RD, weight_R1, *kept], way.setting)
        return None, None, None, *found.matrices


def _beside(rows_SD: Tensor, number_S: Tensor) -> Tensor:
    """Rows with an fp32 number at the end of each, in the type of the rows."""
    return torch.cat([rows_SD, number_S[:, None].float().view(rows_SD.dtype)], 1)


def _apart(rows_SX: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Separates rows of `size` elements from the numbers at their ends; reverses `_beside`."""
    numbers = rows_SX[:, size:].contiguous().view(torch.float32)
    return rows_SX[:, :size], numbers[:, 0]


def crossing_bytes(rows: float, model: ModelConfig, itemsize: int, *, again: bool) -> float:
    """Bytes sent between ranks for the experts of one layer and micro-batch.

    These are tokens and outputs, twice if the layer is recomputed, and the gradients of both, each
    with a routing weight or its gradient in fp32.

    Args:
        rows: (token, expert) pairs whose expert is on another rank.
        model: sizes of the model.
        itemsize: bytes of the compute type.
        again: whether the layer is recomputed for backward.
    """
    row = model.hidden_size * itemsize
    return rows * ((4 if again else 2) * row + 2 * (row + 4))
