"""Who is sent blobs first: members of the run, then those who join or only look on.

Members wait for each other's bytes in every round; a newcomer's download must not make their rounds
longer. Nor may it starve: where a round is mostly transfers, a newcomer that is always served last
would be one round late for ever (seen with turns of 2 s, rounds of 35 s, 25 s of them transfers).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

YIELD_S = 6.0
"""A stranger waits no longer for members; less than it takes for no progress or for stuck."""
TURN_S = 30.0
"""Then it is served like a member for so long."""


class Turns:
    """Of one server; its methods run in one event loop."""

    def __init__(self, is_member: Callable[[str], bool]) -> None:
        """Nobody is being served yet; `is_member` tells whether a peer id is of the run."""
        self._is_member = is_member
        self._num_members = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._turn_ends_s: dict[str, float] = {}

    @contextmanager
    def serving(self, peer: str) -> Iterator[None]:
        """While an answer is sent to a peer."""
        if not self._is_member(peer):
            yield
            return
        self._num_members += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_members -= 1
            if not self._num_members:
                self._idle.set()

    async def wait(self, peer: str) -> None:
        """Returns when the next part of an answer may be sent to the peer."""
        if self._idle.is_set() or self._is_member(peer):
            return
        loop = asyncio.get_running_loop()
        if loop.time() < self._turn_ends_s.get(peer, 0.0):
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(YIELD_S):
                await self._idle.wait()
            return
        self._turn_ends_s[peer] = loop.time() + TURN_S

    def forget(self, peer: str) -> None:
        """The peer has no stream any more."""
        self._turn_ends_s.pop(peer, None)
