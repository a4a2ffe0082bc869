"""Tensor and sequence parallel: ranks share micro-batches, heads and experts."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swarm.config import ModelConfig, OptimizerConfig, RunConfig
from swarm.errors import BadBlob
from swarm.experts import Slice, misfit, shared_shapes, stacked_tensors
from swarm.model.attention import Attention, Positions, RMSNorm
from swarm.model.masking import Tokens
from swarm.model.moe import Pieces, Recall, Routing
from swarm.model.similarity import Pair, similarity
from swarm.model.stage import Stage
from swarm.model.swiglu import mix_experts, plan_rows
from swarm.train.engine.engine import StandIn
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.guard import norm_of, square_sums
from swarm.train.engine.muon import direction, move, nesterov, require_finite
from swarm.train.engine.optimizer import OwnedOptimizer, is_coded, stored_kinds, stored_moments
from swarm.train.engine.optimizer_moments import SCALE, MomentsFormat, Piece, Update, seed_of
from swarm.train.engine.ranks import Ranks
from swarm.train.engine.tensor_file import Form, LazyTensors, forms_of
from swarm.train.parallel.data_parallel import RankEngine
from swarm.train.parallel.dispatch import DealtBank

DIMENSIONS = {"q_proj": 0, "k_proj": 0, "v_proj": 0, "o_proj": 1}
"""The dimension by which each matrix is cut: 0 for rows, 1 for columns."""
NORMS = ("q_norm", "k_norm")
"""Weights of QK-norm. A rank has those of its heads, or all if the heads share weights."""


def why_not_cut(run: RunConfig, ways: int) -> str:
    """Why heads, experts and tokens cannot be cut over this number of ranks; "" if they can."""
    if run.model.num_key_value_heads % ways:
        return f"it has to divide the {run.model.num_key_value_heads} key/value heads"
    if ways > run.model.num_experts:
        return f"it must not exceed the {run.model.num_experts} experts"
    if run.data.sequence_length % ways:
        return f"it has to divide the {run.data.sequence_length} tokens of a sequence"
    return ""


class AttentionHeads:
    """One rank's share of the attention heads.

    Attributes:
        group: the ranks that share the heads; a single rank has all of them.
    """

    def __init__(self, group: Ranks, model: ModelConfig) -> None:
        self.group = group
        share = model.qk_norm == "head"
        self._dimensions = DIMENSIONS | ({} if share else dict.fromkeys(NORMS, 0))
        self._model, self._shapes = model, shared_shapes(model)

    @property
    def model(self) -> ModelConfig:
        """A model whose attention has only the heads of this rank."""
        model = self._model
        own = {
            "num_attention_heads": model.num_attention_heads // self.group.size,
            "num_key_value_heads": model.num_key_value_heads // self.group.size,
            "head_dim": model.dim_per_head,
        }
        return model.model_copy(update=own)

    def dimension(self, name: str) -> int | None:
        """The dimension by which a tensor is cut; None if this rank has all of it."""
        return None if self.group.size == 1 else self._dimensions.get(_part_of_attention(name))

    def cuts(self, name: str) -> bool:
        """Whether this rank has only a part of a tensor."""
        return self.dimension(name) is not None

    def whole_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of a whole tensor, from `shape`, the shape of this rank's part."""
        return self._shapes[name] if self.cuts(name) else shape

    def whole(self, name: str, part: Tensor) -> Tensor:
        """A whole tensor from the parts of all ranks; an operation if the tensor is cut.

        Raises:
            Disconnected: another rank has ended.
        """
        cut = self.dimension(name)
        if cut is None:
            return part
        return torch.cat(self.group.gathered(part[None], "values").unbind(), cut)

    def part(self, name: str, whole: Tensor) -> Tensor:
        """A view of this rank's part of a tensor."""
        cut = self.dimension(name)
        return whole if cut is None else whole.chunk(self.group.size, cut)[self.group.rank]

    def parts(
        self, named: Mapping[str, Tensor], shape: Callable[[str], tuple[int, ...]]
    ) -> dict[str, Tensor]:
        """This rank's parts of several tensors; raises BadBlob for a cut one of a wrong shape."""
        found = dict(named)
        for name in filter(self.cuts, named):
            if why := misfit(name, (*named[name].shape,), shape(name)):
                raise BadBlob("shape", why)
            found[name] = self.part(name, named[name])
        return found

    def put(self, part: Slice, values: Tensor, mine: Tensor) -> None:
        """Overwrites this rank's part of a run of elements of a whole tensor."""
        shape = self.whole_shape(part.name, tuple(mine.shape))
        whole = torch.empty(shape, dtype=mine.dtype, device=mine.device)
        own = self.part(part.name, whole)
        own.copy_(mine)
        whole.view(-1)[part.start : part.stop] = values.to(mine.device)
        mine.copy_(own)

    def square_sums(self, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The fp64 sum of squares of each whole gradient, on the CPU.

        For gradients that are not cut, the sum is the first rank's, so that all ranks clip by the
        same factor.

        Raises:
            Disconnected: another rank has ended.
        """
        table = torch.zeros(len(gradients), self.group.size, dtype=torch.float64)
        mine = [k for k, name in enumerate(gradients) if self.group.rank == 0 or self.cuts(name)]
        if mine:
            every = list(gradients.values())
            found = square_sums([every[k] for k in mine])
            table[mine, self.group.rank] = found.cpu()
        return dict(zip(gradients, self.group.united(table).sum(1).unbind(), strict=True))


class HeadsOptimizer(OwnedOptimizer):
    """`OwnedOptimizer` for tensors of which this rank has parts. Callers see whole tensors.

    Int8 moments cannot be cut, since their blocks would not be those of whole tensors.
    """

    def __init__(
        self, settings: OptimizerConfig, form: MomentsFormat, heads: AttentionHeads
    ) -> None:
        """`heads`: this rank's share."""
        assert form != "int8", "int8 moments lie in blocks of whole tensors"
        super().__init__(settings, form)
        self._heads = heads

    def update_piece(
        self,
        piece: Piece,
        gradient_x: Tensor,
        update: Update,
        *,
        direction_RC: Tensor | None = None,
    ) -> None:
        """See `OwnedOptimizer`; an operation of the ranks if Muon updates a matrix that is cut."""
        name, shape = piece.name, piece.matrix
        if shape is None or not self._heads.cuts(name):
            super().update_piece(piece, gradient_x, update, direction_RC=direction_RC)
            return
        moments = self._moments[name]
        (momentum_x,) = moments.load(piece.row, piece.in_row)
        ahead = self._heads.whole(name, nesterov(gradient_x, momentum_x).view(shape))
        whole = direction(ahead.contiguous())
        require_finite(whole, name)
        move(
            self._parameters[name].detach(),
            self._heads.part(name, whole),
            lr=update.matrix_lr,
            weight_decay=update.settings.weight_decay,
            longest_side=max(whole.shape),
        )
        if moments.form != "fp32":
            moments.store(piece.row, piece.in_row, (momentum_x,), seed=seed_of(piece, update))

    def read_moments(self, names: Collection[str]) -> dict[str, Tensor]:
        """See `OwnedOptimizer`; an operation of the ranks for each cut tensor."""
        found = super().read_moments(names)
        return {stored: self._heads.whole(_base(stored), part) for stored, part in found.items()}

    def write_moments(self, values: Mapping[str, Tensor]) -> None:
        """See `OwnedOptimizer`; takes only this rank's parts."""
        parts = {stored: self._heads.part(_base(stored), each) for stored, each in values.items()}
        super().write_moments(parts)

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `OwnedOptimizer`; takes only this rank's parts."""
        super().load(_Parts(self._heads, tensors))


class _Parts(LazyTensors):
    """A private state of whole tensors; each look-up gives this rank's part."""

    def __init__(self, heads: AttentionHeads, tensors: Mapping[str, Tensor]) -> None:
        self._heads, self._tensors, self._whole = heads, tensors, forms_of(tensors)

    def forms(self) -> dict[str, Form]:
        """See `LazyTensors`; cut moments that were coded are fp32 here."""
        found = dict[str, Form]()
        for name in self:
            (dtype, shape), base = self._whole[name], _base(name)
            if self._heads.cuts(base):
                dtype = torch.float32 if dtype.itemsize == 1 else dtype
                shape = tuple(self._heads.part(base, torch.empty(shape, device="meta")).shape)
            found[name] = dtype, shape
        return found

    def __getitem__(self, name: str) -> Tensor:
        kind, _, base = name.partition(".")
        if not self._heads.cuts(base):
            return self._tensors[name]
        if kind.endswith(SCALE):
            raise KeyError(name)
        kinds = stored_kinds(self._whole, base)
        if kind not in kinds or not is_coded(self._whole, base):
            return self._heads.part(base, self._tensors[name])
        shape = self._whole[name][1]
        moments = stored_moments(self._tensors, self._whole, base)
        values = moments.load(0, slice(0, math.prod(shape)))
        return self._heads.part(base, values[kinds.index(kind)].view(shape))

    def __iter__(self) -> Iterator[str]:
        for name in self._whole:
            if not (name.partition(".")[0].endswith(SCALE) and self._heads.cuts(_base(name))):
                yield name

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _base(stored: str) -> str:
    """The tensor's name in a name of the private state."""
    return stored.partition(".")[2]


def _part_of_attention(name: str) -> str:
    """The part of attention to which a tensor belongs, such as q_proj; "" for other tensors."""
    _, _, within = name.partition(".self_attn.")
    return within.partition(".")[0]


class SharedTokens(Tokens):
    """One rank's run of consecutive tokens of each micro-batch."""

    def __init__(self, group: Ranks) -> None:
        """`group`: the ranks that share micro-batches."""
        self._group, self.ways = group, group.size

    def shape(self, sequences: int, length: int) -> tuple[int, int]:
        """See `Tokens`; a sequence may be cut at any token."""
        return 1, sequences * length // self.ways

    def own(self, x_NX: Tensor) -> Tensor:
        """See `Tokens`."""
        assert len(x_NX) % self.ways == 0, x_NX.shape
        return x_NX.chunk(self.ways)[self._group.rank]

    def routed(self, weight_nK: Tensor, expert_nK: Tensor) -> tuple[Tensor, Tensor]:
        """See `Tokens`."""
        found: tuple[Tensor, Tensor] = _Routed.apply(  # type: ignore[no-untyped-call]
            self._group, weight_nK, expert_nK
        )
        return found

    def mean(self, part: Tensor) -> Tensor:
        """See `Tokens`."""
        return _total(self._group, "losses", part / self.ways)


class HeadsAttention(Attention):
    """Attention over this rank's share of the heads."""

    def __init__(
        self, _: ModelConfig, compute: torch.dtype, device: torch.device, *, heads: AttentionHeads
    ) -> None:
        """`heads`: this rank's share of the model's heads."""
        super().__init__(heads.model, compute, device)
        self._group = heads.group
        if self.whole and self.q_norm and self.k_norm:
            self.q_norm = SharedNorm(self.q_norm, self._group)
            self.k_norm = SharedNorm(self.k_norm, self._group)

    def forward(self, x_1nD: Tensor, positions: Positions) -> Tensor:
        """See `Attention`; from this rank's tokens to the outputs of all heads for these tokens.

        Both are [1, n, D] in the compute type.
        """
        x_ND = _gathered(self._group, "attention inputs", x_1nD.flatten(0, 1).to(self.compute))
        out_BTD = super().forward(x_ND.unflatten(0, (-1, len(positions.cos))), positions)
        return _scattered(self._group, "attention outputs", out_BTD.flatten(0, 1))[None]


class SharedNorm(RMSNorm):
    """A norm over the heads of all ranks, where each rank has some heads."""

    def __init__(self, own: RMSNorm, group: Ranks) -> None:
        """`own`: the norm over only this rank's heads, which this norm replaces."""
        super().__init__(len(own.weight), own.eps, own.weight.device)
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        """See `RMSNorm`."""
        normed: Tensor = _SharedNorm.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.eps, self._group
        )
        return normed


