"""What the driver of rounds has other threads do: one slow disk must not cost a peer its voice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any

from swarm.network.loop_thread import started_pool
from swarm.network.patience import patiently_async
from swarm.protocol.events import Reduce

MEANS_AT_ONCE = 2
"""Of deltas: each makes its results durable before it is told, one after the other."""


class SlowWork:
    """Runs functions in threads, again while a disk is full or memory is short."""

    def __init__(self) -> None:
        self._means = asyncio.Semaphore(MEANS_AT_ONCE)
        self._recorder = started_pool("swarm-record", 1)
        """Of its own: votes wait for the record, which must not wait for what helpers do."""

    def stop(self) -> None:
        """Takes nothing any more; what runs goes on."""
        self._recorder.shutdown(wait=False)

    async def do(
        self,
        what: str,
        function: Callable[..., Any],
        *arguments: Any,
        executor: Executor | None = None,
    ) -> Any:
        """What a function returns; `what` is for the log."""
        run = asyncio.get_running_loop().run_in_executor
        return await patiently_async(lambda: run(executor, partial(function, *arguments)), what)

    async def record(self, what: str, function: Callable[..., Any], *arguments: Any) -> None:
        """Writes what a vote or promise waits for."""
        await self.do(what, function, *arguments, executor=self._recorder)

    async def mean(self, function: Callable[..., Any], effect: Reduce, *arguments: Any) -> Any:
        """A mean; of deltas few are made at a time, lest they take all helpers."""
        if effect.base is None:
            return await self.do("mean", function, effect, *arguments)
        async with self._means:
            return await self.do("mean", function, effect, *arguments)
