"""The store of blobs: content under its digest, in memory or on disk.

Blobs are written, verified and read in pieces, so that no blob is in memory as a whole.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from blake3 import blake3

from swarm.codecs import Content, Read
from swarm.deltas.unit_deltas import Delta
from swarm.errors import BadBlob, StateError
from swarm.network.blobs.packs import FilePack, PackSet, Place
from swarm.protocol.values.digests import (
    DIGEST_BYTES,
    PIECE_BYTES,
    Buffer,
    digest_of,
    digest_of_index,
    num_pieces,
)
from swarm.protocol.values.manifest import Digest

logger = logging.getLogger(__name__)


LEASE_S = 600.0
MAX_LEASES = 2


@dataclass(frozen=True)
class _Lease:
    digests: frozenset[str]
    until: float


class Pins:
    """Pins and leases of a store, which serializes all calls."""

    def __init__(self) -> None:
        self._pins: Counter[str] = Counter()
        self._leases: dict[str, _Lease] = {}

    def pin(self, digests: Iterable[str]) -> None:
        """Keeps each blob until it is unpinned as often as it was pinned."""
        self._pins.update(list(digests))  # `update` would read a mapping as counts

    def unpin(self, digests: Iterable[str]) -> None:
        """Removes one `pin` of each."""
        for digest in digests:
            self._pins[digest] -= 1
            if not self._pins[digest]:
                del self._pins[digest]

    def lease(self, name: str, digests: Iterable[str], now: float) -> bool:
        """See `BlobStore.lease`."""
        self._leases = {n: lease for n, lease in self._leases.items() if lease.until > now}
        if name not in self._leases and len(self._leases) < MAX_LEASES:
            self._leases[name] = _Lease(frozenset(digests), now + LEASE_S)
        return name in self._leases

    def held(self, now: float) -> set[str]:
        """All digests that are pinned, or leased at this time."""
        held = set(self._pins)
        for lease in self._leases.values():
            held |= lease.digests if lease.until > now else frozenset()
        return held


class Partial:
    """A blob that is still arriving: room in a pack, with the pieces verified so far.

    Attributes:
        digest: digest of the complete content.
        num_bytes: size of the complete content.
        index: concatenated digests of the pieces, once known.
        place: the room in the pack.
    """

    def __init__(self, digest: str, place: Place) -> None:
        self.digest = digest
        self.num_bytes = place.num_bytes
        self.index: bytes | None = None
        self.place = place
        self._have: set[int] = set()

    def set_index(self, index: bytes) -> None:
        """Sets the piece index; raises BadBlob if the blob's digest is not that of the index."""
        if len(index) != DIGEST_BYTES * num_pieces(self.num_bytes):
            raise BadBlob("blob_index", f"{self.digest}: piece index of {len(index)} bytes")
        if digest_of_index(index) != self.digest:
            raise BadBlob("blob_index", f"{self.digest}: the piece index has another digest")
        self.index = index

    def has_piece(self, number: int) -> bool:
        """Whether this piece has arrived and is verified."""
        return number in self._have

    @property
    def num_bytes_here(self) -> int:
        """Bytes of the pieces that have arrived; the last piece may be shorter."""
        return min(len(self._have) * PIECE_BYTES, self.num_bytes)

    @property
    def complete(self) -> bool:
        """Whether all pieces have arrived."""
        return len(self._have) == num_pieces(self.num_bytes)

    def write_piece(self, number: int, piece: memoryview) -> None:
        """Verifies and keeps a piece, in 2 ms for 4 MiB; raises BadBlob for a wrong digest."""
        assert self.index is not None, "pieces cannot be verified without the index"
        start = DIGEST_BYTES * number
        if blake3(piece).digest() != self.index[start : start + DIGEST_BYTES]:
            raise BadBlob("blob_digest", f"{self.digest}: piece {number} has another digest")
        self.place.pack.write(self.place.offset, number * PIECE_BYTES, piece)
        self._have.add(number)

    def content(self) -> Content:
        """All bytes, once complete; read in pieces."""
        return Content(self.num_bytes, self._pieces)

    def _pieces(self) -> Iterator[Buffer]:
        for start in range(0, self.num_bytes, PIECE_BYTES):
            length = min(PIECE_BYTES, self.num_bytes - start)
            yield self.place.read(start, length)


