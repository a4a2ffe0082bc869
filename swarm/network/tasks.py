"""Work that an owner has under way in the loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

logger = logging.getLogger(__name__)


class Tasks:
    """Kept alive until they are done, and ended together; `len` is how many run.

    Only the loop's thread may call this.
    """

    def __init__(
        self, owner: str, on_failure: Callable[[BaseException], None] | None = None
    ) -> None:
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
        """Runs it; nobody waits for it, so a failure is logged and told."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self.add(task)
        task.add_done_callback(self._failed)

    def _failed(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        logger.error("a task of %s failed", self._owner, exc_info=error)
        if self._on_failure:
            self._on_failure(error)

    async def stop(self) -> None:
        """Cancels all and returns once they have ended."""
        tasks = list(self._running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
