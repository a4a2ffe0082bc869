"""What a peer does with its local progress when it applies a manifest.

Policies: shared progress, expert progress, merge rebase.

Shared tensors restart from the result of a round, whether or not the round counted this peer. The
peer's offer contained all its progress, since it takes no further steps until the round is over. A
part that was not due (due units) keeps its progress, and is offered once it is due. This holds as
long as the part's agreed value is the one from which the progress started.

*Local progress* of an expert is (base digest, fp32 master, moments): the master was trained from
the agreed value named by the base digest. The rule is a compare-and-swap on that digest. So a slow
owner's work survives rounds that did not renew its expert, and never overwrites newer work.

With several owners, the agreed value is the mean of their values. The difference between an owner's
master and its offered value is in no mean yet, so the owner adds it to the mean. The difference
contains the part that the wire's type rounded off. Without that part, updates below half a unit in
the last place would be lost in each round. After a late offer the owner continues to train, so the
difference also contains the steps since that offer. With fp32 on the wire the difference after a
finished round is zero, so the owner restarts from the exact bits of the mean.

Where deltas are averaged (delta means, carried steps), a trained value x keeps its progress. Let v
be the old and v' the new agreed value, and c the peer's counted delta (0 if none was). Then x
becomes x + (v' - v) - c. So x - v' is always exactly the progress that the swarm does not have yet.
It has three parts: the error of the delta's coding, later steps where rounds overlap, and the steps
of a round that left the peer out. The next delta is x - v', so no progress is lost or sent twice,
although only x is stored. To subtract c, the peer needs the blob that was counted. A peer without
that blob restarts from v', and so does a peer that two rounds in a row left out. A delta that is
taken verbatim needs no such correction: the agreed value is the one that this peer offered, so its
master stays as it is (expert progress).

After a restart of the peer the same function decides, with the bases and the offer of the saved
private state [P6].
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from types import MappingProxyType

from swarm.experts import expert_of_unit, expert_unit
from swarm.protocol.messages.messages import Offer
from swarm.protocol.values.manifest import Digest, Kind, Manifest, PeerId, Unit


class Action(Enum):
    """What happens to the local progress of one expert, or of the shared tensors."""

    KEEP = "keep"  # the agreed value is unchanged, and so are base, master and moments
    PUBLISHED = "published"  # my offered value is the agreed one: master stays, base := its digest
    REBASE = "rebase"  # a merge: master := merged + (master - value of `rebase_from`)
    AVERAGED = "averaged"  # my offered value is in the mean: like REBASE, from that value
    CORRECTED = "corrected"  # my delta `rebase_from` is in the mean: like CARRIED, minus that delta
    CARRIED = "carried"  # a round left me out: master += agreed value - previous one
    RESTART = "restart"  # master := agreed value; the moments, which are local, stay
    DROP = "drop"  # no longer mine: master and moments are dropped
    TAKE_UP = "take_up"  # newly mine: master := agreed value, zero moments


@dataclass(frozen=True)
class ExpertDecision:
    """What to do with one expert."""

    action: Action
    base: Digest | None
    """Base digest of the progress from now on; None after a drop."""
    reason: str
    rebase_from: Digest | None = None
    """For REBASE: the agreed value to subtract, a blob of the previous tip. For AVERAGED and
    CORRECTED: my offered blob, which is kept until the adoption."""


@dataclass(frozen=True)
class Adoption:
    """What to do with all local progress."""

    shared: Action
    """KEEP (unchanged; a finished offer may be offered again) or RESTART; with deltas CORRECTED or
    CARRIED (carried steps)."""
    experts: Mapping[int, ExpertDecision]
    """Decisions on every expert that was or is mine, in order."""
    shared_from: Mapping[Unit, Digest] = field(default_factory=dict)
    """If the shared tensors are CORRECTED: my offered blob of each part."""
    kept_parts: frozenset[Unit] = field(default=frozenset())
    """Parts of the shared tensors whose progress is kept, whatever `shared` says."""
    carried: frozenset[Unit] = field(default=frozenset())
    """Units whose steps are kept after one round left them out; a second such round drops them
    (carried steps)."""

    @property
    def bases(self) -> dict[int, Digest]:
        """For each own expert, the base digest of its progress from now on."""
        experts = self.experts.items()
        return {expert: choice.base for expert, choice in experts if choice.base is not None}

    @property
    def keeps_all(self) -> bool:
        """Whether everything stays as it is."""
        choices = (self.shared, *(each.action for each in self.experts.values()))
        return all(action is Action.KEEP for action in choices)

    def begins_anew(self, shared_units: Iterable[Unit]) -> bool:
        """Whether a part of the shared tensors restarts from its agreed value."""
        return self.shared is Action.RESTART and not self.kept_parts.issuperset(shared_units)

    @property
    def kept(self) -> frozenset[int]:
        """Experts whose progress is kept, whatever becomes of the shared tensors (late offers)."""
        restarted = (Action.RESTART, Action.DROP, Action.TAKE_UP)
        return frozenset(e for e, choice in self.experts.items() if choice.action not in restarted)


def adopt(
    me: PeerId,
    manifest: Manifest,
    *,
    previous: Digest,
    bases: Mapping[int, Digest],
    offers: Sequence[Offer],
    carried: frozenset[Unit] = frozenset(),
    part_bases: Mapping[Unit, Digest] = MappingProxyType({}),
    overlaps: bool = False,
) -> Adoption:
    """Decides what becomes of all local progress.

    Args:
        me: this peer.
        manifest: the manifest that is being applied.
        previous: digest of the tip from which the local steps since the last adoption started.
        bases: base digest of each expert with local progress.
        offers: this peer's offers since that adoption: of late progress, and of the finished round.
            Steps after the last offer are only in the master.
        carried: units whose steps the previous round left out.
        part_bases: for each part of the shared tensors, the agreed value from which its progress
            started; empty if every round renews all parts.
        overlaps: whether this peer has taken steps since its offer. Then all parts of the shared
            tensors keep their progress: parts that are sent whole move like parts with deltas
            (overlapped adoption).

    Returns:
        An action for the shared tensors, and for each expert an action with its reason.
    """
    shared = _decide_shared(me, manifest, previous)
    known: Mapping[Unit, Digest] = {}
    follows = manifest.parent == previous and (_moves_shared(manifest) or overlaps)
    if shared is Action.RESTART and manifest.kind is Kind.QUORUM and follows:
        shared, known = _decide_coded_shared(me, manifest, offers, carried)
    mine = {expert for expert, owners in manifest.owners.items() if me in owners}
    decisions = {}
    for expert in sorted(mine | bases.keys()):
        if expert not in mine:
            decisions[expert] = ExpertDecision(
                Action.DROP, None, f"expert {expert} belongs to others now"
            )
        else:
            decision = _decide_expert(me, expert, manifest, bases.get(expert), offers)
            base = bases.get(expert)
            if base is not None and decision.action is Action.RESTART:
                again = expert_unit(expert) in carried
                decision = (
                    _decide_moved(me, expert, manifest, base, offers, again=again) or decision
                )
            decisions[expert] = decision
    kept = _kept_parts(manifest, part_bases)
    going_on = _going_on(manifest, shared, kept, decisions, carried)
    return Adoption(shared, decisions, known, kept, going_on)


def still_late(late: frozenset[int], adoption: Adoption, *, is_counted: bool) -> frozenset[int]:
    """Own experts whose progress is in no manifest yet, and is therefore offered late.

    Args:
        late: experts that were late before, and all that were trained since.
        adoption: the decisions on these experts, by the manifest that is being applied.
        is_counted: whether that manifest counted this peer's finished round.
    """
    return frozenset() if is_counted else late & adoption.kept


def _decide_shared(me: PeerId, manifest: Manifest, previous: Digest) -> Action:
    """Shared tensors restart, except after a reform or a merge, which leaves them unchanged."""
    is_left = manifest.parent == previous and manifest.kind in (Kind.REFORM, Kind.MERGE)
    # A reform without me deals to others the samples that I have read.
    is_dealt_anew = manifest.kind is Kind.REFORM and me not in manifest.members
    return Action.KEEP if is_left and not is_dealt_anew else Action.RESTART


def _kept_parts(manifest: Manifest, part_bases: Mapping[Unit, Digest]) -> frozenset[Unit]:
    """Parts that the manifest left unchanged: their progress extends the agreed values.

    Policy: shared progress.
    """
    return frozenset(
        unit
        for unit, base in part_bases.items()
        if manifest.entries[unit].digest == base and unit not in manifest.sources
    )


def _decide_expert(
    me: PeerId, expert: int, manifest: Manifest, base: Digest | None, offers: Sequence[Offer]
) -> ExpertDecision:
    unit = expert_unit(expert)
    entry = manifest.entries[unit]
    offered = {offer.units[unit].digest: offer for offer in offers if unit in offer.units}
    if base is None:
        return ExpertDecision(
            Action.TAKE_UP,
            entry.digest,
            f"expert {expert} is mine now, from its value of round {entry.version}",
        )
    if entry.digest == base:
        return ExpertDecision(
            Action.KEEP, base, f"expert {expert} did not move since round {entry.version}"
        )
    if entry.digest in offered:
        return ExpertDecision(
            Action.PUBLISHED, entry.digest, f"my value of expert {expert} is the agreed one"
        )
    if entry.base is not None and entry.delta is None and entry.base in {base, *offered}:
        return ExpertDecision(
            Action.REBASE,
            entry.digest,
            f"expert {expert} was merged; local progress moves with it",
            rebase_from=entry.base,
        )
    averaged = offered.get(dict(manifest.sources.get(unit, ())).get(me, ""))
    if averaged and entry.delta is None and (entry.codec != "fp32" or averaged.steps == 0):
        return ExpertDecision(
            Action.AVERAGED,
            entry.digest,
            f"my value of expert {expert} is in the mean; the rest of my master stays",
            rebase_from=averaged.units[unit].digest,
        )
    return ExpertDecision(
        Action.RESTART,
        entry.digest,
        f"expert {expert} moved in round {entry.version}, away from the value that I trained from",
    )


def _going_on(
    manifest: Manifest,
    shared: Action,
    kept: frozenset[Unit],
    experts: Mapping[int, ExpertDecision],
    carried: frozenset[Unit],
) -> frozenset[Unit]:
    """Units whose steps one round has left out, and which are in no agreed value yet.

    Policy: carried steps.
    """
    actions = {expert_unit(expert): choice.action for expert, choice in experts.items()}
    for unit in manifest.entries:
        if expert_of_unit(unit) is None:
            is_kept = shared is Action.KEEP or unit in kept
            actions[unit] = Action.KEEP if is_kept else shared
    stays = (Action.KEEP, Action.REBASE)
    return frozenset(
        unit
        for unit, action in actions.items()
        if action is Action.CARRIED or (action in stays and unit in carried)
    )


def _moves_shared(manifest: Manifest) -> bool:
    """Whether a training round moved shared tensors by deltas."""
    return any(expert_of_unit(unit) is None for unit in manifest.deltas.values())


def _decide_coded_shared(
    me: PeerId, manifest: Manifest, offers: Sequence[Offer], carried: frozenset[Unit]
) -> tuple[Action, Mapping[Unit, Digest]]:
    """Like `_decide_shared`, for a round with deltas; also returns my counted blobs.

    Policy: carried steps.
    """
    counted = {
        unit: dict(values)[me]
        for unit, values in manifest.sources.items()
        if expert_of_unit(unit) is None and me in dict(values)
    }
    if not counted:
        moved = {unit for unit in manifest.sources if expert_of_unit(unit) is None}
        is_second = bool(carried & moved)  # this is the second round in a row without my values
        return Action.RESTART if is_second else Action.CARRIED, {}
    for offer in offers:
        if all(u in offer.units and offer.units[u].digest == d for u, d in counted.items()):
            return Action.CORRECTED, counted
    return Action.RESTART, {}  # the mean has my deltas, which I no longer know


def _decide_moved(
    me: PeerId,
    expert: int,
    manifest: Manifest,
    base: Digest,
    offers: Sequence[Offer],
    *,
    again: bool,
) -> ExpertDecision | None:
    """The decision on an expert whose base this round moved by a mean of deltas (carried steps).

    None: another rule decides. A delta that was taken verbatim has a single writer, so the work of
        another peer does not continue that line.
    """
    unit = expert_unit(expert)
    entry, sources = manifest.entries[unit], dict(manifest.sources.get(unit, ()))
    is_mean = entry.delta is not None and bool(sources) and entry.digest not in sources.values()
    if not is_mean or entry.base != base:
        return None
    mine = sources.get(me)
    if mine is None:
        why = f"round {manifest.round} moved expert {expert} without my steps; they continue"
        return None if again else ExpertDecision(Action.CARRIED, entry.digest, why)
    if not any(unit in offer.units and offer.units[unit].digest == mine for offer in offers):
        return None
    why = f"my delta of expert {expert} is in the mean; the rest of my progress stays"
    return ExpertDecision(Action.CORRECTED, entry.digest, why, rebase_from=mine)