class Draft:
    """Room in a pack, to be filled from beginning to end with constant use of memory.

    Only one thread at a time may write. As a context manager, a draft is discarded unless finished.

    Attributes:
        num_bytes: complete size of the draft.
    """

    def __init__(
        self, place: Place, keep: Callable[[str, bytes], None], drop: Callable[[], None]
    ) -> None:
        """See `BlobStore.draft`.

        Args:
            place: the room in the pack.
            keep: called with digest and piece index once the draft is complete.
            drop: releases the room.
        """
        self.num_bytes = place.num_bytes
        self._place, self._keep, self._drop = place, keep, drop
        self._num_written = 0
        self._piece = blake3()
        self._index = bytearray()
        self._is_closed = False

    def write(self, content: Buffer) -> None:
        """Appends bytes; about 0.5 s per GB, plus the time of the disk.

        Raises:
            StateError: the disk did not take the bytes. Nothing was appended, so the same bytes may
                be written again.
            ValueError: the draft has no room for them, or is finished or discarded.
        """
        view = memoryview(content).cast("B")
        if self._is_closed:
            raise ValueError("the draft is finished or discarded")
        if self._num_written + len(view) > self.num_bytes:
            raise ValueError(
                f"{self._num_written} + {len(view)} bytes for a draft of {self.num_bytes}"
            )
        self._place.pack.write(self._place.offset, self._num_written, view)
        while view:
            room = PIECE_BYTES - self._num_written % PIECE_BYTES
            part, view = view[:room], view[room:]
            self._piece.update(part)
            self._num_written += len(part)
            if self._num_written % PIECE_BYTES == 0 or self._num_written == self.num_bytes:
                self._index += self._piece.digest()
                self._piece = blake3()

    def finish(self) -> str:
        """Adds the draft to the store as a blob, pinned once, and returns the digest.

        Raises:
            ValueError: bytes are missing, or the draft is finished or discarded.
        """
        if self._is_closed or self._num_written != self.num_bytes:
            state = "closed" if self._is_closed else "open"
            raise ValueError(
                f"{self._num_written} of {self.num_bytes} bytes arrived; the draft is {state}"
            )
        self._is_closed = True
        digest = digest_of_index(bytes(self._index))
        self._keep(digest, bytes(self._index))
        return digest

    def discard(self) -> None:
        """Releases the room; does nothing to a draft that is finished or discarded."""
        if not self._is_closed:
            self._is_closed = True
            self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.discard()


@dataclass(frozen=True)
class BlobFile:
    """The place of a blob in a file; `pack.fileno` is valid while this object lives."""

    pack: FilePack
    offset: int


