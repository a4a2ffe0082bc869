"""Batches of the samples that a peer reads in a round.

A batch is a function of the run's seed, of the peer's deal, of the local step and of the
corpus. Legend: B sequences, T tokens that a sequence predicts.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, Self

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from swarm.background import END_S, Helpers
from swarm.config import RunConfig
from swarm.data.shards import Shards
from swarm.errors import DataError

Indexes = NDArray[np.uint64]
Samples = NDArray[np.int64]
Stretches = Iterable[tuple[int, int]]
"""Pairs (first sample, sample after the last), in reading order."""

_ROUNDS = 4


def samples_at(stretches: Stretches, first: int, count: int) -> Samples:
    """The samples at the positions first .. first + count - 1 of the joined stretches.

    Returns:
        Sample numbers [count], fewer if the stretches end before.
    """
    found = [np.empty(0, dtype=np.int64)]
    for start, stop in stretches:
        skipped = min(first, stop - start)
        taken = min(count, stop - start - skipped)
        found.append(np.arange(start + skipped, start + skipped + taken, dtype=np.int64))
        first, count = first - skipped, count - taken
    return np.concatenate(found)


def windows_of(seed: int, samples: Samples, num_windows: int) -> Samples:
    """The windows of samples, in any order, in a text of `num_windows`. `seed` is the run's.

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
    """Some values of a keyed pseudo-random permutation of range(size).

    It is a Feistel network on the next power of four. A value outside of the range goes through the
    network again until it is inside, at most four times on average.
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
    """Scrambles 64-bit values. Source: the finalizer of splitmix64 (S. Vigna, public domain)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Indexes = values ^ (values >> np.uint64(31))
    return mixed


_READ_DEADLINE_S = 120.0
"""Deadline of a batch of a few hundred small reads. A disk that needs longer is broken."""

Dealt = tuple[tuple[int, int], ...]
Wanted = tuple[Dealt, int, int]


class Loader:
    """Reads samples of one text by their numbers, with the next batch read ahead in a thread.

    `data.mode` only decides which text the caller gives: the common text, or the peer's own. Use it
    as a context manager, or call `close`.
    """

    def __init__(
        self,
        shards: Shards,
        run: RunConfig,
        *,
        agreed_windows: int | None = None,
        end_of_text: int | None = None,
        pin_memory: bool = False,
    ) -> None:
        """Prepares for reading, but reads nothing yet.

        Args:
            shards: the text.
            run: gives seed, sequence length and the largest batch of any phase.
            agreed_windows: the number of windows of the run's text. None if it is not agreed.
            end_of_text: the id that closes a document.
            pin_memory: whether batches are in page-locked memory, for copies to a GPU.

        Raises:
            DataError: the text has less than one batch, or another number of windows than the run's
                text.
        """
        self._seed, self.end_of_text = run.run.seed, end_of_text
        self._pin_memory = pin_memory
        self._length = run.data.sequence_length
        self._arrays = shards.arrays
        counts = shards.windows(self._length)
        self._first_windows = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.num_windows = int(self._first_windows[-1])
        """Windows of T + 1 tokens in the text: the samples of one lap."""
        if agreed_windows not in (None, self.num_windows):
            raise DataError(
                f"the text here has {self.num_windows} sequences of {self._length} tokens, the "
                f"run's has {agreed_windows}",
                hint="every peer of a run reads the same text: name the founder's (--corpus)",
            )
        require_a_batch(shards, run)
        self._reader = Helpers("loader", 1)
        self._ahead: Wanted | None = None
        self._future: Future[torch.Tensor] | None = None

    def batch(self, dealt: Dealt, local_step: int, batch_tokens: int) -> torch.Tensor:
        """The batch of a local step, int64 [batch_tokens / T, T + 1]. Reads the next batch ahead.

        Args:
            dealt: the samples of the round, as stretches in reading order.
            local_step: number of earlier steps on this deal.
            batch_tokens: a multiple of T.

        Raises:
            DataError: the deal has no such batch, or the disk did not answer.
            OSError: reading failed, here or in the reading thread.
        """
        wanted = (dealt, local_step, batch_tokens)
        if self._future is None or self._ahead != wanted:
            self._read_ahead(wanted)
        assert self._future is not None
        future, self._future = self._future, None
        try:
            batch_BT1 = future.result(timeout=_READ_DEADLINE_S)
        except TimeoutError as error:
            raise DataError(f"no batch within {_READ_DEADLINE_S:.0f} s of reading") from error
        if (local_step + 2) * batch_tokens <= _num_samples(dealt) * self._length:
            self._read_ahead((dealt, local_step + 1, batch_tokens))
        return batch_BT1

    def read(self, dealt: Dealt, local_step: int, batch_tokens: int) -> torch.Tensor:
        """Like `batch`, but without a thread that reads ahead."""
        rows, rest = divmod(batch_tokens, self._length)
        assert not rest and rows, (batch_tokens, self._length)
        samples = samples_at(dealt, local_step * rows, rows)
        if len(samples) < rows:
            raise DataError(
                f"local step {local_step} of {rows} sequences is beyond the {_num_samples(dealt)} "
                "sequences that this peer was dealt"
            )
        windows = windows_of(self._seed, samples, self.num_windows)
        batch_BT1 = torch.from_numpy(np.stack([self._window(int(window)) for window in windows]))
        return batch_BT1.pin_memory() if self._pin_memory else batch_BT1

    def close(self) -> None:
        """Stops the thread. A thread that a disk blocks is logged and abandoned."""
        self._reader.end(END_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_ahead(self, wanted: Wanted) -> None:
        self._ahead = wanted
        self._future = self._reader.submit(self.read, *wanted)

    def _window(self, window: int) -> NDArray[np.int64]:
        shard = int(np.searchsorted(self._first_windows, window, side="right")) - 1
        start = (window - int(self._first_windows[shard])) * self._length
        return self._arrays[shard][start : start + self._length + 1].astype(np.int64)


def _num_samples(dealt: Dealt) -> int:
    return sum(stop - start for start, stop in dealt)


def require_a_batch(shards: Shards, run: RunConfig) -> None:
    """Refuses a corpus with fewer sequences than the largest batch of a run.

    Raises:
        DataError: the corpus is too small.
    """
    batches = [run.train.batch_tokens, *(phase.batch_tokens for phase in run.phases)]
    rows_per_step = max(batches) // run.data.sequence_length
    num_windows = sum(shards.windows(run.data.sequence_length))
    if num_windows < rows_per_step:
        raise DataError(
            f"the corpus of {shards.num_tokens} tokens holds {num_windows} sequences of "
            f"{run.data.sequence_length}, less than one batch of {rows_per_step}",
            hint="add text, or choose smaller batches or sequences",
        )
