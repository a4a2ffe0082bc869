"""Virtual time: one event loop that jumps to the next timer, and threads that it schedules.

A virtual thread is a greenlet. It yields only where production would wait: in `sleep`, in
`Event.wait`, in `Thread.join` and in `LoopThread.run`. So the timers determine the order of all
events, and a month of waiting takes no time.
"""

# Stand-ins take the arguments of the originals.
# ruff: noqa: ARG002

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import contextvars
import heapq
import logging
import sys
import threading as real_threading
import time as real_time
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import ALL_COMPLETED, Executor
from queue import Empty, Full
from typing import Any, Generic, TypeVar

from greenlet import GreenletExit, getcurrent, greenlet

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Item = TypeVar("Item")
EPOCH_S = 1_790_000_000.0
"""Wall time (seconds since 1970) at which every month begins."""
BOOT_S = 1000.0
"""The monotonic clock when a month begins."""


class Stuck(Exception):
    """Nothing can happen: every thread and task waits for another."""


class _Jump:
    """Replaces a selector: virtual time passes where a selector would wait."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    def select(self, timeout_s: float | None) -> list[Any]:
        if timeout_s is None:
            raise Stuck("no timer is left, and no task or thread can run")
        self._loop.pass_time(timeout_s)
        return []


class VirtualLoop(asyncio.BaseEventLoop):
    """An event loop in virtual time, which opens no descriptor.

    Attributes:
        now_s: seconds since the month began.
    """

    _scheduled: list[asyncio.TimerHandle]

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self._selector = _Jump(self)
        self.failures: list[str] = []
        """Texts that asyncio would have logged: exceptions that no code has seen."""
        self.set_exception_handler(self._noted)
        self.helpers = 0
        """Calls of `run_in_executor` that have not returned."""

    def time(self) -> float:
        """Seconds, as `time.monotonic` counts them."""
        return BOOT_S + self.now_s

    def pass_time(self, seconds: float) -> None:
        """Lets time pass, as a computation or a hanging disk does."""
        self.now_s += max(seconds, 0.0)

    def _process_events(self, event_list: list[Any]) -> None:
        assert not event_list

    def _write_to_self(self) -> None:
        """Does nothing: no selector sleeps, so none has to be woken."""

    def _noted(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.failures.append(f"{context['message']}: {error!r}")
        logger.error("%s", context["message"], exc_info=error)

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Result], *args: Any
    ) -> asyncio.Future[Result]:
        """Runs a function in a virtual thread of the executor, or in a new virtual thread."""
        if executor is not None:
            return asyncio.wrap_future(executor.submit(func, *args), loop=self)
        future: asyncio.Future[Result] = self.create_future()
        self.helpers += 1

        def work() -> None:
            try:
                result, error = func(*args), None
            except BaseException as raised:  # noqa: BLE001
                result, error = None, raised
            self.helpers -= 1
            if future.done():  # cancelled meanwhile
                return
            if error is None:
                future.set_result(result)  # type: ignore[arg-type]
            else:
                future.set_exception(error)

        Threads.of(self).spawn(work)
        return future

    @property
    def num_timers(self) -> int:
        """Number of timers that are set and not cancelled."""
        return sum(not handle.cancelled() for handle in self._scheduled)

    def forget_cancelled(self) -> None:
        """Drops cancelled timers, as the loop itself does once they are many."""
        self._scheduled = [h for h in self._scheduled if not h.cancelled()]
        for handle in self._scheduled:
            handle._scheduled = True  # type: ignore[attr-defined]
        self._timer_cancelled_count = 0
        heapq.heapify(self._scheduled)


class Threads:
    """Virtual threads of one loop, and the waits that they may call."""

    _of: dict[VirtualLoop, Threads] = {}  # noqa: RUF012

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.living: set[VirtualThread] = set()
        self.crashed: list[tuple[str, BaseException]] = []
        """Names of threads that an exception ended, and the exceptions."""
        self._hub = getcurrent()
        self._waiting: set[greenlet] = set()

    @classmethod
    def of(cls, loop: VirtualLoop) -> Threads:
        """The threads of a loop. Each loop has one such object."""
        found = cls._of.get(loop)
        if found is None:
            found = cls._of[loop] = cls(loop)
        return found

    def forget(self) -> None:
        """Ends with the loop. Threads that still wait will wait for ever.

        They are kept, since a dropped greenlet runs its exception handlers once more.
        """
        self._of.pop(self.loop, None)
        _graveyard.extend(self._waiting)

    @property
    def is_inside(self) -> bool:
        """Whether the running code is in a virtual thread, not in a callback of the loop."""
        return getcurrent() is not self._hub

    def spawn(self, work: Callable[[], None]) -> greenlet:
        """Schedules a function, which runs soon in a new greenlet."""
        fresh = greenlet(work, self._hub)
        fresh.gr_context = contextvars.copy_context()  # the machine on which it runs
        self.loop.call_soon(self._switch, fresh, context=contextvars.Context())
        return fresh

    def _switch(self, to: greenlet, value: object = None) -> None:
        running = events._get_running_loop()
        events._set_running_loop(None)  # a thread has no loop of its own
        try:
            to.switch(value) if to else to.switch()
        finally:
            events._set_running_loop(running)

    def park(self, timeout_s: float | None) -> Parked:
        """Begins a wait of the running thread, which another thread or a time-out ends."""
        if not self.is_inside:
            raise AssertionError("a callback of the event loop would block the whole peer")
        self._waiting.add(getcurrent())
        return Parked(self, timeout_s)

    def sleep(self, seconds: float) -> None:
        """Like `time.sleep`."""
        if self.is_inside:
            self.park(seconds).wait()
        else:  # a callback that sleeps delays everything
            self.loop.pass_time(seconds)

    def resume(self, parked: Parked, *, woken: bool) -> None:
        """Lets a waiting thread run again, once."""
        if parked.is_over or self.loop.is_closed():
            return
        parked.is_over = True
        if parked.timer:
            parked.timer.cancel()
        self.loop.call_soon(self._switch, parked.greenlet, woken, context=contextvars.Context())

    def switch_to_hub(self) -> Any:
        """Yields. Returns the value that `resume` was given."""
        return self._hub.switch()


class Parked:
    """One wait of one virtual thread."""

    def __init__(self, threads: Threads, timeout_s: float | None) -> None:
        self.threads, self.greenlet, self.is_over = threads, getcurrent(), False
        self.timer: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            self.timer = threads.loop.call_later(
                max(timeout_s, 0.0), self._expired, context=contextvars.Context()
            )

    def _expired(self) -> None:
        self.threads.resume(self, woken=False)

    def wake(self) -> None:
        """Ends the wait."""
        self.threads.resume(self, woken=True)

    def wait(self) -> bool:
        """Waits. Returns True if the wait was ended by `wake`, False after a time-out."""
        try:
            return bool(self.threads.switch_to_hub())
        finally:
            self.threads._waiting.discard(self.greenlet)


class VirtualThread:
    """Like `threading.Thread`, as far as the peer uses it."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self._target, self._args, self._kwargs = target, args, kwargs or {}
        self.name, self.daemon = name or "thread", bool(daemon)
        self.ident: int | None = None
        self._threads: Threads | None = None
        self._joining: list[Parked] = []
        self._has_ended = False

    def start(self) -> None:
        """Begins to run soon."""
        self._threads = Threads.of(running_world())
        self._threads.living.add(self)
        self.ident = id(self._threads.spawn(self._run))

    def run(self) -> None:
        """Calls the target."""
        if self._target:
            self._target(*self._args, **self._kwargs)

    def _run(self) -> None:
        assert self._threads
        _current[getcurrent()] = self
        try:
            self.run()
        except GreenletExit:
            pass  # the month is over
        except BaseException as error:
            self._threads.crashed.append((self.name, error))
            logger.error("thread %s ended", self.name, exc_info=error)
        finally:
            _current.pop(getcurrent(), None)
            self._has_ended = True
            self._threads.living.discard(self)
            for parked in self._joining:
                parked.wake()

    def join(self, timeout: float | None = None) -> None:
        """Waits until the thread has ended, at most `timeout` seconds."""
        if self._has_ended or self._threads is None or not _world:
            return
        parked = self._threads.park(timeout)
        self._joining.append(parked)
        parked.wait()
        self._joining.remove(parked)

    def is_alive(self) -> bool:
        """Whether the thread was started and has not ended."""
        return self._threads is not None and not self._has_ended


