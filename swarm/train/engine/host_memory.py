"""Host memory of tensors: allocated exactly, shared with other processes, and counted."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from swarm.errors import ConfigError, CorruptState, StateError
from swarm.experts import Shape
from swarm.train.engine.ranks import COLLECTIVE_S, Disconnected, Ranks


def return_free_memory() -> None:
    """Returns freed memory to the system, even from the middle of the heap.

    glibc keeps freed blocks below 32 MiB. Without this call, memory that one phase of a round has
    freed adds to the peak of the next phase: a model of 83 M parameters took 1.3 to 1.5 times its
    plan. The alternative, to return each block when it is freed (M_MMAP_THRESHOLD), costs a quarter
    to a third of a step's time on a CPU. With other C libraries this function does nothing.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class LiveBytes(TorchDispatchMode):
    """A context that counts the storages which operations of this thread make, and their peak.

    Not counted are memory within a single operation, and memory of other threads, which update
    pieces on the host and need some 8 MB. Source: the idea of torch.distributed._tools.mem_tracker.

    Attributes:
        now: bytes alive.
        peak: the most since the context was entered or since `reset`.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._alive: dict[int, weakref.ref[Any]] = {}
        self.now = self.peak = 0

    def reset(self) -> None:
        """Restarts the search for the peak."""
        self.peak = self.now

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Runs an operation and counts the tensors that it returns."""
        out = func(*args, **(kwargs or {}))
        for each in tree_iter(out):
            if isinstance(each, Tensor):
                self._count(each)
        return out

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if num_bytes == 0 or tensor.is_meta or key in self._alive:
            return
        self.now += num_bytes
        self.peak = max(self.peak, self.now)
        self._alive[key] = weakref.ref(storage, lambda _: self._gone(key, num_bytes))

    def _gone(self, key: int, num_bytes: int) -> None:
        del self._alive[key]
        self.now -= num_bytes


ALIGNMENT = 256
"""Alignment in bytes, at which grouped products and copy engines are fast."""


