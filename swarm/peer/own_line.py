"""A peer's own line is measured: rosters go by uplinks, and leave thin ones out [D3, D5].

That is done while nothing else is under way, before the first round; beside one it takes the line
from it, and is told too little.
"""

from __future__ import annotations

import asyncio
import logging

from swarm.errors import SwarmError
from swarm.network.joining import present_peers
from swarm.network.node import Node
from swarm.peer.link_check import measure_uplink
from swarm.peer.status import PeerStatus
from swarm.protocol.fitness import ALWAYS_LATE

logger = logging.getLogger(__name__)

MEASURED_WITHIN_S = 10.0
"""Before the first round; a network that does not answer must not keep a peer from its run."""


async def measure_line(node: Node, run_id: str) -> None:
    """Measures the line with those that are in a run, or gather for one.

    Takes some seconds, `MEASURED_WITHIN_S` at most, and 8 MiB; nothing if nobody listens there, or
    if the line is known, as a joiner's is.
    """
    if node.lines.up_mbit or node.traffic.sent.mbit:
        return
    try:
        async with asyncio.timeout(MEASURED_WITHIN_S):
            await measure_uplink(node, await present_peers(node, run_id))
    except (SwarmError, TimeoutError) as error:
        logger.info("the line was not measured: %s", str(error) or "no answer in time")


class OwnLine:
    """Measures the line again when rounds go on without this peer.

    Who sends nothing in rounds learns nothing of its line: one that was measured too low, beside
    other transfers, would never be counted again.
    """

    def __init__(self, node: Node, status: PeerStatus, run_id: str) -> None:
        """Measures nothing yet."""
        self._node, self._status, self._run_id = node, status, run_id
        self._measured_at = 0

    async def measure_again(self) -> None:
        """Measures if there is a new reason; what is known can only rise."""
        missed = self._status.missed
        if not is_due_again(missed, self._measured_at):
            return
        self._measured_at = missed
        await measure_uplink(self._node, await present_peers(self._node, self._run_id))


def is_due_again(missed: int, measured_at: int) -> bool:
    """Whether the line is measured anew: a few more rounds in a row went on without the peer.

    Args:
        missed: how many have so far.
        measured_at: how many had when it was measured last.
    """
    return missed > 0 and missed % ALWAYS_LATE == 0 and missed != measured_at
