"""What a private state is still good for after a crash [P6, M10, S1]."""

from __future__ import annotations

from collections.abc import Mapping

from swarm.experts import expert_of_unit
from swarm.protocol.manifest import Digest, Kind, Manifest, PeerId, Unit
from swarm.protocol.messages import Offer, OfferedUnit
from swarm.protocol.rounds.rules import Rules
from swarm.protocol.training.shell import Applied, SavedWork


def problem_of(saved: SavedWork, run_id: str, tip: Manifest) -> str | None:
    """Why a private state may not be trained on, in a sentence; None if nothing is wrong.

    It has to be of this run; and if it names the tip, or the parent of a reform, from which a peer
    goes on in the same way, it has to be of the round after that.
    """
    if saved.run_id != run_id:
        return f"the private state belongs to the run {saved.run_id}, not {run_id}"
    has_steps = saved.steps > 0 and saved.tokens > 0
    fits = saved.round == tip.round + 1 and (has_steps or not saved.is_offered)
    if saved.base_tip in _same(tip) and not fits:
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


def offer_again(saved: SavedWork, tip: Manifest, me: PeerId, rules: Rules) -> Offer | None:
    """An offer that was out when a peer stopped, for the round after the tip.

    The private state is older than it, so the peer has the offered blobs and not the steps behind
    them: it offers them once more and waits.

    Returns:
        None: a round has decided on it, or this peer is to offer other units by now.
    """
    is_undecided = saved.base_tip in _same(tip) and saved.round == tip.round + 1
    if saved.run_id != rules.run or not is_undecided:
        return None
    if set(saved.offered) != set(rules.schedule.due_of(me, tip)):
        return None
    units = {}
    for unit, digest in saved.offered.items():
        expert, delta = expert_of_unit(unit), saved.deltas.get(unit)
        is_delta = unit in rules.unit_coding and delta is None
        num_bytes = (rules.delta_bytes if is_delta else rules.unit_bytes)[unit]
        base = tip.entries[unit].digest if expert is None else saved.expert_bases[expert]
        units[unit] = OfferedUnit(digest, num_bytes, base, delta)
    return Offer(tip.digest, saved.steps, saved.tokens, units, saved.seconds)


def _same(tip: Manifest) -> set[Digest | None]:
    """Tips whose work is good for the round after this one: a reform leaves everything as it is."""
    return {tip.digest, tip.parent} if tip.kind is Kind.REFORM else {tip.digest}