@dataclass(frozen=True)
class Field:
    """The place of one tensor in a buffer."""

    name: str
    shape: Shape
    dtype: torch.dtype
    offset: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Packing:
    """Named tensors one after the other in one buffer, so that one copy moves them all."""

    fields: tuple[Field, ...]
    num_bytes: int

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Shape, torch.dtype]]) -> Packing:
        """Packs tensors in the order given."""
        fields, offset = [], 0
        for name, shape, dtype in tensors:
            field = Field(name, tuple(shape), dtype, offset)
            fields.append(field)
            offset += -(-field.num_bytes // ALIGNMENT) * ALIGNMENT
        return cls(tuple(fields), offset)

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """The tensors as views of a uint8 buffer of `num_bytes`."""
        views = {}
        for field in self.fields:
            part = buffer[field.offset : field.offset + field.num_bytes]
            views[field.name] = part.view(field.dtype).view(field.shape)
        return views

    def as_type(self, types: Mapping[str, torch.dtype] | torch.dtype) -> Packing:
        """The same tensors in other types."""
        dtype_of = {
            f.name: types if isinstance(types, torch.dtype) else types[f.name] for f in self.fields
        }
        return Packing.of((f.name, f.shape, dtype_of[f.name]) for f in self.fields)


class Arena:
    """A block of host memory of exactly the requested size, optionally pinned or in a file.

    `pin_memory()` of a tensor rounds up to a power of two, which this class avoids. The system may
    drop pages of a file from memory at any time, and reads them again on access.

    Attributes:
        buffer: uint8 [num_bytes].
    """

    def __init__(self, num_bytes: int, *, pinned: bool = False, file: Path | None = None) -> None:
        """Allocates the memory.

        Raises:
            StateError: the file cannot be made.
            MemoryError: the memory cannot be pinned.
        """
        self._unpin: Callable[[], object] = lambda: None
        if file is not None:
            self.buffer = _mapped_file(file, num_bytes)
        elif pinned and num_bytes:
            self.buffer = torch.frombuffer(mmap.mmap(-1, num_bytes), dtype=torch.uint8)
            self._pin()
        else:
            self.buffer = torch.empty(num_bytes, dtype=torch.uint8)

    @classmethod
    def of(cls, buffer: Tensor, *, pinned: bool) -> Arena:
        """An arena of memory that was allocated elsewhere. Raises MemoryError as above."""
        arena = cls(0)
        arena.buffer = buffer
        if pinned and buffer.nbytes:
            arena._pin()
        return arena

    def _pin(self) -> None:
        address, num_bytes = self.buffer.data_ptr(), self.buffer.nbytes
        # Torch's enumeration of errors has no names, so the number is used.
        code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
        if code != 0:
            _take_error()
            raise MemoryError(f"{num_bytes} bytes of host memory cannot be pinned ({code})")
        # Unpins also for an engine that could not be made, since that is never closed.
        unpin = weakref.finalize(self, _unregister, address)
        unpin.atexit = False
        self._unpin = unpin

    def close(self) -> None:
        """Unpins the memory. Call it before the last view is freed."""
        self._unpin()


class HostMemory:
    """Allocates the host memory of an engine, for one process alone.

    `SharedMemory` allocates for several processes, which all make the same calls. All processes see
    each allocated piece, and one of them writes the values.

    Attributes:
        rank: rank of this process among those that share the memory.
        size: number of these processes.
    """

    rank, size = 0, 1

    @property
    def writes(self) -> bool:
        """Whether this process writes the values, apart from updates."""
        return self.rank == 0

    def take(self, num_bytes: int, *, pinned: bool = False, file: Path | None = None) -> Arena:
        """Allocates memory. Raises as `Arena`."""
        return Arena(num_bytes, pinned=pinned, file=file)

    def settle(self, *, failed: bool = False) -> bool:
        """Waits until all processes have made this call; returns whether one of them has failed."""
        return failed

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Makes the other processes wait until the writing process has left this context.

        Raises:
            CorruptState: raised in the other processes if the writing process failed.
        """
        failed = True
        try:
            yield
            failed = False
        finally:
            has_failed = self.settle(failed=failed)
        if has_failed:
            raise CorruptState("the writing process could not load the values")

    def wait_until(self, counts_R: Tensor, least: int) -> None:
        """Waits until every element of this shared memory, one per process, is at least `least`."""


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


def _take_error() -> None:
    """Clears the error of a failed call, which CUDA would raise at the next launch."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device="cuda")


def _mapped_file(file: Path, num_bytes: int) -> Tensor:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.unlink(missing_ok=True)
        if num_bytes == 0:
            return torch.empty(0, dtype=torch.uint8)
        return torch.from_file(str(file), shared=True, size=num_bytes, dtype=torch.uint8)
    except (OSError, RuntimeError) as error:
        raise StateError(f"{file}: cannot hold frozen experts: {error}") from error


POLL_S = 0.0005
"""Interval of polling; short compared with updates of a unit, which take milliseconds."""


class SharedMemory(HostMemory):
    """`HostMemory` of several ranks. All ranks allocate together; new memory has zeros."""

    def __init__(self, ranks: Ranks) -> None:
        """`ranks`: must all be on this machine."""
        self._ranks = ranks
        self.rank, self.size = ranks.rank, ranks.size

    def take(self, num_bytes: int, *, pinned: bool = False, file: Path | None = None) -> Arena:
        """See `HostMemory`.

        Raises:
            MemoryError: no memory is left, or it cannot be pinned.
            ConfigError: the ranks are not on one machine.
            Disconnected: another rank has ended.
        """
        assert file is None, "frozen experts on disk have no common file"
        with self._piece(num_bytes) as (path, is_it):
            found = Arena.of(_mapped(path, num_bytes) if is_it else torch.empty(0), pinned=pinned)
            # The first rank may close the piece once all ranks have opened it.
            if self.settle(failed=not is_it):
                raise ConfigError(
                    "the workers share no memory, but stream from one host copy",
                    hint="leave out --remote-workers, or give --engine resident",
                )
        return found

    def settle(self, *, failed: bool = False) -> bool:
        """See `HostMemory`. Raises Disconnected."""
        return bool(self._ranks.united(torch.tensor([float(failed)], dtype=torch.float64)).item())

    def wait_until(self, counts_R: Tensor, least: int) -> None:
        """See `HostMemory`. Raises Disconnected when a rank is silent."""
        end_s = time.monotonic() + COLLECTIVE_S
        while int(counts_R.min()) < least:
            if time.monotonic() > end_s:
                raise Disconnected(f"updates of other ranks are missing: {counts_R.tolist()}")
            time.sleep(POLL_S)

    @contextlib.contextmanager
    def _piece(self, num_bytes: int) -> Iterator[tuple[str, bool]]:
        """Yields the path of a new piece, open in the block, and whether it exists here."""
        token, descriptor = secrets.randbits(48), -1
        try:
            if self.rank == 0:
                descriptor = _made(token, num_bytes)
            mine = [os.getpid(), descriptor, token] if self.rank == 0 else [0, 0, 0]
            # fp64 carries whole numbers below 2^53 exactly.
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
    """Whether a path is the piece of the first rank, not a file of another machine."""
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
