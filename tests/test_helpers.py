"""A pool with threads that hang in a disk: its end is bounded, and is logged."""

import gc
import logging
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from unittest.mock import Mock

import pytest

from swarm.background import Helpers, Joinable, System
from swarm.errors import OutOfMemory

HANGING_PROCESS = """
import logging, sys, threading
from swarm import background
from swarm.network.wire.loop_thread import started_pool

logging.basicConfig(format="%(message)s")
background.END_S = 0.2
pool = started_pool("swarm-record", 1)
pool.submit(threading.Event().wait)
done = started_pool("swarm-tidying", 1)
done.submit(threading.Event().wait, 0.05)
done.submit(print, "what is queued is done", flush=True)
done.shutdown(wait=False)
"""


def test_a_process_ends_though_a_thread_waits_for_the_disk() -> None:
    command = [sys.executable, "-c", HANGING_PROCESS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "what is queued is done\n"
    assert done.stderr.splitlines() == [
        "not ended within 0.2 s, a disk may not answer: swarm-record (Event.wait)"
    ]


def test_a_pool_ends_despite_a_hang_and_drops_what_waits(caplog: pytest.LogCaptureFixture) -> None:
    answers, pool = threading.Event(), Helpers("reader", 1)
    hangs, waits = pool.submit(answers.wait), pool.submit(print)
    while not hangs.running():
        pass
    with caplog.at_level(logging.ERROR):
        assert not pool.end(0.05)
    assert caplog.messages == [
        "not ended within 0.05 s, a disk may not answer: reader (Event.wait)"
    ]
    with pytest.raises(CancelledError):
        waits.result(0)
    with pytest.raises(RuntimeError, match="takes no work"):
        pool.submit(print)
    answers.set()
    assert hangs.result(30)
    assert pool.end(30)


def test_threads_start_as_they_are_needed_and_no_more_than_allowed() -> None:
    may_go, pool = threading.Event(), Helpers("few", 2)
    before = threading.active_count()
    assert pool.submit(len, "one").result(30) == 3
    while not pool._shared.idle:
        pass
    assert pool.submit(len, "four").result(30) == 4
    assert threading.active_count() == before + 1
    waiting = [pool.submit(may_go.wait) for _ in range(4)]
    assert threading.active_count() == before + 2
    may_go.set()
    assert all(each.result(30) for each in waiting)
    assert pool.end(30)


def test_an_error_is_raised_where_the_result_is_wanted_and_holds_nothing() -> None:
    class Large:
        pass

    def fail(_: Large) -> None:
        raise KeyError("lost")

    gc.disable()
    try:
        pool, large = Helpers("failing", 1), Large()
        found, future = weakref.ref(large), pool.submit(fail, large)
        with pytest.raises(KeyError, match="lost"):
            future.result(30)
        del future, large
        assert pool.submit(len, "x").result(30) == 1  # the thread has released it
        assert found() is None
    finally:
        gc.enable()
    assert pool.end(30)


def test_a_thread_that_cannot_begin_fails_its_work() -> None:
    pool = Helpers("beginner", 1, begin=Mock(side_effect=ValueError("no such device")))
    with pytest.raises(ValueError, match="no such device"):
        pool.submit(len, "x").result(30)
    assert pool.end(30)


def test_without_memory_for_a_thread_the_others_do_the_work() -> None:
    class Short(System):
        left = 1

        def start(self, run: Callable[[], object], name: str) -> Joinable:
            self.left -= 1
            if self.left < 0:
                raise OutOfMemory("no memory")
            return super().start(run, name)

    pool = Helpers("short", 2, system=Short())
    assert [each.result(30) for each in [pool.submit(len, "x"), pool.submit(len, "xy")]] == [1, 2]
    assert pool.end(30)
    system = Short()
    system.left = 0
    with pytest.raises(OutOfMemory):
        Helpers("none", 1, system=system).submit(len, "x")
    with pytest.raises(OutOfMemory):
        Helpers("none", 1, are_started=True, system=system)


def test_a_pool_that_nobody_has_any_more_ends_its_threads() -> None:
    pool = Helpers("forgotten", 1, are_started=True)
    (thread,) = pool._shared.threads
    del pool
    gc.collect()
    thread.join(30)
    assert not thread.is_alive()
