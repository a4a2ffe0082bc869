"""Work that is done in a thread of its own while a peer trains on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

from swarm.background import SYSTEM, Joinable
from swarm.errors import OutOfMemory

Result = TypeVar("Result")


class Beside(Generic[Result]):
    """One piece of work at a time, which reads what the thread that began it does not change.

    That thread calls `wait` before it changes anything, and what the work itself has to change is
    done there, see `in_turn`.
    """

    def __init__(self) -> None:
        self._thread: Joinable | None = None
        self._is_running = False
        """Also read by the work itself, which may begin before `_thread` is known."""
        self._owner, self._is_calling = 0, False
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._result: Result | None = None
        self._error: BaseException | None = None

    @property
    def is_running(self) -> bool:
        """Whether something was begun that nobody has waited for."""
        return self._is_running

    def begin(self, work: Callable[[], Result]) -> None:
        """Begins with it, or does it at once where no thread can be started.

        What came before has been waited for.
        """
        assert not self._is_running, "one at a time"
        self._result = self._error = None
        self._owner = threading.get_ident()

        def run() -> None:
            try:
                self._result = work()
            except BaseException as error:  # noqa: BLE001 - it is raised where it is waited for
                self._error = error
            finally:
                self._calls.put(None)

        self._is_running = True
        try:
            self._thread = SYSTEM.start(run, "swarm-beside")
        except OutOfMemory:
            self._is_running = False
            run()
            self._calls.get()

    def in_turn(self, call: Callable[[], None]) -> None:
        """Has something done by the thread that waits, at once if nothing runs beside it."""
        if not self._is_running:
            call()
            return
        done = threading.Event()
        failed: list[BaseException] = []

        def run() -> None:
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - it is raised where it was asked for
                failed.append(error)
            finally:
                done.set()

        self._calls.put(run)
        done.wait()
        if failed:
            raise failed[0]

    def require_waiter(self) -> None:
        """Of what is running, that who calls this may wait for it.

        Raises:
            MemoryError: it is the work itself, which would wait for its own end: an engine asks
                for that before it makes room. There is some once the step has let its memory go.
        """
        if self._is_calling or threading.get_ident() != self._owner:
            raise MemoryError("a step runs beside")

    def wait(self) -> None:
        """Returns when nothing runs any more; raises as `require_waiter`."""
        if not self._is_running:
            return
        self.require_waiter()
        while (call := self._calls.get()) is not None:
            self._is_calling = True
            try:
                call()
            finally:
                self._is_calling = False
        assert self._thread is not None, "its owner has started it"
        self._thread.join()
        self._thread, self._is_running = None, False

    def result(self) -> Result:
        """What the last work has made; waits for it, and raises what it raised."""
        self.wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result
