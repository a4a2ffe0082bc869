"""The bytes of blobs: append-only pack files, each with an index.

`PackSet` places blobs in packs, makes them durable, and rewrites packs with dropped blobs.
"""

from __future__ import annotations

import ctypes
import errno
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from blake3 import blake3

from swarm import durable
from swarm.errors import CorruptState, MissingBlobs, StateError
from swarm.network.blobs.disk_retry import MENDED_BY
from swarm.protocol.values.digests import PIECE_BYTES, digest_of_index

logger = logging.getLogger(__name__)

READ_BYTES = 2**30
"""Most bytes of one read call; Linux returns at most 2 GiB minus a page."""
WRITEBACK_BYTES = 16 * 2**20
"""Written bytes after which the system is asked to start writing them to the disk."""
_SYNC_FILE_RANGE_WRITE = 2
_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
"""The C function; only Linux has it, and Python has no interface to it."""
if _sync_file_range:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)

Placed = tuple[str, int, int]
"""Digest, offset in the pack, size in bytes."""


class Pack(Protocol):
    """Room for blobs. The store serializes `allocate`; other methods may run in several threads.

    Attributes:
        num_bytes: bytes allocated so far.
        num_writers: allocations that are still being filled; counted by the store.
        is_doubtful: writing to the disk has failed once. The system reports this to one caller,
            then treats the pages as clean. So contents that are not durable yet must be written
            elsewhere.
    """

    num_bytes: int
    num_writers: int
    is_doubtful: bool

    def allocate(self, num_bytes: int) -> int:
        """Reserves room and returns its offset."""

    def release(self, offset: int, num_bytes: int) -> None:
        """Takes back an unused allocation; the store serializes this with `allocate`."""

    def write(self, offset: int, start: int, data: memoryview) -> None:
        """Writes into an allocation, `start` bytes after its beginning."""

    def read(self, offset: int, start: int, length: int) -> memoryview:
        """Reads from an allocation, read-only; CorruptState if the bytes are missing."""

    def make_durable(self, placed: Iterable[Placed]) -> None:
        """Makes these blobs durable: after the call they survive kill -9 and loss of power."""

    def delete(self) -> None:
        """Releases the room; reads that are running still succeed."""


class MemoryPack:
    """A pack in memory, which ends with its process."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.num_writers = 0
        self.is_doubtful = False
        self._contents: dict[int, bytearray] = {}

    def allocate(self, num_bytes: int) -> int:
        """See `Pack`."""
        offset = self.num_bytes
        self._contents[offset] = bytearray(num_bytes)
        # Empty blobs take room too, since otherwise two allocations would share an offset.
        self.num_bytes += max(num_bytes, 1)
        return offset

    def release(self, offset: int, num_bytes: int) -> None:
        """See `Pack`; only the last allocation's offset is used again."""
        del self._contents[offset]
        if offset + max(num_bytes, 1) == self.num_bytes:
            self.num_bytes = offset

    def write(self, offset: int, start: int, data: memoryview) -> None:
        """See `Pack`."""
        memoryview(self._contents[offset])[start : start + len(data)] = data

    def read(self, offset: int, start: int, length: int) -> memoryview:
        """See `Pack`; returns a view, since complete content is never written again."""
        return memoryview(self._contents[offset])[start : start + length].toreadonly()

    def make_durable(self, placed: Iterable[Placed]) -> None:
        """Does nothing, since memory cannot be more durable."""

    def delete(self) -> None:
        """Does nothing; the last reader frees the memory."""


class FilePack:
    """A pack file, open while any object refers to it."""

    def __init__(self, path: Path, *, create: bool) -> None:
        self.path = path
        self.num_writers = 0
        self.is_doubtful = False
        self._unwritten_bytes = 0
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        self._descriptor = os.open(path, flags, 0o600)
        self.num_bytes = os.fstat(self._descriptor).st_size

    def fileno(self) -> int:
        """The file's descriptor, valid while this object lives."""
        return self._descriptor

    def __del__(self) -> None:
        # Readers hold a reference to the pack, so its descriptor never belongs to another file.
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def allocate(self, num_bytes: int) -> int:
        """See `Pack`."""
        offset = self.num_bytes
        self.num_bytes += num_bytes
        return offset

    def release(self, offset: int, num_bytes: int) -> None:
        """See `Pack`; room at the end is released at once, the rest becomes garbage."""
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
        """See `Pack`; reads into one buffer, in as many calls as the system needs."""
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
        """Syncs contents, then replaces the index: a crash leaves the old or the new one."""
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
        """Deletes the index first, since a pack without an index counts as empty."""
        try:
            index_path(self.path).unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise _state_error(self.path, error) from error


