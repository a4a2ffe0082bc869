"""Invariants of members: their offers (due units), votes [I15] and claims of work [I14].

Policy: overlapped rounds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Set

from swarm.emulation.simulator.symbols.values import Mean, Values, require, short
from swarm.experts import expert_unit
from swarm.protocol.rounds import Rules
from swarm.protocol.values.invitation import Credential, Invitation
from swarm.protocol.values.manifest import Manifest, PeerId, Unit
from swarm.protocol.values.work import num_samples


def check_brought(
    manifest: Manifest, parent: Manifest, due: Set[Unit], liar: PeerId | None
) -> None:
    """Each contributor offers all due experts that it owns, even if they are not overdue."""
    contributors = frozenset(manifest.contributors) - {liar}
    for expert, owners in parent.owners.items():
        unit = expert_unit(expert)
        if unit not in due:
            continue
        lacking = contributors.intersection(owners) - dict(manifest.sources.get(unit, ())).keys()
        require(
            not lacking,
            "I17",
            f"{short(manifest)}: {sorted(lacking)} did not bring {unit}, which was due",
        )


def check_votes(manifest: Manifest, parent: Manifest) -> None:
    """One peer a round may earn a vote. Unvouched voters stay under a third [R7]."""
    new = manifest.voters - parent.voters - manifest.vouched
    unvouched = manifest.voters - manifest.vouched
    earned = all(manifest.members[p].counted >= 10 for p in new)
    few = len(new) <= 1 and 2 * len(unvouched) < max(1, len(manifest.vouched))
    require(
        not manifest.vouched or (earned and few),
        "I19",
        f"{short(manifest)}: {sorted(new)} vote now, of {sorted(unvouched)} without an anchor's "
        f"word, {len(manifest.vouched)} have one",
    )


def check_trainees(
    manifest: Manifest, parent: Manifest, network_of: Callable[[PeerId], str | None]
) -> None:
    """At most four trainees are of one network, however many keys ask."""
    new = manifest.members.keys() - parent.members.keys() - manifest.vouched
    for network in {network_of(peer) for peer in new} - {None}:
        trainees = {*(parent.members.keys() - parent.voters), *new}
        there = sorted(peer for peer in trainees if network_of(peer) == network)
        require(len(there) <= 4, "I18", f"{short(manifest)}: {there} are of one network")


def check_vouched(
    manifest: Manifest, parent: Manifest, given: Collection[tuple[PeerId, Credential]]
) -> None:
    """A newly vouched peer shows a credential that it was given. Vouched members stay so [R8]."""
    name, shown = short(manifest), manifest.invited
    known = {manifest.founding.founder} | parent.vouched | parent.absent.keys()
    new, lost = manifest.vouched - known, known & manifest.members.keys() - manifest.vouched
    require(new <= shown.keys(), "I15", f"{name}: nobody vouches for {sorted(new)}")
    require(not lost, "I15", f"{name}: nobody vouches for {sorted(lost)} any more")
    for peer, credential in shown.items():
        is_own = (peer, credential) in given
        require(is_own, "I15", f"{name}: nobody has given {peer} its credential")
        require(
            credential.invitation.last_round >= manifest.round,
            "I15",
            f"{name}: {peer} comes with what had expired",
        )
    _check_uses(manifest, parent)


def _check_uses(manifest: Manifest, parent: Manifest) -> None:
    """No invitation and no anchor lets in more peers than allowed."""
    name, of_inviter = short(manifest), Counter[PeerId]()
    of_invitation: dict[Invitation, set[PeerId]] = {}
    for peer, credential in manifest.invited.items():
        invitation = credential.invitation
        of_invitation.setdefault(invitation, set()).add(peer)
        of_inviter[invitation.inviter] += invitation.weight + invitation.invites
    for invitation, guests in of_invitation.items():
        before = parent.invitations.get(invitation.name)
        came = [*(before.peers if before else ()), *sorted(guests)]
        is_fair = len(came) == len(set(came)) <= invitation.uses
        require(is_fair, "I15", f"{name}: {came} came with an invitation for {invitation.uses}")
    for inviter in of_inviter.keys() - {manifest.founding.founder}:
        anchor = parent.members.get(inviter)
        left = anchor.invites - anchor.given if anchor else 0
        wants = of_inviter[inviter]
        require(wants <= left, "I15", f"{name}: {inviter} lets in {wants}, and may {left}")


ROUNDED = 1.002
"""Factor of tolerance, since paces are rounded to four digits."""


def check_claims(manifest: Manifest, parent: Manifest, rules: Rules, values: Values) -> None:
    """Judges a round: weights in means, the run's tokens, paces and deals."""
    _check_weights(manifest, parent, values)
    if rules.round_seconds is None:
        return
    _check_tokens(manifest, parent)
    _check_paces(manifest, parent, rules.round_seconds)
    if not rules.overlaps:
        _check_deals(manifest, rules, rules.round_seconds)


