"""The influences of a training step on routing, and their arithmetic. No weights here.

Shapes: N tokens, E experts, K experts of a token, L layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

_SEED_STEP = 6_364_136_223_846_793_005


@dataclass(frozen=True)
class RoutingControls:
    """Influences on the routing of one training step, apart from weights. Evaluation has none.

    Attributes:
        noise_seed: seed of the noise of noisy routers. It is explicit, so that a step that is
            computed twice (after resuming, or for checkpointed activations) routes equally both
            times.
        own_expert_bias: added to the logits of owned experts, only for the choice.
        balance_factor: factor of the owned experts' token counts in the balancing loss.
        capacity_factor: see `expert_capacity`. None drops nothing.
        probe: whether the similarity of experts is measured.
        draw_apart: whether the similarity is measured with gradients, for its loss.
    """

    noise_seed: int = 0
    own_expert_bias: float = 0.0
    balance_factor: float = 1.0
    capacity_factor: float | None = None
    probe: bool = False
    draw_apart: bool = False

    def part(self, index: int) -> RoutingControls:
        """The controls of one micro-batch of the step, or of one layer, with its own noise."""
        seed = (self.noise_seed * _SEED_STEP + index + 1) % 2**63
        return dataclasses.replace(self, noise_seed=seed)

    def own_bias(self, owned: Sequence[int], logits_NE: Tensor) -> Tensor | None:
        """An addition to each expert's logit in the choice, [E]. None for no addition."""
        if not self.own_expert_bias:
            return None
        bias_E = logits_NE.new_zeros(logits_NE.shape[1])
        bias_E[list(owned)] = self.own_expert_bias
        return bias_E

    def count_weights(self, owned: Sequence[int], like_NE: Tensor) -> Tensor | None:
        """Weight of each expert's tokens in the balancing loss, [E]. None for 1.

        Source: zjr2000/SPES at 2cbcd96, `decayed_load_balance_loss`.
        """
        if self.balance_factor == 1.0:
            return None
        weight_E = like_NE.new_ones(like_NE.shape[1])
        weight_E[list(owned)] = self.balance_factor
        return weight_E


def gaussian(seed: int, num_tokens: int, num_experts: int) -> Tensor:
    """Standard normal noise, fp32 [N, E] on the CPU, as a function of the seed.

    Drawn on the CPU, so that a run's noise does not depend on the device.
    """
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, num_experts, generator=generator)


def expert_capacity(num_tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """The most tokens of an expert in a micro-batch: the even share times the factor, rounded up.

    Source: Switch Transformer (arXiv 2101.03961, eq. 3) for K = 1; times K as in Megatron-Core, so
    that a factor of 1 is exactly enough for even routing with every K.
    """
    return max(1, math.ceil(num_tokens * top_k / num_experts * factor))


def within_capacity(expert_NK: Tensor, num_experts: int, capacity: int) -> Tensor:
    """The (token, expert) pairs within capacity, bool [N, K].

    All first choices come before all second choices. Among first (or second) choices, tokens come
    in their order. Source: GShard (arXiv 2006.16668, algorithm 1).
    """
    num_tokens, top_k = expert_NK.shape
    expert_P = expert_NK.t().flatten()
    order_P = torch.argsort(expert_P, stable=True)
    count_E = torch.bincount(expert_P, minlength=num_experts)
    start_E = count_E.cumsum(0) - count_E
    place_P = torch.empty_like(order_P)
    ascending = torch.arange(len(order_P), device=order_P.device)
    place_P[order_P] = ascending - start_E[expert_P[order_P]]
    return (place_P < capacity).view(top_k, num_tokens).t()


def bias_update(tokens_LE: Tensor, rate: float) -> Tensor:
    """The step of loss-free balancing on the selection biases, fp32 [L, E].

    It is rate * sign(mean load - own load), per layer, from the tokens that chose each expert.
    Source: Wang et al. (arXiv 2408.15664, algorithm 1).
    """
    load_LE = tokens_LE.float()
    return rate * torch.sign(load_LE.mean(-1, keepdim=True) - load_LE)
