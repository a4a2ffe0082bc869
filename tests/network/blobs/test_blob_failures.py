"""Disks that fail at any step, and collections between any two steps of other threads."""

from __future__ import annotations

import errno
import os
import random
import shutil
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import pytest

from swarm.errors import StateError
from swarm.network.blobs import packs
from swarm.network.blobs.blob_store import BlobStore
from swarm.protocol.values.digests import PIECE_BYTES, digest_of, piece_index

CALLS = ("pwrite", "fdatasync", "fsync", "replace", "unlink", "ftruncate")
WAIT_S = 120.0


def content(seed: int, num_bytes: int = 1000) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


AGREED, DEAD, NEWS = range(3), range(3, 12), 20


def mostly_garbage(folder: Path) -> BlobStore:
    """A store whose one synced pack has three needed blobs and nine others."""
    store = BlobStore(folder)
    store.sync([store.put(content(seed)) for seed in (*AGREED, *DEAD)])
    return store


class Faulty:
    """Makes system calls of packs fail: the one with this number, or all from there on."""

    def __init__(self, fail_at: int, error: BaseException, *, for_good: bool = False) -> None:
        self.calls: list[str] = []
        self._fail_at, self._error, self._for_good = fail_at, error, for_good

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in CALLS:
            monkeypatch.setattr(os, name, self._wrap(name, getattr(os, name)))

    def _wrap(self, name: str, call: Callable[..., object]) -> Callable[..., object]:
        def checked(*arguments: object, **named: object) -> object:
            number = len(self.calls)
            self.calls.append(name)
            if number == self._fail_at or (self._for_good and number > self._fail_at):
                raise self._error
            return call(*arguments, **named)

        return checked


def steps_of_a_collection(folder: Path) -> list[str]:
    store, steps = mostly_garbage(folder), Faulty(-1, KeyboardInterrupt())
    with pytest.MonkeyPatch.context() as patch:
        steps.install(patch)
        store.collect([digest_of(content(seed)) for seed in AGREED])
    return steps.calls


def test_no_crash_between_two_steps_of_a_collection_costs_a_blob(tmp_path):
    agreed = [digest_of(content(seed)) for seed in AGREED]
    steps = steps_of_a_collection(tmp_path / "whole")
    assert {"pwrite", "fdatasync", "fsync", "replace", "unlink"} <= set(steps)
    for step in range(len(steps)):
        folder = tmp_path / str(step)
        store = mostly_garbage(folder)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            Faulty(step, KeyboardInterrupt(), for_good=True).install(patch)
            store.collect(agreed)
        again = BlobStore(folder)
        assert again.verify(agreed) == [], f"lost at step {step}, {steps[step]}"
        again.collect(agreed)
        assert BlobStore(folder).verify(agreed) == [], f"lost after step {step}, {steps[step]}"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_no_error_at_any_step_of_a_collection_costs_a_blob(tmp_path, number):
    """A retry neither reads zeros nor deletes the only durable copy."""
    agreed = [digest_of(content(seed)) for seed in AGREED]
    steps = steps_of_a_collection(tmp_path / "whole")
    for step in range(len(steps)):
        folder, where = tmp_path / str(step), f"step {step}, {steps[step]}"
        store = mostly_garbage(folder)
        with pytest.MonkeyPatch.context() as patch:
            faulty = Faulty(step, OSError(number, os.strerror(number)))
            faulty.install(patch)
            if faulty.calls or steps[step] != "ftruncate":
                with pytest.raises(StateError):
                    store.collect(agreed)
        for seed in AGREED:
            assert store.get(digest_of(content(seed))) == content(seed), where
        assert BlobStore(shutil.copytree(folder, tmp_path / "copy")).verify(agreed) == [], where
        shutil.rmtree(tmp_path / "copy")
        store.collect(agreed)
        store.sync(agreed)
        assert store.verify(agreed) == [], where
        assert BlobStore(folder).verify(agreed) == [], where


def test_a_disk_that_stays_full_costs_nothing_and_gives_its_garbage_back(tmp_path):
    agreed = [digest_of(content(seed)) for seed in AGREED]
    store = mostly_garbage(tmp_path)
    store.sync([store.put(content(NEWS, 50_000))])
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        for _ in range(3):
            with pytest.raises(StateError, match="free some space"):
                store.collect(agreed)
        sizes = [path.stat().st_size for path in (tmp_path / "packs").glob("*.pack")]
        assert sum(sizes) == 12 * 1000, "deletions that need no room happen"
    assert store.verify(agreed) == []
    store.collect(agreed)
    assert store.num_bytes == 3000
    assert BlobStore(tmp_path).verify(agreed) == []


