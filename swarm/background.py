"""Supervised background threads and tasks.

An unexpected exception must not end background work silently. Work that lives as long as the
process is a body: a function that returns once it is asked to stop. If a body raises, the traceback
is logged, and the body is called again after a pause (`backoff_s`). Work that may have left a
change half done must not be repeated: it is a task. A task's failure goes to `on_failure`, which
ends the peer with the cause.

Time, waits and the start of threads come from a `System`. Tasks use their event loop instead. A
test, or a simulation in virtual time, passes its own `System`.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, ParamSpec, Protocol, TypeVar

from swarm.errors import OutOfMemory
from swarm.protocol.timing.backoff import backoff_s

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
"""After a body has worked this long without failure, its pauses begin with the shortest again."""

END_S = 5.0
"""Seconds for which the end of a pool waits for its threads, which a disk may block for ever."""

Given = ParamSpec("Given")
Result = TypeVar("Result")
Body = Callable[[], object]
AsyncBody = Callable[[], Coroutine[Any, Any, None]]
OnFailure = Callable[[BaseException], None]


class Joinable(Protocol):
    """A thread that was started."""

    def join(self, timeout: float | None = None) -> None:
        """Waits for the thread's end, at most `timeout` seconds."""

    def is_alive(self) -> bool:
        """Whether the thread has not ended yet."""


