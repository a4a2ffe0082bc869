"""Whether this machine's clock is that of the other members, which is asked every few minutes.

What a peer publishes says until when it holds. Who goes by another clock is believed by nobody, or
believes nobody: the DHT refuses that at a first start alone, and machines' clocks drift apart.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Sequence

from swarm.errors import SwarmError
from swarm.network.node import Node
from swarm.network.probing import DIALLING, look_at
from swarm.network.steady_clock import LIMIT_S, SteadyClock, dht_clock
from swarm.protocol.manifest import PeerId

logger = logging.getLogger(__name__)

ASK_S = 6.0
"""For a few answers of one peer."""
AGAIN_S = 600.0
"""From one comparison to the next: at 100 ppm clocks part by 0.06 s meanwhile."""
SAY_S = 24 * 3600.0
"""A clock that stays wrong is said so often."""


class OwnClock:
    """Compares the DHT's clock of this process with those of a few members, again and again."""

    def __init__(
        self,
        node: Node,
        members: Callable[[], Collection[PeerId]] = tuple,
        *,
        time_s: Callable[[], float] = time.monotonic,
        clock: SteadyClock | None = None,
    ) -> None:
        """Has compared nothing yet.

        Args:
            node: asks.
            members: of the run, whose word counts; without any, neighbours are asked.
            time_s: monotonic seconds.
            clock: the DHT's of this process, unless another is given.
        """
        self._node, self._members, self._time_s = node, members, time_s
        self._clock = clock or dht_clock()
        self._next_s, self._said_s = float("-inf"), float("-inf")

    async def compare(self) -> None:
        """Asks some members for their time, if that is due; moves the clock, or warns.

        Until somebody has answered, it is due at each call.
        """
        now_s = self._time_s()
        if now_s < self._next_s:
            return
        members = sorted({*self._members()} - {self._node.peer_id})
        asked = random.sample(members, min(DIALLING, len(members)))
        asked = asked or sorted(self._node.neighbours)[:DIALLING]
        found = await asyncio.gather(*(_ahead_s(self._node, peer, self._clock) for peer in asked))
        told = [ahead_s for ahead_s in found if ahead_s is not None]
        if not told:
            return
        self._next_s = now_s + AGAIN_S
        if len(told) >= min(len(members), 2) > 0:  # one of several may be wrong, or lie
            self._clock.compare([-ahead_s for ahead_s in told])
        warning = clock_warning(told)
        if warning and now_s - self._said_s >= SAY_S:
            self._said_s = now_s
            logger.warning("%s", warning)


def clock_warning(told: Sequence[float]) -> str | None:
    """What is wrong with this machine's clock; None where one peer's is near enough.

    Args:
        told: for each peer that answered, how far the clock of records here is ahead of its, in
            seconds.
    """
    least_s = min(told, key=abs, default=0.0)
    if abs(least_s) <= LIMIT_S:
        return None
    direction = "ahead of" if least_s > 0 else "behind"
    return (
        f"the clock of this peer's records is {abs(least_s):.1f} s {direction} those of all peers "
        f"that told the time ({len(told)}), and {LIMIT_S:.0f} s are allowed: others do not believe "
        "what this peer publishes, or it not what they do (set this machine's clock, best by "
        "timedatectl set-ntp true, and start again)"
    )


async def _ahead_s(node: Node, peer: PeerId, clock: SteadyClock) -> float | None:
    """How far the DHT's clock here is ahead of a peer's; None if the peer does not say."""
    try:
        async with asyncio.timeout(ASK_S):
            look = await look_at(node, peer)
    except (SwarmError, TimeoutError) as error:
        logger.debug("peer=%s did not tell the time: %s", peer[-6:], error)
        return None
    return clock() - time.time() - look.clock_offset_s
