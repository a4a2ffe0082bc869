"""Which window of a text a sample is: pure arithmetic on (seed, sample).

A text is cut into windows of T + 1 tokens at a stride of T. Samples are numbered from 0 on, and a
lap has as many as there are windows: sample n is window `permute(n mod W)`, with a key of the run's
seed and the lap n // W. So a lap reads every window once, in an order that looks random, and the
next lap draws it anew. The manifest decides which peer reads which samples of a
common text (`swarm.protocol.dealing`); a peer reads a text of its own from its beginning.

Source: M. Luby and C. Rackoff, SIAM J. Comput. 17 (1988), for a permutation made of four Feistel
rounds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

Indexes = NDArray[np.uint64]
Samples = NDArray[np.int64]
Stretches = Iterable[tuple[int, int]]
"""(first sample, the one after the last) each, in reading order."""

_ROUNDS = 4


def samples_at(stretches: Stretches, first: int, count: int) -> Samples:
    """The samples at the places first .. first + count - 1 of these stretches end to end.

    Returns:
        Sample numbers [count], fewer where the stretches end before.
    """
    found = [np.empty(0, dtype=np.int64)]
    for start, stop in stretches:
        skipped = min(first, stop - start)
        taken = min(count, stop - start - skipped)
        found.append(np.arange(start + skipped, start + skipped + taken, dtype=np.int64))
        first, count = first - skipped, count - taken
    return np.concatenate(found)


def windows_of(seed: int, samples: Samples, num_windows: int) -> Samples:
    """The windows behind samples, in any order, of a text of so many; `seed` is the run's.

    Returns:
        Window indexes [len(samples)], each below `num_windows`.
    """
    laps = samples // num_windows
    windows = np.empty(len(samples), dtype=np.int64)
    for lap in np.unique(laps):
        places = (samples[laps == lap] % num_windows).astype(np.uint64)
        windows[laps == lap] = permute(places, num_windows, f"{seed} lap {lap}")
    return windows


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
