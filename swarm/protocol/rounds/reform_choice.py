"""Which chain to follow: reforms wait until this peer's generation has stalled [F2]."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.protocol.messages.events import Purpose, Topic
from swarm.protocol.messages.messages import Commit
from swarm.protocol.rounds.blobs import Blobs
from swarm.protocol.rounds.contacts import Contacts
from swarm.protocol.rounds.durable_state import Role
from swarm.protocol.rounds.state import Life
from swarm.protocol.values.manifest import Manifest, PeerId


@dataclass(eq=False)
class ReformChoice(Role):
    """Judges the reforms of other peers; the adopter fetches and applies them."""

    life: Life
    contacts: Contacts
    blobs: Blobs
    candidate: tuple[PeerId, Commit] | None = field(init=False, default=None)
    """The best reform that is held back, and its sender."""

    def forget_height(self) -> None:
        """Drops manifests that do not beat the new tip, and ends their fetch."""
        pursuit = self.blobs.catch_up
        if pursuit and not self.standing.is_better(pursuit.manifest):
            self.blobs.cancel_fetch(Purpose.CATCH_UP, pursuit)
            self.blobs.catch_up = None
        if self.candidate and not self.standing.is_better(self.candidate[1].manifest):
            self.candidate = None

    @property
    def quiet_s(self) -> float:
        """Seconds since this peer began to listen or applied its tip, whichever came last."""
        return self.now - max(self.life.boot_at, self.standing.applied_at)

    def hold_back(self, source: PeerId, commit: Commit) -> None:
        """Remembers the best reform, in case this generation stalls."""
        manifest = commit.manifest
        best = self.candidate
        if best and best[1].manifest.code >= manifest.code:
            return
        self.candidate = (source, commit)
        self.out.explain(
            Topic.FORK,
            f"reform {manifest.generation[:8]} with {len(manifest.members)} members is held back: "
            f"this peer's tip is {self.now - self.standing.applied_at:.1f} s old, and a quorum "
            f"counts as alive for {self.timers.reform_s:.1f} s",
        )

    def leaves_my_generation(self, manifest: Manifest) -> bool:
        """Whether a manifest descends from a reform of this peer's own generation [F2]."""
        mine, other = self.tip.lineage, manifest.lineage
        return len(other) > len(mine) and other[: len(mine)] == mine

    def may_leave_generation(self) -> bool:
        """Whether to follow a reform: while this peer listens [B1], or if it is stalled [F2]."""
        return self.life.is_listening or self.is_stalled(self.timers.reform_s)

    def set_reform_aside(self) -> None:
        """Ends the fetch of a reform if a quorum of this peer's own generation came back [F2].

        During the fetch, no manifest of this peer's generation could be adopted.
        """
        pursuit = self.blobs.catch_up
        if (
            pursuit is None
            or not self.leaves_my_generation(pursuit.manifest)
            or self.may_leave_generation()
        ):
            return
        self.blobs.cancel_fetch(Purpose.CATCH_UP, pursuit)
        self.blobs.catch_up = None
        self.hold_back(pursuit.sources[0], pursuit.commit)

    def is_stalled(self, limit_s: float) -> bool:
        """Whether this generation has given no sign of life for `limit_s` [F2]."""
        return self.quiet_s >= limit_s and not self.contacts.hears_quorum(limit_s)
