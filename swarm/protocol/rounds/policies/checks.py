"""Checks whether a manifest from another peer may belong to the chain [H1] (merge manifests). Pure.

A proposed manifest is recomputed from the evidence that comes with it. A decided manifest has no
evidence, since a quorum has checked that already. So only its consistency with its parent is
checked here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import inf

from swarm.protocol.chain.trust import reform_electors
from swarm.protocol.membership.membership import Membership, absent_after, come_back
from swarm.protocol.messages.messages import Commit, Evidence, ReducedUnit
from swarm.protocol.rounds.policies import composition, deals
from swarm.protocol.rounds.policies.evidence_checks import evidence_problem
from swarm.protocol.rounds.policies.rules import Rules
from swarm.protocol.values.invitation import MAX_WEIGHT
from swarm.protocol.values.manifest import (
    ALL_EXPERTS,
    SEASONED_ROUNDS,
    UNCODED,
    Entry,
    Kind,
    Manifest,
    Member,
    PeerId,
    Unit,
)
from swarm.protocol.values.schedule import merge_due
from swarm.protocol.values.work import Book, book_of


def members_problem(manifest: Manifest, parent: Manifest, rules: Rules) -> str | None:
    """Why a manifest's members cannot follow its parent's; None if they can [R7, R8].

    Policies: member removal, joiner limits.

    A member's silent rounds go up by one or back to 0. Its capacity and room change only if it was
    heard. A member is removed only if it was silent for too long, or has signed a wish to leave.
    The number of joiners is limited, and only members that earned a vote may have one.
    """
    gone = parent.members.keys() - manifest.members.keys()
    unsigned = sorted(set(wishes_of(manifest, parent, rules)) - manifest.wishes.keys())
    if unsigned:
        return f"it lets {unsigned[0]} go, which has not signed a wish to leave"
    if not manifest.wishes.keys() <= gone:
        return "it holds wishes to leave of peers that it does not remove"
    claimed = _without_pace(manifest.members)
    guests = (manifest.invited, manifest.invitations, manifest.absent)
    for possible in _possible(manifest, parent, rules):
        found = (possible.invited, possible.invitations, possible.absent)
        if (_without_pace(possible.members), found) == (claimed, guests):
            return None
    first = next(_possible(manifest, parent, rules))
    expected = _without_pace(first.members)
    if expected == claimed:
        return "its invitations do not follow from its parent"
    different = [
        peer for peer in sorted({*expected, *claimed}) if expected.get(peer) != claimed.get(peer)
    ]
    return f"its member {different[0]} does not follow from its parent"


def _possible(manifest: Manifest, parent: Manifest, rules: Rules) -> Iterator[Membership]:
    """The memberships that could follow from the manifest's own claims.

    Either the missing members were removed; or all would have been removed, and so all stay listed.
    """
    heard = {peer for peer, member in manifest.members.items() if member.silent == 0}
    for leaving in (wishes_of(manifest, parent, rules), tuple(parent.members)):
        attendance = composition.Attendance(
            heard=heard,
            leaving=dict.fromkeys(leaving, composition.NO_WISH),
            joiners={
                peer: member.capacity
                for peer, member in manifest.members.items()
                if peer not in parent.members
            },
            capacities={peer: manifest.members[peer].capacity for peer in heard},
            rooms={
                peer: member.room
                for peer, member in manifest.members.items()
                if peer in heard or peer not in parent.members
            },
            credentials=manifest.invited,
        )
        yield composition.members_after(parent, manifest.contributors, attendance, rules)


def wishes_of(manifest: Manifest, parent: Manifest, rules: Rules) -> tuple[PeerId, ...]:
    """Members that a manifest removes although they were not silent for too long."""
    return tuple(
        peer
        for peer, member in parent.members.items()
        if peer not in manifest.members
        and (peer in manifest.contributors or member.silent + 1 <= rules.silent_rounds)
    )


def _without_pace(members: Mapping[PeerId, Member]) -> dict[PeerId, Member]:
    """The members without their pace, which contributors report and `pace_problem` checks."""
    return {peer: replace(member, tokens_per_s=0.0) for peer, member in members.items()}


def ownership_problem(manifest: Manifest, parent: Manifest, rules: Rules) -> str | None:
    """Why a manifest's owners cannot follow from its parent; None when they can.

    Policies: expert ownership, ownership cap.
    """
    expected = composition.owners_after(
        parent, manifest.members, manifest.contributors, manifest.entries, rules
    ).owners
    for expert, owners in manifest.owners.items():
        if owners != expected[expert]:
            wrong, right = (", ".join(each) or "nobody" for each in (owners, expected[expert]))
            return f"expert {expert} goes to {wrong}, not {right}"
    return None


def successor_problem(
    manifest: Manifest, parent: Manifest, rules: Rules, *, due: bool
) -> str | None:
    """Why a manifest cannot be the decided successor of `parent`; None when it can.

    `due`: whether a merge is due after the parent (merge schedule).
    """
    return _placement_problem(manifest, parent, rules, due=due) or (
        _merge_problem(manifest, parent, rules)
        if manifest.kind is Kind.MERGE
        else _round_problem(manifest, parent, rules)
    )


def proposal_problem(
    manifest: Manifest, evidence: Evidence | None, parent: Manifest, rules: Rules, *, due: bool
) -> str | None:
    """Why a manifest must get no vote; None when it follows from its evidence [A6].

    A merge needs no evidence. `due`: whether a merge is due after the parent (merge schedule).
    """
    problem = _placement_problem(manifest, parent, rules, due=due)
    if problem:
        return problem
    if manifest.kind is Kind.MERGE:
        return _merge_problem(manifest, parent, rules)
    if evidence is None:
        return "it comes without evidence"
    return evidence_problem(manifest, evidence, parent, rules)


def _placement_problem(
    manifest: Manifest, parent: Manifest, rules: Rules, *, due: bool
) -> str | None:
    """Why place or kind of a manifest cannot follow its parent in the same generation."""
    if manifest.parent != parent.digest:
        return f"its parent is {str(manifest.parent)[:12]}, not {parent.digest[:12]}"
    if manifest.run != rules.run or manifest.founding != parent.founding:
        return "it belongs to another run"
    if manifest.generation != parent.generation or manifest.lineage != parent.lineage:
        return "its generation is not its parent's"
    if manifest.height != parent.height + 1:
        return f"its height is {manifest.height} after {parent.height}"
    if due != (manifest.kind is Kind.MERGE):
        state = "due" if due else "not due"
        return f"it is of kind {manifest.kind.value}, and a merge is {state}"
    return None


def _merge_problem(manifest: Manifest, parent: Manifest, rules: Rules) -> str | None:
    """Why a manifest cannot be a merge of its parent, or None (merge manifests).

    The digests of experts are not checked. Otherwise one peer whose computation gives other bits
    could block the swarm for ever.
    """
    if manifest.entries.keys() != parent.entries.keys():
        return "its units are not its parent's"
    entries = {unit: manifest.entries[unit] for unit in rules.expert_units}
    expected = composition.compose_merge(
        parent,
        {unit: ReducedUnit(entry.digest, entry.num_bytes) for unit, entry in entries.items()},
        {unit: entry.source for unit, entry in entries.items()},
        rules,
    )
    return None if manifest == expected else "a merge may change nothing but the experts' values"


def _round_problem(manifest: Manifest, parent: Manifest, rules: Rules) -> str | None:
    if manifest.kind is not Kind.QUORUM:
        return f"it is of kind {manifest.kind.value}"
    if manifest.round != parent.round + 1 or manifest.merged != parent.merged:
        return f"it counts round {manifest.round} and merge {manifest.merged}"
    if manifest.seed is not None:
        return "it does not order its members by its own digest"
    contributors = manifest.contributors
    if not contributors or list(contributors) != sorted(set(contributors) & parent.members.keys()):
        return "its contributors are not members of its parent, in order"
    return (
        _work_problem(manifest, parent, rules)
        or _sources_problem(manifest, parent, rules)
        or _entries_problem(manifest, parent, rules)
        or owners_problem(manifest, rules)
        or members_problem(manifest, parent, rules)
        or ownership_problem(manifest, parent, rules)
        or _dealt_problem(manifest, parent, rules)
    )


def _work_problem(manifest: Manifest, parent: Manifest, rules: Rules) -> str | None:
    """Why the contributors' tokens in a manifest, or the counts that follow from them, are wrong.

    Policies: claimed work, step count.
    """
    if tuple(manifest.work) != manifest.contributors:
        return "it does not say what each of its contributors did"
    for peer, tokens in manifest.work.items():
        problem = deals.tokens_problem(tokens, peer, parent, rules)
        if problem:
            return f"{peer}: {problem}"
    tokens = rules.tokens_after(parent, manifest.work)
    if (manifest.tokens, manifest.step) != (tokens, rules.step_after(parent, tokens)):
        return f"it counts {manifest.step} steps and {manifest.tokens} tokens"
    return deals.pace_problem(manifest.members, parent, manifest.contributors)


def _dealt_problem(manifest: Manifest, parent: Manifest, rules: Rules) -> str | None:
    book = deals.book_after(parent, manifest.work, manifest.members, manifest.tokens, rules)
    return None if book_of(manifest) == book else "its samples are not dealt as they must be"


def _sources_problem(manifest: Manifest, parent: Manifest, rules: Rules) -> str | None:
    due = rules.schedule.due(parent)
    for unit in rules.shared_units:
        if unit in due and _peers(manifest, unit) != manifest.contributors:
            return f"{unit} is not the mean of its contributors"
    for unit in manifest.sources:
        if unit not in rules.unit_bytes:
            return f"the run has no unit {unit}"
        if unit not in due:
            return f"{unit} is not due"
        expert = rules.expert_units.get(unit)
        if expert is None:
            continue
        able = set(parent.owners.get(expert, ()))
        peers = _peers(manifest, unit)
        if not peers or list(peers) != sorted(set(peers) & able):
            return f"{unit} does not come from its owners"
    return None


def _peers(manifest: Manifest, unit: Unit) -> tuple[PeerId, ...]:
    return tuple(peer for peer, _ in manifest.sources.get(unit, ()))


def _entries_problem(manifest: Manifest, parent: Manifest, rules: Rules) -> str | None:
    if manifest.entries.keys() != parent.entries.keys():
        return "its units are not its parent's"
    for unit, entry in manifest.entries.items():
        if unit not in manifest.sources:
            if entry != parent.entries[unit]:
                return f"{unit} changed without an offer"
        elif (
            entry.version != manifest.round
            or entry.num_bytes != rules.unit_bytes[unit]
            or entry.codec != rules.unit_codec[unit]
        ):
            return f"{unit} is not an entry of round {manifest.round}"
        elif problem := _move_problem(unit, entry, parent, rules):
            return problem
    return None


def _move_problem(unit: Unit, entry: Entry, parent: Manifest, rules: Rules) -> str | None:
    """Why a round cannot have moved a unit in this way; None when it can (delta entries)."""
    if entry.coding != rules.unit_coding.get(unit, UNCODED):
        return f"{unit} is in the coding {entry.coding}"
    is_coded = unit in rules.unit_coding
    if (entry.base is not None, entry.delta is not None) != (is_coded, is_coded):
        return f"{unit} is not an entry of a unit in the coding {entry.coding}"
    if is_coded and entry.base != parent.entries[unit].digest:
        return f"{unit} moved from {str(entry.base)[:12]}, not from its parent's value"
    return None


def owners_problem(manifest: Manifest, rules: Rules) -> str | None:
    """What is wrong with members, voters or owners, such as a missing owner; or None."""
    if not manifest.voters:
        return "nobody has a vote in it"
    for peer, member in manifest.members.items():
        if not (member.silent >= 0 and 0 < member.capacity < inf):
            return f"member {peer} has capacity {member.capacity}, silent {member.silent}"
        if not 0 <= member.counted <= SEASONED_ROUNDS:
            return f"member {peer} was counted in {member.counted} rounds"
        if not 0 <= member.room <= ALL_EXPERTS:
            return f"member {peer} has room for {member.room} experts"
        if not 1 <= member.weight <= MAX_WEIGHT:
            return f"member {peer} has weight {member.weight}"
        if not 0 <= member.tokens_per_s <= deals.MAX_TOKENS_PER_S:
            return f"member {peer} does {member.tokens_per_s} tokens per second"
    wanted = min(rules.owners_per_expert, len(manifest.members))
    if sorted(manifest.owners) != list(range(rules.num_experts)):
        return "it does not name the owners of every expert"
    free = _with_room(manifest)
    for expert, owners in manifest.owners.items():
        if list(owners) != sorted(set(owners) & manifest.members.keys()) or len(owners) > wanted:
            return f"expert {expert} has not {wanted} owners among the members"
        if len(owners) < wanted and (able := sorted(free - set(owners))):
            return f"expert {expert} has {len(owners)} owners of {wanted}: {able[0]} has room"
    return None


def _with_room(manifest: Manifest) -> set[PeerId]:
    """Members whose machines hold more experts than they own."""
    load = Counter(peer for owners in manifest.owners.values() for peer in owners)
    return {peer for peer, member in manifest.members.items() if load[peer] < member.room}


def reform_problem(manifest: Manifest, rules: Rules) -> str | None:
    """Why a manifest cannot be a reform, for which only its author vouches."""
    if manifest.run != rules.run:
        return "it belongs to another run"
    height, (electors, generation) = manifest.lineage[-1] if manifest.lineage else (-1, (0, ""))
    if (height, generation) != (manifest.height, manifest.generation):
        return "its lineage does not end with itself"
    if not 0 < electors <= len(manifest.voters):
        return f"{electors} of its {len(manifest.voters)} voters voted in its parent"
    if manifest.seed is not None or manifest.sources or manifest.work or manifest.wishes:
        return "a reform averages nothing, has no wishes and orders its members by its own digest"
    if manifest.invited:
        return "a reform admits nobody by invitation"
    if rules.is_dealt and manifest.dealt.keys() != manifest.members.keys():
        return "it does not deal to its members"
    if not rules.is_dealt and book_of(manifest) != Book():
        return "it deals text, but every peer of this run has a text of its own"
    return owners_problem(manifest, rules)


def _reform_of_tip_problem(manifest: Manifest, tip: Manifest, rules: Rules) -> str | None:
    """Why a reform of this peer's tip does not follow from it; other reforms are not checked."""
    if manifest.parent != tip.digest:
        return None
    if book_of(manifest) != deals.book_of_reform(tip, manifest.members, rules):
        return "its members do not continue with the text that they were dealt"
    return _survivors_problem(manifest, tip) or deals.pace_problem(manifest.members, tip, ())


