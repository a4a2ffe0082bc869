"""The terms of the training loss, each over one micro-batch.

Shapes: N tokens of a micro-batch, n tokens of a slice, D hidden size, V vocabulary, R rows of the
multiplied head (V, or a few more), L layers, E experts, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from swarm.config import LossConfig
from swarm.model.masking import Tokens
from swarm.model.moe import Routing

SLICE_LOGITS = {"cpu": 2**24, "cuda": 2**28}
"""The most logits that exist at once (64 MiB or 1 GiB in fp32), unless 128 tokens have more. A GPU
needs long slices, because each slice adds to the gradient of the whole head."""
ALIGNED_ROWS = {"cpu": 1, "cuda": 64}
"""The head is multiplied with extra rows, so that the number of rows is a multiple of this. Rows of
an odd number of bf16 logits made each product five times slower on an H100."""


class Losses(NamedTuple):
    """Loss of one micro-batch and its terms before their weights.

    Attributes:
        total: differentiable scalar, the weighted sum.
        cross_entropy: mean over tokens, in nats; detached, like all fields below.
        balance: see `balance_loss`.
        router_z: see `router_z_loss`.
        output_z: mean over tokens of the squared log-sum-exp of the output logits.
        expert_tokens: int64 [L, E], tokens that chose each expert.
        dropped: int64 scalar, choices in all layers that exceeded an expert's capacity.
        similarity: the first value of `similarity_loss`. None if it was not measured.
        pair_P2, alike_P: the compared pairs of experts of all layers, int64, and their CKA.
    """

    total: Tensor
    cross_entropy: Tensor
    balance: Tensor
    router_z: Tensor
    output_z: Tensor
    expert_tokens: Tensor
    dropped: Tensor
    similarity: Tensor | None = None
    pair_P2: Tensor | None = None
    alike_P: Tensor | None = None


def slice_tokens(num_tokens: int, vocab_size: int, device: str) -> int:
    """Tokens per slice: always fewer than all, so all logits never exist at once."""
    fitting = max(128, SLICE_LOGITS[device] // vocab_size // 64 * 64)
    return max(1, min(fitting, (num_tokens + 1) // 2))


def output_losses(
    hidden_ND: Tensor,
    head_VD: Tensor,
    labels_N: Tensor,
    z_weight: float,
    mean_over: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Cross-entropy plus weighted output z-loss of a linear head, slice by slice.

    Args:
        hidden_ND: input of the head, in the compute type.
        head_VD: matrix of the head, fp32 or in the compute type.
        labels_N: the token that follows each position.
        z_weight: weight of the output z-loss.
        mean_over: divisor of sums over the tokens. None: the number of tokens.

    Returns:
        The weighted sum (differentiable), the cross-entropy and the z-loss (both detached), each
        a mean over tokens.

    Forward computes the gradients of `hidden_ND` and `head_VD` while a slice's logits exist, and
    backward scales them. This takes three products per slice, where recomputing would need four.
    """
    total: Tensor
    # Asked here, because within a function's forward gradients always seem to be off.
    wanted = torch.is_grad_enabled() and (hidden_ND.requires_grad or head_VD.requires_grad)
    total, cross_entropy, z = _Output.apply(  # type: ignore[no-untyped-call]
        hidden_ND, head_VD, labels_N, z_weight, mean_over or len(labels_N), wanted
    )
    return total, cross_entropy, z


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, head_VD: Tensor, labels_N: Tensor, *options: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        z_weight, mean_over, wanted = options
        num_tokens, vocab_size = len(labels_N), len(head_VD)
        device = hidden_ND.device.type
        weight_RD = head_VD.to(hidden_ND.dtype)
        if missing := -vocab_size % ALIGNED_ROWS[device]:
            weight_RD = F.pad(weight_RD, (0, 0, 0, missing))
        sums = torch.zeros(2, dtype=torch.float32, device=hidden_ND.device)
        dhidden_ND = torch.empty_like(hidden_ND) if wanted else None
        dhead_RD = torch.zeros_like(weight_RD, dtype=torch.float32) if wanted else None
        step = slice_tokens(num_tokens, vocab_size, device)
        for start in range(0, num_tokens, step):
            part = slice(start, start + step)
            logits_nR = F.linear(hidden_ND[part], weight_RD)
            logits_nR[:, vocab_size:] = -torch.inf
            sums += _slice_losses(logits_nR, labels_N[part], z_weight, mean_over, wanted=wanted)
            if dhidden_ND is not None and dhead_RD is not None:
                torch.mm(logits_nR, weight_RD, out=dhidden_ND[part])
                _add_product(dhead_RD, logits_nR, hidden_ND[part])
            del logits_nR
        dhead_VD = None if dhead_RD is None else dhead_RD[:vocab_size]
        ctx.save_for_backward(dhidden_ND, dhead_VD)
        cross_entropy, z = (sums / mean_over).unbind()
        ctx.mark_non_differentiable(cross_entropy, z)
        return cross_entropy + z_weight * z, cross_entropy, z

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dhidden_ND, dhead_VD = ctx.saved_tensors
        scale = gradients[0]
        return dhidden_ND * scale, dhead_VD * scale, None, None, None, None


