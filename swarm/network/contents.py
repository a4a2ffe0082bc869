"""Blobs on their way into the store and out of it, piece by piece: none is in memory whole."""

from __future__ import annotations

from functools import partial

from swarm.codecs import Buffer, Content, Read
from swarm.errors import StateError
from swarm.network.blobs import BlobStore
from swarm.network.draft import Draft
from swarm.protocol.digests import PIECE_BYTES
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


class BlobGone(StateError):
    """A blob of an older manifest was collected: a newer tip must be adopted instead."""


def reader(store: BlobStore, digest: Digest) -> Read:
    """What reads parts of a blob; it raises BlobGone when the blob is not here any more."""
    return partial(_read, store, digest)


def _read(store: BlobStore, digest: Digest, offset: int, length: int) -> Buffer:
    part = store.read(digest, offset, length)
    if part is None:
        raise BlobGone(f"the blob {digest[:12]} was collected: a newer tip has come")
    return part
