"""A batch as engines compute it: in parts, each with its masks on the device.

Legend: B sequences, T tokens that a sequence predicts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from swarm.data.masks import Masks
from swarm.model.masking import UNMASKED, Masked, documents_of


class MicroBatch(NamedTuple):
    """The sequences of one forward pass.

    Attributes:
        tokens_BT1: where they came from.
        masked: on the device that computes.
    """

    tokens_BT1: Tensor
    masked: Masked = UNMASKED


def micro_batches(
    tokens_BT1: Tensor, masks: Masks | None, rows: int, device: torch.device
) -> list[MicroBatch]:
    """Cuts a batch into micro-batches of so many sequences, the last one perhaps of fewer."""
    parts = tokens_BT1.split(rows)
    if masks is None:
        return [MicroBatch(part) for part in parts]
    starts = [None] * len(parts) if masks.starts_BT is None else masks.starts_BT.split(rows)
    scored_BT, mean_over = masks.scored_BT, None
    if scored_BT is None:
        scored = [None] * len(parts)
    else:
        scored = [part.to(device) for part in scored_BT.split(rows)]
        # Where nothing is scored the sums are 0 whatever divides them.
        mean_over = max(1, int(scored_BT.sum())) / len(parts)
    found = []
    for part, starts_BT, part_BT in zip(parts, starts, scored, strict=True):
        documents = None if starts_BT is None else documents_of(starts_BT)
        on_device = documents and documents.to(device)
        found.append(MicroBatch(part, Masked(on_device, part_BT, mean_over)))
    return found


def num_masked(masks: Masks | None) -> int:
    """How many predictions of a batch are not in its loss."""
    return 0 if masks is None or masks.scored_BT is None else int((~masks.scored_BT).sum())