def _trust(manifest: Manifest, peer: PeerId) -> int:
    """The number of members that a peer counts as, by an anchor's word."""
    member = manifest.members.get(peer)
    return member.weight if member else 1


def _each(manifest: Manifest, parent: Manifest) -> list[tuple[int, int]]:
    """For each contributor, tokens per member that it counts as, and their number; sorted."""
    trusts = ((_trust(parent, peer), tokens) for peer, tokens in manifest.work.items())
    return sorted((max(1, tokens // trust), trust) for trust, tokens in trusts)


def _check_weights(manifest: Manifest, parent: Manifest, values: Values) -> None:
    """No source weighs over 1.5 times the lower median, or over a third among three or more.

    The limit of 1.5 is multiplied for a source that counts as several members. Such a source may
    also weigh more than a third.
    """
    each = _each(manifest, parent)
    median = each[(len(each) - 1) // 2][0]
    for unit, sources in manifest.sources.items():
        mean = values.get(manifest.entries[unit].digest)
        weights = [weight for _, weight in mean.inputs] if isinstance(mean, Mean) else [1]
        trusts = [_trust(parent, peer) for peer, _ in sources]
        weighed = list(zip(weights, trusts, strict=True)) if len(weights) == len(trusts) else []
        others = [weight for weight, trust in weighed if trust == 1]
        is_level = len(weighed) < 3 or 3 * max(others, default=0) <= sum(weights)
        is_usual = len(set(weights)) == 1 or all(2 * w <= 3 * median * t for w, t in weighed)
        require(
            is_level,
            "I14",
            f"{short(manifest)}: values of {unit} weigh {weights}, trusted with {trusts}",
        )
        require(
            is_usual,
            "I14",
            f"{short(manifest)}: values of {unit} weigh {weights}, for work of {each}",
        )


def _check_tokens(manifest: Manifest, parent: Manifest) -> None:
    """The largest claim advances the run's tokens no further than the next largest claim."""
    each = _each(manifest, parent)
    *others, (_, trust) = each
    second = others[-1][0] if others else each[0][0]
    most = sum((1 + tokens) * times for tokens, times in others) + (1 + second) * trust
    require(
        manifest.tokens - parent.tokens <= most,
        "I14",
        f"{short(manifest)} is {manifest.tokens - parent.tokens} tokens on, with {each}",
    )


def _check_paces(manifest: Manifest, parent: Manifest, round_s: float) -> None:
    """A pace allows at most twice the counted work and twice the previous deal as the next deal.

    A deal is 1.25 times the work that fits. A round with little work at most halves a pace.
    """
    for peer, tokens in manifest.work.items():
        if peer in manifest.members:
            pace, before = manifest.members[peer].tokens_per_s, parent.members[peer].tokens_per_s
            most = max(2 * tokens / (1.25 * round_s), before / 2)
            most = min(most, 2 * before) if before else most
            require(
                pace <= ROUNDED * most,
                "I14",
                f"{short(manifest)}: {peer} does {pace} tokens/s after {before}, with {tokens}",
            )


def _check_deals(manifest: Manifest, rules: Rules, round_s: float) -> None:
    """With three or more voters of known pace, a single voter cannot raise a deal."""
    paces = {
        peer: member.tokens_per_s / member.weight
        for peer, member in manifest.members.items()
        if member.votes and member.tokens_per_s
    }
    batch = rules.batch_tokens_at(manifest.tokens)
    for peer in manifest.members if len(paces) > 2 else ():
        dealt = num_samples(manifest.dealt[peer]) * rules.sequence_length
        usual = round_s * max(pace for other, pace in paces.items() if other != peer)
        most = usual * max(4, 1.25 * _trust(manifest, peer))
        require(
            dealt <= most + batch,
            "I14",
            f"{short(manifest)}: {peer} is dealt {dealt} tokens, voters do {paces}",
        )