class BlobStore:
    """Stores blobs; thread-safe, since trainer and network thread use it at the same time.

    Attributes:
        on_lost: called in any thread, with digest and reason, after a damaged blob was dropped.
    """

    def __init__(self, root: Path | None = None) -> None:
        """Opens the store under `root`, with its synced blobs; None keeps blobs in memory only.

        Raises:
            StateError: the folder cannot be used.
        """
        self.on_lost: Callable[[str, str], None] = _ignore
        self._packs = PackSet(root / "packs" if root else None, self._lost)
        self._lock = self._packs.lock
        self._places = self._packs.places
        self._partials: dict[tuple[str, int], Partial] = {}
        self._indexes: dict[str, bytes] = {}
        """Known piece indexes of blobs with several pieces."""
        self._holds = Pins()

    def _lost(self, digest: str, why: str) -> None:
        self._indexes.pop(digest, None)
        self.on_lost(digest, why)

    def put(self, blob: Buffer, digest: str | None = None) -> str:
        """Adds a blob and returns its digest, which is computed unless the caller knows it."""
        view = memoryview(blob).cast("B")
        digest = digest_of(view) if digest is None else digest
        with self._lock:
            if digest in self._places:
                return digest
            place = self._packs.allocate(len(view))
        try:
            place.pack.write(place.offset, 0, view)
        except BaseException:
            with self._lock:
                self._packs.release(place)
            raise
        self._settle(digest, place)
        return digest

    def _settle(self, digest: str, place: Place) -> None:
        with self._lock:
            if digest in self._places:  # it arrived twice at the same time
                self._packs.release(place)
            else:
                self._packs.settle(digest, place)

    def draft(self, num_bytes: int, on_finish: Callable[[str], None] | None = None) -> Draft:
        """Room for a value that this peer makes, whose digest is not yet known.

        Args:
            num_bytes: exact size of the value.
            on_finish: called with the digest once the value is in the store, pinned once.

        Raises:
            StateError: the disk has no room for another pack.
        """

        def keep(digest: str, index: bytes) -> None:
            self.pin([digest])
            self._settle(digest, place)
            if num_pieces(num_bytes) > 1:
                self._indexes[digest] = index
            if on_finish:
                on_finish(digest)

        def drop() -> None:
            with self._lock:
                self._packs.release(place)

        with self._lock:
            place = self._packs.allocate(num_bytes)
        return Draft(place, keep, drop)

    def writer(self, digest: str, num_bytes: int) -> Partial:
        """The arriving blob of this digest and size, with the pieces that have arrived before."""
        key = (digest, num_bytes)
        with self._lock:
            if key not in self._partials:
                self._partials[key] = Partial(digest, self._packs.allocate(num_bytes))
            return self._partials[key]

    def keep(self, partial: Partial) -> None:
        """Adds a complete arriving blob to the store."""
        assert partial.complete
        with self._lock:
            assert self._partials.pop((partial.digest, partial.num_bytes)) is partial
            self._packs.settle(partial.digest, partial.place)
            if partial.index is not None:
                self._indexes[partial.digest] = partial.index

    def discard(self, partial: Partial) -> None:
        """Drops an arriving blob with all its pieces; no thread may still write to it."""
        with self._lock:
            if self._partials.pop((partial.digest, partial.num_bytes), None):
                self._packs.abandon(partial.place)

    def has(self, digest: str) -> bool:
        """Whether the complete blob is here."""
        return digest in self._places

    def digests(self) -> list[str]:
        """Every blob that is here."""
        with self._lock:
            return sorted(self._places)

    def size(self, digest: str) -> int | None:
        """Bytes of the blob; None if it is not here."""
        place = self._places.get(digest)
        return place.num_bytes if place else None

    def bytes_here(self, digest: str, num_bytes: int) -> int:
        """Number of verified bytes here of a blob of this size, which may still be arriving."""
        with self._lock:
            partial = self._partials.get((digest, num_bytes))
        if self.has(digest):
            return num_bytes
        return partial.num_bytes_here if partial else 0

    def get(self, digest: str) -> memoryview | None:
        """The whole blob, read-only; None if it is not here. Bytes from disk are not verified."""
        place = self._places.get(digest)
        return place.read(0, place.num_bytes) if place else None

    def read(self, digest: str, offset: int, length: int) -> memoryview | None:
        """A part of the blob, cut at its end; None if it is not here."""
        place = self._places.get(digest)
        return place.read(offset, length) if place else None

    def chunks(self, digest: str, chunk_bytes: int) -> Iterator[memoryview]:
        """The blob from beginning to end in parts of this size; the last may be shorter.

        Raises:
            StateError: it is not here, is no longer here, or the disk failed.
        """
        size = self.size(digest)
        for start in range(0, size or 0, chunk_bytes):
            part = self.read(digest, start, chunk_bytes)
            if part is None:
                size = None
                break
            yield part
        if size is None:
            raise StateError(f"blob {digest} is not in the store")

    def file_of(self, digest: str) -> BlobFile | None:
        """The place of the blob on disk; None if the blob is not here, or is only in memory."""
        place = self._places.get(digest)
        if place is None or not isinstance(place.pack, FilePack):
            return None
        return BlobFile(place.pack, place.offset)

    def known_index(self, digest: str) -> bytes | None:
        """The `index`, if it is in memory; None if it is not, or the blob has only one piece."""
        return self._indexes.get(digest)

    def index(self, digest: str) -> bytes | None:
        """The concatenated digests of the blob's pieces; None if it is not here.

        The first call reads and hashes the blob; about 0.5 s per GB.
        """
        known = self._indexes.get(digest)
        if known is not None:
            return known
        place = self._places.get(digest)
        if place is None:
            return None
        index = place.index()
        if num_pieces(place.num_bytes) > 1 and digest_of_index(index) == digest:
            self._indexes[digest] = index
        return index

    def sync(self, digests: Iterable[str]) -> None:
        """Makes blobs durable: after the call they survive kill -9 and loss of power.

        Needs one fdatasync and one small file for each pack with new blobs, and closes these packs.

        Raises:
            MissingBlobs: some of these blobs are not here.
            StateError: the disk failed.
        """
        wanted = set(digests)
        with self._packs.durability:
            self._packs.make_durable(wanted)

    def verify(self, digests: Iterable[str]) -> list[str]:
        """Reads blobs again and drops those whose bytes have changed; about 0.5 s per GB.

        Returns:
            The digests of blobs that are not here, or were dropped now.
        """
        absent, damaged = [], {}
        for digest in sorted(set(digests)):
            place = self._places.get(digest)
            if place is None:
                absent.append(digest)
            elif not _is_intact(digest, place):
                damaged[digest] = place
        if damaged:
            with self._packs.durability:
                self._packs.drop(damaged, "it reads wrongly")
        return sorted([*absent, *damaged])

    def pin(self, digests: Iterable[str]) -> None:
        """Protects blobs, here or still to come, from `collect` until unpinned as often."""
        with self._lock:
            self._holds.pin(digests)

    def unpin(self, digests: Iterable[str]) -> None:
        """Removes one `pin` of each."""
        with self._lock:
            self._holds.unpin(digests)

    def lease(self, name: str, digests: Iterable[str], now: float) -> bool:
        """Keeps the blobs of a manifest that a peer is fetching.

        Args:
            name: the manifest's digest.
            digests: digests of the manifest's blobs.
            now: seconds, of the clock that `collect` gets.

        Returns:
            Whether the blobs are kept. They are for ten minutes after the first call, and for at
            most two manifests at a time.
        """
        with self._lock:
            return self._holds.lease(name, digests, now)

    def forget(self, keep: Collection[str], now: float = math.inf) -> int:
        """Drops every blob that is neither in `keep` nor pinned or leased; returns how many.

        `now` is by the clock of `lease`; without `now` no lease counts. The disk is not touched;
        `shrink` releases the room.
        """
        with self._lock:
            live = set(keep) | self._holds.held(now)
            dead = [digest for digest in self._places if digest not in live]
            for digest in dead:
                del self._places[digest]
                self._indexes.pop(digest, None)
            for key in [key for key in self._partials if key[0] not in live]:
                self._packs.abandon(self._partials.pop(key).place)
        return len(dead)

    def shrink(self, is_ended: Callable[[], bool] = lambda: False) -> None:
        """Releases the room of dropped blobs; not for the network thread.

        Packs without blobs are deleted. Packs that are less than half full are rewritten: their
        blobs are read and written again. Other threads may use the store during this work.

        Args:
            is_ended: asked at every piece; once it is true, packs stay as they are.

        Raises:
            StateError: the disk failed. Packs that could not be rewritten are unchanged, and the
                next call tries again.
        """
        self._packs.shrink(is_ended)

    def collect(self, keep: Collection[str], now: float = math.inf) -> int:
        """Calls `forget`, then `shrink`; returns how many blobs were dropped."""
        num_dropped = self.forget(keep, now)
        self.shrink()
        return num_dropped

    @property
    def num_bytes(self) -> int:
        """Size of all packs, garbage included."""
        return self._packs.num_bytes

    def __len__(self) -> int:
        return len(self._places)


