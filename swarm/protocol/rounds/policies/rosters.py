"""Which offers count, which values are averaged, and which peers average them [S3]. Pure.

Policies: roster deadline, shared progress, mean weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from math import inf

from swarm.canonical import canonical
from swarm.protocol.messages.messages import Offer, OfferedUnit, Uplinks
from swarm.protocol.rounds.policies.deals import tokens_problem
from swarm.protocol.rounds.policies.rules import Rules
from swarm.protocol.values.digests import digest_of
from swarm.protocol.values.manifest import Digest, Manifest, PeerId, Unit

NO_UPLINKS: Uplinks = {}
MOST_SHARES = 2
"""No peer averages more than this many times its share of the bytes, whatever uplink it claims.
This limits the effect of a false claim; a similar rule holds for capacities (balanced uploads,
ownership cap)."""
_FULL = 1e30
"""More than any load, in seconds or bytes."""
Sources = Mapping[Unit, tuple[tuple[PeerId, Digest], ...]]


@dataclass(frozen=True)
class Plan:
    """A closed roster, and its consequences."""

    roster_id: Digest
    """Digest of the tip, the offers and the possible reducers. All else follows from these."""
    offers: Mapping[PeerId, Offer]
    sources: Sources
    """For each unit in the roster, its offered values, in peer-id order (roster deadline)."""
    reducers: Mapping[Unit, PeerId]
    """The reducer of each unit with more than one source."""
    able: Uplinks
    """The possible reducers: peers that others can dial, or all peers if none can be dialed."""

    @property
    def contributors(self) -> tuple[PeerId, ...]:
        """Peers whose shared tensors are averaged; late offers have experts only."""
        return tuple(peer for peer, offer in self.offers.items() if not offer.is_late)


def offer_problem(offer: Offer, peer: PeerId, tip: Manifest, rules: Rules) -> str | None:
    """Why an offer may not enter the round after `tip`; None when it may.

    Its steps must start from the tip. Each unit must be due and trained from its value in the tip
    [S3] (shared progress). The offer must have every shared part that is due, and only experts that
    the peer owns. A late offer has only experts.
    """
    if offer.tip != tip.digest:
        return f"it starts from {offer.tip[:12]}, the tip is {tip.digest[:12]}"
    if not 0 <= offer.seconds < inf:
        return f"its steps took {offer.seconds} seconds"
    if offer.is_late and (offer.steps or offer.tokens or not offer.units):
        return f"it has no shared part, but {offer.steps} steps and {len(offer.units)} experts"
    problem = None if offer.is_late else _work_problem(offer, peer, tip, rules)
    if problem:
        return problem
    due = rules.schedule.due(tip)
    for unit in () if offer.is_late else rules.shared_units:
        if unit not in offer.units and unit in due:
            return f"the shared part {unit} is missing"
    entries, sizes, experts = tip.entries, rules.offered_bytes, rules.expert_units
    for unit, offered in offer.units.items():
        entry = entries.get(unit)
        expected = entry and (entry.digest, sizes.get(unit), None)
        is_right = (offered.base, offered.num_bytes, offered.delta) == expected
        if is_right and unit not in experts and unit in due:
            continue  # most units of most offers
        problem = _unit_problem(unit, offered, peer, tip, rules)
        if problem or unit not in due:
            return problem or f"{unit} is not due in round {tip.round + 1}"
    return None


def _work_problem(offer: Offer, peer: PeerId, tip: Manifest, rules: Rules) -> str | None:
    is_of_tip = not rules.overlaps
    if is_of_tip and offer.tokens != offer.steps * rules.batch_tokens_at(tip.tokens):
        return f"it counts {offer.steps} steps and {offer.tokens} tokens"
    return tokens_problem(offer.tokens, peer, tip, rules)


def _unit_problem(
    unit: Unit, offered: OfferedUnit, peer: PeerId, tip: Manifest, rules: Rules
) -> str | None:
    entry = tip.entries.get(unit)
    if entry is None or unit not in rules.unit_bytes:
        return f"the run has no unit {unit}"
    if offered.num_bytes != rules.offered_bytes[unit]:
        return f"{unit} has {offered.num_bytes} bytes instead of {rules.offered_bytes[unit]}"
    if (offered.delta is not None) != rules.is_verbatim(unit):
        return f"{unit} comes {'with' if offered.delta else 'without'} a delta"
    if offered.base != entry.digest:
        return f"{unit} was trained from {offered.base[:12]}, the tip has {entry.digest[:12]}"
    expert = rules.expert_units.get(unit)
    if expert is not None and peer not in tip.owners.get(expert, ()):
        return f"{peer} does not own expert {expert}"
    return None


def plan_roster(
    tip: Manifest,
    offers: Mapping[PeerId, Offer],
    rules: Rules,
    undialable: Collection[PeerId] = (),
    uplinks: Uplinks = NO_UPLINKS,
) -> Plan:
    """Plans the round with these valid offers; undialable peers reduce only if no other can."""
    ordered = {peer: offers[peer] for peer in sorted(offers)}
    sources = sources_of(ordered)
    willing = [peer for peer in ordered if peer not in undialable] or list(ordered)
    able = {peer: uplinks.get(peer, 0) for peer in willing}
    reducers = assign_reducers(ordered, able, rules.moved_bytes, rules.averaged_deltas, sources)
    digests = {peer: offer.digest for peer, offer in ordered.items()}
    identity = digest_of(canonical([tip.digest, digests, able]))
    return Plan(identity, ordered, sources, reducers, able)


def sources_of(offers: Mapping[PeerId, Offer]) -> Sources:
    """For each offered unit, the peers that offer it and their values, in peer-id order."""
    sources: dict[Unit, list[tuple[PeerId, Digest]]] = {}
    for peer in sorted(offers):
        for unit, offered in offers[peer].units.items():
            sources.setdefault(unit, []).append((peer, offered.digest))
    return {unit: tuple(sources[unit]) for unit in sorted(sources)}


def assign_reducers(
    offers: Mapping[PeerId, Offer],
    reducers: Uplinks,
    unit_bytes: Mapping[Unit, int],
    always: Collection[Unit] = (),
    sources: Sources | None = None,
) -> dict[Unit, PeerId]:
    """Assigns a reducer to each unit with more than one source, or with averaged deltas.

    Policies: balanced uploads, delta means.

    A reducer that is a source has its own value already. So a unit of b bytes with s sources costs
    s - 1 transfers to its reducer and N - 1 from it. For S shared units and X experts with R owners
    each, this is b x (2 S (N-1) + X (N+R-2)). Uploads are balanced in seconds. Each unit, largest
    first, goes to the source that would finish its uploads so far the soonest, unless that source
    has MOST_SHARES already. A unit with one source is taken verbatim, and counts as that source's
    upload.

    Args:
        offers: the roster.
        reducers: peers of the roster that may reduce, in any order, and their uplinks. If none of
            these offers a unit, one of the unit's sources averages it.
        unit_bytes: bytes that each unit's next value costs a peer that receives it.
        always: units that have a reducer even if there is a single source.
        sources: `sources_of(offers)`, if already computed: for 256 peers it has 120,000 values.

    Returns:
        Unit -> reducer, sorted by unit; units taken verbatim are not in it.
    """
    fan_out = max(1, len(offers) - 1)
    burden = dict.fromkeys(offers, 0.0)
    slowness = _slowness(offers, reducers)
    shared: list[tuple[int, Unit, list[PeerId]]] = []
    for unit, values in (sources or sources_of(offers)).items():
        able = [peer for peer, _ in values if peer in reducers] or [peer for peer, _ in values]
        num_bytes = unit_bytes.get(unit, 0)
        if able and (len(values) > 1 or unit in always):
            shared.append((-num_bytes, unit, able))
            for peer in able:
                burden[peer] += num_bytes * slowness[peer]
        elif able:
            burden[able[0]] += num_bytes * fan_out * slowness[able[0]]
    chosen = {}
    left = dict.fromkeys(offers, _most_bytes(shared, reducers))
    for negative_bytes, unit, able in sorted(shared):
        peer = min(able, key=burden.__getitem__)  # of equals the first in peer-id order
        burden[peer] -= negative_bytes * (fan_out - 1) * slowness[peer]
        left[peer] += negative_bytes
        if left[peer] <= 0:
            burden[peer] += _FULL
        chosen[unit] = peer
    return dict(sorted(chosen.items()))


def _most_bytes(shared: Collection[tuple[int, Unit, list[PeerId]]], reducers: Uplinks) -> float:
    """Bytes from which on a reducer is chosen last; infinite if all uplinks are equal."""
    if len(set(reducers.values())) < 2:
        return inf
    total_bytes = -sum(negative_bytes for negative_bytes, _, _ in shared)
    return MOST_SHARES * total_bytes / len(reducers)


def _slowness(peers: Iterable[PeerId], uplinks: Uplinks) -> dict[PeerId, float]:
    """Upload time of a byte at each peer, relative to a peer with the usual uplink.

    If all uplinks are equal, or none is known, each time is 1, so that sums of bytes are exact.
    """
    usual = usual_uplink(mbit for mbit in uplinks.values() if mbit) or 1
    return {peer: usual / (uplinks.get(peer) or usual) for peer in peers}


def usual_uplink(known: Iterable[int]) -> int | None:
    """The lower median of the known uplinks; None if none is known."""
    in_order = sorted(known)
    return in_order[(len(in_order) - 1) // 2] if in_order else None
