"""Tensor parallel: the ranks of a group have all tokens, and each its heads and its experts.

The residual stream is whole on every rank, and so is what is computed from it alone: norms, routers
and their losses, with the same values and gradients on all of them. Each rank computes the outputs
of its own heads, and those of its own experts for the tokens that have chosen them; no token
travels. In a layer and micro-batch the ranks add up outputs twice forward, behind attention and
behind the experts, and backward gradients twice, at the inputs of both, and those of the routing
weights; a QK-norm over all heads at once takes four more, of one number a token. Where a layer is
computed again, what comes before the experts' outputs is added up once more; these are not, since
backward needs nothing that follows them.

The head, which can cost as much as several layers, is computed by each rank for its share of the
tokens, unless it is the embedding, whose gradient would be of some tokens twice.

Source: Shoeybi et al., arXiv 1909.08053 (Megatron-LM), with whole experts in the place of cut ones.

Shapes: B sequences, T tokens of a sequence, N tokens, D hidden size, K experts of a token, P tokens
of compared pairs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swarm.config import ModelConfig
from swarm.model.attention import Attention, Positions, RMSNorm
from swarm.model.losses import output_losses
from swarm.model.moe import Recall, Routing
from swarm.model.rows import plan_rows
from swarm.model.similarity import Pair, similarity
from swarm.model.swiglu import mix_experts
from swarm.train.parallel.dispatch import DealtBank
from swarm.train.parallel.heads import Heads
from swarm.train.parallel.ranks import Ranks


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

    def forward(self, x_BTD: Tensor, positions: Positions) -> Tensor:
        """See `Attention`; the outputs of all heads."""
        (x_BTD,) = _entering(self._group, "attention gradients", x_BTD.to(self.compute))
        return _leaving(self._group, "attention outputs", super().forward(x_BTD, positions))


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
    """The experts of one layer that one rank holds, for tokens that all ranks of its group have."""

    def forward(self, x_ND: Tensor, routing: Routing, recall: Recall | None = None) -> Tensor:
        """See `ExpertBank`; the outputs of all experts."""
        inputs = (x_ND.to(self.compute), routing.weight_NK)
        x_ND, weight_NK = _entering(self._group, "token gradients", *inputs)
        mixed_ND = self._mixed(x_ND, weight_NK, routing, recall)
        return _leaving(self._group, "expert outputs", mixed_ND.to(self.compute)).float()

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
        out_PD = _leaving(self._group, "compared outputs", torch.cat(parts))
        outputs = iter(out_PD.split(sizes))
        return similarity(x_ND, pairs, lambda *_: next(outputs))


def shared_output_losses(
    hidden_ND: Tensor,
    head_VD: Tensor,
    labels_N: Tensor,
    z_weight: float,
    mean_over: float | None = None,
    *,
    group: Ranks,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `output_losses`, of which each rank of a group computes its share of the tokens.

    The gradient of the head is of these tokens alone, that of the tokens is collected.
    """
    start, stop = _share(len(labels_N), group, group.rank)
    hidden_nD: Tensor = _Share.apply(group, hidden_ND)  # type: ignore[no-untyped-call]
    labels_n = labels_N[start:stop]
    terms = output_losses(hidden_nD, head_VD, labels_n, z_weight, mean_over or len(labels_N))
    total, cross_entropy, z = _leaving(group, "losses", torch.stack(terms)).unbind()
    return total, cross_entropy.detach(), z.detach()


def head_bytes(tokens: int, model: ModelConfig, itemsize: int, ways: int) -> float:
    """Bytes that leave a rank for the gradients of a micro-batch at the input of the head."""
    return (ways - 1) / ways * tokens * itemsize * model.hidden_size


def sums_bytes(tokens: int, model: ModelConfig, itemsize: int, ways: int, *, again: bool) -> float:
    """Bytes that leave a rank for the sums of one layer and micro-batch.

    Args:
        tokens: of the micro-batch.
        model: its sizes.
        itemsize: bytes of the compute type.
        ways: ranks that add up.
        again: whether the layer is computed again for backward.

    Outputs and gradients twice each, and the gradients of the routing weights in fp32; of each
    element 2 (ways - 1) / ways leave a rank, as of a ring.
    """
    elements = (5 if again else 4) * itemsize * model.hidden_size + 4 * model.num_experts_per_tok
    if model.qk_norm == "projection":
        elements += 4 * (6 if again else 4)
    return 2 * (ways - 1) / ways * tokens * elements


def _entering(group: Ranks, kind: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """What all ranks have, on its way to what each computes: the gradients are added up."""
    entered: tuple[Tensor, ...] = _Enter.apply(group, kind, *tensors)  # type: ignore[no-untyped-call]
    return entered


def _leaving(group: Ranks, kind: str, part: Tensor) -> Tensor:
    """The sum of what each rank has computed: all have its gradient."""
    total: Tensor = _Leave.apply(group, kind, part)  # type: ignore[no-untyped-call]
    return total


def _share(tokens: int, group: Ranks, rank: int) -> tuple[int, int]:
    """Of so many tokens the first of a rank, and the first of the next one."""
    return tokens * rank // group.size, tokens * (rank + 1) // group.size


class _Share(torch.autograd.Function):
    """Of tokens that all ranks have those of this one; their gradients go to all."""

    @staticmethod
    def forward(ctx: Any, group: Ranks, x_ND: Tensor) -> Tensor:
        ctx.group, ctx.tokens = group, len(x_ND)
        start, stop = _share(len(x_ND), group, group.rank)
        return x_ND[start:stop].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        group, own_nD = ctx.group, gradients[0]
        places = [_share(ctx.tokens, group, rank) for rank in range(group.size)]
        sizes = [stop - start for start, stop in places]
        padding = own_nD.new_zeros(max(sizes) - len(own_nD), own_nD.shape[1])
        found = group.collected(torch.cat([own_nD, padding]), "head gradients")
        return None, torch.cat([part[:size] for part, size in zip(found, sizes, strict=True)])


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: Ranks, kind: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.kind = group, kind
        return tuple(each.view_as(each) for each in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        kinds = (ctx.kind, "weight gradients")
        found = [ctx.group.total(each, kind) for each, kind in zip(gradients, kinds, strict=False)]
        return None, None, *found


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, group: Ranks, kind: str, part: Tensor) -> Tensor:
        return group.total(part, kind)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, gradients[0]