class _SharedNorm(torch.autograd.Function):
    """Like `RMSNorm` on a CPU, with squares and their gradients summed over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, group: Ranks) -> Tensor:
        floats = x.float()
        ctx.group, ctx.size = group, group.size * len(weight)
        square = torch.linalg.vector_norm(floats, dim=-1, keepdim=True).square_()
        scale = group.total(square, "norms").div_(ctx.size).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (floats * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        dout, floats = gradients[0], x.float()
        product = (floats * dout).reshape(-1, len(weight))
        dweight = torch.mv(product.t(), scale.flatten())
        own = torch.mv(product, weight).view_as(scale)
        dot = ctx.group.total(own, "norm gradients")
        dx = (dout * weight).mul_(scale)
        dx.addcmul_(floats, scale.pow(3).mul_(dot).div_(-ctx.size))
        return dx.to(x.dtype), dweight, None, None


class SharedBank(DealtBank):
    """One rank's experts of one layer, for the tokens of all ranks."""

    def inputs(self, x_nD: Tensor) -> Tensor:
        """See `ExpertBank`; in the compute type."""
        return _gathered(self._group, "expert inputs", x_nD.to(self.compute))

    def forward(self, x_ND: Tensor, routing: Routing, recall: Recall | None = None) -> Tensor:
        """See `ExpertBank`; the outputs of all experts for this rank's tokens, fp32 [n, D]."""
        mixed_ND = self._mixed(x_ND, routing.weight_NK, routing, recall)
        return _scattered(self._group, "expert outputs", mixed_ND.to(self.compute)).float()

    def _mixed(
        self, x_ND: Tensor, weight_NK: Tensor, routing: Routing, recall: Recall | None
    ) -> Tensor:
        """The outputs of this rank's experts, fp32 [N, D]."""
        held = self.dealing.counts[self._group.rank]
        if not held:
            return (x_ND * 0).float() + (weight_NK * 0).sum(1, keepdim=True)
        first = sum(self.dealing.counts[: self._group.rank])
        group_NK = self.get_buffer("group_of")[routing.expert_NK] - first
        mine_NK = (group_NK >= 0) & (group_NK < held)
        if routing.kept_NK is not None:
            mine_NK &= routing.kept_NK
        plan = recall.plan if recall else None
        if plan is None:
            # A plan needs at least one row, so a row of another rank is used with weight 0.
            planned_NK = mine_NK.clone()
            planned_NK[0, 0] = True
            owned, multiple = len(self.owned_here), self.multiple(x_ND)
            plan = plan_rows(group_NK.clamp(0, held - 1), held, owned, multiple, planned_NK)
        if recall:
            recall.expert_NK, recall.plan = routing.expert_NK, plan
        return mix_experts(x_ND, weight_NK * mine_NK, self.masters(), self.setting(plan))

    def alike(self, x_ND: Tensor, pairs: list[Pair]) -> Tensor:
        """See `ExpertBank`; all ranks have the same pairs."""
        if not pairs:
            return super(DealtBank, self).alike(x_ND, pairs)
        parts, sizes = [], []
        for pair in pairs:
            x_nD = x_ND.detach()[pair.tokens]
            for expert in pair.experts:
                is_here = expert in self.row_of
                nothing_nD = torch.zeros_like(x_nD, dtype=self.compute)
                parts.append(self.one(x_nD, expert) if is_here else nothing_nD)
                sizes.append(len(x_nD))
        out_PD = _total(self._group, "compared outputs", torch.cat(parts))
        outputs = iter(out_PD.split(sizes))
        return similarity(x_ND, pairs, lambda *_: next(outputs))


