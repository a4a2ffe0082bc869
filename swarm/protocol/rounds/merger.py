"""Merges: each peer computes them from the values of a due tip; agreement is as in a round.

Policy: merge manifests.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.protocol.messages.events import ComputeMerge, MergeComputed, Topic
from swarm.protocol.messages.messages import ReducedUnit
from swarm.protocol.rounds.blobs import Blobs, Pursuit
from swarm.protocol.rounds.campaign import Value
from swarm.protocol.rounds.durable_state import Role
from swarm.protocol.rounds.policies.composition import compose_merge
from swarm.protocol.values.manifest import Digest, Kind, Unit


@dataclass(eq=False)
class Merger(Role):
    """Computes the merge of a due tip."""

    blobs: Blobs
    merged: dict[Unit, ReducedUnit] | None = field(init=False, default=None)
    """This peer's result for the tip."""
    _asked_for: Digest | None = field(init=False, default=None)

    def forget_height(self) -> None:
        """Starts over with a new tip."""
        self.merged = None

    def start(self) -> None:
        """Has the merge computed; the result stays valid for all campaigns on the tip.

        Policy: merge manifests.
        """
        if self.standing.is_due(self.tip) and self._asked_for != self.tip.digest:
            self._asked_for = self.tip.digest
            self.out.explain(
                Topic.ROUND,
                f"merge due at step {self.tip.step}: {self.tip.merged} merges done, interval "
                f"{self.rules.merging.interval_steps} steps",
            )
            self.out.emit(ComputeMerge(self.tip))

    def take(self, event: MergeComputed) -> bool:
        """Notes a computed merge; returns whether it is for the tip."""
        self.blobs.have([unit.digest for unit in event.units.values()])
        if event.tip != self.tip.digest or event.units.keys() != self.rules.expert_units.keys():
            return False
        self.merged = dict(event.units)
        return True

    def composed(self) -> Value | None:
        """The manifest to propose, once the merge is computed."""
        if self.merged is None:
            return None
        holders = dict.fromkeys(self.rules.expert_units, self.me)
        manifest = compose_merge(self.tip, self.merged, holders, self.rules)
        return Value(manifest, None, "merge computed")

    def awaits_own_merge(self, pursuit: Pursuit) -> bool:
        """Whether to wait, up to 2 T_red, for this peer's own result before any fetch.

        Policy: merge manifests.
        """
        return (
            pursuit.manifest.kind is Kind.MERGE
            and pursuit.manifest.parent == self.tip.digest
            and self._asked_for == self.tip.digest
            and self.merged is None
            and self.now - pursuit.since < 2 * self.timers.reduce_s
        )
