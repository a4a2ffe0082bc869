"""Packs are rewritten while other threads read, write, drop and sync, and the peer may end."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest

from swarm.errors import StateError
from swarm.network.blobs.blob_store import BlobFile, BlobStore
from swarm.network.blobs.packs import FilePack
from swarm.protocol.values.digests import PIECE_BYTES, digest_of

WAIT_S = 60.0


def content(seed: int, num_bytes: int = 1000) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


def digest(seed: int) -> str:
    return digest_of(content(seed))


def digests_of(seeds: tuple[int, ...]) -> list[str]:
    return [digest(seed) for seed in seeds]


DURABLE, FRESH, DEAD = (0, 1), (2, 3), range(4, 14)


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    """A store with one pack, mostly garbage: two durable blobs, and two not yet durable."""
    made = BlobStore(tmp_path / "store")
    for seed in (*DURABLE, *FRESH, *DEAD):
        made.put(content(seed))
    made.sync(digests_of(DURABLE))
    made.forget(digests_of((*DURABLE, *FRESH)))
    return made


def packs_of(store: BlobStore) -> list[str]:
    return [pack.path.name for pack in store._packs._packs if isinstance(pack, FilePack)]


def assert_survives(store: BlobStore, tmp_path: Path, *seeds: int) -> None:
    """Checks that a peer that is killed now has these blobs after a restart."""
    copy = shutil.copytree(tmp_path / "store", tmp_path / "copy")
    assert BlobStore(copy).verify(digests_of(seeds)) == []
    shutil.rmtree(copy)


@contextmanager
def shrinking(
    store: BlobStore, is_ended: Callable[[], bool] = lambda: False
) -> Iterator[Future[None]]:
    """A shrink that pauses at its first piece while the context lasts, then finishes."""
    reads, goes_on = threading.Event(), threading.Event()
    read, pool = FilePack.read, ThreadPoolExecutor(1)

    def slow(self: FilePack, offset: int, start: int, length: int) -> memoryview:
        piece = read(self, offset, start, length)
        if threading.current_thread() is not threading.main_thread():
            reads.set()
            assert goes_on.wait(WAIT_S)
        return piece

    with pytest.MonkeyPatch.context() as patch, pool:
        patch.setattr(FilePack, "read", slow)
        future = pool.submit(store.shrink, is_ended)
        try:
            assert reads.wait(WAIT_S)
            yield future
        finally:
            goes_on.set()
            future.exception(WAIT_S)


def test_others_store_and_sync_while_a_pack_is_rewritten(store: BlobStore, tmp_path: Path) -> None:
    with shrinking(store) as shrink:
        store.put(content(20))
        store.sync([digest(20)])
        assert store.get(digest(0)) == content(0)
        assert_survives(store, tmp_path, 20, *DURABLE)
        assert not shrink.done()
    shrink.result(WAIT_S)
    assert "00000000.pack" not in packs_of(store)
    assert not (tmp_path / "store/packs/00000000.pack").exists()
    for seed in (*DURABLE, *FRESH, 20):
        assert store.get(digest(seed)) == content(seed)
    assert_survives(store, tmp_path, 20, *DURABLE)


def test_what_becomes_durable_while_its_pack_is_rewritten_stays_so(
    store: BlobStore, tmp_path: Path
) -> None:
    with shrinking(store) as shrink:
        store.sync([digest(FRESH[0])])
        assert_survives(store, tmp_path, *DURABLE, FRESH[0])
    shrink.result(WAIT_S)
    assert not (tmp_path / "store/packs/00000000.pack").exists()
    assert_survives(store, tmp_path, *DURABLE, FRESH[0])
    store.sync([digest(FRESH[1])])
    assert_survives(store, tmp_path, *DURABLE, *FRESH)


def test_what_is_dropped_while_its_pack_is_rewritten_does_not_come_back(
    store: BlobStore, tmp_path: Path
) -> None:
    with shrinking(store) as shrink:
        assert store.forget([digest(1), digest(2)]) == 2
    shrink.result(WAIT_S)
    assert store.digests() == sorted(digests_of((1, 2)))
    assert "00000000.pack" not in packs_of(store)
    assert_survives(store, tmp_path, 1)


def test_what_is_dropped_while_its_copy_becomes_durable_does_not_come_back_there(
    store: BlobStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, places = os.fdatasync, list[BlobFile | None]()

    def dropping(descriptor: int) -> None:
        if not places:
            store.forget(digests_of((1, 2)))
            store.put(content(0))
            places.append(store.file_of(digest(0)))
        sync(descriptor)

    monkeypatch.setattr(os, "fdatasync", dropping)
    store.shrink()
    assert store.digests() == sorted(digests_of((0, 1, 2)))
    assert [store.file_of(digest(0))] == places
    assert not (tmp_path / "store/packs/00000000.pack").exists()
    store.sync([digest(0)])
    assert_survives(store, tmp_path, 0, 1)


def test_what_comes_again_while_its_pack_is_rewritten_lies_where_it_came_to(
    store: BlobStore, tmp_path: Path
) -> None:
    with shrinking(store) as shrink:
        store.forget([digest(1), *digests_of(FRESH)])
        store.put(content(0))
        place = store.file_of(digest(0))
    shrink.result(WAIT_S)
    assert store.file_of(digest(0)) == place
    store.sync([digest(0)])
    assert_survives(store, tmp_path, 0, 1)


def test_garbage_that_comes_during_a_rewrite_goes_too(store: BlobStore, tmp_path: Path) -> None:
    store.put(content(30))
    store.sync([digest(30)])
    with shrinking(store) as shrink:
        store.forget([digest(0)])
    shrink.result(WAIT_S)
    assert store.digests() == [digest(0)]
    assert store.num_bytes == 1000
    assert len(list((tmp_path / "store/packs").glob("*.pack"))) == 1


def test_a_copy_that_may_be_lost_takes_no_blobs_place(store: BlobStore, tmp_path: Path) -> None:
    """A failed sync on behalf of others has left the pack's pages marked as clean in the system."""

    fail = Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    with shrinking(store) as shrink:
        store.put(content(20))
        with pytest.MonkeyPatch.context() as patch, pytest.raises(StateError, match="check the"):
            patch.setattr(os, "fdatasync", fail)
            store.sync([digest(20)])
    with pytest.raises(StateError, match="may not be on the disk"):
        shrink.result(WAIT_S)
    for seed in (*DURABLE, *FRESH, 20):
        assert store.get(digest(seed)) == content(seed)
    assert "00000000.pack" in packs_of(store)
    assert_survives(store, tmp_path, *DURABLE)
    store.shrink()
    assert "00000000.pack" not in packs_of(store)
    assert_survives(store, tmp_path, *DURABLE)


