"""The height at which a peer with a lost record votes again [P5]. The simulator shows why."""

from dataclasses import replace

import pytest

from swarm.protocol.chain.chain_record import (
    ABSTAIN_HEIGHTS,
    UNTIL_IT_CONTRIBUTES,
    abstains,
    decode_record,
    encode_record,
    regained,
    repaired,
    rolled_back,
    without_record,
)
from swarm.protocol.messages.events import Record, Regained
from swarm.protocol.messages.messages import MAX_ATTEMPT, Ballot, Certificate, Link
from tests.protocol.round_pump import found, make_offer, make_rules

ME = "A"
RULES = make_rules()
TIP = found(RULES, [ME, "B"])
OFFER = make_offer(RULES, ME, TIP)
COUNTED = {unit: ((ME, offered.digest),) for unit, offered in OFFER.units.items()}
LOST = without_record(ME, Record(TIP, None, None), ())


def after(tip, **changes):
    """A manifest that follows a tip, with the given fields."""
    return replace(tip, parent=tip.digest, height=tip.height + 1, **changes)


def applied(record, manifest, offer=OFFER):
    """The record of a peer that applies a manifest."""
    return replace(record, tip=manifest, regained=regained(record, manifest, ME, offer))


def test_who_lost_its_record_votes_one_height_after_it_has_contributed():
    heights = applied(LOST, after(TIP), None)
    assert abstains(LOST) and abstains(heights)
    counted = applied(heights, after(heights.tip, sources=COUNTED))
    assert abstains(counted), "its offer may have been made before the loss"
    assert not abstains(applied(counted, after(counted.tip)))


def test_who_is_no_member_of_what_it_is_shown_is_a_newcomer():
    strange = replace(TIP, members={"B": TIP.members["B"]})
    assert not abstains(without_record(ME, Record(strange, None, None), (Link(strange.head),)))


def test_who_voted_on_the_way_to_what_it_is_shown_is_no_newcomer():
    """Another chain may continue with it, and it has voted there [F1]."""
    strange = replace(after(TIP), members={"B": TIP.members["B"]})
    proof = (Link(TIP.head), Link(strange.head, Certificate(Ballot(0, "B"), {})))
    assert abstains(without_record(ME, Record(strange, None, None), proof))
    assert not abstains(without_record("C", Record(strange, None, None), proof))


def test_what_others_contributed_gives_no_vote_back():
    others = {unit: (("B", digest),) for unit, ((_, digest),) in COUNTED.items()}
    assert abstains(applied(applied(LOST, after(TIP, sources=others)), after(TIP)))


def test_a_vote_is_regained_in_one_generation_not_in_another():
    mine = after(TIP, generation="1" * 32)
    alone = replace(LOST, tip=mine, regained=Regained(mine.generation, mine.height))
    assert not abstains(alone)
    counted = applied(alone, after(mine, sources=COUNTED))
    assert not abstains(counted)
    back = replace(TIP, height=30)
    assert abstains(applied(counted, back, None))


def test_a_generation_that_leaves_one_with_a_vote_began_after_the_loss():
    counted = applied(LOST, after(TIP, sources=COUNTED))
    soon = applied(counted, after(counted.tip, generation="1" * 32), None)
    assert abstains(soon), "it may have voted in that"
    voting = applied(counted, after(counted.tip))
    later = applied(voting, after(voting.tip, generation="1" * 32), None)
    assert not abstains(later)
    far = replace(after(later.tip, generation="2" * 32), parent=TIP.digest)
    assert abstains(applied(later, far, None))


def test_who_lost_nothing_votes_everywhere():
    record = Record(TIP, None, None)
    for manifest in (after(TIP, sources=COUNTED), after(TIP, generation="1" * 32)):
        assert not abstains(applied(record, manifest))
        assert not abstains(applied(record, replace(manifest, parent=manifest.digest)))


@pytest.mark.parametrize("damage", [rolled_back, repaired])
def test_a_second_damage_shortens_no_abstention(damage):
    attempt = Ballot(MAX_ATTEMPT + 1, "B")
    counted = replace(applied(LOST, after(TIP, sources=COUNTED)), promised=attempt)
    damaged = damage(counted)
    assert damaged and damaged.abstain_until_height == UNTIL_IT_CONTRIBUTES
    assert abstains(applied(damaged, after(damaged.tip, sources={}), None))


def test_a_rolled_back_record_casts_no_vote_for_two_heights():
    record = rolled_back(Record(TIP, None, None))
    for _ in range(ABSTAIN_HEIGHTS):
        assert abstains(record)
        record = applied(record, after(record.tip), None)
    assert not abstains(record)


def test_the_disk_keeps_where_a_vote_was_regained():
    record = replace(LOST, regained=Regained("1" * 32, 7))
    assert decode_record(encode_record(record)) == record
    assert decode_record(encode_record(LOST)) == LOST
    assert b"regained" not in encode_record(LOST), "as it was written before"
