"""What one message costs its sender: bytes that are fetched for it, and processor time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import TypeVar

from swarm.network.ledger import Cost, Ledger
from swarm.protocol.manifest import PeerId

LARGE_BYTES = 2**18
"""More is decoded in another thread: a roster of 256 peers takes a second."""

Result = TypeVar("Result")


class Costs:
    """Charges the sender of one message."""

    def __init__(self, source: PeerId, ledger: Ledger, turn: asyncio.Lock | None = None) -> None:
        """Begins with nothing spent.

        Args:
            source: who is charged.
            ledger: its account.
            turn: shared by messages of which one at a time is worked on in another thread: what
                many peers show alike is then known to the second, and not worked out, and charged
                for, by as many threads as there are.
        """
        self._source, self._ledger, self._turn = source, ledger, turn or asyncio.Lock()

    def fetching(self, amount: int, cost: Cost = Cost.BYTES) -> None:
        """Charges attachments that are not here, by bytes or number; raises TooCostly."""
        self._ledger.take(self._source, cost, amount, time.monotonic())

    async def parsing(self, work: Callable[[], Result], *, off_loop: bool = False) -> Result:
        """Does some work, in another thread if it is much, and charges its processor time."""
        spent_s: list[float] = []
        try:
            if off_loop:
                loop = asyncio.get_running_loop()
                async with self._turn:
                    return await loop.run_in_executor(None, _timed, work, spent_s)
            return _timed(work, spent_s)
        finally:
            self._ledger.charge(self._source, Cost.SECONDS, sum(spent_s), time.monotonic())


def _timed(work: Callable[[], Result], spent_s: list[float]) -> Result:
    began_s = time.thread_time()
    try:
        return work()
    finally:
        spent_s.append(time.thread_time() - began_s)