def _begin_writeback(descriptor: int) -> None:
    """Asks the system to start writing to the disk, so that `make_durable` waits less.

    When 112 MB arrive over half a second, fdatasync then takes 6 to 20 ms instead of 40 to 60
    (measured). fdatasync reports a failure.
    """
    if _sync_file_range:
        _sync_file_range(descriptor, 0, 0, _SYNC_FILE_RANGE_WRITE)


def index_path(pack: Path) -> Path:
    """The path of a pack file's index."""
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


PACK_BYTES = 2**30
"""A pack larger than this takes no further blob."""
TURN_S = 0.001
"""Pause after each rewritten pack, in which waiting threads can take a lock, since locks have no
queue."""


@dataclass(frozen=True)
class Place:
    """An allocation in a pack, and whether its content is listed and durable."""

    pack: Pack
    offset: int
    num_bytes: int
    is_durable: bool = False

    def read(self, start: int, length: int) -> memoryview:
        """A part of the content, cut at its end."""
        return self.pack.read(self.offset, start, max(0, min(length, self.num_bytes - start)))

    def index(self, see: Callable[[int, memoryview], None] | None = None) -> bytes:
        """Concatenated digests of the content's pieces; `see` gets start and bytes of each."""
        index = bytearray()
        for start in range(0, self.num_bytes, PIECE_BYTES):
            piece = self.read(start, PIECE_BYTES)
            index += blake3(piece).digest()
            if see:
                see(start, piece)
        return bytes(index)


class _Ended(Exception):
    """The caller no longer wants the copy."""