def test_a_write_that_ends_early_is_continued_and_one_without_end_fails(tmp_path, monkeypatch):
    store, write = BlobStore(tmp_path), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: write(file, bytes(data[:300]), at))
    digest = store.put(content(0))
    assert store.get(digest) == content(0)
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    with pytest.raises(StateError, match="free some space"):
        store.put(content(1))
    assert store.digests() == [digest]


def test_what_was_not_written_is_not_here(tmp_path, monkeypatch):
    """Neither after `put` nor in a draft, and no hole is left in its place."""
    store = BlobStore(tmp_path)
    full = Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    draft = store.draft(2000)
    draft.write(content(0))
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StateError):
            store.put(content(1))
        with pytest.raises(StateError):
            draft.write(content(2))
    assert store.digests() == []
    assert store.num_bytes == 2000
    draft.write(content(2))
    assert store.get(draft.finish()) == content(0) + content(2)


def failing_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fail = Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO)))
    monkeypatch.setattr(os, "fdatasync", fail)


def test_a_sync_that_failed_is_not_believed_the_second_time(tmp_path, monkeypatch):
    """The system reports a failed write-back once, and then counts the pages as clean."""
    store, lost = BlobStore(tmp_path), []
    store.on_lost = lambda digest, why: lost.append(digest)
    good, bad = store.put(content(0)), store.put(content(1))
    with monkeypatch.context() as patch, pytest.raises(StateError, match="check the disk"):
        failing_once(patch)
        store.sync([good, bad])
    with open(tmp_path / "packs/00000000.pack", "r+b") as file:  # its part on the disk
        file.seek(1000)
        file.write(bytes(1000))
    with pytest.raises(StateError, match=bad):
        store.sync([good, bad])
    assert lost == [bad]
    assert not store.has(bad)
    store.sync([good])
    assert store.file_of(good).pack.path.name != "00000000.pack"
    again = BlobStore(tmp_path)
    assert again.verify([good]) == []
    assert not again.has(bad)


def test_a_blob_that_is_damaged_is_not_moved_but_told(tmp_path):
    store, lost = mostly_garbage(tmp_path), []
    store.on_lost = lambda digest, why: lost.append(digest)
    agreed = [digest_of(content(seed)) for seed in AGREED]
    place = store.file_of(agreed[1])
    os.pwrite(place.pack.fileno(), bytes(1000), place.offset)
    store.collect(agreed)
    assert lost == [agreed[1]]
    assert store.verify(agreed) == [agreed[1]]
    assert BlobStore(tmp_path).verify(agreed) == [agreed[1]]


def test_a_pack_that_is_shorter_than_its_index_says_is_an_error_and_never_zeros(tmp_path):
    store = mostly_garbage(tmp_path)
    os.truncate(tmp_path / "packs/00000000.pack", 1500)
    with pytest.raises(StateError, match="ends before byte 2000"):
        store.get(digest_of(content(1)))
    assert BlobStore(tmp_path).digests() == [digest_of(content(0))]


def test_a_blob_is_read_into_one_buffer_however_little_comes_at_once(tmp_path, monkeypatch):
    """As with blobs beyond 2 GiB, the most that Linux reads at once."""
    size, at_once = 8 * 2**20, 3 * 2**20
    store = BlobStore(tmp_path)
    digest = store.put(content(0, size))
    read, read_into = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda f, n, at: read(f, min(n, at_once), at))
    monkeypatch.setattr(os, "preadv", lambda f, v, at: read_into(f, [v[0][:at_once]], at))
    tracemalloc.start()
    try:
        blob = store.get(digest)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 1.1 * size
    assert blob == content(0, size)


# ---------------------------------------------------------------- collections in between


class MeddlingLock:
    """A lock that calls a function after each release.

    While another lock is held, only with `within`.
    """

    num_held = 0
    runs_within = False
    meddle: Callable[[], object] | None = None

    def __init__(self) -> None:
        self._lock = _Lock()

    def __enter__(self) -> None:
        self._lock.acquire()
        MeddlingLock.num_held += 1

    def __exit__(self, *_: object) -> None:
        MeddlingLock.num_held -= 1
        self._lock.release()
        meddle = MeddlingLock.meddle
        if meddle and (MeddlingLock.runs_within or not MeddlingLock.num_held):
            MeddlingLock.meddle = None
            meddle()
            MeddlingLock.meddle = meddle


