"""What a private state is still good for after a crash [P6, M10, S1]."""

from __future__ import annotations

from collections.abc import Mapping

from swarm.protocol.manifest import Digest, Kind, Manifest, Unit
from swarm.protocol.messages import Offer, OfferedUnit
from swarm.protocol.training.shell import Applied, SavedWork


def problem_of(saved: SavedWork, run_id: str, tip: Manifest) -> str | None:
    """Why a private state may not be trained on, in a sentence; None if nothing is wrong.

    It has to be of this run; and if it names the tip, or the parent of a reform, from which a peer
    goes on in the same way, it has to be of the round after that.
    """
    if saved.run_id != run_id:
        return f"the private state belongs to the run {saved.run_id}, not {run_id}"
    tips = [tip.digest, tip.parent] if tip.kind is Kind.REFORM else [tip.digest]
    fits = saved.round == tip.round + 1 and saved.steps > 0 and saved.tokens > 0
    if saved.base_tip in tips and not fits:
        return (
            f"the private state (round {saved.round}, {saved.steps} steps, {saved.tokens} "
            f"tokens) cannot follow the manifest that it names (round {tip.round})"
        )
    return None


def manifests_to(newest: Applied, base_tip: Digest) -> list[Manifest]:
    """Manifests to be adopted one after the other to come from one to the newest tip.

    Of what came in between the record has the tip's parent; a merge is redone from that [M10].
    """
    tip, parent = newest.manifest, newest.parent
    if base_tip == tip.digest:
        return []
    if parent and parent.digest == tip.parent and parent.parent == base_tip:
        return [parent, tip]
    return [tip]


def offer_of(saved: SavedWork, unit_bytes: Mapping[Unit, int]) -> Offer:
    """What had been offered when the private state was written, without work of its own."""
    units = {
        unit: OfferedUnit(digest, unit_bytes[unit], base="")
        for unit, digest in saved.offered.items()
    }
    return Offer(saved.base_tip, 0, 0, units)
