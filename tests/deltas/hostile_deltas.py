"""Digests of the results of awkward deltas on awkward values, on this processor.

Inputs are random bits from numpy's integers alone, so they are the same everywhere. As a program it
prints the digests as JSON: `ATEN_CPU_CAPABILITY=default python -m tests.deltas.hostile_deltas`.
"""

import json
import sys
from functools import cache

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from swarm.codings import BLOCK, CODE_BYTES, GROUP
from swarm.config import Codec, Coding
from tests.deltas.units import CODINGS, applied, unit

SIZE = 2**16 + 300
"""A whole group, and one whose last block is cut."""
CODECS: tuple[Codec, ...] = ("fp32", "bf16")
Bits = NDArray[np.uint16]


def _within(random: np.random.Generator, low: int, high: int, size: int) -> Bits:
    """bf16 numbers from 2^low to 2^(high + 1), most of them small, and zeros."""
    exponents = 127 + random.integers(low, high + 1, size)
    close = random.random(size) < 0.7
    exponents[close] = 127 + random.integers(low, low + 12, int(close.sum()))
    bits = (exponents << 7) | random.integers(0, 128, size)
    bits[random.random(size) < 0.05] = 0
    return bits.astype(np.uint16)


@cache
def base_bits(codec: Codec) -> bytes:
    """Values of all signs and magnitudes. A few are not canonical: subnormal, or negative zero."""
    random = np.random.Generator(np.random.PCG64(1))
    high = _within(random, -100, 39, SIZE).astype(np.uint32)
    odd = random.random(SIZE) < 0.03
    high[odd] = random.integers(0, 27 << 7, int(odd.sum()))
    high[random.random(SIZE) < 0.01] = 0x8000
    high |= (random.integers(0, 2, SIZE) << 15).astype(np.uint32) * (high != 0)
    if codec == "bf16":
        return high.astype("<u2").tobytes()
    low = random.integers(0, 2**16, SIZE).astype(np.uint32) * (high != 0)
    return ((high << 16) | low).astype("<u4").tobytes()


@cache
def delta_bits(coding: Coding) -> bytes:
    random = np.random.Generator(np.random.PCG64(2))
    if coding == "bf16":
        # A third subtracts its base exactly.
        bits = np.frombuffer(base_bits("bf16"), "<u2") ^ 0x8000
        other = _within(random, -100, 39, SIZE)
        is_canonical = (bits & 0x7FFF) >= 27 << 7
        bits = np.where((random.random(SIZE) < 0.3) & is_canonical, bits, other)
        return bits.astype("<u2").tobytes()
    pieces, blocks = [], -(-SIZE // BLOCK)
    for first in range(0, blocks, GROUP):
        count = min(GROUP, blocks - first)
        pieces += [_within(random, -96, 39, count).astype("<u2").tobytes()]
        codes = random.integers(0, 256, (count, CODE_BYTES[coding]))
        pieces += [codes.astype(np.uint8).tobytes()]
    return b"".join(pieces)


def digest(coding: Coding, codec: Codec, misaligned: int = 0) -> str:
    layout = unit(coding, codec, SIZE)
    moved = [bytes(misaligned) + blob for blob in (base_bits(codec), delta_bits(coding))]
    base, delta = (memoryview(blob)[misaligned:] for blob in moved)
    return blake3(applied(layout, base, delta)).hexdigest()


def digests() -> dict[str, str]:
    """By coding and agreed type: under this process's kernels, flushing and keeping subnormals."""
    found = {}
    for flush in (False, True):
        torch.set_flush_denormal(flush)
        try:
            for coding in CODINGS:
                for codec in CODECS:
                    value = digest(coding, codec)
                    assert found.setdefault(f"{coding} {codec}", value) == value
        finally:
            torch.set_flush_denormal(False)
    return found


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    sys.stdout.write(json.dumps([torch.backends.cpu.get_cpu_capability(), digests()]))
