"""The main loop with overlapping rounds: steps during an offer, and their fate.

Policies: overlapped rounds, overlap accounting.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from swarm.protocol.messages.messages import Offer, OfferedUnit
from swarm.protocol.records.records import PeerState
from swarm.protocol.training import SavedWork
from swarm.protocol.training.adoption import Action, adopt
from swarm.protocol.values.manifest import Entry, Kind, Manifest
from swarm.protocol.values.work import book_of, num_samples, split
from tests.protocol.round_pump import found, make_rules
from tests.protocol.values.test_training import RULES, STEPS, Done, Peer, after, applied, saved_on

UNITS = [*RULES.shared_units, *RULES.expert_units]
AHEAD = replace(
    RULES,
    overlaps=True,
    unit_coding=dict.fromkeys(UNITS, "b2"),
    delta_bytes=dict.fromkeys(UNITS, 30),
)
TIP = found(AHEAD, ["me", "you"])
MY_DELTA = f"trained.{RULES.shared_units[0]}"
SAMPLES = 100
"""Local steps of a round."""


def round_after(parent: Manifest, *peers: str) -> Manifest:
    """A round with these peers' deltas of the shared part."""
    unit = RULES.shared_units[0]
    before, book = parent.entries[unit], AHEAD.next_book
    entry = Entry(f"v{parent.height + 1}", 1, 1, "me", "fp32", before.digest, "b2", "B")
    deals = book(
        book_of(parent), dict.fromkeys(peers, SAMPLES), dict.fromkeys(parent.members, 2 * SAMPLES)
    )
    return after(
        parent,
        contributors=peers,
        entries={**parent.entries, unit: entry},
        sources={unit: tuple((p, MY_DELTA if p == "me" else "theirs") for p in peers)},
        **vars(deals),
    )


def peer_with(*tips: Manifest, steps: Sequence[Done] = ()) -> Peer:
    """A peer that has begun the run and completed these rounds."""
    return Peer([applied(tip) for tip in tips], steps=[*steps], at=applied(TIP)[0]).go(rules=AHEAD)


def course(peer: Peer) -> list[str]:
    """The local steps, offers and waits of a peer, in order."""
    return [name for name in peer.names() if name in ("train", "submit", "wait")]


def tokens(peer: Peer) -> list[tuple[int, int]]:
    """Steps and tokens of each offer."""
    return [(offer.steps, offer.tokens) for offer in peer.offers]


def test_a_peer_trains_beside_its_offer_and_waits_only_if_the_round_takes_longer() -> None:
    peer = peer_with()
    assert course(peer) == ["train", "submit", "train", "wait"], "one offer is undecided"
    first, ahead = (call.task for call in peer.of("train"))
    assert (first.step, first.is_offered) == (0, False)
    assert (ahead.step, ahead.is_offered) == (STEPS, True)
    assert (*first.dealt,) == TIP.dealt["me"]
    assert ahead.dealt == split(TIP.dealt["me"], SAMPLES)[1], "nothing is read twice"
    assert peer.of("wait")[0].state is PeerState.AVERAGING


def test_steps_beside_a_round_that_counts_the_offer_are_offered_on_its_manifest() -> None:
    second = round_after(TIP, "me", "you")
    peer = peer_with(second)
    assert tokens(peer) == [(STEPS, 1000), (STEPS, 1000)]
    assert [offer.tip for offer in peer.offers] == [TIP.digest, second.digest]
    assert [call.counted for call in peer.of("report")] == [True]
    assert peer.of("lose") == []


def test_what_a_manifest_counts_is_not_offered_again_where_its_blobs_are_gone() -> None:
    first = round_after(TIP, "me", "you")
    second = round_after(first, "you")
    half = Done(steps=1, tokens=250, completed=False)
    tips, gone = [applied(first), applied(second)], frozenset({first.digest})
    peer = Peer(tips, steps=[Done(), half], gone=gone, at=applied(TIP)[0]).go(rules=AHEAD)
    assert [call.tokens for call in peer.of("lose")] == [250], "of the steps that no offer had"
    assert tokens(peer)[1:] == [(STEPS, 1000)]


def test_a_tip_that_comes_between_two_steps_is_adopted_and_the_rest_is_trained_on_it() -> None:
    second = round_after(TIP, "me", "you")
    partly = Done(steps=3, tokens=300, completed=False)
    peer = peer_with(second, steps=[Done(), partly])
    rest = peer.of("train")[2]
    assert rest.before == partly
    assert (rest.tip.digest, rest.task.step, rest.task.is_offered) == (second.digest, 3, False)
    assert rest.task.dealt == split(second.dealt["me"], 30)[1]
    assert peer.of("adopt")[1].decision.shared is Action.CORRECTED


def test_steps_that_a_round_left_out_are_counted_with_the_next_offer() -> None:
    peer = peer_with(round_after(TIP, "you"))
    assert tokens(peer) == [(STEPS, 1000), (2 * STEPS, 2000)]
    assert [call.counted for call in peer.of("report")] == [False]
    assert peer.of("lose") == []
    assert peer.of("adopt")[1].decision.shared is Action.CARRIED


def test_a_peer_that_has_read_all_that_it_was_dealt_waits() -> None:
    second = round_after(TIP, "you")
    peer = peer_with(second)
    assert num_samples(second.dealt["me"]) == 2 * SAMPLES
    assert course(peer) == [
        *("train", "submit", "train", "wait"),  # the first round
        *("submit", "wait"),  # the samples of both offers are the whole deal
    ]


