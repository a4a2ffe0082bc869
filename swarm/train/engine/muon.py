"""Muon: the update of a matrix is its momentum, with all singular values brought near 1.

Source: Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024). The scale
of the update is that of Liu et al., arXiv 2502.16982. With this scale Muon can use AdamW's learning
rates.

Shapes: R rows and C columns of a matrix.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from swarm.config import MUON_SCALE, OptimizerConfig
from swarm.errors import TrainingDiverged
from swarm.experts import MUON_MOMENTS, moments_of

MOMENTUM_DECAY = 0.95
"""Decay of the momentum, which is a running mean of gradients."""
NEWTON_SCHULZ_STEPS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of s, s^3 and s^5 in the polynomial that a step applies to each singular value s."""
SMALLEST_NORM = 1e-7


def takes_muon(name: str, settings: OptimizerConfig) -> bool:
    """Whether Muon updates a parameter; AdamW updates embeddings, head, norms and routers."""
    return moments_of(name, settings.kind) == MUON_MOMENTS


def update_bytes(rows: int, columns: int, itemsize: int) -> int:
    """Bytes that `update_matrix` needs in addition to its arguments.

    Args:
        rows: R.
        columns: C.
        itemsize: bytes of an element in the products: 4 on a CPU, 2 on a GPU.
    """
    side = min(rows, columns)
    return 4 * rows * columns + itemsize * (2 * rows * columns + 2 * side * side)


def newton_schulz_flops(rows: int, columns: int) -> int:
    """Floating-point operations of `orthogonalised` for a matrix of this shape."""
    short, long = sorted((rows, columns))
    return NEWTON_SCHULZ_STEPS * 2 * short * short * (2 * long + short)


def update_matrix(
    master_RC: Tensor,
    gradient_RC: Tensor,
    momentum_RC: Tensor,
    *,
    lr: float,
    weight_decay: float,
    name: str,
) -> None:
    """One update, in place, in fp32; only the products on a GPU are in bf16.

    Raises:
        TrainingDiverged: the momentum is not finite. The matrix does not change.
    """
    update_RC = direction(nesterov(gradient_RC, momentum_RC))
    require_finite(update_RC, name)
    move(master_RC, update_RC, lr=lr, weight_decay=weight_decay, longest_side=max(master_RC.shape))


def nesterov(gradient_RC: Tensor, momentum_RC: Tensor) -> Tensor:
    """Adds a gradient to the momentum in place; returns Nesterov's look-ahead momentum, fp32."""
    advance(momentum_RC, gradient_RC)
    return gradient_RC.lerp(momentum_RC, MOMENTUM_DECAY)


def advance(momentum: Tensor, gradient: Tensor) -> None:
    """Adds a gradient to the momentum, in place; both fp32 of one shape."""
    momentum.lerp_(gradient, 1 - MOMENTUM_DECAY)


def direction(momentum_RC: Tensor) -> Tensor:
    """Orthogonalises the momentum of a whole matrix, and overwrites it. Zeros stay zeros."""
    norm = torch.linalg.vector_norm(momentum_RC)
    momentum_RC.div_(norm.clamp_(min=SMALLEST_NORM))
    return orthogonalised(momentum_RC.bfloat16() if momentum_RC.is_cuda else momentum_RC)


def require_finite(update_RC: Tensor, name: str) -> None:
    """Raises TrainingDiverged if a direction, and so its momentum, is not finite."""
    if not update_RC.sum().isfinite():
        raise TrainingDiverged(
            f"the momentum of {name} is not finite; nothing of this step was offered to the swarm",
            hint="start this peer again without its private state",
        )


def move(
    master_RC: Tensor, update_RC: Tensor, *, lr: float, weight_decay: float, longest_side: int
) -> None:
    """Moves a matrix, or a part of it, by a direction; `longest_side` is the whole matrix's."""
    master_RC.mul_(1 - lr * weight_decay)
    master_RC.sub_(update_RC, alpha=lr * MUON_SCALE * math.sqrt(longest_side))


def orthogonalised(matrix_RC: Tensor) -> Tensor:
    """Brings the singular values of a matrix, which are at most 1, to about 1; zeros stay zeros.

    A value of at least 0.003 ends between 0.68 and 1.13.

    Cost: `newton_schulz_flops`, and memory for two copies of the matrix and two square matrices
    whose side is the shorter side of the matrix.
    """
    is_tall = matrix_RC.shape[0] > matrix_RC.shape[1]
    x = matrix_RC.mT if is_tall else matrix_RC
    first, third, fifth = COEFFICIENTS
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), x, beta=first)
    return x.mT if is_tall else x