class System:
    """The clock, the waits and the threads of this process."""

    def monotonic(self) -> float:
        """Seconds of a clock that only rises."""
        return time.monotonic()

    def wait(self, event: threading.Event, timeout_s: float | None) -> bool:
        """Waits for an event. Returns whether the event is set."""
        return event.wait(timeout_s)

    def start(self, run: Callable[[], object], name: str) -> Joinable:
        """Starts a daemon thread.

        Raises:
            OutOfMemory: there is no memory for the thread's stack.
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
    """A daemon thread that calls a body until the body returns; see the module's docstring.

    Attributes:
        stopping: set once the thread is asked to end. The body must check this event.
    """

    def __init__(self, name: str, body: Body, system: System = SYSTEM) -> None:
        """Starts nothing yet.

        Args:
            name: name of the thread, also in the log.
            body: returns once `stopping` is set. If `stopping` is set in the pause after a failure,
                the body is called once more, to finish.
            system: the system of this process.
        """
        self.name, self.stopping = name, threading.Event()
        self._body, self._system = body, system
        self._thread: Joinable | None = None

    def start(self) -> None:
        """Starts the thread.

        Raises:
            OutOfMemory: there is no memory for the thread.
        """
        assert self._thread is None, "a thread starts once"
        self._thread = self._system.start(self._run, self.name)

    @property
    def is_alive(self) -> bool:
        """Whether the thread was started and has not ended."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self, timeout_s: float | None) -> bool:
        """Asks the thread to end. Returns whether it ended within `timeout_s` (None: no limit).

        A thread that did not end is logged and ends with the process.
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
        supervised(f"the thread {self.name}", self._body, self.stopping, system=self._system)


class _Work:
    """The queue and threads of a pool. Threads refer only to this, so they keep no pool alive."""

    def __init__(self, name: str, begin: Callable[[], object] | None) -> None:
        self.name, self.begin = name, begin
        self.changed = threading.Condition()
        self.queue = deque[tuple[Future[Any], partial[Any]]]()
        self.idle, self.is_ended = 0, False
        self.threads: list[Joinable] = []
        self.running: dict[int, str] = {}
        """Name of the call that each thread runs now."""

    def end(self, *, cancels: bool = False) -> None:
        """Takes no more work. Threads first do the queued work, or drop it (`cancels`)."""
        with self.changed:
            self.is_ended = True
            dropped = list(self.queue) if cancels else []
            if cancels:
                self.queue.clear()
            self.changed.notify_all()
        for future, _ in dropped:
            future.cancel()

    def start_one(self, system: System) -> None:
        """Starts a thread. If the thread fails between two calls, its body begins again."""
        run = partial(supervised, f"a thread of {self.name}", self.run, threading.Event())
        self.threads.append(system.start(run, self.name))

    def run(self) -> None:
        """The body of a thread."""
        me, failure = threading.get_ident(), None
        try:
            if self.begin is not None:
                self.begin()
        except BaseException as error:  # noqa: BLE001 - it is raised where results are wanted
            failure = error
        while True:
            with self.changed:
                self.idle += 1
                try:
                    self.changed.wait_for(lambda: self.queue or self.is_ended)
                finally:
                    self.idle -= 1
                if not self.queue:
                    return
                call = self.queue[0][1]  # removed only once nothing can fail
                self.running[me] = getattr(call.func, "__qualname__", str(call.func))
                future, call = self.queue.popleft()
            _answer(future, call, failure)
            del future, call  # a waiting thread must hold no references
            with self.changed:
                del self.running[me]

    def has_ended(self, end_s: float) -> bool:
        """Waits for all threads until `end_s` of the monotonic clock. Returns whether all ended."""
        for thread in self.threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self.threads)

    def hanging(self) -> str:
        """Names of the pool and of its running calls, for the log."""
        with self.changed:
            return f"{self.name} ({', '.join(sorted(self.running.values())) or 'starting'})"


class Helpers(ThreadPoolExecutor):
    """A pool of daemon threads whose end is bounded.

    A thread that waits for a disk may wait for ever. `ThreadPoolExecutor` would join such a thread
    when the pool is shut down, and again when the process ends. This pool logs hanging calls, and
    does not wait for them. When the process ends, queued work is done for at most `END_S`.
    """

    def __init__(
        self,
        name: str,
        number: int,
        *,
        begin: Callable[[], object] | None = None,
        are_started: bool = False,
        system: System = SYSTEM,
    ) -> None:
        """Makes the pool.

        Args:
            name: name of the threads, also in the log.
            number: most threads.
            begin: called by each thread at its start.
            are_started: whether all threads start now. Otherwise a thread starts when it is needed.
            system: the system of this process.

        Raises:
            OutOfMemory: `are_started` is set, and there is no memory for a thread.
        """
        super().__init__(number, name)  # starts no thread: its `submit` is never called
        self._number, self._system = number, system
        self._shared = _Work(name, begin)
        _AT_WORK.add(self._shared)
        weakref.finalize(self, self._shared.end)
        for _ in range(number if are_started else 0):
            self._shared.start_one(system)

    def submit(
        self, fn: Callable[Given, Result], /, *args: Given.args, **kwargs: Given.kwargs
    ) -> Future[Result]:
        """Has a thread call a function. Returns the future result.

        Raises:
            OutOfMemory: the pool has no thread, and there is no memory for a thread.
            RuntimeError: the pool has ended.
        """
        future, shared = Future[Result](), self._shared
        with shared.changed:
            if shared.is_ended:
                raise RuntimeError(f"{shared.name} takes no work any more")
            if len(shared.queue) >= shared.idle and len(shared.threads) < self._number:
                self._start_one()
            shared.queue.append((future, partial(fn, *args, **kwargs)))
            shared.changed.notify()
        return future

    def _start_one(self) -> None:
        shared = self._shared
        try:
            shared.start_one(self._system)
        except OutOfMemory:
            if not shared.threads:  # otherwise the existing threads do the work
                raise

    def end(self, timeout_s: float = END_S, *, cancels: bool = True) -> bool:
        """Waits at most `timeout_s` for running work, and logs calls that have not ended by then.

        Returns whether all calls have ended. Queued work is dropped with `cancels`, and done first
        without.
        """
        self._shared.end(cancels=cancels)
        return _all_ended([self._shared], timeout_s)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no more work. Prefer `end`, whose wait is bounded."""
        self._shared.end(cancels=cancel_futures)
        for thread in self._shared.threads if wait else ():
            thread.join()


