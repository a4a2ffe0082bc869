"""Who is sent blobs first: members of the run, then those who join or only look on.

Members wait for each other's bytes in every round; a newcomer's download must not make their rounds
longer. Nor may it starve: where a round is mostly transfers, a newcomer that is always served last
would be one round late for ever. So while a member is being served, all strangers together get a
quarter of the bytes, and everything while none is. Members wait likewise for what may wait: experts
that they fetch ahead, while others fetch what is to be averaged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from swarm.network.ledger import STRANGERS_SHARE
from swarm.network.throttle import LARGEST_PART_BYTES

YIELD_S = 6.0
"""A stranger waits no longer for its next 64 KiB, less than it takes for no progress or for stuck:
the member that is being served may take nothing at all."""
PER_MEMBER_BYTE = STRANGERS_SHARE / (1 - STRANGERS_SHARE)
LOOK_S = 0.03
"""How often who waits looks whether the line has room: less than it moves at a time."""
MOST_BYTES = 2**20
"""Strangers save up, and owe, no more than this, so that one burst is not paid for long after."""


class FairQueue:
    """Of one server; its methods run in one event loop."""

    def __init__(self, is_member: Callable[[str], bool]) -> None:
        """Nobody is being served yet; `is_member` tells whether a peer id is of the run."""
        self._is_member = is_member
        self._num_members = 0
        self._allowed_bytes = 0.0
        self._free = asyncio.Event()
        self._free.set()

    @contextmanager
    def serving(self, peer: str, *, may_wait: bool = False) -> Iterator[None]:
        """While an answer is sent to a peer, which may wait for other members if it says so."""
        if may_wait or not self._is_member(peer):
            yield
            return
        self._num_members += 1
        self._allow(0.0)
        try:
            yield
        finally:
            self._num_members -= 1
            self._allow(0.0)

    async def wait(
        self,
        peer: str,
        num_bytes: int,
        *,
        may_wait: bool = False,
        has_room: Callable[[], bool] = lambda: False,
    ) -> None:
        """Returns when a part of an answer of so many bytes may be sent to the peer.

        Args:
            peer: who asks.
            num_bytes: of the part.
            may_wait: whether it may wait though the peer is a member.
            has_room: whether the others leave some of the line unused, as where theirs are full.
        """
        if not may_wait and self._is_member(peer):
            self._allow(num_bytes * PER_MEMBER_BYTE)
            return
        loop = asyncio.get_running_loop()
        until_s = loop.time() + YIELD_S * min(1.0, num_bytes / LARGEST_PART_BYTES)
        # Another stranger may have been faster.
        while not (self._free.is_set() or has_room()) and loop.time() < until_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(LOOK_S, until_s - loop.time())):
                    await self._free.wait()
        if self._num_members:
            self._allow(-num_bytes)

    def _allow(self, more_bytes: float) -> None:
        if not self._num_members:
            self._allowed_bytes = 0.0
        allowed = self._allowed_bytes + more_bytes
        self._allowed_bytes = max(-MOST_BYTES, min(MOST_BYTES, allowed))
        if self._num_members and self._allowed_bytes <= 0:
            self._free.clear()
        else:
            self._free.set()
