"""Measures this machine's uplink in quiet moments, and has blobs leave a little slower than it.

A router at home queues a quarter of a second and then drops: TCP alone fills that queue, loses what
is dropped and sends it again. At nine tenths of the line the queue stays empty, so nearly nothing
is sent twice, and messages do not wait in it.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import deque

from swarm.errors import NetworkDown, Unreachable
from swarm.network.node import Node
from swarm.network.probing import measure_mbit
from swarm.network.traffic import Traffic

logger = logging.getLogger(__name__)

PACED_SHARE = 0.92
"""Headers are 3 to 4 % on top, acknowledgements of what comes in 2 % (`scripts/bench_link.py`)."""
THIN_MBIT = 60.0
"""Faster lines are not paced: what their routers queue is sent in less time."""
KEPT = 3
"""The fastest of so many measurements counts: in the others the line was not as quiet as it seemed,
or the other peer's was not."""
AGAIN_S = 600.0
SOON_S = 10.0
"""Until there are `KEPT` measurements, and after one that failed."""
QUIET_S = 1.0
"""A line on which no blob has moved for so long is quiet."""
MEASURED_BYTES = 4 * 2**20
MEASURE_S = 2.5


async def watch_line(node: Node) -> None:
    """Runs until it is cancelled, in the node's loop; a cap that a person set needs no pace."""
    rates: deque[float] = deque(maxlen=KEPT)
    due_s = 0.0
    while node.traffic.up.mbit is None:
        before = _moved(node.traffic)
        await asyncio.sleep(QUIET_S)
        if time.monotonic() < due_s or _moved(node.traffic) != before:
            continue
        rate = await _measured(node)
        if rate is not None:
            rates.append(rate)
            node.lines.up_mbit = max(rates)
            node.traffic.up.pace_mbit = pace_for(max(rates))
            logger.debug("uplink: %.3g Mbit/s, paced at %s", rate, node.traffic.up.pace_mbit)
        pause_s = AGAIN_S if len(rates) == KEPT else SOON_S
        due_s = time.monotonic() + pause_s * random.uniform(0.5, 1.5)


def pace_for(up_mbit: float) -> float | None:
    """The rate in Mbit/s at which blobs leave on a line; None: as fast as it goes."""
    return None if up_mbit > THIN_MBIT else PACED_SHARE * up_mbit


async def _measured(node: Node) -> float | None:
    """The rate away from this peer, if somebody answered and nothing else moved meanwhile."""
    peers = sorted(node.neighbours, key=lambda peer: (not node.ledger.is_member(peer), peer))
    members = [peer for peer in peers if node.ledger.is_member(peer)]
    if not peers:
        return None
    before = _moved(node.traffic)
    try:
        rate = await measure_mbit(
            node, random.choice(members or peers), is_down=False, limit_s=MEASURE_S,
            num_bytes=MEASURED_BYTES,
        )  # fmt: skip
    except (Unreachable, NetworkDown) as error:
        logger.debug("uplink not measured: %s", error)
        return None
    return rate if _moved(node.traffic) == before else None


def _moved(traffic: Traffic) -> int:
    """Bytes of blobs so far, both ways."""
    sent = traffic.blob_bytes_sent + traffic.moments_bytes_sent + traffic.relayed_bytes
    return sent + traffic.blob_bytes_received
