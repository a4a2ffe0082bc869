"""Plain merging with all experts in memory: the reference for merging by chunks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm.config import ModelConfig
from swarm.experts import PROJECTIONS, expert_tensor

COLUMNS = 2**16
"""Elements per expert that exist in fp64 at once."""
DECIMALS = 12
"""Decimals of similarities. The order of an fp64 sum (1e-15) must not choose a donor."""


@dataclass(frozen=True)
class Merged:
    """Merged experts, and their donors.

    Attributes:
        named: fp32 tensors of all experts, by Hugging Face name.
        donors: for each layer and expert its donors, ascending.
    """

    named: dict[str, Tensor]
    donors: tuple[tuple[tuple[int, ...], ...], ...]


def similarities(gates: Sequence[Tensor]) -> Tensor:
    """Cosines between flattened gate projections, fp64 [E, E], rounded to `DECIMALS`.

    A projection of zeros is similar to nothing (0).

    Cost: 2 * E^2 * X operations in fp64 and E * COLUMNS * 8 bytes; about 1 s for one layer of
    the 7B model of SPES (32 experts of 2048 x 2048) on one thread.
    """
    gates_X = [gate.detach().reshape(-1) for gate in gates]
    dots_EE = torch.zeros(len(gates), len(gates), dtype=torch.float64)
    for start in range(0, len(gates_X[0]), COLUMNS):
        part_EX = torch.stack([gate[start : start + COLUMNS].double().cpu() for gate in gates_X])
        dots_EE += part_EX @ part_EX.T
    norm_E = dots_EE.diagonal().sqrt()
    cosines_EE = dots_EE / torch.outer(norm_E, norm_E)
    return cosines_EE.nan_to_num(nan=0.0).round(decimals=DECIMALS)


def donors(gates: Sequence[Tensor], top_k: int) -> tuple[tuple[int, ...], ...]:
    """The `top_k` experts most similar to each expert of one layer, ascending.

    An expert is never its own donor. Of equally similar experts the lower index is chosen.
    """
    rows = similarities(gates).tolist()
    chosen = []
    for expert, row in enumerate(rows):
        others = [other for other in range(len(rows)) if other != expert]
        ranked = sorted(others, key=lambda other: (-row[other], other))
        chosen.append(tuple(sorted(ranked[:top_k])))
    return tuple(chosen)


def merge_experts(
    named: Mapping[str, Tensor], model: ModelConfig, *, alpha: float, top_k: int
) -> Merged:
    """Merges all experts of all layers.

    The update is elementwise in fp32 with separate multiplications and additions, donors in
    ascending order, and so gives the same bits for every number of threads. Cost: `similarities`,
    and about 19 ms for a matrix of 2048 x 2048 with 4 donors.

    Args:
        named: agreed values of every expert's tensors. Other entries are ignored.
        model: names and number of experts.
        alpha: share of the way to the mean of the donors.
        top_k: donors per expert, fewer than there are experts.
    """
    assert top_k < model.num_experts, (top_k, model.num_experts)
    merged: dict[str, Tensor] = {}
    all_donors = []
    for layer in range(model.num_hidden_layers):
        by_projection = {kind: _experts(named, model, layer, kind) for kind in PROJECTIONS}
        of_layer = donors(by_projection["gate"], top_k)
        all_donors.append(of_layer)
        for kind in PROJECTIONS:
            snapshot = by_projection[kind]
            for expert, chosen in enumerate(of_layer):
                name = expert_tensor(layer, expert, kind)
                merged[name] = _towards(snapshot, expert, chosen, alpha)
    return Merged(dict(sorted(merged.items())), tuple(all_donors))


def _experts(
    named: Mapping[str, Tensor], model: ModelConfig, layer: int, projection: str
) -> list[Tensor]:
    names = [expert_tensor(layer, expert, projection) for expert in range(model.num_experts)]
    return [named[name].detach() for name in names]


def _towards(
    snapshot: Sequence[Tensor], expert: int, chosen: Sequence[int], alpha: float
) -> Tensor:
    """snapshot[expert] + alpha * (sum of (snapshot[k] - snapshot[expert]) / K), in this order."""
    own = snapshot[expert].float()
    total = torch.zeros_like(own)
    for donor in chosen:
        total.add_(snapshot[donor].float().sub(own))
    return total.div_(len(chosen)).mul_(alpha).add_(own)
