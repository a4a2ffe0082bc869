"""Threads and tasks that run beside the main thread, and are supervised.

An exception that nobody expected must not end such work silently. Work that lives as long as the
process is a body: a function that returns once it is asked to stop. A body that raises is logged
with its traceback, rests (`backoff_s`), and is called again. Work that must not be called again,
because it may have changed half of something, is a task whose failure `on_failure` hears, which
ends the peer with the cause.

Time, waiting and the start of threads are those of a `System`; tasks use their loop's. A test, or
a simulation in virtual time, gives others.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any, Protocol

from swarm.errors import OutOfMemory
from swarm.protocol.backoff import backoff_s

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
"""A body that has worked for so long since its last failure begins with the first pause again."""

Body = Callable[[], object]
AsyncBody = Callable[[], Coroutine[Any, Any, None]]
OnFailure = Callable[[BaseException], None]


class Joinable(Protocol):
    """A thread that was started."""

    def join(self, timeout: float | None = None) -> None:
        """Waits for its end, at most so many seconds."""

    def is_alive(self) -> bool:
        """Whether it has not ended yet."""


class System:
    """The clock, the waits and the threads of this process."""

    def monotonic(self) -> float:
        """Seconds of a clock that only rises."""
        return time.monotonic()

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        """Waits for an event; returns whether it is set."""
        return event.wait(timeout_s)

    def start(self, run: Callable[[], object], name: str) -> Joinable:
        """Starts a daemon thread.

        Raises:
            OutOfMemory: there is no memory for its stack.
        """
        thread = threading.Thread(target=run, name=name, daemon=True)
        try:
            thread.start()
        except (RuntimeError, MemoryError) as error:
            raise OutOfMemory(
                f"no memory is left for the thread {name}",
                hint="stop other programs, or raise the limit of processes (ulimit -u)",
            ) from error
        return thread


SYSTEM = System()


class SupervisedThread:
    """A daemon thread that calls a body until that returns; see the module.

    Attributes:
        stopping: set once the thread is asked to end, for the body to look at.
    """

    def __init__(self, name: str, body: Body, system: System = SYSTEM) -> None:
        """Starts nothing yet.

        Args:
            name: of the thread, in the log too.
            body: returns once `stopping` is set. A stop that comes while it rests after a failure
                lets it run once more, to finish.
            system: of this process.
        """
        self.name, self.stopping = name, threading.Event()
        self._body, self._system = body, system
        self._thread: Joinable | None = None

    def start(self) -> None:
        """Starts the thread.

        Raises:
            OutOfMemory: there is no memory for it.
        """
        assert self._thread is None, "a thread starts once"
        self._thread = self._system.start(self._run, self.name)

    @property
    def is_alive(self) -> bool:
        """Whether it was started and has not ended."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self, timeout_s: float | None) -> bool:
        """Asks the thread to end; returns whether it has within so many seconds, None: any.

        One that has not is logged and left alone: it ends with the process.
        """
        self.stopping.set()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            logger.error("the thread %s did not end within %s s", self.name, timeout_s)
            return False
        return True

    def _run(self) -> None:
        failures = 0
        while True:
            is_last, began_s = self.stopping.is_set(), self._system.monotonic()
            try:
                self._body()
                return
            except BaseException as error:  # noqa: BLE001 - whatever it is, it must not end here
                failures = _failures(failures, self._system.monotonic() - began_s)
                pause_s = _pause_s(failures)
                _log_rest(f"the thread {self.name}", error, pause_s)
            if is_last:
                return
            self._system.wait(self.stopping, pause_s)


class Tasks:
    """Tasks of one owner in a loop: kept alive until they are done, and ended together.

    `len` is how many run. Only the loop's thread may call this.
    """

    def __init__(self, owner: str, on_failure: OnFailure | None = None) -> None:
        """Starts with none; `owner` is named in the log when a task fails, then it is told."""
        self._owner = owner
        self._on_failure = on_failure
        self._running: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def add(self, task: asyncio.Task[Any]) -> None:
        """Ends this task with the others; those that wait for it hear of its failure."""
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs work that has an end; nobody waits for it, so a failure is logged and told."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self.add(task)
        task.add_done_callback(self._failed)

    def supervise(self, body: AsyncBody) -> None:
        """Runs work that lives as long as its owner: after a failure it rests and begins again."""
        self.spawn(supervised(f"a task of {self._owner}", body))

    async def stop(self) -> None:
        """Cancels all and returns once they have ended."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _failed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            error = task.exception()
        elif task.cancelling():
            return
        else:
            error = asyncio.CancelledError("what it waited for was cancelled")
        if error is None:
            return
        with suppress(MemoryError):
            logger.error("a task of %s failed", self._owner, exc_info=error)
        if self._on_failure:
            self._on_failure(error)


async def supervised(who: str, body: AsyncBody) -> None:
    """Awaits a body until it returns; see the module. Only being cancelled ends it before.

    Args:
        who: is named in the log when the body fails.
        body: makes the coroutine, again after each failure.
    """
    loop, failures = asyncio.get_running_loop(), 0
    while True:
        began_s = loop.time()
        try:
            await body()
            return
        except (KeyboardInterrupt, SystemExit, GeneratorExit):
            raise
        except BaseException as error:
            if is_cancelled():
                raise
            failures = _failures(failures, loop.time() - began_s)
            pause_s = _pause_s(failures)
            _log_rest(who, error, pause_s)
        await asyncio.sleep(pause_s)


def is_cancelled() -> bool:
    """Whether somebody has cancelled the current task.

    Otherwise a `CancelledError` comes from something that the task awaits, and is a failure.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _failures(before: int, worked_s: float) -> int:
    """Failures in a row, this one included."""
    return 1 if worked_s >= LONGEST_PAUSE_S else before + 1


def _pause_s(failures: int) -> float:
    return backoff_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S)


def _log_rest(who: str, error: BaseException, pause_s: float) -> None:
    with suppress(MemoryError):  # there may be none for the line either
        logger.error("%s failed; it begins again in %g s", who, pause_s, exc_info=error)
