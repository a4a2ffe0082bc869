#!/usr/bin/env python3
"""The speed of coding and applying deltas: GB/s of one core, by processor time.

For encoding, GB count the fp32 differences. For applying, they count the resulting agreed value.
Differences are Gaussian. Each figure is the best of some repeats, on one thread.

    scripts/benchmarks/bench_codings.py [--elements 16777216] [--repeat 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import get_args

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from swarm.codecs import DTYPES, Content, Read, cut_from, encoded
from swarm.codings import coded_bytes
from swarm.config import Codec, Coding
from swarm.deltas.unit_deltas import Delta, apply_delta, elements_of, encode_delta
from swarm.experts import Slice, UnitLayout

GB = 1e9
CODECS: tuple[Codec, ...] = ("bf16", "fp32")


def processor_s(work: Callable[[], Iterable[object]], repeat: int) -> float:
    """The least processor time of a pass through the results of `work`."""
    times = []
    for _ in range(repeat):
        begin = time.process_time()
        deque(work(), maxlen=0)
        times.append(time.process_time() - begin)
    return min(times)


def reader(blob: bytes | memoryview) -> Read:
    return lambda offset, length: blob[offset : offset + length]


def measured(coding: Coding, num_elements: int, repeat: int) -> dict[str, float | str]:
    """One row of the table."""
    generator = torch.Generator().manual_seed(0)
    tensors = {"x": torch.randn(num_elements, generator=generator) * 0.02}
    moves = torch.randn(num_elements, generator=generator) * 1e-3
    layouts = {
        codec: UnitLayout(
            "expert.0",
            codec,
            (Slice("x", 0, num_elements),),
            num_elements,
            num_elements * DTYPES[codec].itemsize,
            coding,
        )
        for codec in CODECS
    }
    read = elements_of(layouts["fp32"], lambda part: moves[part.start : part.stop])
    content: Content = encode_delta(layouts["fp32"], read)
    row: dict[str, float | str] = {
        "coding": coding,
        "bytes_per_element": coded_bytes(layouts["fp32"]) / num_elements,
        "encode_gb_s": num_elements * 4 / processor_s(lambda: content, repeat) / GB,
    }
    blob = content.whole()
    delta = Delta(len(blob), reader(blob))
    for codec, layout in layouts.items():
        base = reader(encoded(layout, cut_from(tensors.__getitem__)).whole())
        applied = apply_delta(layout, base, delta)
        spent = processor_s(lambda value=applied: value, repeat)  # type: ignore[misc]
        row[f"apply_{codec}_gb_s"] = layout.num_bytes / spent / GB
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--elements", type=int, default=2**24)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object a row")
    options = parser.parse_args()
    torch.set_num_threads(1)
    heading = ("coding", "bytes_per_element", "encode_gb_s", "apply_bf16_gb_s", "apply_fp32_gb_s")
    if not options.json:
        print("".join(f"{name:>19}" for name in heading))
    for coding in get_args(Coding)[1:]:
        row = measured(coding, options.elements, options.repeat)
        if options.json:
            print(json.dumps(row), flush=True)
        else:
            cells = [f"{row[name]:.3f}" for name in heading[1:]]
            print("".join(f"{cell:>19}" for cell in [coding, *cells]), flush=True)


if __name__ == "__main__":
    main()