def _answer(future: Future[Any], call: Callable[[], Any], failure: BaseException | None) -> None:
    """Gives a future the result of a call, or its error."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        if failure is not None:
            raise failure
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 - it is raised where the result is wanted
        future.set_exception(error)
        del future, call  # the traceback refers to this frame


_AT_WORK = weakref.WeakSet[_Work]()


@atexit.register
def _end_with_process() -> None:
    pools = [work for work in _AT_WORK if work.running or work.queue]
    for work in pools:
        work.end()
    _all_ended(pools, END_S)


def _all_ended(pools: Iterable[_Work], timeout_s: float) -> bool:
    end_s = time.monotonic() + timeout_s
    hanging = [work.hanging() for work in pools if not work.has_ended(end_s)]
    if hanging:
        logger.error(
            "not ended within %g s, a disk may not answer: %s", timeout_s, "; ".join(hanging)
        )
    return not hanging


class Tasks:
    """Tasks of one owner in a loop: kept alive until they are done, and ended together.

    `len` is the number of running tasks. Only the loop's thread may call the methods.
    """

    def __init__(self, owner: str, on_failure: OnFailure | None = None) -> None:
        """Has no tasks yet. A failed task is logged with `owner`, then `on_failure` is called."""
        self._owner = owner
        self._on_failure = on_failure
        self._running: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._running)

    def add(self, task: asyncio.Task[Any]) -> None:
        """Ends this task with the others. A failure reaches only those that await the task."""
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Runs work that ends by itself. Nobody awaits it, so a failure is logged and reported."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self.add(task)
        task.add_done_callback(self._failed)

    def supervise(self, body: AsyncBody) -> None:
        """Runs a body for as long as its owner lives: it is called again after a failure."""
        self.spawn(supervised_async(f"a task of {self._owner}", body))

    async def stop(self) -> None:
        """Cancels all tasks, and returns once they have ended."""
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
            error = asyncio.CancelledError("its awaited work was cancelled")
        if error is None:
            return
        with suppress(MemoryError):
            logger.error("a task of %s failed", self._owner, exc_info=error)
        if self._on_failure:
            self._on_failure(error)


def supervised(
    who: str,
    body: Body,
    stopping: threading.Event,
    *,
    ends: tuple[type[BaseException], ...] = (),
    system: System = SYSTEM,
) -> None:
    """Calls a body in this thread until the body returns; see the module's docstring.

    Args:
        who: name of the work in the log when the body fails.
        body: returns once `stopping` is set.
        stopping: ends the pause after a failure. The body is then called once more, to finish.
        ends: expected exceptions that end the work. They are raised.
        system: the system of this process.
    """
    failures = 0
    while True:
        is_last, began_s = stopping.is_set(), system.monotonic()
        try:
            body()
            return
        except ends:
            raise
        except BaseException as error:  # noqa: BLE001 - it is logged, whatever it is
            failures = _failures(failures, system.monotonic() - began_s)
            pause_s = _pause_s(failures)
            _log_rest(who, error, pause_s)
        if is_last:
            return
        system.wait(stopping, pause_s)


async def supervised_async(who: str, body: AsyncBody) -> None:
    """Awaits a body in this task until it returns. Only a cancellation ends the work earlier.

    Args:
        who: name of the work in the log when the body fails.
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
    """Whether the current task itself was cancelled.

    If it was not, a `CancelledError` comes from work that the task awaits, and is a failure.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _failures(before: int, worked_s: float) -> int:
    """Failures in a row, this one included."""
    return 1 if worked_s >= LONGEST_PAUSE_S else before + 1


def _pause_s(failures: int) -> float:
    return backoff_s(failures, FIRST_PAUSE_S, LONGEST_PAUSE_S)


def _log_rest(who: str, error: BaseException, pause_s: float) -> None:
    with suppress(MemoryError):  # there may be no memory left for the log line either
        logger.error("%s failed; it begins again in %g s", who, pause_s, exc_info=error)
