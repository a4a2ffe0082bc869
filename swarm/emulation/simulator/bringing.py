"""What must hold of what contributors bring: all of their own that is due [U3]."""

from __future__ import annotations

from collections.abc import Set

from swarm.emulation.simulator.violation import require, short
from swarm.experts import expert_unit
from swarm.protocol.manifest import Manifest, PeerId, Unit


def check_brought(
    manifest: Manifest, parent: Manifest, due: Set[Unit], liar: PeerId | None
) -> None:
    """What is due, overdue or not, each contributor brings of the experts that it owns."""
    contributors = frozenset(manifest.contributors) - {liar}
    for expert, owners in parent.owners.items():
        unit = expert_unit(expert)
        if unit not in due:
            continue
        lacking = contributors.intersection(owners) - dict(manifest.sources.get(unit, ())).keys()
        require(
            not lacking,
            "U3",
            f"{short(manifest)}: {sorted(lacking)} did not bring {unit}, which was due",
        )
