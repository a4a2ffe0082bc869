"""Causal attention with rotary positions, grouped keys and normalised queries and keys.

Shapes: B sequences, T tokens of a sequence, D hidden size, H query heads, G key/value heads,
C size of a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarm.config import ModelConfig


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, always in fp32.

    Source: Transformers 5.23 `Qwen3MoeRMSNorm`.
    """

    def __init__(self, size: int, eps: float, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Returns fp32 of the shape of `x`."""
        x = x.float()
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * (x * scale)


class Linear(nn.Module):
    """A matrix whose fp32 master is cast to the compute type of each use."""

    def __init__(self, inner: int, outer: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outer, inner, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x @ weight.T` in the type of `x`."""
        return F.linear(x, self.weight.to(x.dtype))


def rotary_tables(
    num_tokens: int, dim_per_head: int, theta: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the rotary angles, both fp32 [T, C / 2].

    Source: Su et al., arXiv 2104.09864, with the two halves of a head as the pairs, as in
    Transformers 5.23 `apply_rotary_pos_emb`.
    """
    exponents = torch.arange(0, dim_per_head, 2, dtype=torch.float32, device=device) / dim_per_head
    positions = torch.arange(num_tokens, dtype=torch.float32, device=device)
    angles = torch.outer(positions, 1.0 / theta**exponents)
    return angles.cos(), angles.sin()


def rotate(x_BHTC: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Turns each pair (i, i + C / 2) of a head by its position's angle; same shape and type."""
    cos, sin = tables
    first, second = x_BHTC.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    """Grouped-query attention with QK-norm per head (Qwen3) or over the projection (OLMoE)."""

    def __init__(self, model: ModelConfig, compute: torch.dtype, device: torch.device) -> None:
        super().__init__()
        head, hidden = model.dim_per_head, model.hidden_size
        queries, keys = model.num_attention_heads * head, model.num_key_value_heads * head
        whole = model.qk_norm == "projection"
        self.q_proj = Linear(hidden, queries, device)
        self.k_proj = Linear(hidden, keys, device)
        self.v_proj = Linear(hidden, keys, device)
        self.o_proj = Linear(queries, hidden, device)
        self.q_norm = RMSNorm(queries if whole else head, model.rms_norm_eps, device)
        self.k_norm = RMSNorm(keys if whole else head, model.rms_norm_eps, device)
        self.dim_per_head, self.whole, self.compute = head, whole, compute
        self.queries_per_key = model.num_attention_heads // model.num_key_value_heads

    def forward(self, x_BTD: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
        """Returns the attended values, [B, T, D] in the compute type."""
        x_BTD = x_BTD.to(self.compute)
        q_BHTC = rotate(self._heads(self.q_proj(x_BTD), self.q_norm), tables).to(self.compute)
        k_BGTC = rotate(self._heads(self.k_proj(x_BTD), self.k_norm), tables).to(self.compute)
        v_BGTC = self.v_proj(x_BTD).unflatten(-1, (-1, self.dim_per_head)).transpose(1, 2)
        out_BHTC = F.scaled_dot_product_attention(
            q_BHTC, k_BGTC, v_BGTC, is_causal=True, enable_gqa=self.queries_per_key > 1
        )
        out_BTD: Tensor = self.o_proj(out_BHTC.transpose(1, 2).flatten(2))
        return out_BTD

    def _heads(self, x: Tensor, norm: RMSNorm) -> Tensor:
        """Normalises and splits a projection: [B, T, H * C] to fp32 [B, H, T, C]."""
        split = (-1, self.dim_per_head)
        heads: Tensor = norm(x).unflatten(-1, split) if self.whole else norm(x.unflatten(-1, split))
        return heads.transpose(1, 2)
