"""Causal attention with rotary positions, grouped keys, and normalized queries and keys.

Shapes: B sequences, T tokens of a sequence, D hidden size, H query heads, G key/value heads,
C size of a head; X = B * G, and R rows: the queries of a block of tokens that share a key.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swarm.config import ModelConfig
from swarm.model.masking import Documents

SHORT_TOKENS = 512
"""Up to this length bf16 attention on a CPU uses plain products, which keep T * T / 2 weights.
Plain products are faster than torch's fused kernel: 11 against 31 ms forward and backward for 8 x
256 tokens and 4 heads, 1.9 against 6.3 ms for 8 x 64, 19 against 64 ms for 4 x 512 (one thread)."""
BLOCK_TOKENS = 64
AMPERE = (8, 0)
"""The compute capability of GPUs of the generation Ampere."""


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
        normed: Tensor = _Norm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return normed


class _Norm(torch.autograd.Function):
    """The norm with explicit gradients, which take half as many passes over memory as autograd.

    A GPU has its own kernels for norm and gradients. They also keep the input in its type.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        floats = x.float()
        normed: Tensor
        if x.is_cuda:
            normed, scale = torch.ops.aten._fused_rms_norm(floats, weight.shape, weight, eps)
        else:
            scale = torch.linalg.vector_norm(floats, dim=-1, keepdim=True)
            scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
            normed = (floats * scale).mul_(weight)
        ctx.save_for_backward(x, weight, scale)
        return normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        dout, floats = gradients[0], x.float()
        if x.is_cuda:
            dx, dweight = torch.ops.aten._fused_rms_norm_backward(
                dout.contiguous(), floats, weight.shape, scale, weight, [True, True]
            )
            return dx.to(x.dtype), dweight, None
        product = (floats * dout).reshape(-1, x.shape[-1])
        dweight = torch.mv(product.t(), scale.flatten())
        dot = torch.mv(product, weight).view_as(scale)
        dx = (dout * weight).mul_(scale)
        dx.addcmul_(floats, scale.pow(3).mul_(dot).div_(-x.shape[-1]))
        return dx.to(x.dtype), dweight, None


