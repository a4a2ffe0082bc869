"""What must hold of votes, by counting anew [V1]."""

from __future__ import annotations

from swarm.emulation.simulator.violation import require, short
from swarm.protocol.manifest import Manifest


def check_votes(manifest: Manifest, parent: Manifest) -> None:
    """Votes are given few at a time to who has worked, and the young stay few [R7]."""
    staying = manifest.voters & parent.voters
    new = manifest.voters - parent.voters - {manifest.founding.founder}
    is_small, most = len(staying) < 8, max(1, len(staying) // 10)
    young = [p for p in manifest.voters if manifest.members[p].counted < 50]
    earned = all(manifest.members[p].counted >= (1 if is_small else 10) for p in new)
    few = is_small or not new or 4 * len(young) < len(manifest.voters)
    require(
        not staying or (earned and few and len(new) <= most),
        "V1",
        f"{short(manifest)}: {sorted(new)} vote now, {sorted(young)} are young, "
        f"{len(staying)} voted before",
    )
