"""Initial weights. Each tensor depends only on the run's seed and on its own name."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from blake3 import blake3
from torch import Tensor

from swarm.config import RunConfig
from swarm.errors import BadBlob
from swarm.experts import (
    Shape,
    expert_of,
    expert_shapes,
    exported,
    moved_by_rule,
    shared_shapes,
    unknown,
)

CUT = 3.0
"""Standard deviations at which the normal distribution is cut."""


def generator_of(seed: int, name: str) -> np.random.Generator:
    """The random generator of one tensor, the same on every machine."""
    digest = blake3(f"{seed}\n{name}".encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))


def initial_tensor(name: str, shape: Shape, run: RunConfig) -> Tensor:
    """The initial fp32 value of a tensor, the same on every peer.

    Norms are 1. Matrices are drawn from N(0, initializer_range), and values beyond 3 sigma are
    drawn again. A router's selection bias and noise matrix are 0 (noise of softplus(0) = 0.69
    standard deviations). numpy's generator is used, because torch's gives other bits on CPUs with
    other vector units.

    Source: SPES (arXiv 2602.11543), configurations of the reference code; Shazeer et al.
    (arXiv 1701.06538, appendix A) for the noise.
    Cost: about 13 ns per element.
    """
    if moved_by_rule(name) or not exported(name):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    generator = generator_of(run.run.seed, name)
    values = generator.standard_normal(shape, dtype=np.float32)
    while num_outside := np.count_nonzero(outside := np.abs(values) > CUT):
        values[outside] = generator.standard_normal(num_outside, dtype=np.float32)
    values *= np.float32(run.model.initializer_range)
    return torch.from_numpy(values)


def initial_tensors(run: RunConfig, names: Iterable[str]) -> dict[str, Tensor]:
    """Initial values of some of the model's tensors, by Hugging Face name.

    Raises:
        BadBlob: a name that the model does not have.
    """
    names = list(names)
    shapes = shared_shapes(run.model)
    experts = {expert for name in names if (expert := expert_of(name)) is not None}
    for expert in sorted(experts):
        if expert < run.model.num_experts:
            shapes |= expert_shapes(run.model, expert)
    for name in names:
        if name not in shapes:
            raise BadBlob("name", unknown(name))
    return {name: initial_tensor(name, shapes[name], run) for name in names}