def sums_bytes(tokens: int, model: ModelConfig, itemsize: int, ways: int, *, again: bool) -> float:
    """Bytes that leave a rank for one layer and micro-batch.

    A rank sends (ways - 1) / ways of all inputs and outputs of attention and experts, and of their
    gradients. It also sends each token's weights and experts, 4 bytes each, and the gradients of
    the weights. Recomputed tensors move again, except the experts' outputs.

    Args:
        tokens: tokens of the micro-batch.
        model: sizes of the model.
        itemsize: bytes of the compute type.
        ways: ranks that share the micro-batch.
        again: whether the layer is recomputed for backward.
    """
    per_token = (11 if again else 8) * itemsize * model.hidden_size
    per_token += (20 if again else 12) * model.num_experts_per_tok
    if model.qk_norm == "projection":
        per_token += 2 * 4 * (6 if again else 4)
    return (ways - 1) / ways * tokens * per_token


def _gathered(group: Ranks, kind: str, rows_nX: Tensor) -> Tensor:
    """The rows of all ranks. In backward each rank gets the summed gradients of its rows."""
    found: Tensor = _Gathered.apply(group, kind, rows_nX)  # type: ignore[no-untyped-call]
    return found


def _scattered(group: Ranks, kind: str, rows_NX: Tensor) -> Tensor:
    """This rank's share of the rows summed over the ranks. Backward gathers all gradients."""
    found: Tensor = _Scattered.apply(group, kind, rows_NX)  # type: ignore[no-untyped-call]
    return found


