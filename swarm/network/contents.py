"""Blobs on their way into the store and out of it, piece by piece: none is in memory whole."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from swarm.codecs import Content, Read
from swarm.deltas.units import Delta
from swarm.errors import StateError
from swarm.network.blobs import BlobStore
from swarm.network.draft import Draft
from swarm.protocol.digests import PIECE_BYTES, Buffer
from swarm.protocol.manifest import Digest


def write(draft: Draft, content: Content) -> Digest:
    """Fills a draft and finishes it, or discards it; returns the digest, whose blob is pinned."""
    with draft:
        for piece in content:
            draft.write(piece)
        return draft.finish()


def store_content(store: BlobStore, content: Content) -> Digest:
    """Adds a blob that is made piece by piece; it is not pinned."""
    digest = write(store.draft(content.num_bytes), content)
    store.unpin([digest])
    return digest


def content_of(store: BlobStore, digest: Digest) -> Content:
    """What is here under a digest; nothing if it is not here."""
    return Content(store.size(digest) or 0, lambda: store.chunks(digest, PIECE_BYTES))


def delta_in(store: BlobStore, digest: Digest) -> Delta:
    """A delta in the store; reading it raises as `reader` says."""
    return Delta(store.size(digest) or 0, reader(store, digest))


@contextmanager
def kept(store: BlobStore, digests: Iterable[Digest]) -> Iterator[list[Digest]]:
    """Keeps blobs for as long as the context lasts; gives those that are not here."""
    wanted = sorted(set(digests))
    store.pin(wanted)  # before the look, so that no collection falls between
    try:
        yield [digest for digest in wanted if not store.has(digest)]
    finally:
        store.unpin(wanted)


class BlobGone(StateError):
    """A blob of an older manifest was collected: a newer tip must be adopted instead."""

    def __init__(self, digest: Digest) -> None:
        super().__init__(f"the blob {digest[:12]} was collected: a newer tip has come")


def reader(store: BlobStore, digest: Digest) -> Read:
    """What reads parts of a blob; it raises BlobGone when the blob is not here any more."""
    return partial(_read, store, digest)


def _read(store: BlobStore, digest: Digest, offset: int, length: int) -> Buffer:
    part = store.read(digest, offset, length)
    if part is None:
        raise BlobGone(digest)
    return part
