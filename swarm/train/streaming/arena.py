"""Exact pieces of host memory, and how named tensors lie in them."""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from swarm.errors import CorruptState, StateError
from swarm.experts import Shape

ALIGNMENT = 256
"""Bytes; grouped products and copy engines are fast at such places."""


@dataclass(frozen=True)
class Field:
    """Where one tensor lies in a buffer."""

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
    """A run of host memory that is as large as asked, pinned or backed by a file where wanted.

    `pin_memory()` of a tensor rounds up to a power of two; this does not. A file's pages may
    leave memory whenever the system needs it, and come back when they are read.

    Attributes:
        buffer: uint8 [num_bytes].
    """

    def __init__(self, num_bytes: int, *, pinned: bool = False, file: Path | None = None) -> None:
        """Takes the memory.

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
        """Memory that was taken elsewhere; raises MemoryError as above."""
        arena = cls(0)
        arena.buffer = buffer
        if pinned and buffer.nbytes:
            arena._pin()
        return arena

    def _pin(self) -> None:
        address, num_bytes = self.buffer.data_ptr(), self.buffer.nbytes
        # Torch binds an enumeration that has no name for any error.
        code = int(torch.cuda.cudart().cudaHostRegister(address, num_bytes, 0))
        if code != 0:
            _take_error()
            raise MemoryError(f"{num_bytes} bytes of host memory cannot be pinned ({code})")
        # An engine that could not be made is closed by nobody.
        unpin = weakref.finalize(self, _unregister, address)
        unpin.atexit = False
        self._unpin = unpin

    def close(self) -> None:
        """Unpins the memory; to be called before the last view goes."""
        self._unpin()


class HostMemory:
    """Where an engine takes host memory: that of one process alone.

    `SharedMemory` (`parallel/shared_memory.py`) is that of several, which call everything here
    alike. What one of them takes, all of them have; one of them puts values there.

    Attributes:
        rank: of this process among those that have the memory in common.
        size: number of these.
    """

    rank, size = 0, 1

    @property
    def writes(self) -> bool:
        """Whether this process is the one that puts values there, updates apart."""
        return self.rank == 0

    def take(self, num_bytes: int, *, pinned: bool = False, file: Path | None = None) -> Arena:
        """Takes memory; raises as `Arena`."""
        return Arena(num_bytes, pinned=pinned, file=file)

    def settle(self, *, failed: bool = False) -> bool:
        """Returns once all processes are here, and says whether one of them has failed."""
        return failed

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Lets nobody read what one process writes here before it has done so.

        Raises:
            CorruptState: in the others, if that one could not.
        """
        failed = True
        try:
            yield
            failed = False
        finally:
            has_failed = self.settle(failed=failed)
        if has_failed:
            raise CorruptState("the process that writes values could not take them over")

    def wait_until(self, counts_R: Tensor, least: int) -> None:
        """Returns once each process has counted so far in its element of some of this memory."""


def _unregister(address: int) -> None:
    torch.cuda.cudart().cudaHostUnregister(address)


def _take_error() -> None:
    """Takes the error of a call that has failed, which CUDA keeps for the next launch to raise."""
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