_Lock = threading.Lock


@pytest.fixture(params=["collect", "forget"])
def meddled(request, tmp_path, monkeypatch) -> Iterator[BlobStore]:
    """A store on disk that is collected after every release of one of its locks.

    Or forgets what is not held, also between the steps of a sync and while a pack is rewritten.
    """
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Lock", MeddlingLock)
        store = BlobStore(tmp_path)
    MeddlingLock.runs_within = request.param == "forget"
    MeddlingLock.meddle = lambda: getattr(store, request.param)(set())
    yield store
    MeddlingLock.meddle = None


def put(store: BlobStore, blob: bytes) -> None:
    store.put(blob)


def write_draft(store: BlobStore, blob: bytes) -> None:
    with store.draft(len(blob)) as draft:
        for start in range(0, len(blob), 1_000_003):
            draft.write(blob[start : start + 1_000_003])
        draft.finish()


def receive(store: BlobStore, blob: bytes) -> None:
    partial = store.writer(digest_of(blob), len(blob))
    partial.set_index(piece_index(blob))
    for number in range(2):
        piece = memoryview(blob)[number * PIECE_BYTES : (number + 1) * PIECE_BYTES]
        partial.write_piece(number, piece)
    store.keep(partial)


@pytest.mark.parametrize("way", [put, write_draft, receive])
def test_no_collection_falls_between_a_blob_and_its_place(meddled, tmp_path, way):
    blobs = [content(seed, PIECE_BYTES + seed) for seed in range(1, 4)]
    digests = [digest_of(blob) for blob in blobs]
    meddled.pin(digests)
    for blob, digest in zip(blobs, digests, strict=True):
        way(meddled, blob)
        assert meddled.get(digest) == blob
        meddled.sync([digest])
        meddled.shrink()
        assert BlobStore(shutil.copytree(tmp_path, tmp_path / "copy")).verify([digest]) == []
        shutil.rmtree(tmp_path / "copy")
    assert meddled.verify(digests) == []
    assert BlobStore(tmp_path).verify(digests) == []


def test_a_blob_that_came_again_while_its_damage_was_found_stays(meddled, monkeypatch):
    """`verify` drops the place that it read, and no other."""
    digest = meddled.put(content(0))
    meddled.pin([digest])
    meddled.put(content(0))
    place = meddled.file_of(digest)
    os.pwrite(place.pack.fileno(), bytes(1000), place.offset)
    read = packs.FilePack.read

    def replaced_meanwhile(self: packs.FilePack, *arguments: int) -> object:
        wrong = read(self, *arguments)
        monkeypatch.undo()
        meddled.unpin([digest])
        meddled.collect(set())
        meddled.pin([digest])
        meddled.put(content(0))
        return wrong

    monkeypatch.setattr(packs.FilePack, "read", replaced_meanwhile)
    assert meddled.verify([digest]) == [digest]
    assert meddled.get(digest) == content(0)


class YieldingLock:
    """A lock that often pauses the thread for a moment after its release."""

    def __init__(self) -> None:
        self._lock, self._random = _Lock(), random.Random(0)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        pause_s = self._random.choice([0.0, 0.0, 0.001])
        self._lock.release()
        time.sleep(pause_s)


def test_what_was_synced_beside_collections_is_there_at_the_next_start(tmp_path, monkeypatch):
    """Two writers, a collector and a shrink interleave their critical sections."""
    with monkeypatch.context() as patch:
        patch.setattr(threading, "Lock", YieldingLock)
        store = BlobStore(tmp_path)
    done = threading.Event()

    def write(seed: int) -> list[str]:
        choose, synced = random.Random(seed), []
        for number in range(60):
            blob = choose.randbytes(50)
            digest = digest_of(blob)
            store.pin([digest])
            store.put(blob, digest)
            if number % 3 == 0:
                store.sync([digest])
                synced.append(digest)
            else:
                store.unpin([digest])
        return synced

    def repeat(act: Callable[..., object], *given: object) -> None:
        while not done.is_set():
            act(*given)

    with ThreadPoolExecutor(5) as pool:
        calls = [(store.collect, set()), (store.forget, set()), (store.shrink,)]
        others = [pool.submit(repeat, *call) for call in calls]
        try:
            writers = [pool.submit(write, seed) for seed in range(2)]
            synced = [digest for writer in writers for digest in writer.result(WAIT_S)]
        finally:
            done.set()
        for other in others:
            other.result(WAIT_S)
    assert len(synced) == 40
    assert BlobStore(tmp_path).verify(synced) == []