def _is_intact(digest: str, place: Place) -> bool:
    try:
        return digest_of_index(place.index()) == digest
    except StateError as error:
        logger.error("blob %s: %s", digest, error)
        return False


def _ignore(*_: str) -> None:
    """Default of `on_lost`."""


def write(draft: Draft, content: Content) -> Digest:
    """Fills and finishes a draft, or discards it; returns the digest of the pinned blob."""
    with draft:
        for piece in content:
            draft.write(piece)
        return draft.finish()


def store_content(store: BlobStore, content: Content) -> Digest:
    """Adds a blob that is made in pieces; it is not pinned."""
    digest = write(store.draft(content.num_bytes), content)
    store.unpin([digest])
    return digest


def content_of(store: BlobStore, digest: Digest) -> Content:
    """The content of a blob; empty if it is not here."""
    return Content(store.size(digest) or 0, lambda: store.chunks(digest, PIECE_BYTES))


def delta_in(store: BlobStore, digest: Digest) -> Delta:
    """A delta in the store; reading it raises like `reader`."""
    return Delta(store.size(digest) or 0, reader(store, digest))


@contextmanager
def kept(store: BlobStore, digests: Iterable[Digest]) -> Iterator[list[Digest]]:
    """Keeps blobs while the context lasts. Yields the blobs that are not here."""
    wanted = sorted(set(digests))
    store.pin(wanted)  # before the check, so that no collection comes between
    try:
        yield [digest for digest in wanted if not store.has(digest)]
    finally:
        store.unpin(wanted)


class BlobGone(StateError):
    """A blob of an older manifest was deleted, so a newer tip must be adopted instead."""

    def __init__(self, digest: Digest) -> None:
        super().__init__(f"the blob {digest[:12]} was collected: a newer tip has come")


def reader(store: BlobStore, digest: Digest) -> Read:
    """A function that reads parts of a blob, and raises BlobGone once the blob is missing."""
    return partial(_read, store, digest)


def _read(store: BlobStore, digest: Digest, offset: int, length: int) -> Buffer:
    part = store.read(digest, offset, length)
    if part is None:
        raise BlobGone(digest)
    return part
