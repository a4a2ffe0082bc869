"""How the next manifest is made from its parent [F3]. Pure.

Policies: member removal, joiner limits, entry renewal, expert ownership, merge manifests.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from swarm.experts import expert_unit
from swarm.protocol.chain.trust import reform_electors
from swarm.protocol.membership.membership import (
    Membership,
    absent_after,
    come_back,
    next_members,
    on_trial,
)
from swarm.protocol.membership.ownership import Assignment, assign
from swarm.protocol.messages.messages import ReducedUnit
from swarm.protocol.rounds.policies.deals import book_after, book_of_reform, with_pace, work_of
from swarm.protocol.rounds.policies.rosters import Plan
from swarm.protocol.rounds.policies.rules import Rules
from swarm.protocol.values import manifest
from swarm.protocol.values.digests import digest_of
from swarm.protocol.values.invitation import Credential
from swarm.protocol.values.schedule import merged_until

NO_WISH: manifest.Wish = ""
"""Stands for a missing wish. A manifest that lacks the wish of a leaver follows from no
evidence."""


@dataclass(frozen=True)
class Attendance:
    """The peers that a convener heard in its campaign."""

    heard: Collection[manifest.PeerId]
    leaving: Mapping[manifest.PeerId, manifest.Wish]
    """Members that leave, each with its signed wish."""
    joiners: Mapping[manifest.PeerId, float]
    """Capacity of each stranger that asked to join."""
    capacities: Mapping[manifest.PeerId, float] = field(default_factory=dict)
    """Declared capacities of the members that were heard."""
    rooms: Mapping[manifest.PeerId, int] = field(default_factory=dict)
    """Declared rooms of members that were heard, and of joiners."""
    credentials: Mapping[manifest.PeerId, Credential] = field(default_factory=dict)
    """Credentials that peers have shown; their signatures are valid."""


def compose_round(
    tip: manifest.Manifest,
    plan: Plan,
    results: Mapping[manifest.Unit, ReducedUnit],
    attendance: Attendance,
    rules: Rules,
) -> manifest.Manifest:
    """The manifest of an ordinary training round; `results` has the mean of each reduced unit."""
    number, contributors = tip.round + 1, plan.contributors
    membership = members_after(tip, contributors, attendance, rules)
    entries = {**tip.entries, **_renewed(plan, results, number, rules)}
    members, work = with_pace(membership.members, plan.offers, rules), work_of(plan.offers)
    assignment = owners_after(tip, members, contributors, entries, rules)
    tokens = rules.tokens_after(tip, work)
    book = book_after(tip, work, members, tokens, rules)
    return replace(
        tip,
        run=rules.run,
        height=tip.height + 1,
        round=number,
        kind=manifest.Kind.QUORUM,
        parent=tip.digest,
        step=rules.step_after(tip, tokens),
        tokens=tokens,
        members=members,
        contributors=contributors,
        sources=plan.sources,
        owners=assignment.owners,
        entries=entries,
        work=work,
        cursor=book.cursor,
        holes=book.holes,
        dealt=book.dealt,
        wishes={
            peer: attendance.leaving[peer]
            for peer in sorted(tip.members.keys() & attendance.leaving.keys())
            if peer not in members
        },
        invited=membership.invited,
        invitations=membership.invitations,
        absent=membership.absent,
        seed=None,
        reasons=(*membership.reasons, *assignment.reasons),
    )


def members_after(
    tip: manifest.Manifest,
    contributors: Collection[manifest.PeerId],
    attendance: Attendance,
    rules: Rules,
) -> Membership:
    """Members after an ordinary training round."""
    return next_members(
        tip,
        heard=attendance.heard,
        contributors=contributors,
        leaving=attendance.leaving,
        joiners=attendance.joiners,
        capacities=attendance.capacities,
        rooms=attendance.rooms,
        seed=tip.digest,
        silent_limit=rules.silent_rounds,
        guests=rules.guests(tip, attendance.credentials),
        elect=rules.with_voters,
    )


def owners_after(
    tip: manifest.Manifest,
    members: Mapping[manifest.PeerId, manifest.Member],
    contributors: Sequence[manifest.PeerId],
    entries: Mapping[manifest.Unit, manifest.Entry],
    rules: Rules,
) -> Assignment:
    """Owners after an ordinary training round."""
    return assign(
        tip.owners,
        _capacities(members),
        [peer for peer in contributors if peer in members],
        stale=stale_experts(entries, tip.round + 1, rules),
        rooms=rules.rooms_of(members),
        silent=[
            peer for peer, member in members.items() if member.silent > rules.owner_silent_rounds
        ],
        on_trial=on_trial(members),
        owners_per_expert=rules.owners_per_expert,
        num_experts=rules.num_experts,
        # The seed is the same in all rounds, so that a repeated round moves the same experts.
        seed=tip.founding.nonce,
    )


def _renewed(
    plan: Plan, results: Mapping[manifest.Unit, ReducedUnit], number: int, rules: Rules
) -> dict[manifest.Unit, manifest.Entry]:
    """New entries of the roster's units; other units keep digest and version (entry renewal)."""
    entries = {}
    for unit, values in plan.sources.items():
        source = plan.reducers.get(unit, values[0][0])
        offered = plan.offers[values[0][0]].units[unit]
        found = results[unit] if unit in plan.reducers else offered
        entries[unit] = manifest.Entry(
            digest=found.digest,
            num_bytes=rules.unit_bytes[unit],
            version=number,
            source=source,
            codec=rules.unit_codec[unit],
            base=offered.base if unit in rules.unit_coding else None,  # the parent's [S3]
            delta=found.delta,
            coding=rules.unit_coding.get(unit, manifest.UNCODED),
        )
    return entries


