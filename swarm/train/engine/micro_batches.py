"""A batch as engines compute it: micro-batches, masks, and figures on the routing."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from swarm.data.masks import Masks
from swarm.model.losses import Losses
from swarm.model.masking import UNMASKED, Masked, documents_of


class MicroBatch(NamedTuple):
    """The sequences of one forward pass.

    Attributes:
        tokens_BT1: the original tokens.
        masked: masks of the micro-batch, on the device that computes.
    """

    tokens_BT1: Tensor
    masked: Masked = UNMASKED


def micro_batches(
    tokens_BT1: Tensor, masks: Masks | None, rows: int, device: torch.device
) -> list[MicroBatch]:
    """Cuts a batch into micro-batches of a given number of sequences. The last may have fewer."""
    parts = tokens_BT1.split(rows)
    if masks is None:
        return [MicroBatch(part) for part in parts]
    starts = [None] * len(parts) if masks.starts_BT is None else masks.starts_BT.split(rows)
    scored_BT, mean_over = masks.scored_BT, None
    if scored_BT is None:
        scored = [None] * len(parts)
    else:
        scored = [part.to(device) for part in scored_BT.split(rows)]
        # Without scored predictions the sums are 0, whatever the divisor.
        mean_over = max(1, int(scored_BT.sum())) / len(parts)
    found = []
    for part, starts_BT, part_BT in zip(parts, starts, scored, strict=True):
        documents = None if starts_BT is None else documents_of(starts_BT)
        on_device = documents and documents.to(device)
        found.append(MicroBatch(part, Masked(on_device, part_BT, mean_over)))
    return found


def num_masked(masks: Masks | None) -> int:
    """The number of a batch's predictions that are not in the loss."""
    return 0 if masks is None or masks.scored_BT is None else int((~masks.scored_BT).sum())


class Routed:
    """Adds up the figures on routing in the losses of the micro-batches.

    Attributes:
        tokens_LE: tokens that chose each expert.
    """

    def __init__(self, device: torch.device) -> None:
        self.tokens_LE = torch.zeros((), dtype=torch.int64, device=device)
        self._dropped = torch.zeros((), dtype=torch.int64, device=device)
        self._similarities: list[Tensor] = []
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def add(self, losses: Losses) -> None:
        """Adds one micro-batch without waiting for the device."""
        self.tokens_LE = self.tokens_LE + losses.expert_tokens
        self._dropped = self._dropped + losses.dropped
        if losses.similarity is not None:
            self._similarities.append(losses.similarity)
        if losses.pair_P2 is not None and losses.alike_P is not None:
            self._pairs.append((losses.pair_P2, losses.alike_P))

    def fields(self) -> dict[str, Any]:
        """The fields of `StepStats` about routing."""
        alike = self._similarities
        return {
            "expert_tokens": tuple(tuple(layer) for layer in self.tokens_LE.tolist()),
            "dropped": int(self._dropped),
            "similarity": torch.stack(alike).mean().item() if alike else None,
            "pairs": self._alike(),
        }

    def _alike(self) -> tuple[tuple[int, int, float], ...]:
        """Means of pairs of experts over layers and micro-batches, the most similar pair first."""
        found: dict[tuple[int, int], list[float]] = {}
        for pair_P2, alike_P in self._pairs:
            for (first, second), alike in zip(pair_P2.tolist(), alike_P.tolist(), strict=True):
                found.setdefault((first, second), []).append(alike)
        means = [(a, b, sum(each) / len(each)) for (a, b), each in found.items()]
        return tuple(sorted(means, key=lambda pair: (-pair[2], pair)))
