"""The one store of blobs: content under its digest, in memory or on disk.

A blob is readable as soon as it was put, and durable only after `sync`: what was not synced is
forgotten at the next start, so a crash never leaves half a blob behind.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from blake3 import blake3

from swarm.errors import CorruptState, StateError
from swarm.network.packs import (
    FilePack,
    MemoryPack,
    Pack,
    index_path,
    read_index,
    sync_folder,
)
from swarm.network.partial import Partial
from swarm.protocol.digests import (
    PIECE_BYTES,
    Buffer,
    digest_of,
    digest_of_index,
    num_pieces,
)

logger = logging.getLogger(__name__)

PACK_BYTES = 2**30
"""A pack that has grown beyond this takes no further blob."""
LEASE_S = 600.0
MAX_LEASES = 2


@dataclass(frozen=True)
class _Place:
    pack: Pack
    offset: int
    num_bytes: int
    durable: bool


@dataclass(frozen=True)
class BlobFile:
    """Where a blob lies in a file; `pack.fileno` is valid for as long as this is held."""

    pack: FilePack
    offset: int


@dataclass(frozen=True)
class _Lease:
    digests: frozenset[str]
    until: float


class BlobStore:
    """Thread-safe: the trainer puts and reads, the network thread serves and receives."""

    def __init__(self, root: Path | None = None) -> None:
        """Opens the store under `root`, with the blobs that were synced; None: in memory only.

        Raises:
            StateError: the folder cannot be used.
        """
        self._folder = root / "packs" if root else None
        self._lock = threading.Lock()
        self._durability = threading.Lock()
        """Held by whoever writes indexes or removes packs; taken before `_lock`."""
        self._places: dict[str, _Place] = {}
        self._partials: dict[tuple[str, int], Partial] = {}
        self._packs: list[Pack] = []
        self._open: Pack | None = None
        self._indexes: dict[str, bytes] = {}
        """Of blobs of several pieces, as far as they are known."""
        self._pins: Counter[str] = Counter()
        self._leases: dict[str, _Lease] = {}
        self._next_number = 0
        if self._folder:
            self._load(self._folder)

    def _load(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            sync_folder(folder.parent)
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
                self._places[digest] = _Place(pack, offset, num_bytes, durable=True)
            else:
                logger.error("%s is too short for blob %s, which is lost", path, digest)

    def put(self, blob: Buffer, digest: str | None = None) -> str:
        """Adds a blob and returns its digest, which is computed unless known to be right."""
        view = memoryview(blob).cast("B")
        digest = digest_of(view) if digest is None else digest
        with self._lock:
            if digest in self._places:
                return digest
            pack, offset = self._allocate(len(view))
        try:
            pack.write(offset, 0, view)
        finally:
            with self._lock:
                pack.num_writers -= 1
        with self._lock:
            self._places.setdefault(digest, _Place(pack, offset, len(view), durable=False))
        return digest

    def put_pinned(self, blob: Buffer, digest: str) -> None:
        """Adds a blob of this digest and pins it, with no collection in between."""
        self.pin([digest])
        try:
            self.put(blob, digest)
        except BaseException:
            self.unpin([digest])
            raise

    def writer(self, digest: str, num_bytes: int) -> Partial:
        """The blob of this digest and size that is arriving, with the pieces that came before."""
        key = (digest, num_bytes)
        with self._lock:
            if key not in self._partials:
                self._partials[key] = Partial(digest, num_bytes, *self._allocate(num_bytes))
            return self._partials[key]

    def keep(self, partial: Partial) -> None:
        """Makes a complete arriving blob one of the store's."""
        assert partial.complete
        with self._lock:
            assert self._partials.pop((partial.digest, partial.num_bytes)) is partial
            partial.pack.num_writers -= 1
            place = _Place(partial.pack, partial.offset, partial.num_bytes, durable=False)
            self._places.setdefault(partial.digest, place)
            if partial.index is not None:
                self._indexes[partial.digest] = partial.index

    def discard(self, partial: Partial) -> None:
        """Forgets an arriving blob with all its pieces; nobody may write to it any more."""
        with self._lock:
            if self._partials.pop((partial.digest, partial.num_bytes), None):
                partial.pack.num_writers -= 1

    def _allocate(self, num_bytes: int) -> tuple[Pack, int]:
        """Room in the open pack, which counts one writer more; the caller holds the lock."""
        if self._open is None or self._open.num_bytes >= PACK_BYTES:
            self._open = self._new_pack()
            self._packs.append(self._open)
        self._open.num_writers += 1
        return self._open, self._open.allocate(num_bytes)

    def _new_pack(self) -> Pack:
        if self._folder is None:
            return MemoryPack()
        path = self._folder / f"{self._next_number:08d}.pack"
        self._next_number += 1
        try:
            return FilePack(path, create=True)
        except OSError as error:
            raise StateError(f"{path}: {error.strerror}") from error

    def has(self, digest: str) -> bool:
        """Whether the blob is here, complete."""
        return digest in self._places

    def digests(self) -> list[str]:
        """Every blob that is here."""
        with self._lock:
            return sorted(self._places)

    def size(self, digest: str) -> int | None:
        """Bytes of the blob; None if it is not here."""
        place = self._places.get(digest)
        return place.num_bytes if place else None

    def get(self, digest: str) -> memoryview | None:
        """The whole blob, read-only; None if it is not here. Disk contents are not verified."""
        place = self._places.get(digest)
        return memoryview(place.pack.read(place.offset, 0, place.num_bytes)) if place else None

    def read(self, digest: str, offset: int, length: int) -> bytes | None:
        """A part of the blob, cut at its end; None if it is not here."""
        place = self._places.get(digest)
        if place is None:
            return None
        length = max(0, min(length, place.num_bytes - offset))
        return place.pack.read(place.offset, offset, length)

    def file_of(self, digest: str) -> BlobFile | None:
        """Where the blob lies on disk; None if it is not here, or in memory."""
        place = self._places.get(digest)
        if place is None or not isinstance(place.pack, FilePack):
            return None
        return BlobFile(place.pack, place.offset)

    def index(self, digest: str) -> bytes | None:
        """The concatenated digests of the blob's pieces; None if it is not here.

        Reads and hashes the blob when asked for the first time; about 0.5 s per GB.
        """
        known = self._indexes.get(digest)
        if known is not None:
            return known
        size = self.size(digest)
        if size is None:
            return None
        starts = range(0, size, PIECE_BYTES)
        parts = (self.read(digest, start, PIECE_BYTES) for start in starts)
        index = b"".join(blake3(part).digest() for part in parts if part is not None)
        if num_pieces(size) > 1:
            self._indexes[digest] = index
        return index

    def sync(self, digests: Iterable[str]) -> None:
        """Makes blobs durable; after it returns they survive kill -9 and loss of power.

        Costs one fdatasync and one small file for each pack with news; closes these packs.

        Raises:
            StateError: a blob is not here, or the disk failed.
        """
        wanted = set(digests)
        with self._durability:
            self._sync(wanted)

    def _sync(self, wanted: set[str]) -> None:
        with self._lock:
            missing = sorted(wanted - self._places.keys())
            if missing:
                raise StateError(f"{len(missing)} blobs are not in the store: {missing[0]}")
            new = {digest for digest in wanted if not self._places[digest].durable}
            packs = [p for p in self._packs if any(self._places[d].pack is p for d in new)]
        for pack in packs:
            with self._lock:
                if self._open is pack:
                    self._open = None
                listed = {
                    digest: place
                    for digest, place in self._places.items()
                    if place.pack is pack and (place.durable or digest in new)
                }
            pack.make_durable((d, p.offset, p.num_bytes) for d, p in listed.items())
            with self._lock:
                self._places |= {d: replace(p, durable=True) for d, p in listed.items()}

    def verify(self, digests: Iterable[str]) -> list[str]:
        """Reads blobs again and drops those whose bytes have changed; about 0.5 s per GB.

        Returns:
            The digests that are not here, or no longer.
        """
        bad = []
        for digest in sorted(set(digests)):
            try:
                self._indexes.pop(digest, None)
                index = self.index(digest)
            except StateError as error:
                logger.error("blob %s: %s", digest, error)
                index = None
            if index is None or digest_of_index(index) != digest:
                bad.append(digest)
        with self._durability:
            self._forget([digest for digest in bad if self.has(digest)])
        return bad

    def _forget(self, bad: list[str]) -> None:
        """Drops blobs, also from the indexes on disk; the caller holds `_durability`."""
        with self._lock:
            packs = [p for p in self._packs if any(self._places[d].pack is p for d in bad)]
            for digest in bad:
                logger.error("blob %s is corrupt and was dropped", digest)
                del self._places[digest]
                self._indexes.pop(digest, None)
            left = {d: place for d, place in self._places.items() if place.durable}
        for pack in packs:
            pack.make_durable(
                (d, place.offset, place.num_bytes)
                for d, place in left.items()
                if place.pack is pack
            )

    def pin(self, digests: Iterable[str]) -> None:
        """Keeps blobs through `collect` until they are unpinned as often, here or not yet here."""
        with self._lock:
            self._pins.update(list(digests))  # a mapping would be taken for counts

    def unpin(self, digests: Iterable[str]) -> None:
        """Takes back one `pin` of each."""
        with self._lock:
            for digest in digests:
                self._pins[digest] -= 1
                if not self._pins[digest]:
                    del self._pins[digest]

    def lease(self, name: str, digests: Iterable[str], now: float) -> bool:
        """Keeps the blobs of a manifest that somebody is fetching.

        Args:
            name: the manifest's digest.
            digests: its blobs.
            now: seconds, of the same clock as `collect` gets.

        Returns:
            Whether they are kept: for ten minutes after the first call, and for at most two
            manifests at a time.
        """
        with self._lock:
            self._leases = {n: lease for n, lease in self._leases.items() if lease.until > now}
            if name not in self._leases and len(self._leases) < MAX_LEASES:
                self._leases[name] = _Lease(frozenset(digests), now + LEASE_S)
            return name in self._leases

    def collect(self, keep: Collection[str], now: float = math.inf) -> int:
        """Drops every blob that is neither in `keep` nor pinned nor leased; returns how many.

        `now` is of the same clock as `lease` gets; without it no lease counts.
        Packs without blobs are deleted; packs filled by less than half are rewritten, which costs
        reading and writing what is left of them. Not for the network thread.
        """
        with self._durability:
            with self._lock:
                live = set(keep) | self._pins.keys()
                for lease in self._leases.values():
                    live |= lease.digests if lease.until > now else frozenset()
                dead = [digest for digest in self._places if digest not in live]
                for digest in dead:
                    del self._places[digest]
                    self._indexes.pop(digest, None)
                for key in [key for key in self._partials if key[0] not in live]:
                    self._partials.pop(key).pack.num_writers -= 1
            for pack in list(self._packs):
                self._shrink(pack)
        return len(dead)

    def _shrink(self, pack: Pack) -> None:
        """Deletes or rewrites a pack that is mostly garbage; the caller holds `_durability`."""
        with self._lock:
            placed = {d: place for d, place in self._places.items() if place.pack is pack}
            live_bytes = sum(place.num_bytes for place in placed.values())
            if pack.num_writers or (placed and 2 * live_bytes >= pack.num_bytes):
                return
            if self._open is pack:
                self._open = None
        for digest, place in placed.items():
            self._move(digest, place)
        self._sync({digest for digest, place in placed.items() if place.durable})
        with self._lock:
            self._packs.remove(pack)
        pack.delete()

    def _move(self, digest: str, place: _Place) -> None:
        content = memoryview(place.pack.read(place.offset, 0, place.num_bytes))
        with self._lock:
            pack, offset = self._allocate(place.num_bytes)
        try:
            pack.write(offset, 0, content)
        finally:
            with self._lock:
                pack.num_writers -= 1
                self._places[digest] = _Place(pack, offset, place.num_bytes, durable=False)

    @property
    def num_bytes(self) -> int:
        """Bytes that the blobs' packs take, garbage included."""
        return sum(pack.num_bytes for pack in self._packs)

    def __len__(self) -> int:
        return len(self._places)
