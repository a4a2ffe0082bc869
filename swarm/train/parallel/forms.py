"""Type and shape of the tensors of a private state, whichever rank has them. Pure."""

from __future__ import annotations

import math

import torch

from swarm.config import RunConfig
from swarm.experts import expert_shapes, selection_biases, shared_shapes
from swarm.train.adam_moments import SCALE, Moments, MomentsFormat
from swarm.train.tensor_file import Form


def state_forms(run: RunConfig, owned: tuple[int, ...], moments: MomentsFormat) -> dict[str, Form]:
    """Of all tensors of a private state, by name."""
    shapes = shared_shapes(run.model)
    for expert in owned:
        shapes |= expert_shapes(run.model, expert)
    forms: dict[str, Form] = {}
    biases = selection_biases(run.model)
    for name, shape in shapes.items():
        forms[f"master.{name}"] = (torch.float32, shape)
        if name not in biases:
            forms |= _moment_forms(moments, name, shape)
    return forms


def expert_moment_forms(
    run: RunConfig, expert: int, layer: int, moments: MomentsFormat
) -> dict[str, Form]:
    """Of the moments of an expert's matrices in one layer, by name."""
    forms: dict[str, Form] = {}
    for name, shape in expert_shapes(run.model, expert).items():
        if name.startswith(f"model.layers.{layer}."):
            forms |= _moment_forms(moments, name, shape)
    return forms


def _moment_forms(moments: MomentsFormat, name: str, shape: tuple[int, ...]) -> dict[str, Form]:
    parts = Moments.zeros(moments, 1, math.prod(shape), torch.device("meta")).parts
    return {
        f"{kind}.{name}": (part.dtype, tuple(part.shape[1:]) if kind.endswith(SCALE) else shape)
        for kind, part in parts.items()
    }