class PackSet:
    """Packs and places; a place changes only under `lock`, and slow work runs without it.

    An allocation counts as a writer of its pack until its content has a place, or it is abandoned.
    The place is added and the writer removed in one locked section, so a pack without both is
    garbage.

    Attributes:
        lock: held for `allocate`, `settle`, `release`, `abandon` and changes of `places`.
        durability: held to write indexes, move blobs or remove packs; taken before `lock`. Without
            this lock places may be added or removed, but not changed.
        places: places of all stored blobs.
    """

    def __init__(self, folder: Path | None, on_lost: Callable[[str, str], None]) -> None:
        """Opens the packs in `folder`; None keeps blobs in memory only.

        Args:
            folder: folder of the packs.
            on_lost: called with digest and reason for a blob whose bytes proved damaged.

        Raises:
            StateError: the folder cannot be used.
        """
        self.lock = threading.Lock()
        self.durability = threading.Lock()
        self._shrinking = threading.Lock()
        """Held while a pack is rewritten; taken before `durability`."""
        self.places: dict[str, Place] = {}
        self._folder = folder
        self._on_lost = on_lost
        self._packs: list[Pack] = []
        self._open: Pack | None = None
        self._next_number = 0
        if folder:
            self._load(folder)

    def _load(self, folder: Path) -> None:
        try:
            durable.make_folder(folder)
            for path in sorted(folder.iterdir()):
                if path.suffix == ".pack":
                    self._load_pack(path)
                elif path.suffix != ".index" or not path.with_suffix(".pack").exists():
                    path.unlink()
        except OSError as error:
            raise StateError(f"blob folder {folder}: {error.strerror}") from error

    def _load_pack(self, path: Path) -> None:
        self._next_number = max(self._next_number, int(path.stem) + 1)
        try:
            placed = read_index(index_path(path)) if index_path(path).exists() else []
        except CorruptState as error:
            logger.error("%s; its blobs are lost", error)
            placed = []
        if not placed:
            index_path(path).unlink(missing_ok=True)
            path.unlink()
            return
        pack = FilePack(path, create=False)
        self._packs.append(pack)
        for digest, offset, num_bytes in placed:
            if offset + num_bytes <= pack.num_bytes:
                self.places[digest] = Place(pack, offset, num_bytes, is_durable=True)
            else:
                logger.error("%s is too short for blob %s, which is lost", path, digest)

    # ------------------------------------------------ allocations; the caller holds `lock`

    def allocate(self, num_bytes: int) -> Place:
        """Allocates room in the open pack, and counts a further writer of the pack."""
        if self._open is None or self._open.num_bytes >= PACK_BYTES:
            self._open = self._new_pack()
            self._packs.append(self._open)
        place = Place(self._open, self._open.allocate(num_bytes), num_bytes)
        self._open.num_writers += 1
        return place

    def _new_pack(self) -> Pack:
        if self._folder is None:
            return MemoryPack()
        path = self._folder / f"{self._next_number:08d}.pack"
        self._next_number += 1
        try:
            return FilePack(path, create=True)
        except OSError as error:
            raise StateError(f"{path}: {error.strerror}") from error

    def settle(self, digest: str, place: Place) -> None:
        """Makes this the blob's place once its content is written, unless the blob has one."""
        self.places.setdefault(digest, place)
        self.abandon(place)

    def abandon(self, place: Place) -> None:
        """Ends an allocation that is no longer being filled; its room becomes garbage."""
        place.pack.num_writers -= 1

    def release(self, place: Place) -> None:
        """Ends an allocation that no thread reads or writes; its room is released at once."""
        self.abandon(place)
        place.pack.release(place.offset, place.num_bytes)

    # ------------------------------------------------ durability; the caller holds `durability`

    def make_durable(self, wanted: Collection[str]) -> None:
        """Makes blobs durable; raises StateError if the disk fails, or MissingBlobs."""
        new = self._new(wanted)
        doubtful = {d: place for d, place in new.items() if place.pack.is_doubtful}
        if doubtful:
            self._move(doubtful, self._copies(doubtful), doubtful)
            new = self._new(wanted)
        for pack in _packs_of(new.values()):
            listed = {digest: place for digest, place in new.items() if place.pack is pack}
            self._list(pack, listed)
            with self.lock:
                self.places |= {d: replace(p, is_durable=True) for d, p in listed.items()}

    def _new(self, wanted: Collection[str]) -> dict[str, Place]:
        """The blobs that are not durable yet."""
        with self.lock:
            missing = sorted(digest for digest in wanted if digest not in self.places)
            if missing:
                raise MissingBlobs(missing)
            return {d: self.places[d] for d in wanted if not self.places[d].is_durable}

    def _list(self, pack: Pack, new: dict[str, Place]) -> None:
        """Makes a pack durable with an index of earlier and new blobs; closes it."""
        with self.lock:
            if self._open is pack:
                self._open = None
            old = {d: p for d, p in self.places.items() if p.pack is pack and p.is_durable}
        pack.make_durable((d, place.offset, place.num_bytes) for d, place in (old | new).items())

    def drop(self, places: dict[str, Place], why: str) -> None:
        """Drops blobs that are still at these places, from the indexes on disk too."""
        with self.lock:
            dropped = {d: p for d, p in places.items() if self.places.get(d) is p}
            for digest in dropped:
                del self.places[digest]
        for digest in dropped:
            logger.error("blob %s is damaged and was dropped: %s", digest, why)
            self._on_lost(digest, why)
        for pack in _packs_of(place for place in dropped.values() if place.is_durable):
            self._list(pack, {})

    # ------------------------------------------------ room; the caller holds no lock

    def shrink(self, is_ended: Callable[[], bool]) -> None:
        """Deletes packs that are garbage, then rewrites packs that are mostly garbage.

        Packs that become garbage during the call are included. `durability` is held only while the
        copies of one pack are made durable.

        Args:
            is_ended: called with every piece. Once it returns True, packs are not changed.

        Raises:
            StateError: the disk failed for a pack, which does not change. The others are rewritten.
        """
        tried: list[Pack] = []
        failure: StateError | None = None
        while not is_ended():
            if tried:
                time.sleep(TURN_S)
            with self._shrinking:
                pack, placed = self._most_garbage(tried)
                if pack is None:
                    break
                tried.append(pack)
                try:
                    self._shrink(pack, placed, is_ended)
                except StateError as error:
                    failure = failure or error
                except _Ended:
                    break
        if failure:
            raise failure

    def _most_garbage(self, tried: Collection[Pack]) -> tuple[Pack | None, dict[str, Place]]:
        """The least filled pack, and its blobs; None if all are at least half full.

        The pack is closed, and none of its blobs are being made durable, so no blobs are added any
        more.
        """
        with self.durability, self.lock:
            live_bytes: dict[int, int] = {}
            for place in self.places.values():
                number = id(place.pack)
                # An empty blob takes room in memory, so that a pack of empty blobs is not always
                # garbage.
                live_bytes[number] = live_bytes.get(number, 0) + max(place.num_bytes, 1)
            live = {pack: live_bytes.get(id(pack), -1) for pack in self._packs}
            garbage = [
                pack
                for pack in self._packs
                if not pack.num_writers and pack not in tried and 2 * live[pack] < pack.num_bytes
            ]
            if not garbage:
                return None, {}
            pack = min(garbage, key=live.__getitem__)
            if self._open is pack:
                self._open = None
            return pack, {d: place for d, place in self.places.items() if place.pack is pack}

    def _shrink(self, pack: Pack, placed: dict[str, Place], is_ended: Callable[[], bool]) -> None:
        copies = self._copies(placed, is_ended)
        with self.durability:
            with self.lock:  # blobs may have been dropped or made durable
                here = {d: p for d in placed if (p := self.places.get(d)) and p.pack is pack}
            self._move(here, copies, {digest for digest, place in here.items() if place.is_durable})
            if is_ended():  # another process may have opened the folder
                return
            with self.lock:
                self._packs.remove(pack)
            pack.delete()

    def _move(
        self, placed: dict[str, Place], copies: dict[str, Place], durable: Collection[str]
    ) -> None:
        """Moves these blobs to their copies, once durable blobs have durable copies.

        Until then nothing refers to the copies, and the old places are kept. So neither a failure
        nor a crash between any two steps loses a blob.
        """
        try:
            listed = {digest: copy for digest, copy in copies.items() if digest in durable}
            for pack in _packs_of(listed.values()):
                if pack.is_doubtful:
                    hint = MENDED_BY[errno.EIO]
                    raise StateError("copies of blobs may not be on the disk", hint=hint)
                self._list(pack, {d: copy for d, copy in listed.items() if copy.pack is pack})
        except BaseException:
            with self.lock:
                for copy in copies.values():  # an index may list them, so their room is kept
                    self.abandon(copy)
            raise
        with self.lock:
            for digest in placed.keys() & copies.keys():
                if self.places.get(digest) is placed[digest]:
                    self.places[digest] = replace(copies[digest], is_durable=digest in durable)
            for copy in copies.values():
                self.abandon(copy)
        self.drop({d: place for d, place in placed.items() if d not in copies}, "it reads wrongly")

    def _copies(
        self, placed: dict[str, Place], is_ended: Callable[[], bool] = lambda: False
    ) -> dict[str, Place]:
        """Verified copies of these blobs, without damaged ones."""
        copies: dict[str, Place] = {}
        try:
            for digest, place in placed.items():
                copy = self._copy(digest, place, is_ended)
                if copy:
                    copies[digest] = copy
        except BaseException:
            with self.lock:
                for copy in reversed(copies.values()):
                    self.release(copy)
            raise
        return copies

    def _copy(self, digest: str, place: Place, is_ended: Callable[[], bool]) -> Place | None:
        with self.lock:
            copy = self.allocate(place.num_bytes)

        def write(start: int, piece: memoryview) -> None:
            if is_ended():
                raise _Ended
            copy.pack.write(copy.offset, start, piece)

        is_right = False
        try:
            is_right = digest_of_index(place.index(write)) == digest
        except CorruptState as error:
            logger.error("%s", error)
        finally:
            if not is_right:
                with self.lock:
                    self.release(copy)
        return copy if is_right else None

    @property
    def num_bytes(self) -> int:
        """Size of all packs, garbage included."""
        with self.lock:
            return sum(pack.num_bytes for pack in self._packs)


def _packs_of(places: Iterable[Place]) -> list[Pack]:
    """Each pack once, in order of appearance."""
    return list({id(place.pack): place.pack for place in places}.values())
