"""Checks whether a round's manifest follows from signed statements [A6]. Pure.

A convener names the contributions, the peers that join or leave, and the reducers' results. It
shows signed declarations and results for all of these. Every acceptor recomputes the manifest from
them. The offers follow from the declarations and the manifest's `sources` and `work`, so acceptors
fetch no offer. The roster follows from the offers, and the manifest from the roster, by the
`compose_round` that the convener used.

Two claims of the convener remain unproved: which peers it did not hear, and whose offers it left
out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache

from swarm.protocol.messages.messages import Evidence, Offer, OfferedUnit, ReducedUnit, Report
from swarm.protocol.rounds.policies.composition import NO_WISH, Attendance, compose_round
from swarm.protocol.rounds.policies.rosters import Plan, offer_problem, plan_roster
from swarm.protocol.rounds.policies.rules import Rules
from swarm.protocol.values.invitation import Credential
from swarm.protocol.values.manifest import Manifest, PeerId, Unit, Wish


@dataclass(frozen=True)
class _Case:
    """A cache key that compares the identity of its objects, not their contents."""

    names: tuple[int, int, int, int] = field(init=False)
    manifest: Manifest = field(compare=False)
    evidence: Evidence = field(compare=False)
    tip: Manifest = field(compare=False)
    rules: Rules = field(compare=False)

    def __post_init__(self) -> None:
        names = (id(self.manifest), id(self.evidence), id(self.tip), id(self.rules))
        object.__setattr__(self, "names", names)


def evidence_problem(
    manifest: Manifest, evidence: Evidence, tip: Manifest, rules: Rules
) -> str | None:
    """Why a manifest does not follow from its evidence; None when it does.

    With 256 peers, the check would block an event loop for too long. So the shell runs it in
    another thread before it passes a proposal on, and the answer is cached by the objects'
    identity.

    The caller has dropped invalid signatures from the evidence.
    """
    return _judged(_Case(manifest, evidence, tip, rules))


@lru_cache(maxsize=8)
def _judged(case: _Case) -> str | None:
    manifest, evidence, tip, rules = case.manifest, case.evidence, case.tip, case.rules
    problem = _sources_problem(manifest, evidence, tip, rules)
    if problem:
        return problem
    offers = offers_shown(manifest, evidence, tip, rules)
    for peer, offer in offers.items():
        if offer.digest != evidence.declared[peer].declaration.offer:
            return f"{peer} has declared another offer"
        problem = offer_problem(offer, peer, tip, rules)
        if problem:
            return f"offer of {peer}: {problem}"
    plan = plan_roster(tip, offers, rules, offers.keys() - evidence.able.keys(), evidence.able)
    if (plan.able, plan.roster_id) != (evidence.able, evidence.roster_id):
        return "its reducers have signed for another roster"
    results = results_of(evidence.reports, plan, rules)
    for unit, reducer in plan.reducers.items():
        if unit not in results:
            return f"{reducer} has not signed a mean of {unit}"
    expected = compose_from(tip, plan, evidence, Brought(manifest.wishes, manifest.invited), rules)
    return None if expected.encoded == manifest.encoded else _difference(manifest, expected)


def _sources_problem(
    manifest: Manifest, evidence: Evidence, tip: Manifest, rules: Rules
) -> str | None:
    """Why no offers can be rebuilt from a manifest's sources; None when they can."""
    for unit in manifest.sources:
        if unit not in rules.unit_bytes or not unit_in(unit, tip, manifest):
            return f"the run has no unit {unit}"
    sources = {peer for values in manifest.sources.values() for peer, _ in values}
    for peer in sorted(sources):
        if peer not in tip.members:
            return f"{peer} is no member and has nothing to offer"
        if peer not in evidence.declared:
            return f"{peer} has not declared an offer"
    return None if sources else "nobody contributes"


def unit_in(unit: Unit, *manifests: Manifest) -> bool:
    """Whether each of these manifests has a value of the unit."""
    return all(unit in manifest.entries for manifest in manifests)


