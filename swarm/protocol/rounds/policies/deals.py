"""Each member's share of the text, and the weight of its work. Pure.

Policies: text deals, deal sizes, counted work, claimed work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import ceil

from swarm.protocol.messages.messages import Offer
from swarm.protocol.rounds.policies.rules import MARGIN, MOST, Rules
from swarm.protocol.values.manifest import Founding, Manifest, Member, PeerId
from swarm.protocol.values.work import Book, book_of, next_book, num_samples

UNKNOWN_PACE = 16
"""A peer of unknown pace is dealt this many times `local_steps`, so that a very fast peer does not
idle in its first round."""
FASTEST = 64
"""No member is dealt more than this many times the work of the lower median voter. Of two voters,
the upper median is the faster one itself, and so no limit."""
MAX_TOKENS_PER_S = 1e12
"""The largest pace; it keeps quotas finite, whatever an offer says."""
MAX_QUOTA = 2**40
"""The largest number of samples that a peer is dealt for one round."""


def quotas(
    members: Mapping[PeerId, Member], tokens: int, windows: int | None, rules: Rules
) -> dict[PeerId, int]:
    """Samples that each member may read in the round after a manifest, in whole steps (deal sizes).

    In the exact mode, a member gets the samples of the steps that every peer takes. With
    `round.seconds`, a member gets 1.25 times the samples that fit the time at its pace, but at most
    4 times those of the median voter. For a member that is vouched for with weight w, the limit is
    the larger of 4 and 1.25 w times those of the median voter.

    A member without a pace gets 16 times the samples of the exact mode, within the same limit.
    While no voter has a pace, all members together get at most half a lap. So the first round does
    not deal a small text several times.

    Args:
        members: members of the manifest, with their pace.
        tokens: cumulative tokens of the manifest.
        windows: samples of one lap through the text; None: not known.
        rules: the run's rules.
    """
    per_step = rules.batch_tokens_at(tokens) // rules.sequence_length
    usual = rules.local_steps_at(tokens) * per_step
    if rules.round_seconds is None:
        return dict.fromkeys(members, usual)
    unknown = UNKNOWN_PACE * usual
    if windows is not None:
        room = windows // (2 * len(members)) // per_step * per_step
        unknown = max(usual, min(unknown, room))
    per_pace, median = rules.round_seconds / rules.sequence_length, _median_pace(members)
    if not median:
        return dict.fromkeys(members, unknown)
    found = {}
    for peer, member in members.items():
        samples = MARGIN * member.tokens_per_s * per_pace if member.tokens_per_s else unknown
        most = rules.most_of_median(member) * median * per_pace
        found[peer] = _fitting(min(samples, most), per_step)
    return found


def _median_pace(members: Mapping[PeerId, Member]) -> float:
    """The pace of the median voter (of two medians, the upper); 0 if no voter has a pace.

    A voter that is vouched for with weight w counts with 1/w of its pace.
    """
    voters = (member for member in members.values() if member.votes and member.tokens_per_s)
    known = sorted(voter.tokens_per_s / voter.weight for voter in voters)
    if not known:
        return 0.0
    return min(known[len(known) // 2], FASTEST / MOST * known[(len(known) - 1) // 2])


def _fitting(samples: float, per_step: int) -> int:
    """Whole steps for a number of samples, at least one step."""
    return max(1, ceil(min(samples, MAX_QUOTA) / per_step)) * per_step


def first_book(founding: Founding, members: Mapping[PeerId, Member], rules: Rules) -> Book:
    """The book of manifest 0."""
    if not rules.is_dealt:
        return Book()
    return next_book(Book(), {}, _wanted(members, 0, founding, rules))


def book_after(
    parent: Manifest,
    work: Mapping[PeerId, int],
    members: Mapping[PeerId, Member],
    tokens: int,
    rules: Rules,
) -> Book:
    """The book after a round, with the new manifest's members and cumulative tokens.

    Policies: text deals, counted work.
    """
    if not rules.is_dealt:
        return Book()
    counted = {peer: tokens // rules.sequence_length for peer, tokens in work.items()}
    wanted = _wanted(members, tokens, parent.founding, rules)
    return rules.next_book(book_of(parent), counted, wanted)


def book_of_reform(tip: Manifest, members: Mapping[PeerId, Member], rules: Rules) -> Book:
    """The book of a reform: its members keep the samples that they were dealt."""
    if not rules.is_dealt:
        return Book()
    wanted = _wanted(members, tip.tokens, tip.founding, rules)
    return rules.reformed_book(book_of(tip), wanted)


def _wanted(
    members: Mapping[PeerId, Member], tokens: int, founding: Founding, rules: Rules
) -> dict[PeerId, int]:
    """Samples of each member's deal: of one round or, where rounds overlap, of two.

    Policy: overlapped deals.
    """
    windows = founding.text.windows if founding.text else None
    rounds = 2 if rules.overlaps else 1
    return {peer: rounds * q for peer, q in quotas(members, tokens, windows, rules).items()}


def most_samples(peer: PeerId, parent: Manifest, rules: Rules) -> int:
    """Samples that a peer may count in the round after a manifest (counted work).

    These are the samples of its deal. A peer with a private corpus may count as many as it would be
    dealt from a common text.
    """
    if rules.is_dealt:
        return num_samples(parent.dealt.get(peer, ()))
    return _wanted(parent.members, parent.tokens, parent.founding, rules).get(peer, 0)


def work_of(offers: Mapping[PeerId, Offer]) -> dict[PeerId, int]:
    """Tokens of each contributor, in peer-id order; late offers are not contributions.

    Policy: claimed work.
    """
    return {peer: offers[peer].tokens for peer in sorted(offers) if not offers[peer].is_late}


def with_pace(
    members: Mapping[PeerId, Member], offers: Mapping[PeerId, Offer], rules: Rules
) -> dict[PeerId, Member]:
    """The members with the pace of their offers, rounded to four digits to keep manifests small.

    Policy: counted work.
    """
    paced = dict(members)
    for peer, offer in offers.items():
        if peer in members and not offer.is_late:
            known = members[peer].tokens_per_s
            pace = min(rules.pace_after(known, offer.tokens, offer.seconds), MAX_TOKENS_PER_S)
            paced[peer] = replace(members[peer], tokens_per_s=float(f"{pace:.4g}"))
    return paced


def tokens_problem(tokens: int, peer: PeerId, parent: Manifest, rules: Rules) -> str | None:
    """Why a contributor cannot have trained `tokens` on this manifest. None if it can.

    Policy: counted work.

    Tokens must be whole steps, and no more than the peer may read. In the exact mode, they must be
    exactly the steps of a round. Where rounds overlap, this is not required: some steps are older
    than the tip, so their number and batches may differ.
    """
    batch = rules.sequence_length if rules.overlaps else rules.batch_tokens_at(parent.tokens)
    if tokens <= 0 or tokens % batch:
        return f"{tokens} tokens are no whole steps of {batch}"
    is_exact = rules.round_seconds is None and not rules.overlaps
    if is_exact and tokens != rules.local_steps_at(parent.tokens) * batch:
        return f"{tokens} tokens are not the {rules.local_steps_at(parent.tokens)} steps of a round"
    samples = most_samples(peer, parent, rules)
    if tokens > samples * rules.sequence_length:
        return f"{tokens} tokens are more than the {samples} samples that it may read"
    return None


def pace_problem(
    members: Mapping[PeerId, Member], parent: Manifest, changed: Iterable[PeerId]
) -> str | None:
    """The problem that a member outside `changed` has another pace than in the parent; or None."""
    free = set(changed)
    for peer, member in members.items():
        before = parent.members.get(peer)
        known = before.tokens_per_s if before else 0.0
        if peer not in free and member.tokens_per_s != known:
            return f"member {peer} has another pace, and did not contribute"
    return None
