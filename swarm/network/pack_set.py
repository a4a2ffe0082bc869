"""All packs of a store, and where each blob lies in them: placing, making durable, rewriting."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from blake3 import blake3

from swarm import durable
from swarm.errors import CorruptState, MissingBlobs, StateError
from swarm.network.packs import (
    FilePack,
    MemoryPack,
    Pack,
    index_path,
    read_index,
)
from swarm.protocol.digests import PIECE_BYTES, digest_of_index

logger = logging.getLogger(__name__)

PACK_BYTES = 2**30
"""A pack that has grown beyond this takes no further blob."""


@dataclass(frozen=True)
class Place:
    """An allocation in a pack, and whether what was written there is listed and durable."""

    pack: Pack
    offset: int
    num_bytes: int
    is_durable: bool = False

    def read(self, start: int, length: int) -> memoryview:
        """A part of it, cut at its end."""
        return self.pack.read(self.offset, start, max(0, min(length, self.num_bytes - start)))

    def index(self, see: Callable[[int, memoryview], None] | None = None) -> bytes:
        """Concatenated digests of the pieces that are read there; `see` gets start and piece."""
        index = bytearray()
        for start in range(0, self.num_bytes, PIECE_BYTES):
            piece = self.read(start, PIECE_BYTES)
            index += blake3(piece).digest()
            if see:
                see(start, piece)
        return bytes(index)


class PackSet:
    """Packs and places; changes of a place take `lock`, and slow work runs outside of it.

    An allocation counts as a writer of its pack until the same section that gives its content a
    place, or abandons it, counts it off: so a pack without writers and places is garbage.

    Attributes:
        lock: held for `allocate`, `settle`, `release`, `abandon` and changes of `places`.
        durability: held by whoever writes indexes, moves blobs or removes packs; taken before
            `lock`. Without it no place but a new one may change.
        places: of all blobs that are here.
    """

    def __init__(self, folder: Path | None, on_lost: Callable[[str, str], None]) -> None:
        """Opens the packs in `folder`; None: in memory only.

        Args:
            folder: of the packs.
            on_lost: called with digest and reason for a blob whose bytes turned out damaged.

        Raises:
            StateError: the folder cannot be used.
        """
        self.lock = threading.Lock()
        self.durability = threading.Lock()
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
        """Room in the open pack, which counts one writer more."""
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
        """Makes what was written there this blob, unless it has a place already."""
        self.places.setdefault(digest, place)
        self.abandon(place)

    def abandon(self, place: Place) -> None:
        """Nobody fills this allocation any more; places that nothing refers to are garbage."""
        place.pack.num_writers -= 1

    def release(self, place: Place) -> None:
        """The same for room that nobody writes to or reads from even now: it comes back at once."""
        self.abandon(place)
        place.pack.release(place.offset, place.num_bytes)

    # ------------------------------------------------ durability; the caller holds `durability`

    def make_durable(self, wanted: Collection[str]) -> None:
        """Makes blobs durable; StateError if the disk failed, MissingBlobs if some are not here."""
        doubtful = {d: p for d, p in self._new(wanted).items() if p.pack.is_doubtful}
        if doubtful:
            self._move(doubtful, doubtful)
        new = self._new(wanted)
        for pack in _packs_of(new.values()):
            listed = {digest: place for digest, place in new.items() if place.pack is pack}
            self._list(pack, listed)
            with self.lock:
                self.places |= {d: replace(p, is_durable=True) for d, p in listed.items()}

    def _new(self, wanted: Collection[str]) -> dict[str, Place]:
        """Those of these blobs that are not durable yet."""
        with self.lock:
            missing = sorted(digest for digest in wanted if digest not in self.places)
            if missing:
                raise MissingBlobs(missing)
            return {d: self.places[d] for d in wanted if not self.places[d].is_durable}

    def _list(self, pack: Pack, new: dict[str, Place]) -> None:
        """Makes a pack durable with an index of what was listed before and these; closes it."""
        with self.lock:
            if self._open is pack:
                self._open = None
            old = {d: p for d, p in self.places.items() if p.pack is pack and p.is_durable}
        pack.make_durable((d, place.offset, place.num_bytes) for d, place in (old | new).items())

    def drop(self, places: dict[str, Place], why: str) -> None:
        """Drops blobs that still lie at these places, also from the indexes on disk."""
        with self.lock:
            dropped = {d: p for d, p in places.items() if self.places.get(d) is p}
            for digest in dropped:
                del self.places[digest]
        for digest in dropped:
            logger.error("blob %s is damaged and was dropped: %s", digest, why)
            self._on_lost(digest, why)
        for pack in _packs_of(place for place in dropped.values() if place.is_durable):
            self._list(pack, {})

    def shrink(self) -> None:
        """Deletes packs that are garbage, then rewrites those that are mostly garbage.

        Raises:
            StateError: the disk failed for one of them, which is as it was; the others are done.
        """
        with self.lock:
            full = {id(place.pack) for place in self.places.values()}
            packs = sorted(self._packs, key=lambda pack: id(pack) in full)
        failure: StateError | None = None
        for pack in packs:
            try:
                self._shrink(pack)
            except StateError as error:
                failure = failure or error
        if failure:
            raise failure

    def _shrink(self, pack: Pack) -> None:
        with self.lock:
            placed = {d: place for d, place in self.places.items() if place.pack is pack}
            live_bytes = sum(place.num_bytes for place in placed.values())
            if pack.num_writers or (placed and 2 * live_bytes >= pack.num_bytes):
                return
            if self._open is pack:
                self._open = None
        self._move(placed, {digest for digest, place in placed.items() if place.is_durable})
        with self.lock:
            self._packs.remove(pack)
        pack.delete()

    def _move(self, placed: dict[str, Place], durable: Collection[str]) -> None:
        """Copies blobs into other packs, where they lie once those to be durable are.

        Until then nothing refers to the copies and the old places stay as they are, so that
        neither a failure nor a crash between any two steps costs a blob.
        """
        copies = self._copies(placed)
        try:
            listed = {digest: copy for digest, copy in copies.items() if digest in durable}
            for pack in _packs_of(listed.values()):
                self._list(pack, {d: copy for d, copy in listed.items() if copy.pack is pack})
        except BaseException:
            with self.lock:
                for copy in copies.values():  # an index may list them, so their room stays
                    self.abandon(copy)
            raise
        with self.lock:
            for digest, copy in copies.items():
                self.places[digest] = replace(copy, is_durable=digest in durable)
                self.abandon(copy)
        self.drop({d: place for d, place in placed.items() if d not in copies}, "it reads wrongly")

    def _copies(self, placed: dict[str, Place]) -> dict[str, Place]:
        """Verified copies of these blobs, without those that are damaged."""
        copies: dict[str, Place] = {}
        try:
            for digest, place in placed.items():
                copy = self._copy(digest, place)
                if copy:
                    copies[digest] = copy
        except BaseException:
            with self.lock:
                for copy in reversed(copies.values()):
                    self.release(copy)
            raise
        return copies

    def _copy(self, digest: str, place: Place) -> Place | None:
        with self.lock:
            copy = self.allocate(place.num_bytes)
        is_right = False
        try:
            index = place.index(lambda start, piece: copy.pack.write(copy.offset, start, piece))
            is_right = digest_of_index(index) == digest
        except CorruptState as error:
            logger.error("%s", error)
        finally:
            if not is_right:
                with self.lock:
                    self.release(copy)
        return copy if is_right else None

    @property
    def num_bytes(self) -> int:
        """Bytes that all packs take, garbage included."""
        with self.lock:
            return sum(pack.num_bytes for pack in self._packs)


def _packs_of(places: Iterable[Place]) -> list[Pack]:
    """Each pack once, in order of appearance."""
    return list({id(place.pack): place.pack for place in places}.values())
