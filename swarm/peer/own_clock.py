"""Whether this machine's clock is that of the others, which is asked once after a start.

What a peer publishes says until when it holds. Who starts by another clock is believed by nobody,
or believes nobody: the DHT refuses that at a first start alone, and it goes by the clock of the
start for as long as the process lives.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from swarm.errors import SwarmError
from swarm.network.node import Node
from swarm.network.probing import DIALLING, look_at
from swarm.network.steady_clock import LIMIT_S, dht_clock
from swarm.protocol.manifest import PeerId

logger = logging.getLogger(__name__)

ASK_S = 6.0
"""For a few answers of one peer."""


class OwnClock:
    """Compares the DHT's clock of this process with a few neighbours', until one has answered."""

    def __init__(self, node: Node) -> None:
        self._node, self._is_compared = node, False

    async def compare(self) -> None:
        """Asks some neighbours for the time, unless one has told it; warns if all have another."""
        if self._is_compared:
            return
        asked = sorted(self._node.neighbours)[:DIALLING]
        found = await asyncio.gather(*(_ahead_s(self._node, peer) for peer in asked))
        told = [ahead_s for ahead_s in found if ahead_s is not None]
        self._is_compared = bool(told)
        if warning := clock_warning(told):
            logger.warning("%s", warning)


def clock_warning(told: Sequence[float]) -> str | None:
    """What is wrong with this machine's clock; None where one peer's is near enough.

    Args:
        told: for each peer that answered, how far this machine's clock is ahead of its, in seconds.
    """
    least_s = min(told, key=abs, default=0.0)
    if abs(least_s) <= LIMIT_S:
        return None
    direction = "ahead of" if least_s > 0 else "behind"
    return (
        f"this machine's clock is {abs(least_s):.1f} s {direction} those of all peers that told "
        f"the time ({len(told)}), and {LIMIT_S:.0f} s are allowed: others do not believe what this "
        "peer publishes, or it not what they do (set the clock, best by timedatectl set-ntp true, "
        "and start again)"
    )


async def _ahead_s(node: Node, peer: PeerId) -> float | None:
    """How far the DHT's clock here is ahead of a peer's clock; None if the peer does not say."""
    try:
        async with asyncio.timeout(ASK_S):
            look = await look_at(node, peer)
    except (SwarmError, TimeoutError) as error:
        logger.debug("peer=%s did not tell the time: %s", peer[-6:], error)
        return None
    return dht_clock()() - time.time() - look.clock_offset_s
