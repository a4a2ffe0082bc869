"""A peer's own line is measured: rosters go by uplinks, and leave thin ones out [D3, D5].

That is done while nothing else is under way, before the first round; beside one it takes the line
from it, and is told too little. A peer that comes back soon goes by what it knew, and measures when
all is quiet. Tests count for a day; one that shows another line than before is repeated in the next
quiet moment. Of an uplink that two measurements agree about, nine tenths are used from then on,
unless a person has set a cap: a router at home drops much of what comes faster.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection

from swarm.errors import NobodyReachable, SwarmError
from swarm.network.full_line import agreed_mbit
from swarm.network.joining import present_peers
from swarm.network.node import Node
from swarm.peer.host import Host
from swarm.peer.kept_line import VALID_S, KeptLine, read_line, write_line
from swarm.peer.link_check import measure_full_uplink
from swarm.peer.round_account import up_mbit
from swarm.peer.status import PeerStatus
from swarm.protocol.estimates import DAY_S
from swarm.protocol.fitness import ALWAYS_LATE, HOME_MBIT, cap_for
from swarm.protocol.manifest import PeerId

logger = logging.getLogger(__name__)

MEASURED_WITHIN_S = 15.0
"""A network that does not answer must not keep a peer from its run, or its records from others."""
QUIET_S = 5.0
"""A line on which nothing was sent for so long may be measured."""
AGAIN_S = VALID_S
"""An uplink that is known is measured again."""
TRIES = 5
"""In quiet moments; then the line is left in peace until `AGAIN_S` have passed."""
DOUBT = 0.5
"""A line of which others take less than this share of what counts is tested again."""
DOUBT_AGAIN_S = 600.0
"""But not more often: they may be thin themselves."""


async def measure_line(host: Host, run_id: str, members: Collection[PeerId] | None = None) -> None:
    """Measures the line with members of a run, or all that gather for one; holds uploads to it.

    Takes some seconds, `MEASURED_WITHIN_S` at most, and 16 MiB at most; nothing is measured if
    nobody listens there, or if the line is known, as a joiner's is, or one kept from before.
    """
    node = host.node
    try:
        async with asyncio.timeout(MEASURED_WITHIN_S):
            if not (node.lines.up_mbit or node.traffic.sent.mbit or _recall(host)):
                await _measure_with(node, run_id, members)
    except (SwarmError, TimeoutError) as error:
        logger.info("the line was not measured: %s", str(error) or "no answer in time")
    if node.traffic.up.mbit is None:  # nobody has set another cap
        hold_uploads(node)
    await _keep(host)


def _recall(host: Host) -> bool:
    """Goes by what the line was when this peer ran last, if that was known, and not long ago."""
    line, own_cap = read_line(host.state.line_path), host.config.network.max_upload_mbit
    if line is None or not (line.up_mbit > HOME_MBIT or line.cap_mbit or own_cap):
        return False
    host.node.lines.recall(line.up_mbit, time.time() - line.at)
    if own_cap is None:
        host.node.traffic.up.hold(line.cap_mbit)
    return True


async def _keep(host: Host) -> None:
    """For the next start; a cap that a person has set is not the line's."""
    own_cap, traffic = host.config.network.max_upload_mbit, host.node.traffic
    cap = traffic.up.mbit if own_cap is None else None
    lines = host.node.lines
    if mbit := lines.up_mbit:
        line = KeptLine(mbit, cap, time.time() - lines.test_age_s)
        await asyncio.to_thread(write_line, host.state.line_path, line)


async def _measure_with(node: Node, run_id: str, members: Collection[PeerId] | None) -> None:
    """Only members have earned that one believes them; any key may say that it is in the run."""
    present = await present_peers(node, run_id)
    asked = present if members is None else {p: present[p] for p in present if p in members}
    await measure_full_uplink(node, asked)


