"""Where the tokens of one step went, added up over its micro-batches.

Shapes: L layers, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from swarm.model.losses import Losses


class Routed:
    """Adds up the figures on routing that the losses of the micro-batches give.

    Attributes:
        tokens_LE: tokens that chose each expert.
    """

    def __init__(self, device: torch.device) -> None:
        self.tokens_LE = torch.zeros((), dtype=torch.int64, device=device)
        self._dropped = torch.zeros((), dtype=torch.int64, device=device)
        self._similarities: list[Tensor] = []
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def add(self, losses: Losses) -> None:
        """Adds one micro-batch; nothing waits for the device."""
        self.tokens_LE = self.tokens_LE + losses.expert_tokens
        self._dropped = self._dropped + losses.dropped
        if losses.similarity is not None:
            self._similarities.append(losses.similarity)
        if losses.pair_P2 is not None and losses.alike_P is not None:
            self._pairs.append((losses.pair_P2, losses.alike_P))

    def fields(self) -> dict[str, Any]:
        """The fields of `StepStats` that are about routing."""
        alike = self._similarities
        return {
            "expert_tokens": tuple(tuple(layer) for layer in self.tokens_LE.tolist()),
            "dropped": int(self._dropped),
            "similarity": torch.stack(alike).mean().item() if alike else None,
            "pairs": self._alike(),
        }

    def _alike(self) -> tuple[tuple[int, int, float], ...]:
        """The mean of each pair of experts over layers and micro-batches, the most alike first."""
        found: dict[tuple[int, int], list[float]] = {}
        for pair_P2, alike_P in self._pairs:
            for (first, second), alike in zip(pair_P2.tolist(), alike_P.tolist(), strict=True):
                found.setdefault((first, second), []).append(alike)
        means = [(a, b, sum(each) / len(each)) for (a, b), each in found.items()]
        return tuple(sorted(means, key=lambda pair: (-pair[2], pair)))