def stale_experts(
    entries: Mapping[manifest.Unit, manifest.Entry], number: int, rules: Rules
) -> tuple[int, ...]:
    """Experts that were not renewed in the last K rounds in which they were due.

    Policies: expert ownership, merge manifests.
    """
    limit = rules.silent_limit * rules.experts_every
    return tuple(
        expert
        for expert in range(rules.num_experts)
        if number - entries[expert_unit(expert)].version >= limit
    )


def compose_merge(
    tip: manifest.Manifest,
    merged: Mapping[manifest.Unit, ReducedUnit],
    sources: Mapping[manifest.Unit, manifest.PeerId],
    rules: Rules,
) -> manifest.Manifest:
    """The merge manifest of a due tip, which changes only the experts' values (merge manifests).

    `merged` has the new value of every expert, `sources` a peer that holds it.
    """
    entries = dict(tip.entries)
    for unit in rules.expert_units:
        before = tip.entries[unit]
        entries[unit] = replace(
            before,
            digest=merged[unit].digest,
            source=sources[unit],
            base=before.digest,
            delta=None,
            coding=manifest.UNCODED,
        )
    return replace(
        tip,
        run=rules.run,
        height=tip.height + 1,
        kind=manifest.Kind.MERGE,
        parent=tip.digest,
        merged=merged_until(tip.step, rules.merging),
        sources={},
        wishes={},
        invited={},
        entries=entries,
        seed=tip.seed or tip.digest,
        reasons=(),
    )


def compose_reform(
    tip: manifest.Manifest,
    members: Mapping[manifest.PeerId, manifest.Member],
    generation: str,
    rules: Rules,
) -> manifest.Manifest:
    """The manifest with which survivors leave a generation that lost its majority [F3].

    Voters keep their votes, and the founder has one. Trainees stay trainees, and strangers that
    were heard become trainees.
    """
    voters = reform_electors(tip.head).intersection(members)
    members = {
        peer: _survivor(tip, peer, member, votes=peer in voters)
        for peer, member in sorted(members.items())
    }
    contributors = tuple(peer for peer in tip.contributors if peer in members)
    assignment = assign(
        tip.owners,
        _capacities(members),
        contributors,
        stale=(),
        rooms=rules.rooms_of(members),
        on_trial=on_trial(members),
        owners_per_expert=rules.owners_per_expert,
        num_experts=rules.num_experts,
        seed=tip.founding.nonce,
    )
    lost = [peer for peer in sorted(tip.members) if peer not in members]
    book = book_of_reform(tip, members, rules)
    return replace(
        tip,
        run=rules.run,
        generation=generation,
        kind=manifest.Kind.REFORM,
        parent=tip.digest,
        members=members,
        contributors=contributors,
        sources={},
        work={},
        wishes={},
        invited={},
        absent=absent_after(tip, members, tip.round),
        cursor=book.cursor,
        holes=book.holes,
        dealt=book.dealt,
        owners=assignment.owners,
        lineage=(*tip.lineage, (tip.height, (len(voters), generation))),
        seed=None,
        reasons=(
            f"{len(members)} survivors go on without {', '.join(lost) or 'anybody'}",
            *assignment.reasons,
        ),
    )


def _survivor(
    tip: manifest.Manifest, peer: manifest.PeerId, member: manifest.Member, *, votes: bool
) -> manifest.Member:
    """A member of a reform, with its standing in the tip."""
    before = tip.members.get(peer) or come_back(tip, peer, member.capacity)
    before = before or manifest.Member(0, member.capacity, counted=0, vouched=False)
    declared = replace(before, capacity=member.capacity, room=member.room)
    return replace(declared, silent=member.silent, votes=votes)


def new_generation(tip: manifest.Manifest, reformer: manifest.PeerId, nonce: int) -> str:
    """A generation's id [F3]; random, since two reformers could choose the same number."""
    return digest_of(f"{tip.digest}/{reformer}/{nonce:032x}".encode())[:32]


def _capacities(members: Mapping[manifest.PeerId, manifest.Member]) -> dict[manifest.PeerId, float]:
    return {peer: member.capacity for peer, member in members.items()}