def hold_uploads(node: Node) -> bool:
    """Holds uploads to nine tenths of a thin line; whether it is known if that has to be.

    Nothing changes while no two measurements agree.
    """
    lines, up = node.lines, node.traffic.up
    is_fast = (lines.up_mbit or 0.0) > HOME_MBIT
    uplink = agreed_mbit(lines.full_mbit)
    if is_fast:
        up.hold(None)
    if is_fast or uplink is None:
        return is_fast
    lines.forget_full()
    up.hold(cap_for(uplink, node.traffic.sent.mbit_since(lines.settled_s)))
    logger.info(
        "link: %.3g Mbit/s up, of which uploads take %.3g, so that the router queues little "
        "(--max-upload for another cap)",
        uplink,
        up.mbit,
    )
    return True


class OwnLine:
    """Measures the line again, in quiet moments.

    One reason is that rounds go on without this peer. Who sends nothing in rounds learns nothing of
    its line: one that was measured too low, beside other transfers, would never be counted again.
    Another is that its cap is not known yet, or has been for long; under a cap that a person has
    set, that no test of the last half day is there. The third is that others take much less than
    the line is said to carry.
    """

    def __init__(
        self,
        host: Host,
        status: PeerStatus,
        run_id: str,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Measures nothing yet.

        Args:
            host: this peer's; a cap that a person has set stays.
            status: what it tells of itself.
            run_id: of its run.
            clock: in seconds.
        """
        self._host, self._node = host, host.node
        self._status, self._run_id = status, run_id
        self._measured_at = 0
        self._holds, self._clock = host.config.network.max_upload_mbit is None, clock
        is_known = self._node.traffic.up.mbit is not None and not self._node.lines.is_recalled
        self._pause_s = AGAIN_S if self._holds else DAY_S / 2
        self._tries_left, self._next_s = TRIES, clock() + (self._pause_s if is_known else 0.0)
        self._sent, self._sent_s = 0, clock()
        self._doubt_s = clock()

    async def measure_again(self) -> None:
        """Measures if there is a new reason; called at each heartbeat."""
        missed, now_s, sent = self._status.missed, self._clock(), self._node.traffic.bytes_sent
        if sent != self._sent:
            self._sent, self._sent_s = sent, now_s
        if is_due_again(missed, self._measured_at):
            self._measured_at = missed
            await self._measure()
        elif now_s >= self._sent_s + QUIET_S and self._is_due(now_s):
            await self._measure()
            self._tries_left -= 1
            is_held = hold_uploads(self._node) if self._holds else True
            if (is_held and self._node.lines.is_agreed) or not self._tries_left:
                self._tries_left, self._next_s = TRIES, self._clock() + self._pause_s
            await _keep(self._host)

    def _is_due(self, now_s: float) -> bool:
        """Whether the line is tested in a quiet moment such as this."""
        if now_s >= self._next_s:
            return True
        lines, sent = self._node.lines, self._node.traffic.sent
        known, shown = up_mbit(lines, self._node.traffic), sent.shown_since(lines.tested_s)
        if not known or shown is None or shown >= DOUBT * known or now_s < self._doubt_s:
            return False
        logger.info("link: others take %.3g of %.3g Mbit/s, it is measured again", shown, known)
        self._doubt_s, self._next_s = now_s + DOUBT_AGAIN_S, now_s
        return True

    async def _measure(self) -> None:
        """Without its own cap for as long as that takes, which is some seconds."""
        up, tip = self._node.traffic.up, self._status.manifest
        before, members = up.mbit, tip.members if tip else ()
        if self._holds:
            up.hold(None)
        try:
            async with asyncio.timeout(MEASURED_WITHIN_S):
                await _measure_with(self._node, self._run_id, members)
        except (NobodyReachable, TimeoutError):
            logger.debug("the line was not measured in time")
        finally:
            up.hold(before)


def is_due_again(missed: int, measured_at: int) -> bool:
    """Whether the line is measured anew: a few more rounds in a row went on without the peer.

    Args:
        missed: how many have so far.
        measured_at: how many had when it was measured last.
    """
    return missed > 0 and missed % ALWAYS_LATE == 0 and missed != measured_at
