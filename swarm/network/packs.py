"""Where the bytes of blobs lie: append-only pack files, each with an index written on demand.

`packs/NNNNNNNN.pack` is contents end to end. `packs/NNNNNNNN.index` is two lines: the BLAKE3 of the
second, and the second, a JSON list of [digest, offset, bytes]. A pack without a valid index holds
nothing.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from swarm import durable
from swarm.errors import CorruptState, StateError
from swarm.network.patience import MENDED_BY

logger = logging.getLogger(__name__)

READ_BYTES = 2**30
"""Asked of the system at once; Linux gives at most 2 GiB less a page."""
WRITEBACK_BYTES = 16 * 2**20
"""After so much has been written the disk begins with it."""
_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
"""Linux alone has it, and Python does not offer it."""
if _sync_file_range:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)

Placed = tuple[str, int, int]
"""Digest, offset in the pack, size in bytes."""


class Pack(Protocol):
    """Room for blobs. The store serialises `allocate`; the rest may run in several threads.

    Attributes:
        num_bytes: allocated so far.
        num_writers: allocations that are still being filled; kept by the store.
        is_doubtful: writing contents back failed once. The system reports that to one caller and
            then takes the pages for clean, so what is not durable has to be written elsewhere.
    """

    num_bytes: int
    num_writers: int
    is_doubtful: bool

    def allocate(self, num_bytes: int) -> int:
        """Reserves room and returns its offset."""

    def release(self, offset: int, num_bytes: int) -> None:
        """Takes an allocation back that nobody uses; serialised with `allocate`."""

    def write(self, offset: int, start: int, data: memoryview) -> None:
        """Writes into an allocation, `start` bytes after its beginning."""

    def read(self, offset: int, start: int, length: int) -> memoryview:
        """Reads from an allocation, read-only; CorruptState if the bytes are not there."""

    def make_durable(self, placed: Iterable[Placed]) -> None:
        """After this returns, these blobs survive kill -9 and loss of power."""

    def delete(self) -> None:
        """Gives the room back; reads that run now still succeed."""


class MemoryPack:
    """A pack that is gone when the process is."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_writers = 0
        self.is_doubtful = False
        self._contents: dict[int, bytearray] = {}

    def allocate(self, num_bytes: int) -> int:
        """See `Pack`."""
        offset = self.num_bytes
        self._contents[offset] = bytearray(num_bytes)
        # Empty blobs take room too, else two allocations would share an offset.
        self.num_bytes += max(num_bytes, 1)
        return offset

    def release(self, offset: int, num_bytes: int) -> None:
        """See `Pack`; the offset is used again only if it is the last."""
        del self._contents[offset]
        if offset + max(num_bytes, 1) == self.num_bytes:
            self.num_bytes = offset

    def write(self, offset: int, start: int, data: memoryview) -> None:
        """See `Pack`."""
        memoryview(self._contents[offset])[start : start + len(data)] = data

    def read(self, offset: int, start: int, length: int) -> memoryview:
        """See `Pack`; a view, for what is complete is never written again."""
        return memoryview(self._contents[offset])[start : start + length].toreadonly()

    def make_durable(self, placed: Iterable[Placed]) -> None:
        """Nothing to do: memory is as durable as it gets."""

    def delete(self) -> None:
        """Nothing to do: the last reader frees it."""


class FilePack:
    """A pack file, opened for as long as anybody refers to it."""

    def __init__(self, path: Path, *, create: bool) -> None:
        self.path = path
        self.num_writers = 0
        self.is_doubtful = False
        self._unwritten_bytes = 0
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        self._descriptor = os.open(path, flags, 0o600)
        self.num_bytes = os.fstat(self._descriptor).st_size

    def fileno(self) -> int:
        """The file's descriptor, for as long as this object lives."""
        return self._descriptor

    def __del__(self) -> None:
        # Readers hold the pack while they read, so its descriptor is never one of another file.
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def allocate(self, num_bytes: int) -> int:
        """See `Pack`."""
        offset = self.num_bytes
        self.num_bytes += num_bytes
        return offset

    def release(self, offset: int, num_bytes: int) -> None:
        """See `Pack`; only the room at the end comes back at once, the rest is garbage."""
        if offset + num_bytes != self.num_bytes:
            return
        try:
            os.ftruncate(self._descriptor, offset)
        except OSError as error:
            logger.warning("%s keeps its garbage: %s", self.path, error.strerror)
        else:
            self.num_bytes = offset

    def write(self, offset: int, start: int, data: memoryview) -> None:
        """See `Pack`; StateError when the disk is full."""
        try:
            while data:
                written = os.pwrite(self._descriptor, data, offset + start)
                if not written:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                data, start = data[written:], start + written
                self._unwritten_bytes += written
            if self._unwritten_bytes >= WRITEBACK_BYTES:
                self._unwritten_bytes = 0
                _begin_writeback(self._descriptor)
        except OSError as error:
            raise _state_error(self.path, error) from error

    def read(self, offset: int, start: int, length: int) -> memoryview:
        """See `Pack`; into one buffer, however many calls the system needs for it."""
        content = memoryview(bytearray(length))
        position = 0
        try:
            while position < length:
                part = content[position : position + READ_BYTES]
                num_read = os.preadv(self._descriptor, [part], offset + start + position)
                if not num_read:
                    raise CorruptState(f"{self.path} ends before byte {offset + start + length}")
                position += num_read
        except OSError as error:
            raise _state_error(self.path, error) from error
        return content.toreadonly()

    def make_durable(self, placed: Iterable[Placed]) -> None:
        """Contents first, then an index beside, then its new name: a crash leaves old or new."""
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            self.is_doubtful = True
            raise _state_error(self.path, error) from error
        try:
            durable.write_file(index_path(self.path), _index_bytes(placed))
        except OSError as error:
            raise _state_error(self.path, error) from error

    def delete(self) -> None:
        """The index first: contents without an index hold nothing."""
        try:
            index_path(self.path).unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise _state_error(self.path, error) from error


def _begin_writeback(descriptor: int) -> None:
    """Lets the disk begin, so that `make_durable` has little to wait for; only a hint.

    112 MB that arrive over half a second: fdatasync takes 6 to 20 ms after it instead of 40 to 60
    (measured). A failure shows in fdatasync.
    """
    if _sync_file_range:
        _sync_file_range(descriptor, 0, 0, _SYNC_FILE_RANGE_WRITE)


def index_path(pack: Path) -> Path:
    """Where the index of a pack file lies."""
    return pack.with_suffix(".index")


def _index_bytes(placed: Iterable[Placed]) -> bytes:
    content = json.dumps(sorted(placed), separators=(",", ":")).encode()
    return blake3(content).hexdigest().encode() + b"\n" + content


def read_index(path: Path) -> list[Placed]:
    """The blobs that an index file lists.

    Raises:
        CorruptState: the file is torn or was changed.
    """
    try:
        checksum, _, content = path.read_bytes().partition(b"\n")
    except OSError as error:
        raise _state_error(path, error) from error
    if blake3(content).hexdigest().encode() != checksum:
        raise CorruptState(f"{path} is torn or was changed")
    return [(digest, offset, num_bytes) for digest, offset, num_bytes in json.loads(content)]


def _state_error(path: Path, error: OSError) -> StateError:
    return StateError(f"{path}: {error.strerror}", hint=MENDED_BY.get(error.errno or 0, ""))
