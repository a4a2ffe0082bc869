"""The room of dropped blobs is given back beside the rounds, which wait for none of it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

from swarm.background import Tasks
from swarm.errors import StateError
from swarm.network.blobs import BlobStore
from swarm.network.loop_thread import started_pool
from swarm.network.patience import patiently_async

logger = logging.getLogger(__name__)

END_S = 5.0
"""What is under way as a peer ends may take so long: a disk may not answer."""


class Tidying:
    """Shrinks a store in a thread of its own; only the loop's thread may call this."""

    def __init__(self, store: BlobStore, on_failure: Callable[[BaseException], None]) -> None:
        """Does nothing yet; `on_failure` is told when memory stays short."""
        self._store = store
        self._thread = started_pool("swarm-tidying", 1)
        self._tasks = Tasks("tidying", on_failure)
        self._is_asked = False
        self._is_idle, self._ended = asyncio.Event(), threading.Event()
        self._is_idle.set()

    def ask(self) -> None:
        """Begins, or goes on when what is under way is done."""
        self._is_asked = True
        if self._is_idle.is_set():
            self._tasks.spawn(self._run())
            self._is_idle.clear()

    async def stop(self) -> None:
        """Ends after the piece at hand; returns when it has ended, or the disk does not let it."""
        self._is_asked = False
        self._ended.set()
        try:
            async with asyncio.timeout(END_S):
                await self._is_idle.wait()
        except TimeoutError:
            logger.warning("the disk is slow: a pack of blobs is still being rewritten")
        await self._tasks.stop()
        self._thread.shutdown(wait=False)

    async def _run(self) -> None:
        shrink = asyncio.get_running_loop().run_in_executor
        try:
            while self._is_asked:
                self._is_asked = False
                await patiently_async(lambda: shrink(self._thread, self._shrink), "garbage")
        finally:
            self._is_idle.set()

    def _shrink(self) -> None:
        """A disk that is too full to be tidied is no reason to wait: the next round asks again."""
        try:
            self._store.shrink(self._ended.is_set)
        except StateError as error:
            logger.error("garbage is left until the next round: %s", error)
