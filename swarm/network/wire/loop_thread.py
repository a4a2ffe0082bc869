"""One asyncio loop in one named daemon thread, and the only entries to it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import sys
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from swarm.background import Helpers, SupervisedThread

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
SWITCH_INTERVAL_S = 0.0002
"""Python's switch interval. With the default of 5 ms, a training thread starves the network. With
this value, steps take 1.0 to 1.3 times as long at 12.5 MB/s (measured)."""
HELPERS = 6


class LoopThread:
    """Runs coroutines for other threads.

    p2pd ends with the thread that starts it, so this thread must outlive p2pd. If the loop itself
    fails, as a selector does without memory, the same thread runs the same loop again.
    """

    def __init__(self, name: str) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.SelectorEventLoop()
        self.loop.set_exception_handler(_complain)
        self.loop.set_default_executor(started_pool(f"{name}-helper", HELPERS))
        self._thread = SupervisedThread(name, self._run)
        self._ident: int | None = None
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Result], timeout_s: float | None) -> Result:
        """Runs a coroutine in the loop and returns its result, from any other thread.

        Args:
            coroutine: the coroutine to run.
            timeout_s: limit in seconds; None for a coroutine with its own limit.

        Raises:
            TimeoutError: not done in time; the coroutine is cancelled.
        """
        assert threading.get_ident() != self._ident, "would wait for itself"
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        try:
            return future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            if future.done() and not future.cancelled():
                raise  # the coroutine's own TimeoutError
            future.cancel()
            raise TimeoutError(f"not done within {timeout_s:g} s") from None
        except concurrent.futures.CancelledError:
            raise TimeoutError("the network thread stopped meanwhile") from None

    def stop(self, timeout_s: float) -> None:
        """Cancels running tasks, ends the loop and joins the thread, within a time limit."""
        if self.loop.is_closed():
            return
        try:
            self.run(_cancel_others(), timeout_s)
        except TimeoutError:
            logger.warning("tasks of the network thread ignored their cancellation")
        self.loop.call_soon_threadsafe(self.loop.stop)
        if self._thread.stop(timeout_s):
            self.loop.close()

    def _run(self) -> None:
        self._ident = threading.get_ident()
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()


def _complain(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Asyncio's handler of errors that no code awaits, with one exception.

    With each question, hivemind 1.1.12 drops a task that waits for the end of a search
    (`dht/traverse.py`, `await_finished_task`). This does no harm.
    """
    task = context.get("task")
    name = getattr(task.get_coro(), "__qualname__", "") if task else ""
    if name == "Event.wait" and "destroyed" in context["message"]:
        logger.debug("%s: %s", context["message"], name)
        return
    loop.default_exception_handler(context)


def started_pool(name: str, helpers: int) -> Helpers:
    """Helpers that are already running.

    If a helper could not be started for lack of memory, its work would stay in the queue. Such work
    would run after it was reported as failed, so an old record could replace a new record.
    """
    return Helpers(name, helpers, are_started=True)


async def _cancel_others() -> None:
    """Cancels all other tasks, repeatedly, since hivemind starts new tasks while old tasks end."""
    for _ in range(10):
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if not others:
            break
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
    loop = asyncio.get_running_loop()
    await loop.shutdown_asyncgens()
    # hivemind leaves connections to its daemon open when a call over them is cancelled.
    for transport in list(getattr(loop, "_transports", {}).values()):
        transport.abort()
    # Closed transports release their sockets in the next turn of the loop.
    await asyncio.sleep(0)
    await asyncio.sleep(0)
