"""Tensor and sequence parallel: the ranks of a group share micro-batches, heads and experts.

Each rank has the residual stream of its share of the tokens: with it embedding, norms, router and
head, so that nothing is computed twice. Attention and experts take all tokens, of which each rank
computes its heads, and its experts for the tokens that have chosen them. So in a layer and
micro-batch the ranks gather inputs twice forward, of attention and of the experts, and give each
the sums of outputs of its tokens twice (reduce-scatter); backward gradients go the same ways back.
Weights and experts of all tokens are gathered beside, so that every rank knows who is over an
expert's capacity. A QK-norm over all heads at once takes four sums more, of one number a token.
Where a layer is computed again, inputs are gathered and attention's outputs added up once more; the
experts' are not, since backward needs nothing that follows them.

What of a rank's tokens is a mean over them, in the losses, is averaged over the ranks once a
micro-batch.

Sources: Shoeybi et al., arXiv 1909.08053 (Megatron-LM), with whole experts in the place of cut
ones; Korthikanti et al., arXiv 2205.05198, section 4.2.2 (sequence parallel).

Shapes: B sequences, T tokens of a sequence, N tokens, n of these on each rank, D hidden size, K
experts of a token, P tokens of compared pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swarm.config import ModelConfig
from swarm.model.attention import Attention, Positions, RMSNorm
from swarm.model.moe import Recall, Routing
from swarm.model.rows import plan_rows
from swarm.model.similarity import Pair, similarity
from swarm.model.swiglu import mix_experts
from swarm.model.tokens import Tokens
from swarm.train.parallel.dispatch import DealtBank
from swarm.train.parallel.heads import Heads
from swarm.train.parallel.ranks import Ranks


class SharedTokens(Tokens):
    """Of each micro-batch the run of consecutive tokens that one rank has."""

    def __init__(self, group: Ranks) -> None:
        """`group`: the ranks that have the same micro-batches."""
        self._group, self.ways = group, group.size

    def shape(self, sequences: int, length: int) -> tuple[int, int]:
        """See `Tokens`; sequences may be cut anywhere."""
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
    """Attention of which this rank has some of the heads."""

    def __init__(
        self, _: ModelConfig, compute: torch.dtype, device: torch.device, *, heads: Heads
    ) -> None:
        """`heads`: those of this rank, of the model."""
        super().__init__(heads.model, compute, device)
        self._group = heads.group
        if self.whole and self.q_norm and self.k_norm:
            self.q_norm = SharedNorm(self.q_norm, self._group)
            self.k_norm = SharedNorm(self.k_norm, self._group)

    def forward(self, x_1nD: Tensor, positions: Positions) -> Tensor:
        """See `Attention`; takes this rank's tokens, and gives the outputs of all heads for them.

        [1, n, D] in the compute type, both.
        """
        x_ND = _gathered(self._group, "attention inputs", x_1nD.flatten(0, 1).to(self.compute))
        out_BTD = super().forward(x_ND.unflatten(0, (-1, len(positions.cos))), positions)
        return _scattered(self._group, "attention outputs", out_BTD.flatten(0, 1))[None]


class SharedNorm(RMSNorm):
    """A norm over the heads of all ranks, of which this one has some."""

    def __init__(self, own: RMSNorm, group: Ranks) -> None:
        """`own`: one over the heads of this rank alone, in whose place it is."""
        super().__init__(len(own.weight), own.eps, own.weight.device)
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        """See `RMSNorm`."""
        normed: Tensor = _SharedNorm.apply(  # type: ignore[no-untyped-call]
            x, self.weight, self.eps, self._group
        )
        return normed


class _SharedNorm(torch.autograd.Function):
    """As `RMSNorm` on a CPU, with sums over the ranks of the squares, and of what goes back."""

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
    """The experts of one layer that one rank holds, for tokens of which each has some."""

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
            # A plan needs a row; one of another rank's has the weight 0 here.
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

    Args:
        tokens: of the micro-batch.
        model: its sizes.
        itemsize: bytes of the compute type.
        ways: ranks that share it.
        again: whether the layer is computed again for backward.

    Inputs of attention and experts, their outputs, and the gradients of all these, of which
    (ways - 1) / ways leave a rank; likewise each token's weights and experts, 4 bytes each, and the
    gradients of the weights. What is computed again moves again, but for the experts' outputs.
    """
    per_token = (11 if again else 8) * itemsize * model.hidden_size
    per_token += (20 if again else 12) * model.num_experts_per_tok
    if model.qk_norm == "projection":
        per_token += 2 * 4 * (6 if again else 4)
    return (ways - 1) / ways * tokens * per_token


def _gathered(group: Ranks, kind: str, rows_nX: Tensor) -> Tensor:
    """The rows of all ranks; each gets the sums of the gradients of its own."""
    found: Tensor = _Gathered.apply(group, kind, rows_nX)  # type: ignore[no-untyped-call]
    return found


def _scattered(group: Ranks, kind: str, rows_NX: Tensor) -> Tensor:
    """Of the sums over the ranks this rank's share of rows; the gradients of all are gathered."""
    found: Tensor = _Scattered.apply(group, kind, rows_NX)  # type: ignore[no-untyped-call]
    return found


def _total(group: Ranks, kind: str, part: Tensor) -> Tensor:
    """The sum of what each rank has computed: all have its gradient."""
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
    """Weights and experts of each rank's tokens, beside each other, to all."""

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