class VirtualEvent:
    """Like `threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: list[Parked] = []

    def is_set(self) -> bool:
        """Whether the event is set."""
        return self._is_set

    def set(self) -> None:
        """Wakes all that wait."""
        self._is_set = True
        for parked in self._waiting:
            parked.wake()

    def clear(self) -> None:
        """Makes later waits wait again."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the event is set, at most `timeout` seconds. Returns whether it is set."""
        if self._is_set or (timeout is not None and timeout <= 0):
            return self._is_set
        parked = Threads.of(running_world()).park(timeout)
        self._waiting.append(parked)
        parked.wait()
        self._waiting.remove(parked)
        return self._is_set


class VirtualCondition:
    """Like `threading.Condition` with a lock that no thread ever waits for."""

    def __init__(self, lock: object = None) -> None:
        self._lock = lock if lock is not None else real_threading.RLock()
        self._waiting: list[Parked] = []

    def __enter__(self) -> bool:
        return True  # one thread runs at a time, and yields only in `wait`

    def __exit__(self, *_: object) -> None:
        return None

    def acquire(self, *_: object) -> bool:
        """Always succeeds at once."""
        return True

    def release(self) -> None:
        """Does nothing, because no thread waits for the lock."""

    def wait(self, timeout: float | None = None) -> bool:
        """Waits for a notification, at most `timeout` seconds."""
        parked = Threads.of(running_world()).park(timeout)
        self._waiting.append(parked)
        woken = parked.wait()
        if parked in self._waiting:
            self._waiting.remove(parked)
        return woken

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Waits until a condition holds, at most `timeout` seconds."""
        if not _world:  # the month is over: threads that still hang end with the process
            return predicate()
        loop = running_world()
        end_s = None if timeout is None else loop.time() + timeout
        while not predicate():
            left_s = None if end_s is None else end_s - loop.time()
            if left_s is not None and left_s <= 0:
                return predicate()
            self.wait(left_s)
        return True

    def notify(self, n: int = 1) -> None:
        """Wakes `n` waiting threads."""
        for parked in self._waiting[:n]:
            parked.wake()
        del self._waiting[:n]

    def notify_all(self) -> None:
        """Wakes all that wait."""
        self.notify(len(self._waiting))


class VirtualSemaphore:
    """Like `threading.Semaphore`."""

    def __init__(self, value: int = 1) -> None:
        self._value, self._changed = value, VirtualCondition()

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        """Takes a permit as soon as there is one."""
        if not self._changed.wait_for(lambda: self._value > 0, timeout if blocking else 0.0):
            return False
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        """Gives permits back."""
        self._value += n
        self._changed.notify(n)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class VirtualQueue(Generic[Item]):
    """Like `queue.SimpleQueue` and `queue.Queue`."""

    def __init__(self, maxsize: int = 0) -> None:
        self._items: deque[Item] = deque()
        self._most, self._changed = maxsize or sys.maxsize, VirtualCondition()

    def put(self, item: Item, block: bool = True, timeout: float | None = None) -> None:
        """Adds an item as soon as there is room."""
        limit_s = timeout if block else 0.0
        if not self._changed.wait_for(lambda: len(self._items) < self._most, limit_s):
            raise Full
        self._items.append(item)
        self._changed.notify_all()

    def get(self, block: bool = True, timeout: float | None = None) -> Item:
        """The oldest item, as soon as there is one."""
        if not self._changed.wait_for(lambda: bool(self._items), timeout if block else 0.0):
            raise Empty
        item = self._items.popleft()
        self._changed.notify_all()
        return item

    def put_nowait(self, item: Item) -> None:
        """Adds an item. Raises Full."""
        self.put(item, block=False)

    def get_nowait(self) -> Item:
        """The oldest item. Raises Empty."""
        return self.get(block=False)

    def empty(self) -> bool:
        """Whether it has no items."""
        return not self._items

    def qsize(self) -> int:
        """The number of items."""
        return len(self._items)


class VirtualTimer(VirtualThread):
    """Like `threading.Timer`."""

    def __init__(self, interval: float, function: Callable[..., object], *_: Any) -> None:
        super().__init__(target=function, name="timer")
        self._interval, self._finished = interval, VirtualEvent()

    def cancel(self) -> None:
        """Stops the timer. Does nothing once its time is over."""
        self._finished.set()

    def run(self) -> None:
        """Waits, then calls the function."""
        if not self._finished.wait(self._interval):
            super().run()


class VirtualFuture(concurrent.futures.Future[Any]):
    """Like `concurrent.futures.Future`, but waits pass in virtual time."""

    def result(self, timeout: float | None = None) -> Any:
        """The result, as soon as there is one.

        Raises:
            TimeoutError: there is no result in time.
        """
        if not self.done():
            parked = Threads.of(running_world()).park(timeout)
            self.add_done_callback(lambda _: parked.wake())
            parked.wait()
        if not self.done():
            raise TimeoutError
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The raised exception or None, as soon as the call has ended."""
        with contextlib.suppress(Exception):
            self.result(timeout)
        return super().exception(0)


