"""Type and shape of the tensors of a private state, whichever rank has them. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from swarm.config import RunConfig
from swarm.experts import Shape, expert_shapes, layer_of, selection_biases, shared_shapes
from swarm.train.adam_moments import SCALE, Moments, MomentsFormat
from swarm.train.tensor_file import Form


def state_forms(run: RunConfig, owned: Sequence[int], form: MomentsFormat) -> dict[str, Form]:
    """Of all tensors of a private state with these experts, by name."""
    shapes = shared_shapes(run.model)
    for expert in owned:
        shapes |= expert_shapes(run.model, expert)
    forms: dict[str, Form] = {}
    biases = selection_biases(run.model)
    for name, shape in shapes.items():
        forms[f"master.{name}"] = (torch.float32, shape)
        if name not in biases:
            forms |= _moment_forms(form, name, shape)
    return forms


def forms_in(layer: int, shapes: Mapping[str, Shape], form: MomentsFormat) -> dict[str, Form]:
    """Of the moments of those tensors that are in a layer, by name."""
    forms: dict[str, Form] = {}
    for name, shape in shapes.items():
        if layer_of(name) == layer:
            forms |= _moment_forms(form, name, shape)
    return forms


def _moment_forms(form: MomentsFormat, name: str, shape: Shape) -> dict[str, Form]:
    """Of the moments of a tensor."""
    parts = Moments.zeros(form, 1, math.prod(shape), torch.device("meta")).parts
    return {
        f"{kind}.{name}": (part.dtype, tuple(part.shape[1:]) if kind.endswith(SCALE) else shape)
        for kind, part in parts.items()
    }
