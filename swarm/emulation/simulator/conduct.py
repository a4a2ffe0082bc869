"""What the program round a round machine decides: its clock, its lost records, its patience.

In a real peer these rules sit in the network package and in the start of a peer; here they are in
one place, so that a mutant can replace any of them.
"""

from __future__ import annotations

from swarm.protocol import abstaining
from swarm.protocol.deadlines import Timers, production_timers
from swarm.protocol.events import Record
from swarm.protocol.manifest import PeerId
from swarm.protocol.pace import Pace

ANSWER_WITHIN_S = 2.5
"""How long a source may be silent while it is to send."""


class Conduct:
    """The rules of a real peer."""

    def clock_s(self, passed_s: float, *, awake_s: float, wall_s: float) -> float:  # noqa: ARG002
        """What the machine is told as the time.

        Args:
            passed_s: all time that has passed since some moment.
            awake_s: the same without what the machine slept.
            wall_s: what the wall clock says, which jumps.
        """
        return passed_s

    def rolled_back(self, earlier: Record) -> Record:
        """The record of a peer whose newest one is damaged [P5]."""
        return abstaining.rolled_back(earlier)

    def without_record(self, me: PeerId, shown: Record) -> Record:
        """The record of a peer that has lost its own and was shown a tip by others [P5]."""
        return abstaining.without_record(me, shown)

    def waits_on(self, *, is_flowing: bool) -> bool:
        """Whether to wait on for bytes that are not all there `ANSWER_WITHIN_S` after the last."""
        return is_flowing

    def timers(self, pace: Pace, base: Timers) -> Timers:
        """The machine's timers, adapted to what this peer saw."""
        return production_timers(
            pace.measured(),
            roster_after_s=base.roster_s,
            reform_after_s=base.reform_s,
            base=base,
        ).timers