def wait(
    fs: Iterable[VirtualFuture], timeout: float | None = None, return_when: str = ALL_COMPLETED
) -> concurrent.futures._base.DoneAndNotDoneFutures[Any]:
    """Like `concurrent.futures.wait`."""
    futures, loop = set[concurrent.futures.Future[Any]](fs), running_world()
    end_s = None if timeout is None else loop.time() + timeout
    while True:
        done = {future for future in futures if future.done()}
        left_s = None if end_s is None else end_s - loop.time()
        is_enough = done == futures or (done and return_when != ALL_COMPLETED)
        if is_enough or (left_s is not None and left_s <= 0):
            return concurrent.futures._base.DoneAndNotDoneFutures(done, futures - done)
        parked = Threads.of(loop).park(left_s)
        for future in futures - done:
            future.add_done_callback(lambda _, parked=parked: parked.wake())  # type: ignore[misc]
        parked.wait()


class VirtualExecutor(Executor):
    """Like `ThreadPoolExecutor`: `max_workers` virtual threads do submitted work in order."""

    def __init__(self, max_workers: int = 1, thread_name_prefix: str = "", **_: Any) -> None:
        self._most, self._name = max_workers, thread_name_prefix
        self._todo: deque[tuple[VirtualFuture, Callable[[], Any]]] = deque()
        self._workers: list[VirtualThread] = []
        self._arrived, self._is_closed = VirtualCondition(), False

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Lets the next idle worker call a function."""
        if self._is_closed:
            raise RuntimeError("cannot schedule new futures after shutdown")
        future = VirtualFuture()
        self._todo.append((future, lambda: fn(*args, **kwargs)))
        if len(self._workers) < self._most:
            worker = VirtualThread(target=self._work, name=f"{self._name}_{len(self._workers)}")
            self._workers.append(worker)
            worker.start()
        self._arrived.notify()
        return future

    def _work(self) -> None:
        while self._todo or not self._is_closed:
            if not self._todo:
                self._arrived.wait()
                continue
            future, call = self._todo.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except GreenletExit:
                raise
            except BaseException as error:  # noqa: BLE001
                future.set_exception(error)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Ends the workers once they are done. With `wait`, waits until they have ended."""
        self._is_closed = True
        if cancel_futures:
            for future, _ in self._todo:
                future.cancel()
            self._todo.clear()
        self._arrived.notify_all()
        if wait:
            for worker in self._workers:
                worker.join()


