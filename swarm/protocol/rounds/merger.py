"""Merges: a due tip is merged here, from the agreed values, and agreed on like a round [M2-M6]."""

from __future__ import annotations

from swarm.protocol.events import ComputeMerge, MergeComputed, Topic
from swarm.protocol.manifest import Kind
from swarm.protocol.rounds.reducer import Reducer
from swarm.protocol.rounds.state import Pursuit


class Merger(Reducer):
    """Computes the merge of a due tip."""

    def _start_merge(self) -> None:
        """Has the merge computed; the result belongs to the tip, not to a campaign [M2]."""
        if self._is_due(self.tip) and self._merge_asked != self.tip.digest:
            self._merge_asked = self.tip.digest
            self._explain(
                Topic.ROUND,
                f"merge due at step {self.tip.step}: {self.tip.merged} merges done, interval "
                f"{self.rules.merging.interval_steps} steps",
            )
            self._effects.append(ComputeMerge(self.tip))

    def _on_merge_computed(self, event: MergeComputed) -> None:
        self._have([unit.digest for unit in event.units.values()])
        if event.tip != self.tip.digest or event.units.keys() != self.rules.expert_units.keys():
            return
        self._merged = dict(event.units)
        self._pursue_proposal()
        self._pursue_catch_up()
        self._advance_campaign()

    def _awaits_own_merge(self, pursuit: Pursuit) -> bool:
        """Whether to wait for the own result, up to 2 T_red, before fetching others' bits [M6]."""
        return (
            pursuit.manifest.kind is Kind.MERGE
            and pursuit.manifest.parent == self.tip.digest
            and self._merge_asked == self.tip.digest
            and self._merged is None
            and self._now - pursuit.since < 2 * self.timers.reduce_s
        )