class Linear(nn.Module):
    """A matrix whose fp32 master is cast to the compute type of each use."""

    def __init__(self, inner: int, outer: int, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outer, inner, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """Returns `x @ weight.T` in the type of `x`."""
        return F.linear(x, self.weight.to(x.dtype))


class Positions(NamedTuple):
    """The positions of the tokens of a micro-batch.

    Attributes:
        cos, sin: cosines and sines of the rotary angles, both fp32 [T, C / 2].
        documents: attention stays within each document. None: a token attends to its whole
            sequence.
    """

    cos: Tensor
    sin: Tensor
    documents: Documents | None = None


def rotary_tables(
    num_tokens: int, dim_per_head: int, theta: float, device: torch.device
) -> Positions:
    """Cosines and sines of the rotary angles.

    Angles count from the sequence's beginning, even in documents that begin later, because
    attention depends only on differences.

    Source: Su et al., arXiv 2104.09864, with the two halves of a head as the pairs, as in
    Transformers 5.23 `apply_rotary_pos_emb`.
    """
    exponents = torch.arange(0, dim_per_head, 2, dtype=torch.float32, device=device) / dim_per_head
    positions = torch.arange(num_tokens, dtype=torch.float32, device=device)
    angles = torch.outer(positions, 1.0 / theta**exponents)
    return Positions(angles.cos(), angles.sin())


def rotate(x_BHTC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns each pair (i, i + C / 2) of a head by its position's angle. Keeps shape and type."""
    rotated: Tensor = _Rotate.apply(x_BHTC, cos, sin)  # type: ignore[no-untyped-call]
    return rotated


class _Rotate(torch.autograd.Function):
    """`rotate`, in four passes over memory each way, without temporaries."""

    @staticmethod
    def forward(ctx: Any, x_BHTC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        first, second = x_BHTC.chunk(2, dim=-1)
        out_BHTC = torch.empty_like(x_BHTC)
        out_first, out_second = out_BHTC.chunk(2, dim=-1)
        torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=out_second).addcmul_(first, sin)
        return out_BHTC

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return rotate(gradients[0], cos, -sin), None, None


def attend(q_BHTC: Tensor, k_BGTC: Tensor, v_BGTC: Tensor) -> Tensor:
    """Causal softmax attention, [B, H, T, C]. Each key serves H / G consecutive queries."""
    short = q_BHTC.shape[2] <= SHORT_TOKENS
    if short and q_BHTC.dtype is torch.bfloat16 and q_BHTC.device.type == "cpu":
        attended: Tensor = _Short.apply(q_BHTC, k_BGTC, v_BGTC)  # type: ignore[no-untyped-call]
        return attended
    times = q_BHTC.shape[1] // k_BGTC.shape[1]
    if times > 1 and repeats_keys(q_BHTC.is_cuda, q_BHTC.dtype):
        k_BGTC, v_BGTC = (x_BGTC.repeat_interleave(times, 1) for x_BGTC in (k_BGTC, v_BGTC))
        times = 1
    return F.scaled_dot_product_attention(
        q_BHTC, k_BGTC, v_BGTC, is_causal=True, enable_gqa=times > 1
    )


def repeats_keys(is_cuda: bool, dtype: torch.dtype) -> bool:
    """Whether keys are repeated, so that each query has its own key.

    Kernels for shared keys exist for 16 bits on a GPU from Ampere on. Elsewhere PyTorch 2.13 would
    keep T * T weights. Before Ampere PyTorch keeps such weights in bf16 in any case, because bf16
    has no kernel there. A merely described GPU, on a machine without a GPU, counts as Ampere or
    newer.
    """
    return is_cuda and (dtype is torch.float32 or _is_before_ampere())


def _is_before_ampere() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() < AMPERE


class _Short(torch.autograd.Function):
    """Attention by blocks of queries, each with only the keys up to the block's last token."""

    @staticmethod
    def forward(ctx: Any, q_BHTC: Tensor, k_BGTC: Tensor, v_BGTC: Tensor) -> Tensor:
        groups, num_tokens = k_BGTC.shape[1:3]
        q_BHTC = q_BHTC * q_BHTC.shape[-1] ** -0.5
        k_XTC, v_XTC = k_BGTC.flatten(0, 1), v_BGTC.flatten(0, 1)
        out_BHTC = torch.empty_like(q_BHTC)
        future_TT = q_BHTC.new_full((BLOCK_TOKENS, BLOCK_TOKENS), -torch.inf).triu_(1)
        weights = []
        for start in range(0, num_tokens, BLOCK_TOKENS):
            end = min(start + BLOCK_TOKENS, num_tokens)
            block, size = slice(start, end), end - start
            scores_XRT = torch.bmm(_rows(q_BHTC, groups, block), k_XTC[:, :end].mT)
            newest = scores_XRT.unflatten(1, (-1, size))[..., block]
            newest.add_(future_TT[:size, :size])
            # Computed in fp32, rounded once.
            weights.append(scores_XRT.softmax(-1))
            _write_rows(torch.bmm(weights[-1], v_XTC[:, :end]), out_BHTC, groups, block)
        ctx.save_for_backward(q_BHTC, k_XTC, v_XTC, *weights)
        return out_BHTC

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_BHTC, k_XTC, v_XTC, *weights = ctx.saved_tensors
        groups = len(k_XTC) // len(q_BHTC)
        dq_BHTC, dk_XTC, dv_XTC = (torch.zeros_like(each) for each in (q_BHTC, k_XTC, v_XTC))
        for index, weight_XRT in enumerate(weights):
            end = weight_XRT.shape[2]
            block = slice(index * BLOCK_TOKENS, end)
            dout_XRC = _rows(gradients[0], groups, block)
            dweight_XRT = torch.bmm(dout_XRC, v_XTC[:, :end].mT)
            dscore_XRT = torch.ops.aten._softmax_backward_data(
                dweight_XRT, weight_XRT, -1, weight_XRT.dtype
            )
            _write_rows(torch.bmm(dscore_XRT, k_XTC[:, :end]), dq_BHTC, groups, block)
            dk_XTC[:, :end].baddbmm_(dscore_XRT.mT, _rows(q_BHTC, groups, block))
            dv_XTC[:, :end].baddbmm_(weight_XRT.mT, dout_XRC)
        dq_BHTC.mul_(q_BHTC.shape[-1] ** -0.5)
        return dq_BHTC, dk_XTC.unflatten(0, (-1, groups)), dv_XTC.unflatten(0, (-1, groups))


def _rows(x_BHTC: Tensor, groups: int, block: slice) -> Tensor:
    """The block's tokens of all heads with a common key, one head after the other: [X, R, C]."""
    rows_XRC: Tensor = x_BHTC.unflatten(1, (groups, -1))[:, :, :, block].flatten(2, 3).flatten(0, 1)
    return rows_XRC


def _write_rows(rows_XRC: Tensor, out_BHTC: Tensor, groups: int, block: slice) -> None:
    """Overwrites the values that `_rows` would read."""
    target = out_BHTC.unflatten(1, (groups, -1))[:, :, :, block]
    target.copy_(rows_XRC.view(target.shape))


class Attention(nn.Module):
    """Grouped-query attention with QK-norm per head (Qwen3), projection (OLMoE), or none."""

    def __init__(self, model: ModelConfig, compute: torch.dtype, device: torch.device) -> None:
        super().__init__()
        head, hidden = model.dim_per_head, model.hidden_size
        queries, keys = model.num_attention_heads * head, model.num_key_value_heads * head
        whole = model.qk_norm == "projection"
        self.q_proj = Linear(hidden, queries, device)
        self.k_proj = Linear(hidden, keys, device)
        self.v_proj = Linear(hidden, keys, device)
        self.o_proj = Linear(queries, hidden, device)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if model.qk_norm != "none":
            self.q_norm = RMSNorm(queries if whole else head, model.rms_norm_eps, device)
            self.k_norm = RMSNorm(keys if whole else head, model.rms_norm_eps, device)
        self.dim_per_head, self.whole, self.compute = head, whole, compute

    def forward(self, x_BTD: Tensor, positions: Positions) -> Tensor:
        """Returns the attended values, [B, T, D] in the compute type."""
        x_BTD = x_BTD.to(self.compute)
        cos, sin, documents = positions
        q_BHTC = rotate(self._heads(self.q_proj(x_BTD), self.q_norm), cos, sin).to(self.compute)
        k_BGTC = rotate(self._heads(self.k_proj(x_BTD), self.k_norm), cos, sin).to(self.compute)
        v_BGTC = self.v_proj(x_BTD).unflatten(-1, (-1, self.dim_per_head)).transpose(1, 2)
        if documents is None:
            out_BHTC = attend(q_BHTC, k_BGTC, v_BGTC)
        else:
            out_BHTC = documents.apply(attend, q_BHTC, k_BGTC, v_BGTC)
        out_BTD: Tensor = self.o_proj(out_BHTC.transpose(1, 2).flatten(2))
        return out_BTD

    def _heads(self, x: Tensor, norm: RMSNorm | None) -> Tensor:
        """Normalizes and splits a projection: [B, T, H * C] to fp32 [B, H, T, C]."""
        if norm is not None and self.whole:
            x = norm(x)
        heads_BTHC: Tensor = x.unflatten(-1, (-1, self.dim_per_head))
        if norm is not None and not self.whole:
            heads_BTHC = norm(heads_BTHC)
        return heads_BTHC.float().transpose(1, 2)