def _total(group: Ranks, kind: str, part: Tensor) -> Tensor:
    """The sum over the ranks. Each rank's part gets the gradient of the sum."""
    total: Tensor = _Total.apply(group, kind, part)  # type: ignore[no-untyped-call]
    return total


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Ranks, kind: str, rows_nX: Tensor) -> Tensor:
        ctx.group, ctx.kind = group, f"gradients of {kind}"
        return group.gathered(rows_nX, kind)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, ctx.group.scattered(gradients[0], ctx.kind)


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Ranks, kind: str, rows_NX: Tensor) -> Tensor:
        ctx.group, ctx.kind = group, f"gradients of {kind}"
        return group.scattered(rows_NX, kind)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, ctx.group.gathered(gradients[0], ctx.kind)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, group: Ranks, kind: str, part: Tensor) -> Tensor:
        return group.total(part, kind)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, gradients[0]


class _Routed(torch.autograd.Function):
    """Concatenates the weights and experts of all ranks' tokens on every rank."""

    @staticmethod
    def forward(
        ctx: Any, group: Ranks, weight_nK: Tensor, expert_nK: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.group = group
        both_nX = torch.cat([weight_nK, expert_nK.int().view(torch.float32)], 1)
        weight_NK, expert_NK = group.gathered(both_nX, "routing").chunk(2, 1)
        expert_NK = expert_NK.contiguous().view(torch.int32).long()
        ctx.mark_non_differentiable(expert_NK)
        return weight_NK.contiguous(), expert_NK

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, ctx.group.scattered(gradients[0], "gradients of routing"), None


# `Engine` and `RankEngine` document the methods.
# ruff: disable[undocumented-public-method]


class HeadsEngine(RankEngine):
    """`RankEngine` with cut heads. To read a cut tensor, all ranks of a group must take part."""

    def __init__(
        self, run: RunConfig, options: EngineOptions, ranks: Ranks, *, stage: Stage | None = None
    ) -> None:
        super().__init__(run, options, ranks, stage=stage)
        self._stage_ranks = ranks.part(self._mesh.stages)

    def _pieces(self, model: ModelConfig) -> Pieces:
        self._heads = AttentionHeads(self._group, model)
        return Pieces(
            functools.partial(SharedBank, group=self._group),
            functools.partial(HeadsAttention, heads=self._heads),
            SharedTokens(self._group),
        )

    def _new_optimizer(self, options: EngineOptions) -> OwnedOptimizer:
        return HeadsOptimizer(self._run.optimizer, options.moments, self._heads)

    # ------------------------------------------------ who holds what

    def takes_part(self, name: str) -> bool:
        if self._heads.cuts(name):
            return self._replicas.rank == 0 and self.holds(name)
        return self.answers(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._heads.whole_shape(name, self._model.shape(name))

    def whole(self, name: str, part: Tensor) -> Tensor:
        return self._heads.whole(name, part)

    # ------------------------------------------------ values

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: self.whole(name, part) for name, part in super().read(names).items()}

    def read_part(self, part: Slice) -> Tensor:
        if not self._heads.cuts(part.name):
            return super().read_part(part)
        return self.read([part.name])[part.name].view(-1)[part.start : part.stop].clone()

    def write(self, named: Mapping[str, Tensor]) -> None:
        held = {name: each for name, each in named.items() if self.holds(name)}
        super().write({**named, **self._heads.parts(held, self.shape)})

    def write_part(self, part: Slice, values: Tensor) -> None:
        if self._heads.cuts(part.name) and self.holds(part.name):
            self._heads.put(part, values, self._model.read([part.name])[part.name])
        else:
            super().write_part(part, values)

    def evaluate(
        self,
        tokens_BT1: Tensor,
        *,
        scored_BT: Tensor | None = None,
        agreed: StandIn | None = None,
    ) -> float:
        # Padding changes no other token: a token does not attend to later ones, and none is
        # dropped.
        missing = -(tokens_BT1.shape[1] - 1) % self._group.size
        if missing:
            scored = torch.ones_like(tokens_BT1[:, 1:], dtype=torch.bool)
            scored_BT = F.pad(scored if scored_BT is None else scored_BT, (0, missing))
            tokens_BT1 = F.pad(tokens_BT1, (0, missing))
        return super().evaluate(tokens_BT1, scored_BT=scored_BT, agreed=agreed)

    # ------------------------------------------------ a step

    def _told(self, mine: range, rows: Sequence[Sequence[float]], shape: tuple[int, int]) -> Tensor:
        return super()._told(mine, rows if self._group.rank == 0 else (), shape)

    def _add_up(self) -> None:
        """Adds up gradients: of heads and experts over ranks with the same, others over the stage.

        The gradient of any other tensor comes from this rank's tokens only.
        """
        own: list[Tensor] = []
        of_tokens: list[Tensor] = []
        for name, gradient in self._gradients_by_name().items():
            is_own = self._heads.cuts(name) or stacked_tensors(name, (0,))
            (own if is_own else of_tokens).append(gradient)
        self._replicas.add_up(own)
        self._stage_ranks.add_up(of_tokens)

    def _norms(self, scale: float) -> dict[str, Tensor]:
        named = self._gradients_by_name()
        shared = {name: each for name, each in named.items() if not stacked_tensors(name, (0,))}
        squares = self._heads.square_sums(shared)
        found = {name: norm_of(each, scale).to(self._device) for name, each in squares.items()}
        return found | self._dealt_norms(scale)

    def _idle(self, _count: int) -> int:
        return 0  # all ranks of a group have the same micro-batches


# ruff: enable[undocumented-public-method]