class VirtualLoopThread:
    """Like `network.loop_thread.LoopThread`, but with the world's loop."""

    def __init__(self, name: str) -> None:
        self.loop, self.name = running_world(), name
        self._context, self.is_stopped = contextvars.copy_context(), False

    def run(self, coroutine: Coroutine[Any, Any, Result], timeout_s: float | None) -> Result:
        """Runs a coroutine in the loop and returns its result, from a virtual thread.

        Raises:
            TimeoutError: the coroutine is not done in time, and is cancelled.
        """
        parked = Threads.of(self.loop).park(timeout_s)
        task = self.loop.create_task(coroutine, context=self._context.copy())
        task.add_done_callback(lambda _: parked.wake())
        if not parked.wait() and not task.done():
            task.cancel()
            raise TimeoutError(f"not done within {timeout_s:g} s")
        if task.cancelled():
            raise TimeoutError("the network thread stopped meanwhile")
        return task.result()

    def stop(self, timeout_s: float) -> None:
        """Marks this thread as stopped. The world's loop still runs for others."""
        self.is_stopped = True


_graveyard: list[greenlet] = []
_current: dict[greenlet, VirtualThread] = {}
_world: list[VirtualLoop] = []


def running_world() -> VirtualLoop:
    """The loop of the month that runs now."""
    assert _world, "outside of a month"
    return _world[-1]


def enter_world(loop: VirtualLoop) -> None:
    """Makes `loop` the loop of the month that runs now."""
    _world.append(loop)


def leave_world(loop: VirtualLoop) -> None:
    """Ends the month."""
    _world.remove(loop)
    Threads.of(loop).forget()
    _current.clear()


def current_thread() -> object:
    """Like `threading.current_thread`."""
    return _current.get(getcurrent()) or real_threading.current_thread()


def get_ident() -> int:
    """Like `threading.get_ident`."""
    return id(getcurrent())


class Clock:
    """The clocks of a machine, which may differ from the true time `VirtualLoop.now_s`.

    Attributes:
        drift: how much faster than true time the machine's oscillator runs, such as 60e-6.
        stepped_s: how far the wall clock was set forward since the start, without the drift.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop, self.drift, self.stepped_s = loop, 0.0, 0.0

    def monotonic(self) -> float:
        """Like `time.monotonic`. The loop's timers use the same clock."""
        return self.loop.time()

    def boot(self) -> float:
        """Like `time.clock_gettime(CLOCK_BOOTTIME)`, with the oscillator's drift."""
        return BOOT_S + self.loop.now_s * (1 + self.drift)

    def wall(self) -> float:
        """Like `time.time`."""
        return EPOCH_S + self.loop.now_s * (1 + self.drift) + self.stepped_s

    def true_wall(self) -> float:
        """The time of a correct clock."""
        return EPOCH_S + self.loop.now_s

    def set_right(self) -> None:
        """Sets the wall clock to the correct time, as an NTP client does."""
        self.stepped_s += self.true_wall() - self.wall()


CLOCK_BOOTTIME = real_time.CLOCK_BOOTTIME
