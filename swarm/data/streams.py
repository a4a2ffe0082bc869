"""Which windows of a corpus a peer trains on: pure arithmetic on (seed, data index, sample).

A corpus is cut into windows of T + 1 tokens at a stride of T. All peers see them in one
pseudo-random order, a permutation keyed by the run's seed, as a circle of W windows. The stream
with data index i enters the circle at the fraction that i's mirrored binary digits give
(0, 1/2, 1/4, 3/4, 1/8, ...: van der Corput's sequence) and goes round it. So

- a stream meets no window twice before it has seen the whole corpus; then the order is drawn anew;
- streams 0..N-1 start at least W / 2^ceil(log2 N) windows apart and share none until each has gone
  that far: for N a power of two, until the run has used up the corpus once;
- nobody needs to know how many streams there are: data indexes taken from peer ids, which are as
  good as random, start at random places.

A sample is a step's row: sample = step x rows per step + row.

Source: J. G. van der Corput, "Verteilungsfunktionen", 1935, for the sequence; M. Luby and
C. Rackoff, SIAM J. Comput. 17 (1988), for a permutation made of four Feistel rounds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

Indexes = NDArray[np.uint64]

_ROUNDS = 4
_INDEX_BITS = 64


def stream_start(data_index: int, num_windows: int) -> int:
    """Where a stream enters the circle of windows; data indexes count modulo 2^64."""
    digits = f"{data_index % 2**_INDEX_BITS:0{_INDEX_BITS}b}"
    return (int(digits[::-1], 2) * num_windows) >> _INDEX_BITS


def stream_windows(
    seed: int, data_index: int, samples: range, num_windows: int
) -> NDArray[np.int64]:
    """The windows behind consecutive samples of one stream.

    Args:
        seed: the run's.
        data_index: names the stream.
        samples: consecutive sample numbers, from 0 up.
        num_windows: windows in the corpus.

    Returns:
        Window indexes [len(samples)], each below `num_windows`.
    """
    start = stream_start(data_index, num_windows)
    windows = [np.empty(0, dtype=np.int64)]
    first = samples.start
    while first < samples.stop:
        lap = first // num_windows
        stop = min(samples.stop, (lap + 1) * num_windows)
        places = (np.arange(first, stop, dtype=np.int64) + start) % num_windows
        windows.append(permute(places.astype(np.uint64), num_windows, f"{seed} lap {lap}"))
        first = stop
    return np.concatenate(windows)


def permute(places: Indexes, size: int, key: str) -> NDArray[np.int64]:
    """A keyed pseudo-random permutation of range(size), at some of its places.

    A Feistel network on the next power of four; a value that falls outside goes through it again
    until it falls inside, at most four times on average.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    digest = blake3(f"windows {key}".encode()).digest(length=8 * _ROUNDS)
    keys = np.frombuffer(digest, dtype="<u8")
    values = _feistel(places, keys, half_bits)
    outside = values >= size
    while outside.any():
        values[outside] = _feistel(values[outside], keys, half_bits)
        outside = values >= size
    return values.astype(np.int64)


def _feistel(values: Indexes, keys: NDArray[np.uint64], half_bits: int) -> Indexes:
    bits, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> bits, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right + key) & mask)
    return (left << bits) | right


def _mix(values: NDArray[Any]) -> Indexes:
    """Scrambles 64-bit values. Source: the finaliser of splitmix64 (S. Vigna, public domain)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Indexes = values ^ (values >> np.uint64(31))
    return mixed