def _slice_losses(
    logits_nR: Tensor, labels_n: Tensor, z_weight: float, mean_over: float, *, wanted: bool
) -> Tensor:
    """Cross-entropy and z-loss of a slice, fp32 [2], each summed over its tokens.

    Overwrites the logits. If `wanted`, they become the gradient of the sum divided by `mean_over`.
    """
    label_n1 = labels_n[:, None]
    chosen_n = logits_nR.gather(1, label_n1)[:, 0].float()
    exponent_nR, sum_n, z_n = _exponentials(logits_nR)
    if wanted:
        scale_n = (1 + 2 * z_weight * z_n) / (mean_over * sum_n)
        dlogits_nR = exponent_nR.mul_(scale_n[:, None])
        dlogits_nR.scatter_add_(1, label_n1, torch.full_like(z_n, -1 / mean_over)[:, None])
        logits_nR.copy_(dlogits_nR)
    return torch.stack([(z_n - chosen_n).sum(), z_n.square().sum()])


def _exponentials(logits_nR: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Exponentials up to a factor, their sums and the log-sum-exps, in fp32 with few passes.

    Fp32 logits may be overwritten.
    """
    # In place, because the gradient needs the same exponentials.
    floats_nR = logits_nR.float()
    largest_n = floats_nR.amax(-1)
    exponent_nR = floats_nR.sub_(largest_n[:, None]).exp_()
    sum_n = exponent_nR.sum(-1)
    return exponent_nR, sum_n, largest_n + sum_n.log()


def _add_product(into_RD: Tensor, left_nR: Tensor, right_nD: Tensor) -> None:
    if left_nR.dtype == into_RD.dtype:
        into_RD.addmm_(left_nR.t(), right_nD)
    elif into_RD.is_cuda:
        # One pass over the gradient, and the product is never rounded to bf16.
        torch.addmm(into_RD, left_nR.t(), right_nD, out_dtype=into_RD.dtype, out=into_RD)
    else:
        # Copying to fp32 before adding: `fp32.add_(bf16)` is 3.5 times slower on a CPU.
        into_RD.add_(torch.mm(left_nR.t(), right_nD).float())


class LayerTerms(NamedTuple):
    """Inputs of the losses from the router of one layer, in one micro-batch.

    Attributes:
        mean_E: mean probability of each expert. Where processes share the tokens, the mean is over
            this process's tokens until `of_all`.
        z: mean over the same tokens of the squared log-sum-exp of the logits.
        tokens_E: int64, tokens that chose each expert, including dropped choices.
        dropped: int64 scalar, choices that exceeded an expert's capacity.
        num_tokens: tokens of the micro-batch.
        top_k: experts of a token.
        similarity: CKA of P pairs of experts [P]. None if it was not measured.
        pair_P2: int64 [P, 2], these pairs. None if not measured.
    """

    mean_E: Tensor
    z: Tensor
    tokens_E: Tensor
    dropped: Tensor
    num_tokens: int
    top_k: int
    similarity: Tensor | None = None
    pair_P2: Tensor | None = None

    @classmethod
    def of(cls, routing: Routing) -> LayerTerms:
        """The terms of a router's decision."""
        (num_tokens, top_k), num_experts = routing.expert_NK.shape, routing.logits_NE.shape[1]
        kept_NK = routing.kept_NK
        dropped = torch.zeros((), dtype=torch.int64, device=routing.logits_NE.device)
        return cls(
            routing.probabilities_NE.mean(0),
            routing.logits_NE.logsumexp(-1).square().mean(),
            torch.bincount(routing.expert_NK.flatten(), minlength=num_experts),
            dropped if kept_NK is None else (~kept_NK).sum(),
            num_tokens,
            top_k,
            routing.similarity,
            routing.pair_P2,
        )


def of_all(
    tokens: Tokens, output: Sequence[Tensor], terms: Sequence[LayerTerms]
) -> tuple[Sequence[Tensor], Sequence[LayerTerms]]:
    """Losses of the output and terms of the routers over all tokens, from each process's own.

    Args:
        tokens: the tokens of this process.
        output: result of `output_losses`.
        terms: terms of all layers.
    """
    if tokens.ways == 1:
        return output, terms
    routers = [part for each in terms for part in (each.z[None], each.mean_E)]
    numbers = tokens.mean(torch.cat([torch.stack(list(output)), *routers]))
    total, cross_entropy, output_z = numbers[: len(output)].unbind()
    rows = numbers[len(output) :].view(len(terms), -1)
    found = [each._replace(z=r[0], mean_E=r[1:]) for each, r in zip(terms, rows, strict=True)]
    return (total, cross_entropy.detach(), output_z.detach()), found


def balance_loss(terms: Sequence[LayerTerms], tokens_LE: Tensor, kind: str) -> Tensor:
    """Load-balancing loss of one micro-batch. `tokens_LE` may be weighted (SPES).

    per_layer: E / (L * K * N) * sum over layers and experts of (tokens * mean probability):
        1 when the routing of every layer is even, up to E / K when it has collapsed.
        Source: reference code of SPES (arXiv 2602.11543), as in Megablocks; Switch Transformer
        (arXiv 2101.03961, eq. 4) without the division by K.
    global: E * sum over experts of (tokens of all layers / (L * N)) * (mean probability over all
        layers and tokens): K when even, so K times the scale of per_layer.
        Source: Transformers 5.23 `load_balancing_loss_func`.
    """
    num_experts = tokens_LE.shape[1]
    mean_LE = torch.stack([each.mean_E for each in terms])
    share_LE = tokens_LE / terms[0].num_tokens
    if kind == "global":
        return num_experts * (share_LE.mean(0) * mean_LE.mean(0)).sum()
    return num_experts / terms[0].top_k * (share_LE * mean_LE).sum(-1).mean()


def router_z_loss(terms: Sequence[LayerTerms]) -> Tensor:
    """Mean over layers and tokens of the squared log-sum-exp of the router's logits.

    Source: ST-MoE (arXiv 2202.08906, eq. 5), mean over layers as in OLMoE and SPES.
    """
    return torch.stack([each.z for each in terms]).mean()


def similarity_loss(terms: Sequence[LayerTerms], threshold: float) -> tuple[Tensor, Tensor] | None:
    """Similarity of experts with common tokens, over the compared pairs of all layers.

    Returns:
        The mean (detached), and the mean with pairs up to the threshold as 0 (differentiable). None
        if nothing was measured or no two experts shared enough tokens.

    Source: SimSMoE (arXiv 2406.15883), released code, without its projection and with a mean
    over pairs where it has a sum; see `similarity.cka`.
    """
    found = [r.similarity for r in terms if r.similarity is not None and len(r.similarity)]
    if not found:
        return None
    pairs = torch.cat(found)
    return pairs.detach().mean(), (pairs * (pairs > threshold)).mean()


def _pairs(terms: Sequence[LayerTerms]) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The compared pairs of all layers [P, 2] and their similarity [P], detached."""
    found = [
        (r.pair_P2, r.similarity.detach())
        for r in terms
        if r.similarity is not None and r.pair_P2 is not None and len(r.pair_P2)
    ]
    if not found:
        return None, None
    return torch.cat([pairs for pairs, _ in found]), torch.cat([alike for _, alike in found])


def combine(
    output: Sequence[Tensor],
    terms: Sequence[LayerTerms],
    loss: LossConfig,
    count_weight_E: Tensor | None = None,
) -> Losses:
    """Adds the routers' terms of all layers to the output's terms, from `output_losses`.

    `count_weight_E` weights an expert's tokens in the balancing loss. None for 1.
    """
    tokens_LE = torch.stack([each.tokens_E for each in terms])
    counted_LE = tokens_LE if count_weight_E is None else tokens_LE * count_weight_E
    balance = balance_loss(terms, counted_LE, loss.balance)
    router_z = router_z_loss(terms)
    total, cross_entropy, output_z = output
    total = total + loss.balance_weight * balance + loss.router_z_weight * router_z
    alike = similarity_loss(terms, loss.similarity_threshold)
    if alike and loss.similarity_weight:
        total = total + loss.similarity_weight * alike[1]
    return Losses(
        total,
        cross_entropy,
        balance.detach(),
        router_z.detach(),
        output_z,
        tokens_LE,
        torch.stack([each.dropped for each in terms]).sum(),
        alike[0] if alike else None,
        *_pairs(terms),
    )
