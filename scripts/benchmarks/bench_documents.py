#!/usr/bin/env python3
"""Attention within documents on a CPU: against the whole sequence, and torch's kernel with a mask.

Each line has processor milliseconds for forward and backward, the median of `--repeat`:

  window     attention over the whole sequence
  mask       torch's fused kernel with a mask of documents
  documents  each document separately, as with `data.attention = "document"`

    .venv/bin/python scripts/benchmarks/bench_documents.py --length 2048 --documents 64 256 1024
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from swarm.model.attention import attend
from swarm.model.masking import Documents, documents_of

SEQUENCES, HEADS, GROUPS, DIM = 2, 8, 4, 64

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def milliseconds(attention: Attention, given: list[Tensor], repeat: int) -> float:
    """The median, after a warm-up."""
    found = []
    for _ in range(repeat + 1):
        began_s = time.process_time()
        attention(*given).sum().backward()
        found.append(1e3 * (time.process_time() - began_s))
    return statistics.median(found[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--length", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--documents", type=int, nargs="+", default=[64, 256, 1024], help="mean")
    parser.add_argument("--repeat", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    size = args.length
    for mean in args.documents:
        starts_BT = torch.rand(SEQUENCES, size) < 1 / mean
        documents = documents_of(starts_BT)
        assert documents is not None, "name shorter documents"
        number_BT = starts_BT.cumsum(1)
        same_B1TT = number_BT[:, None, :, None] == number_BT[:, None, None, :]
        mask_B1TT = same_B1TT & torch.ones(size, size, dtype=torch.bool).tril()

        def masked(q: Tensor, k: Tensor, v: Tensor, mask_B1TT: Tensor = mask_B1TT) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask_B1TT, enable_gqa=True)

        def apart(q: Tensor, k: Tensor, v: Tensor, documents: Documents = documents) -> Tensor:
            return documents.apply(attend, q, k, v)

        for dtype in (torch.float32, torch.bfloat16):
            given = [
                torch.randn(SEQUENCES, size, heads, DIM).to(dtype).transpose(1, 2).requires_grad_()
                for heads in (HEADS, GROUPS, GROUPS)
            ]
            ways = (attend, masked, apart)
            window, mask, each = (milliseconds(way, given, args.repeat) for way in ways)
            print(
                f"{size} tokens, {sum(many for many, _ in documents.widths)} documents in "
                f"{SEQUENCES} sequences, {str(dtype)[6:]}: window {window:.0f}, mask {mask:.0f}, "
                f"documents {each:.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
