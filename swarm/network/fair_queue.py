"""Who is sent blobs first: members of the run, then those who join or only look on.

Members wait for each other's bytes in every round; a newcomer's download must not make their rounds
longer. Nor may it starve: where a round is mostly transfers, a newcomer that is always served last
would be one round late for ever. So while a member is being served, all strangers together get a
quarter of the bytes, and everything while none is. Members wait likewise for what may wait: experts
that they fetch ahead, while others fetch what is to be averaged. Among strangers each network has
one turn at a time, however many keys and streams are in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

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


@dataclass
class _Network:
    """The streams of one network that wait for its turn, and the one that has it."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_streams: int = 0


class FairQueue:
    """Of one server; its methods run in one event loop."""

    def __init__(
        self, is_member: Callable[[str], bool], network_of: Callable[[str], str] = str
    ) -> None:
        """Nobody is being served yet.

        Args:
            is_member: whether a peer id is of the run.
            network_of: the network of a stranger; without it each is one of its own.
        """
        self._is_member, self._network_of = is_member, network_of
        self._networks: dict[str, _Network] = {}
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

    @asynccontextmanager
    async def among_strangers(self, peer: str) -> AsyncIterator[None]:
        """The turn of a stranger's network, or after `YIELD_S` none; a member needs none."""
        if self._is_member(peer):
            yield
            return
        name = self._network_of(peer)
        network = self._networks.setdefault(name, _Network())
        network.num_streams += 1
        has_turn = False
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(YIELD_S):
                    has_turn = await network.turn.acquire()
            yield
        finally:
            if has_turn:
                network.turn.release()
            network.num_streams -= 1
            if not network.num_streams:
                del self._networks[name]

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