def offers_shown(
    manifest: Manifest, evidence: Evidence, tip: Manifest, rules: Rules
) -> dict[PeerId, Offer]:
    """The offers behind a manifest, rebuilt from its statements about them, in peer-id order.

    Offers without tokens are late ones.
    """
    units: dict[PeerId, dict[Unit, OfferedUnit]] = {}
    for unit, values in manifest.sources.items():
        num_bytes, base = rules.offered_bytes[unit], tip.entries[unit].digest
        delta = manifest.entries[unit].delta if rules.is_verbatim(unit) else None
        for peer, digest in values:
            units.setdefault(peer, {})[unit] = OfferedUnit(digest, num_bytes, base, delta)
    batch_tokens = rules.batch_tokens_at(tip.tokens)
    offers = {}
    for peer in sorted(units):
        tokens, seconds = manifest.work.get(peer, 0), evidence.declared[peer].declaration.seconds
        offers[peer] = Offer(tip.digest, tokens // batch_tokens, tokens, units[peer], seconds)
    return offers


def valid_results(report: Report, plan: Plan, rules: Rules) -> dict[Unit, ReducedUnit]:
    """The results in a report for which its reducer was asked."""
    return {
        unit: result
        for unit, result in report.results.items()
        if plan.reducers.get(unit) == report.reducer and not result_problem(unit, result, rules)
    }


def result_problem(unit: Unit, result: ReducedUnit, rules: Rules) -> str | None:
    """Why this cannot be the mean of a unit; None when it can."""
    if result.num_bytes != rules.unit_bytes[unit]:
        return f"{unit} has {result.num_bytes} bytes"
    if (result.delta is not None) != (unit in rules.averaged_deltas):
        return f"{unit} comes {'with' if result.delta else 'without'} a delta"
    return None


def newest_results(reports: Sequence[Report], plan: Plan, rules: Rules) -> tuple[Report, ...]:
    """The reports of a reducer, newest first, without those whose results newer reports have."""
    kept: list[Report] = []
    covered: set[Unit] = set()
    for report in reports:
        units = valid_results(report, plan, rules).keys()
        if units - covered:
            kept.append(report)
            covered |= units
    return tuple(kept)


def results_of(reports: Sequence[Report], plan: Plan, rules: Rules) -> dict[Unit, ReducedUnit]:
    """The results of the reducers; of several for one unit, the first one shown."""
    results: dict[Unit, ReducedUnit] = {}
    for report in reports:
        results = {**valid_results(report, plan, rules), **results}
    return results


@dataclass(frozen=True)
class Brought:
    """Signed statements in the manifest itself, which the evidence does not repeat."""

    wishes: Mapping[PeerId, Wish]
    """Signed wishes of the members that leave."""
    credentials: Mapping[PeerId, Credential]
    """Credentials of peers for which anchors vouch; both signatures are valid."""


def compose_from(
    tip: Manifest, plan: Plan, evidence: Evidence, brought: Brought, rules: Rules
) -> Manifest:
    """The manifest that follows from the declarations and from the reducers' results."""
    results = results_of(evidence.reports, plan, rules)
    return compose_round(tip, plan, results, attendance_of(evidence, brought, tip), rules)


def attendance_of(evidence: Evidence, brought: Brought, tip: Manifest) -> Attendance:
    """The attendance that follows from what each peer has declared."""
    said = {peer: declared.declaration for peer, declared in evidence.declared.items()}
    members = {peer: each for peer, each in said.items() if peer in tip.members}
    return Attendance(
        heard=members.keys(),
        leaving={
            peer: brought.wishes.get(peer, NO_WISH) for peer, each in members.items() if each.leave
        },
        joiners={
            peer: each.capacity
            for peer, each in said.items()
            if peer not in members and not each.leave
        },
        capacities={peer: each.capacity for peer, each in members.items()},
        rooms={peer: each.room for peer, each in said.items()},
        credentials=brought.credentials,
    )


def _difference(manifest: Manifest, expected: Manifest) -> str:
    """Where a manifest differs from the manifest that follows from its evidence."""
    different = [
        each.name
        for each in fields(Manifest)
        if getattr(manifest, each.name) != getattr(expected, each.name)
    ]
    return f"its {', '.join(different) or 'form'} does not follow from what was signed"