def test_who_ends_leaves_the_pack_at_hand_as_it_was(store: BlobStore, tmp_path: Path) -> None:
    ended, before = threading.Event(), store.num_bytes
    with shrinking(store, ended.is_set) as shrink:
        ended.set()
    shrink.result(WAIT_S)
    assert packs_of(store)[0] == "00000000.pack"
    assert store.num_bytes == before, "copies have freed their room"
    assert_survives(store, tmp_path, *DURABLE)
    store.shrink()
    assert store.num_bytes == 4000


def test_who_has_ended_deletes_nothing(tmp_path: Path) -> None:
    """The folder may belong to another process by then."""
    store = BlobStore(tmp_path / "store")
    for seed in (*DURABLE, *DEAD):
        store.put(content(seed))
    store.sync(store.digests())
    store.forget(digests_of(DURABLE))

    # At the third piece, which does not exist: after both copies.
    is_ended = Mock(side_effect=[False] * 3 + [True] * 2)
    store.shrink(is_ended)
    # Asked before a pack, with both pieces, before it is deleted, and before the next.
    assert is_ended.call_count == 5
    assert (tmp_path / "store/packs/00000000.index").exists()
    other = BlobStore(tmp_path / "store")
    assert other.verify(digests_of(DURABLE)) == []
    other.collect(digests_of(DURABLE))
    assert other.num_bytes == 2000


def test_a_large_blob_is_given_up_between_its_pieces(tmp_path: Path) -> None:
    store = BlobStore(tmp_path / "store")
    kept = store.put(content(0, 3 * PIECE_BYTES))
    store.put(content(1, 4 * PIECE_BYTES))
    store.sync([kept])
    store.forget([kept])

    is_ended = Mock(side_effect=[False, False, True])
    store.shrink(is_ended)
    assert is_ended.call_count == 3, "before the pack and with two of three pieces"
    assert store.num_bytes == 7 * PIECE_BYTES
    assert store.get(kept) == content(0, 3 * PIECE_BYTES)


@pytest.mark.parametrize("where", [None, "store"])
def test_packs_of_empty_blobs_are_no_lasting_garbage(tmp_path: Path, where: str | None) -> None:
    store = BlobStore(tmp_path / where if where else None)
    empty = store.put(b"")
    assert store.collect([empty]) == 0
    assert store.get(empty) == b""


def test_who_is_killed_between_dropping_and_shrinking_has_what_was_kept(
    store: BlobStore, tmp_path: Path
) -> None:
    assert_survives(store, tmp_path, *DURABLE)
    again = BlobStore(tmp_path / "store")
    again.collect(digests_of(DURABLE))
    assert again.num_bytes == 2000
    assert_survives(again, tmp_path, *DURABLE)
