"""Host memory that several processes of one machine have in common.

A piece of it is a file in memory without a name (so not in /dev/shm, which containers cut to 64
MB). The first rank makes it and says which of its descriptors it is; the others open it where the
system shows the descriptors of a process. All map it, and nobody keeps a descriptor: the memory is
given back when the last one has unmapped it, or has ended in whatever way.

Shapes: R ranks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from swarm.errors import ConfigError
from swarm.train.parallel.ranks import COLLECTIVE_S, Disconnected, Ranks
from swarm.train.streaming.arena import Arena, HostMemory

POLL_S = 0.0005
"""Against updates of a unit, which take milliseconds and more."""


class SharedMemory(HostMemory):
    """As `HostMemory`; what is taken is an operation of all ranks, and holds zeros."""

    def __init__(self, ranks: Ranks) -> None:
        """`ranks`: all on this machine."""
        self._ranks = ranks
        self.rank, self.size = ranks.rank, ranks.size

    def take(self, num_bytes: int, *, pinned: bool = False, file: Path | None = None) -> Arena:
        """See `HostMemory`.

        Raises:
            MemoryError: there is none left, or it cannot be pinned.
            ConfigError: the ranks are not on one machine.
            Disconnected: another rank is gone.
        """
        assert file is None, "frozen experts on disk have no common file"
        with self._piece(num_bytes) as (path, is_it):
            found = Arena.of(_mapped(path, num_bytes) if is_it else torch.empty(0), pinned=pinned)
            # Now all have opened it, and the first rank may close it.
            if self.settle(failed=not is_it):
                raise ConfigError(
                    "the workers have no memory in common: they stream from one host copy",
                    hint="leave out --remote-workers, or give --engine resident",
                )
        return found

    def settle(self, *, failed: bool = False) -> bool:
        """See `HostMemory`; raises Disconnected."""
        return bool(self._ranks.united(torch.tensor([float(failed)], dtype=torch.float64)).item())

    def wait_until(self, counts_R: Tensor, least: int) -> None:
        """See `HostMemory`; raises Disconnected when a rank is silent."""
        end_s = time.monotonic() + COLLECTIVE_S
        while int(counts_R.min()) < least:
            if time.monotonic() > end_s:
                raise Disconnected(f"updates of other ranks are missing: {counts_R.tolist()}")
            time.sleep(POLL_S)

    @contextlib.contextmanager
    def _piece(self, num_bytes: int) -> Iterator[tuple[str, bool]]:
        """Where a new piece can be opened meanwhile, and whether it is there for this process."""
        token, descriptor = secrets.randbits(48), -1
        try:
            if self.rank == 0:
                descriptor = _made(token, num_bytes)
            mine = [os.getpid(), descriptor, token] if self.rank == 0 else [0, 0, 0]
            # Whole numbers below 2^53 come through.
            told = self._ranks.united(torch.tensor(mine, dtype=torch.float64))
            pid, number, token = map(int, told.tolist())
            path = f"/proc/{pid}/fd/{number}"
            yield path, _is_piece(path, token)
        finally:
            if descriptor >= 0:
                os.close(descriptor)


def _made(token: int, num_bytes: int) -> int:
    """The descriptor of a new piece."""
    try:
        descriptor = os.memfd_create(_name(token))
    except OSError as error:
        raise MemoryError(f"no memory that processes share: {error.strerror}") from error
    try:
        os.ftruncate(descriptor, num_bytes)
    except OSError as error:
        os.close(descriptor)
        raise MemoryError(f"{num_bytes} bytes of shared memory: {error.strerror}") from error
    return descriptor


def _name(token: int) -> str:
    return f"swarm-{token:012x}"


def _is_piece(path: str, token: int) -> bool:
    """Whether a path leads to what the first rank has made, and to nothing of another machine."""
    try:
        return _name(token) in os.readlink(path)
    except OSError:
        return False


def _mapped(path: str, num_bytes: int) -> Tensor:
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    try:
        return torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise MemoryError(f"{num_bytes} bytes of shared memory: {error}") from error
