"""Safetensors files that are hashed during writing, and read by their header.

A private state may have several such files: one of the peer itself, and one of each worker process,
called a part.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, TypeVar

import torch
from blake3 import blake3
from torch import Tensor

from swarm import durable
from swarm.background import Helpers
from swarm.errors import CorruptState
from swarm.train.engine import tensor_file

LENGTH_BYTES = 8
DIGEST_BYTES = 32
CHUNKS_AHEAD = 4
"""Most chunks that are hashed but not yet written; they are the memory that saving needs."""
HASHED_BYTES = 64 * 2**20
"""Bytes that are read and hashed at a time, enough to use all cores."""
FLUSH_BYTES = 256 * 2**20
"""Bytes that are written between two flushes to disk, so that the last fsync is short."""
STALLED_S = 120.0
"""A disk that takes longer for `FLUSH_BYTES` counts as broken."""
LOOK_S = 1.0
END_S = 10.0
"""Longest wait for the threads of a file that is given up."""
Result = TypeVar("Result")
_DTYPES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.int8: "I8",
    torch.uint8: "U8",
}


@dataclass(frozen=True)
class Written:
    """A file that is whole and durable.

    Attributes:
        num_bytes: size of the file.
        digest: BLAKE3 of its content, without a seal.
    """

    num_bytes: int
    digest: bytes


class HashedFile:
    """Writes tensors into a file: one thread hashes them, another thread writes.

    The tensors must not change until `finish` or `give_up` has returned. After that this object
    refers to no tensor, so that an engine that changes its experts does not keep old values in
    memory.
    """

    def __init__(self, path: Path, groups: Callable[[], Sequence[Mapping[str, Tensor]]]) -> None:
        """Begins to write.

        Args:
            path: path of the file. An older file is replaced.
            groups: called by the hashing thread. It returns the tensors in the order of the file.
        """
        self._path = path
        self._digest = blake3(max_threads=blake3.AUTO)
        self._chunks = SimpleQueue[bytes | memoryview | None]()
        self._room = threading.Semaphore(CHUNKS_AHEAD)
        self._given_up = False
        self._in_disk_since_s: float | None = None
        """When the writing thread began its present wait for the disk; None if it does not wait."""
        self._pool = Helpers("swarm-private", 2)
        self._written: Future[BinaryIO] | None = self._pool.submit(self._write)
        self._hashed: Future[None] | None = self._pool.submit(self._hash, groups)

    def finish(self, trailer: Callable[[], Iterable[bytes]] = tuple, *, seal: bool) -> Written:
        """Waits until the file is written and durable. May be called once.

        Args:
            trailer: called after the tensors are hashed. It returns the bytes after the tensors.
            seal: whether the digest of everything before is written at the end.

        Raises:
            OSError: the disk refused, now or while the tensors were written, or has not answered
                for `STALLED_S`.
            Exception: an error of `groups` or of a tensor's look-up.
        """
        self._once_done(self._hashed)
        with self._once_done(self._written) as file:
            for chunk in trailer():
                self._digest.update(chunk)
                file.write(chunk)
            digest = self._digest.digest()
            if seal:
                file.write(digest)
            file.flush()
            os.fsync(file.fileno())
            return Written(file.tell(), digest)

    def give_up(self) -> None:
        """Stops writing, and waits until it has stopped. Harmless after `finish`.

        A thread that hangs in a disk call is logged and abandoned. Such a thread may still write
        into its open file, so the caller removes this file instead of reusing it.
        """
        self._given_up = True
        self._room.release()  # for the hashing thread
        self._pool.end(END_S, cancels=False)
        if self._written is not None:
            self._written.add_done_callback(_close)
        # The tracebacks of the threads' errors hold tensors.
        self._written = self._hashed = None

    def _once_done(self, future: Future[Result] | None) -> Result:
        """The result of a thread, unless the disk has not answered for `STALLED_S`."""
        assert future is not None, "it was given up"
        try:
            while not wait([future], LOOK_S).done:
                began_s = self._in_disk_since_s
                if began_s is not None and time.monotonic() - began_s > STALLED_S:
                    text = f"the disk has not answered for {STALLED_S:.0f} s"
                    raise OSError(errno.ETIMEDOUT, text)
            return future.result()
        finally:
            del future  # its error refers to this frame

    def _hash(self, groups: Callable[[], Sequence[Mapping[str, Tensor]]]) -> None:
        try:
            for chunk in encoded(*groups()):
                if self._given_up:
                    return
                self._digest.update(chunk)
                self._room.acquire()
                self._chunks.put(chunk)
        finally:
            self._chunks.put(None)

    def _write(self) -> BinaryIO:
        try:
            self._in_disk_since_s = time.monotonic()
            durable.make_folder(self._path.parent)
            file = self._path.open("wb")
            self._in_disk_since_s = None
            try:
                self._write_chunks(file)
            except BaseException:
                _emptied(file)
                raise
            return file
        finally:
            self._given_up = True  # nobody takes chunks any more
            self._room.release()

    def _write_chunks(self, file: BinaryIO) -> None:
        unflushed = 0
        while (chunk := self._chunks.get()) is not None:
            self._room.release()
            self._in_disk_since_s = time.monotonic()
            unflushed += file.write(chunk)
            if unflushed >= FLUSH_BYTES:
                os.fdatasync(file.fileno())
                unflushed = 0
            self._in_disk_since_s = None


def _close(written: Future[BinaryIO]) -> None:
    """Closes the file after its last write."""
    if written.exception() is None:
        written.result().close()


def _emptied(file: BinaryIO) -> None:
    """Frees a file's disk space for waiting writers. Another file may have its name by now."""
    descriptor = os.dup(file.fileno())
    try:
        with contextlib.suppress(OSError):
            file.close()
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def encoded(*groups: Mapping[str, Tensor]) -> Iterator[bytes | memoryview]:
    """A safetensors file in pieces of at most a few MB.

    Args:
        groups: tensors by name, written group by group, and by name within each.
    """
    header: dict[str, Any] = {}
    offset = 0
    for tensors in groups:
        for name, (dtype, shape) in sorted(tensor_file.forms_of(tensors).items()):
            stop = offset + math.prod(shape) * dtype.itemsize
            header[name] = {
                "dtype": _DTYPES[dtype],
                "shape": list(shape),
                "data_offsets": [offset, stop],
            }
            offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(LENGTH_BYTES, "little") + text
    for tensors in groups:
        for name in sorted(tensors):
            yield from tensor_file.bytes_of(tensors[name])