def _trust(member: Member | None) -> tuple[bool, int, int, int]:
    """The rights that anchors gave a member; the defaults for any other peer."""
    if member is None:
        return False, 0, 0, 1
    return member.vouched, member.invites, member.given, member.weight


def _survivors_problem(manifest: Manifest, tip: Manifest) -> str | None:
    """Why a reform has votes or counted rounds that its parent did not have; or None."""
    if manifest.invitations != tip.invitations:
        return "its invitations are not its parent's"
    if manifest.absent != absent_after(tip, manifest.members, tip.round):
        return "the peers that are vouched for and absent do not follow from its parent"
    rounds = {peer: member.counted for peer, member in tip.members.items()}
    able = reform_electors(tip.head)
    for peer, member in manifest.members.items():
        before = tip.members.get(peer) or come_back(tip, peer, member.capacity)
        if member.counted != rounds.get(peer, 0) or _trust(member) != _trust(before):
            return f"member {peer} is not what its parent says"
        if member.votes and peer not in able:
            return f"{peer} has a vote, and had none before"
    return None


def commit_problem(commit: Commit, tip: Manifest, rules: Rules) -> str | None:
    """Why a COMMIT's manifest contradicts its claims; None if it does not.

    `swarm.protocol.chain.trust` checks whether the manifest was decided.
    """
    manifest, parent = commit.manifest, commit.parent
    if manifest.founding != tip.founding or manifest.run != rules.run:
        return "it belongs to another run"
    if set(manifest.entries) != set(rules.unit_bytes):
        return "its units are not the run's"
    for unit, entry in manifest.entries.items():
        if entry.num_bytes != rules.unit_bytes[unit]:
            return f"{unit} has {entry.num_bytes} bytes instead of {rules.unit_bytes[unit]}"
    if manifest.kind is Kind.REFORM:
        return reform_problem(manifest, rules) or _reform_of_tip_problem(manifest, tip, rules)
    if manifest.kind is Kind.FOUNDING:
        return "a founding manifest is never decided"
    if manifest.parent == tip.digest:
        parent = tip
    if parent is None:
        return None
    if parent.digest != manifest.parent:
        return "the manifest sent as its parent is not its parent"
    return successor_problem(manifest, parent, rules, due=merge_due(parent, rules.merging))
