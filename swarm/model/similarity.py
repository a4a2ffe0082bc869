"""Similarity of experts that get the same tokens: centered kernel alignment (CKA).

Shapes: N tokens of a micro-batch, n tokens that two experts share, D hidden size, K experts of a
token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

MAX_PAIRS = 4
"""Most compared pairs of experts per layer: those that share most tokens."""
MAX_TOKENS = 128
"""Most compared tokens of a pair. MAX_PAIRS * 2 * MAX_TOKENS rows bound the cost."""
MIN_TOKENS = 16
"""Fewest tokens for a meaningful estimate. The formula needs at least 4."""
_LEAST_VARIANCE = 1e-5
"""Least variance of outputs that are scaled to a sum of squares of 1. The rounding of fp32 is
smaller."""


class Pair(NamedTuple):
    """Two experts, and tokens that both experts got.

    Attributes:
        experts: indices of the experts, ascending.
        tokens: int64 [n], the first tokens that they share.
    """

    experts: tuple[int, int]
    tokens: Tensor


def cka(x_nD: Tensor, y_nD: Tensor) -> Tensor:
    """Similarity of two representations of the same tokens: 1 if equal, about 0 if unrelated.

    Clamped to -1 to 1, because the estimate may exceed this range. It is 0 if one side is equal for
    all tokens. Rotation, scaling and shifts of either side do not change it. The kernel is linear,
    and the estimate of HSIC is unbiased. The biased estimate, which SimSMoE uses, gives D / (D + n)
    for independent outputs. That is far above 0 for fewer tokens than dimensions.

    Source: Kornblith et al. (arXiv 1905.00414, eq. 3-4); Nguyen et al. (arXiv 2010.15327, eq. 3)
    for the unbiased HSIC.
    """
    x_nn, y_nn = _gram(x_nD), _gram(y_nD)
    both, x_alone, y_alone = _hsic(x_nn, y_nn), _hsic(x_nn, x_nn), _hsic(y_nn, y_nn)
    n = len(x_nD)
    # Estimates of variances. They are about 0 or negative when outputs are (nearly) equal for all
    # tokens. Then there is nothing to compare, and the ratio would be noise divided by almost 0.
    varies = torch.minimum(x_alone, y_alone) > _LEAST_VARIANCE / (n * (n - 3))
    scale = torch.where(varies, x_alone * y_alone, 1.0).sqrt()
    return torch.where(varies, both / scale, 0.0).clamp(-1, 1)


def _gram(x_nD: Tensor) -> Tensor:
    """Products of the tokens' representations, except products of a token with itself.

    Representations are first centered and scaled. Neither changes the result, and both keep fp32
    accurate.
    """
    x_nD = x_nD - x_nD.mean(0)
    x_nD = F.normalize(x_nD.flatten(), dim=0).view_as(x_nD)
    gram_nn = x_nD @ x_nD.t()
    return gram_nn - torch.diag(gram_nn.diagonal())


def _hsic(x_nn: Tensor, y_nn: Tensor) -> Tensor:
    n = len(x_nn)
    x_n, y_n = x_nn.sum(0), y_nn.sum(0)
    constant = x_n.sum() * y_n.sum() / ((n - 1) * (n - 2))
    return ((x_nn * y_nn).sum() + constant - 2 / (n - 2) * (x_n @ y_n)) / (n * (n - 3))


def shared_tokens(expert_NK: Tensor, num_experts: int) -> list[Pair]:
    """The pairs of experts with the most common tokens.

    Cost: [N, E] and [E, E] products; one wait for the device.
    """
    got_NE = torch.zeros(len(expert_NK), num_experts, device=expert_NK.device)
    got_NE.scatter_(1, expert_NK, 1.0)
    count_EE = (got_NE.t() @ got_NE).triu(1)
    best = count_EE.flatten().topk(min(MAX_PAIRS, count_EE.numel()))
    pairs = []
    for count, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        if count < MIN_TOKENS:
            break
        first, second = divmod(index, num_experts)
        both_N = got_NE[:, first] * got_NE[:, second]
        pairs.append(Pair((first, second), both_N.nonzero()[:MAX_TOKENS, 0]))
    return pairs


def similarity(x_ND: Tensor, pairs: list[Pair], expert: Callable[[Tensor, int], Tensor]) -> Tensor:
    """CKA of each pair of experts on their common tokens, [pairs].

    The tokens are detached, so the loss changes only experts, not the layers before them.

    Args:
        x_ND: the layer's input.
        pairs: the pairs that `shared_tokens` gave.
        expert: the output [n, D] of an expert for some tokens [n, D].
    """
    found = []
    for (first, second), tokens_n in pairs:
        x_nD = x_ND.detach()[tokens_n]
        found.append(cka(expert(x_nD, first).float(), expert(x_nD, second).float()))
    return torch.stack(found) if found else x_ND.new_empty(0, dtype=torch.float32)
