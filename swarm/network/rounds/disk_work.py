"""Disk work of the rounds in other threads, so that a slow disk does not silence a peer."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Any

from swarm.background import Tasks
from swarm.errors import MissingBlobs, StateError
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.blobs.disk_retry import patiently_async
from swarm.network.wire.loop_thread import started_pool
from swarm.protocol.messages.events import Record, Reduce
from swarm.protocol.values.manifest import Digest, Manifest, PeerId

logger = logging.getLogger(__name__)


MEANS_AT_ONCE = 2
"""Most means of deltas computed at a time; each syncs its results before it reports."""


class SlowWork:
    """Runs functions in threads, and repeats them while a disk is full or memory is short."""

    def __init__(self) -> None:
        self._means = asyncio.Semaphore(MEANS_AT_ONCE)
        self._recorder = started_pool("swarm-record", 1)
        """A separate thread: votes wait for the record, which must not wait for other work."""

    def stop(self) -> None:
        """Takes no new work; running work continues."""
        self._recorder.shutdown(wait=False)

    async def do(
        self,
        what: str,
        function: Callable[..., Any],
        *arguments: Any,
        executor: Executor | None = None,
    ) -> Any:
        """The result of a function; `what` is for the log."""
        run = asyncio.get_running_loop().run_in_executor
        return await patiently_async(lambda: run(executor, partial(function, *arguments)), what)

    async def record(self, what: str, function: Callable[..., Any], *arguments: Any) -> None:
        """Writes a record for which a vote or promise waits."""
        await self.do(what, function, *arguments, executor=self._recorder)

    async def mean(self, function: Callable[..., Any], effect: Reduce, *arguments: Any) -> Any:
        """Computes a mean. Few means of deltas run at a time, so that other work gets threads."""
        if effect.base is None:
            return await self.do("mean", function, effect, *arguments)
        async with self._means:
            return await self.do("mean", function, effect, *arguments)


END_S = 5.0
"""Limit for work in progress when a peer ends, since a disk may not answer."""


class Tidying:
    """Shrinks a store in a separate thread; only the loop's thread may call this."""

    def __init__(self, store: BlobStore, on_failure: Callable[[BaseException], None]) -> None:
        """Does nothing yet; `on_failure` is called when memory stays short."""
        self._store = store
        self._thread = started_pool("swarm-tidying", 1)
        self._tasks = Tasks("tidying", on_failure)
        self._is_asked = False
        self._is_idle, self._ended = asyncio.Event(), threading.Event()
        self._is_idle.set()

    def ask(self) -> None:
        """Starts to shrink the store; if that runs already, repeats it afterwards."""
        self._is_asked = True
        if self._is_idle.is_set():
            self._tasks.spawn(self._run())
            self._is_idle.clear()

    async def stop(self) -> None:
        """Ends the work after the current piece, but waits at most `END_S` for a slow disk."""
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
        """Shrinks the store. If the disk is too full, logs it; the next round asks again."""
        try:
            self._store.shrink(self._ended.is_set)
        except StateError as error:
            logger.error("garbage is left until the next round: %s", error)


def sync_manifest(store: BlobStore, manifest: Manifest) -> None:
    """Makes a manifest and every blob that it names durable.

    The manifest's deltas are included if they are here; a peer that fetched values has none.

    Raises:
        MissingBlobs: some are not in the store.
        StateError: the disk failed.
    """
    store.put(manifest.encoded, manifest.blob)
    store.sync({*manifest.blobs, *filter(store.has, manifest.deltas)})


def missing_of(error: StateError) -> tuple[Digest, ...]:
    """The blobs whose absence caused the error."""
    return error.__cause__.digests if isinstance(error.__cause__, MissingBlobs) else ()


def lease_to_stranger(
    store: BlobStore, record: Record, peer: PeerId, digest: Digest, now: float
) -> None:
    """Leases all blobs of a manifest to a stranger that asks for one of them [GC].

    Members fetch only blobs that the protocol keeps for them.
    """
    if peer in record.tip.members:
        return
    for manifest in (record.tip, record.parent):
        blobs = {entry.digest for entry in manifest.entries.values()} if manifest else set()
        if manifest and digest in blobs:
            store.lease(manifest.digest, {manifest.blob, *blobs}, now)
            return