def places_in(file: tensor_file.OpenFile) -> dict[str, tensor_file.Place]:
    """The places of the tensors of a file that `encoded` has made, by name.

    Raises:
        OSError: the disk failed.
    """
    length = int.from_bytes(os.pread(file.descriptor, LENGTH_BYTES, 0), "little")
    header = json.loads(os.pread(file.descriptor, length, LENGTH_BYTES))
    return {name: _place(LENGTH_BYTES + length, entry) for name, entry in header.items()}


def digest_of(file: tensor_file.OpenFile, num_bytes: int) -> bytes:
    """BLAKE3 of the first bytes of a file. Raises OSError."""
    digest = blake3(max_threads=blake3.AUTO)
    for start in range(0, num_bytes, HASHED_BYTES):
        digest.update(os.pread(file.descriptor, min(HASHED_BYTES, num_bytes - start), start))
    return digest.digest()


def _place(start: int, entry: Mapping[str, Any]) -> tensor_file.Place:
    dtype = next(dtype for dtype, name in _DTYPES.items() if name == entry["dtype"])
    return tensor_file.Place(start + entry["data_offsets"][0], dtype, tuple(entry["shape"]))


PREVIOUS = ".previous"
"""Suffix of the name of the previous state."""


class UnreadableState(CorruptState):
    """A file that may be intact, but cannot be read now or by this version.

    The caller treats it as damaged for now. The file is kept for a later start.
    """


@dataclass(frozen=True)
class Part:
    """A safetensors file, whole and durable.

    Attributes:
        name: name of the file in the folder of parts.
        num_bytes: size of the file.
        digest: BLAKE3 of it, in hex.
    """

    name: str
    num_bytes: int
    digest: str


class Parts(ABC):
    """Parts that are being written.

    Attributes:
        rest: the tensors that are in no part.
    """

    rest: Mapping[str, Tensor]

    @abstractmethod
    def finish(self) -> Sequence[Part]:
        """Waits until all parts are whole and durable.

        Raises:
            OSError: the disk refused.
            SwarmError: the writing processes have failed.
        """


class PartedTensors(tensor_file.LazyTensors):
    """Tensors of other processes, which can write them to files themselves."""

    @abstractmethod
    def begin_parts(self, folder: Path, stem: str) -> Parts:
        """Starts the writing of parts. The tensors must not change until it has finished.

        Args:
            folder: the existing folder of the parts.
            stem: the beginning of their names, and of no others.

        Raises:
            SwarmError: the processes cannot write.
        """


def folder_of(path: Path) -> Path:
    """The folder of the parts of the state at `path`, and of the previous state."""
    return path.with_name(f"{path.name.removesuffix(PREVIOUS)}.parts")


def new_stem() -> str:
    """A new beginning of names, which no other parts have."""
    return secrets.token_hex(8)


def open_part(folder: Path, part: Part) -> tensor_file.TensorFile:
    """The tensors of a part, after a check of its digest.

    Raises:
        CorruptState: the file is missing, torn or changed.
        UnreadableState: it cannot be read now.
    """
    path = folder / part.name
    try:
        file = tensor_file.OpenFile.at(path)
        size = os.fstat(file.descriptor).st_size
        if size != part.num_bytes or digest_of(file, size).hex() != part.digest:
            raise CorruptState(f"{path}: the content has changed ({size} bytes)")
        return tensor_file.TensorFile(file, places_in(file))
    except OSError as error:
        kind = CorruptState if isinstance(error, FileNotFoundError) else UnreadableState
        raise kind(f"{path}: cannot be read: {error}") from error


def drop_parts(folder: Path, named: Iterable[Part]) -> None:
    """Removes all files of a folder except the named parts. Raises OSError."""
    kept = {part.name for part in named}
    if folder.is_dir():
        for path in folder.iterdir():
            if path.name not in kept:
                path.unlink(missing_ok=True)
