"""Disk space is freed during rounds, one step at a time, and never after its peer's end."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import cast

import pytest

from swarm.errors import OutOfMemory, StateError
from swarm.network.blobs import disk_retry
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.rounds import disk_work
from swarm.network.rounds.disk_work import Tidying
from swarm.network.wire.loop_thread import LoopThread

WAIT_S = 30.0


class SlowStore:
    """A store whose shrinking a test prolongs."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self.minds_its_end = True
        self.num_begun, self.num_running, self.most_running = 0, 0, 0
        self.begun, self.goes_on = threading.Semaphore(0), threading.Semaphore(0)
        self.is_done = threading.Event()

    def shrink(self, is_ended: Callable[[], bool]) -> None:
        self.num_begun += 1
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        self.begun.release()
        while not self.goes_on.acquire(timeout=0.01):
            if self.minds_its_end and is_ended():
                break
        self.num_running -= 1
        self.is_done.set()
        if self.errors:
            raise self.errors.pop(0)


class Bench:
    """A tidying in its own loop."""

    def __init__(self) -> None:
        self.thread, self.store = LoopThread("test-tidying"), SlowStore()
        self.failures: list[BaseException] = []
        self.failed = threading.Event()
        self.tidying = Tidying(cast(BlobStore, self.store), self._fail)

    def _fail(self, error: BaseException) -> None:
        self.failures.append(error)
        self.failed.set()

    def ask(self) -> None:
        async def ask() -> None:
            self.tidying.ask()

        self.thread.run(ask(), WAIT_S)

    def stop(self) -> None:
        self.thread.run(self.tidying.stop(), WAIT_S)

    def close(self) -> None:
        self.store.goes_on.release(100)
        self.stop()
        self.thread.stop(WAIT_S)


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    made.close()


def test_what_is_asked_meanwhile_is_done_once_when_the_first_is_done(bench: Bench) -> None:
    bench.ask()
    assert bench.store.begun.acquire(timeout=WAIT_S)
    for _ in range(3):
        bench.ask()
    assert bench.store.num_begun == 1
    bench.store.goes_on.release()
    assert bench.store.begun.acquire(timeout=WAIT_S)
    bench.store.goes_on.release()
    bench.stop()
    assert (bench.store.num_begun, bench.store.most_running) == (2, 1)


def test_a_disk_that_fails_is_asked_again_in_the_next_round(bench: Bench, caplog) -> None:
    bench.store.errors = [StateError("the disk is full")]
    for _ in range(2):
        bench.ask()
        assert bench.store.begun.acquire(timeout=WAIT_S)
        bench.store.goes_on.release()
        assert bench.store.is_done.wait(WAIT_S)
        bench.store.is_done.clear()
    assert caplog.text.count("garbage is left until the next round: the disk is full") == 1
    assert bench.failures == []


def test_memory_that_stays_away_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_retry, "MEMORY_PATIENCE_S", 0.0)
    bench.store.errors = [MemoryError()]
    bench.ask()
    bench.store.goes_on.release()
    assert bench.failed.wait(WAIT_S)
    assert isinstance(bench.failures[0], OutOfMemory)


def test_the_end_waits_for_what_is_under_way(bench: Bench, caplog) -> None:
    bench.ask()
    assert bench.store.begun.acquire(timeout=WAIT_S)
    bench.ask()
    bench.stop()
    assert bench.store.is_done.is_set()
    assert bench.store.num_begun == 1, "nothing begins any more"
    assert caplog.text == ""


def test_the_end_does_not_wait_for_ever_for_a_disk_that_does_not_answer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setattr(disk_work, "END_S", 0.01)
    bench.store.minds_its_end = False
    bench.ask()
    assert bench.store.begun.acquire(timeout=WAIT_S)
    bench.stop()
    assert not bench.store.is_done.is_set()
    assert "the disk is slow" in caplog.text
    bench.store.goes_on.release()
    assert bench.store.is_done.wait(WAIT_S)