def test_steps_that_two_rounds_left_out_are_lost_and_read_again() -> None:
    second = round_after(TIP, "you")
    third = round_after(second, "you")
    peer = peer_with(second, third)
    assert [call.tokens for call in peer.of("lose")] == [2000]
    assert peer.of("train")[2].task.dealt == third.dealt["me"]


def test_a_peer_that_is_no_member_any_more_cannot_have_its_steps_counted() -> None:
    second = round_after(TIP, "you")
    without = replace(second, members={"you": TIP.members["you"]})
    peer = peer_with(without)
    assert [call.tokens for call in peer.of("lose")] == [2000]


def test_after_a_reform_the_undecided_offer_goes_with_the_next_one() -> None:
    reform = after(TIP, kind=Kind.REFORM)
    peer = peer_with(reform)
    assert tokens(peer) == [(STEPS, 1000), (2 * STEPS, 2000)]
    assert peer.of("lose") == []


@pytest.mark.parametrize("is_mine", [True, False])
def test_steps_count_on_another_line_only_if_it_deals_their_samples(is_mine: bool) -> None:
    """After two reforms of one manifest. With slices, no value moved from one to the other."""
    sliced = make_rules(experts=2, parts=2, experts_every=2, shared_every=2, stagger=True)
    rules = replace(sliced, overlaps=True)
    tip = found(rules, ["me", "you"])
    here = after(tip, kind=Kind.REFORM)
    mine, theirs = tip.dealt["me"], tip.dealt["you"]
    dealt = {"me": mine, "you": theirs} if is_mine else {"me": theirs, "you": mine}
    there = after(tip, kind=Kind.REFORM, generation="other", dealt=dealt)
    peer = Peer([applied(here), applied(there)], at=applied(tip)[0]).go(rules=rules)
    assert not peer.of("adopt")[-1].decision.begins_anew(rules.shared_units)
    assert [call.tokens for call in peer.of("lose")] == ([] if is_mine else [2000])
    first = next(call.task for call in peer.of("train") if call.tip == there)
    assert first.dealt == split(dealt["me"], 2 * SAMPLES if is_mine else 0)[1]


def test_there_is_nothing_to_train_beside_the_last_round() -> None:
    peer = Peer([applied(round_after(TIP, "me", "you"))], at=applied(TIP)[0])
    peer.go(rules=AHEAD, rounds=1)
    assert course(peer) == ["train", "submit", "wait"]


def saved(tip: Manifest) -> SavedWork:
    return replace(saved_on(tip), offered={RULES.shared_units[0]: MY_DELTA})


def test_after_a_restart_the_offer_is_in_flight_again_bit_for_bit() -> None:
    peer = Peer([], saved=saved(TIP), at=applied(TIP)[0]).go(rules=AHEAD)
    assert course(peer) == ["submit", "train", "wait"]
    assert peer.of("train")[0].task.dealt == split(TIP.dealt["me"], SAMPLES)[1]


@pytest.mark.parametrize("peers", [("me", "you"), ("you",)])
def test_after_a_restart_behind_its_round_steps_are_counted_once(peers: tuple[str, ...]) -> None:
    tip = round_after(TIP, *peers)
    peer = Peer([], saved=saved(TIP), at=replace(applied(tip)[0], parent=TIP)).go(rules=AHEAD)
    was_counted = "me" in peers
    assert tokens(peer)[0] == ((STEPS, 1000) if was_counted else (2 * STEPS, 2000))
    skipped = 0 if was_counted else SAMPLES
    assert peer.of("train")[0].task.dealt == split(tip.dealt["me"], skipped)[1]


def test_where_rounds_overlap_parts_that_are_sent_whole_follow_too() -> None:
    """A jump to the mean would lose their progress since the offer."""
    whole = after(
        TIP, contributors=("me", "you"), sources={"shared.0": (("me", "m"), ("you", "y"))}
    )
    offer = Offer(TIP.digest, STEPS, 1000, {"shared.0": OfferedUnit("m", 100, "v0")})
    for overlaps, action in ((True, Action.CORRECTED), (False, Action.RESTART)):
        decided = adopt(
            "me", whole, previous=TIP.digest, bases={}, offers=[offer], overlaps=overlaps
        )
        assert decided.shared is action
        assert decided.begins_anew(["shared.0"]) is not overlaps


def test_steps_go_on_while_a_merge_is_due_and_are_offered_after_it() -> None:
    due = round_after(TIP, "me", "you")
    merge = after(due, kind=Kind.MERGE)
    peer = Peer([applied(due), applied(merge)], at=applied(TIP)[0])
    peer.go(rules=AHEAD, is_due=lambda tip: tip.digest == due.digest)
    assert [offer.tip for offer in peer.offers] == [TIP.digest, merge.digest]
    beside = [call for call in peer.of("train") if call.tip.digest == due.digest]
    assert all(call.task.is_offered for call in beside), "nobody waits for these steps"
    assert [call.state for call in peer.of("wait")][1] is PeerState.MERGING


def test_no_steps_are_taken_beside_the_merge_after_the_last_round() -> None:
    due = round_after(TIP, "me", "you")
    peer = Peer([applied(due), applied(after(due, kind=Kind.MERGE))], at=applied(TIP)[0])
    peer.go(rules=AHEAD, rounds=1, is_due=lambda tip: tip.digest == due.digest)
    assert [call.tip.digest for call in peer.of("train")] == [TIP.digest]
