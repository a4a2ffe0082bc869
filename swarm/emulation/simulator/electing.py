"""What must hold of votes, by counting anew [V1]."""

from __future__ import annotations

from swarm.emulation.simulator.violation import require, short
from swarm.protocol.manifest import Manifest


def check_votes(manifest: Manifest, parent: Manifest) -> None:
    """Votes are earned one a round, and those without an anchor's word stay under a third [R7]."""
    new = manifest.voters - parent.voters - manifest.vouched
    unvouched = manifest.voters - manifest.vouched
    earned = all(manifest.members[p].counted >= 10 for p in new)
    few = len(new) <= 1 and 2 * len(unvouched) < max(1, len(manifest.vouched))
    require(
        not manifest.vouched or (earned and few),
        "V1",
        f"{short(manifest)}: {sorted(new)} vote now, of {sorted(unvouched)} without an anchor's "
        f"word, {len(manifest.vouched)} have one",
    )
