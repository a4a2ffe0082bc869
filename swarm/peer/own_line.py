"""A peer's own line is kept measured: rosters go by uplinks, and leave thin ones out [D3, D5]."""

from __future__ import annotations

from swarm.network.joining import present_peers
from swarm.network.node import Node
from swarm.peer.link_check import measured_rates
from swarm.peer.status import PeerStatus
from swarm.protocol.fitness import ALWAYS_LATE


class OwnLine:
    """Measures the line as soon as somebody is there to measure with, and when it may be another.

    Joiners have measured theirs before they joined; founders, those that they gathered, and peers
    that go on from their disk have not. Who sends nothing in rounds learns nothing of its line
    either: one that was measured too low, beside other transfers, would never be counted again.
    """

    def __init__(self, node: Node, status: PeerStatus, run_id: str) -> None:
        """Measures nothing yet."""
        self._node, self._status, self._run_id = node, status, run_id
        self._measured_at = 0

    async def keep_measured(self) -> None:
        """Measures if there is a reason; takes some seconds then, and 16 MiB at most."""
        lines, missed = self._node.lines, self._status.missed
        is_known = bool(lines.up_mbit or self._node.traffic.sent.mbit)
        if is_known and not is_due_again(missed, self._measured_at):
            return
        self._measured_at = missed
        present = await present_peers(self._node, self._run_id)
        await measured_rates(self._node, present, (lines.down_mbit, lines.up_mbit))


def is_due_again(missed: int, measured_at: int) -> bool:
    """Whether a known line is measured anew: a few more rounds in a row went on without the peer.

    Args:
        missed: how many have so far.
        measured_at: how many had when it was measured last.
    """
    return missed > 0 and missed % ALWAYS_LATE == 0 and missed != measured_at
