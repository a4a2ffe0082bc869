"""In a large swarm, peers with fast lines relay experts and manifests (blob relays)."""

from __future__ import annotations

from collections import Counter
from string import ascii_letters

import pytest

from swarm.experts import expert_of_unit
from swarm.protocol.messages.events import Fetch, Purpose, Send
from swarm.protocol.messages.messages import Ballot, Propose, Roster
from swarm.protocol.rounds.policies.rosters import plan_roster
from swarm.protocol.rounds.policies.slow_links import (
    BODY_FEW,
    BODY_RELAYS,
    FEW,
    MOST_TIMES,
    NONE,
    RELAYS,
    in_turn,
    relays_among,
    relays_of_body,
)
from swarm.protocol.rounds.reducer import wanted_ahead
from swarm.protocol.values.digests import digest_of
from tests.protocol.round_pump import Pump, found, make_offer, make_rules, start_swarm

PEERS = ascii_letters[:40]
UPLINKS = {peer: 10 * (1 + place) for place, peer in enumerate(PEERS)}
DIGESTS = [digest_of(str(number).encode()) for number in range(2000)]


def test_a_small_round_or_one_whose_lines_are_not_known_has_none() -> None:
    few = dict(list(UPLINKS.items())[:FEW])
    assert relays_among(few, few) == NONE
    assert relays_among(UPLINKS, dict.fromkeys(UPLINKS, 0)) == NONE
    assert relays_of_body(dict(list(UPLINKS.items())[:BODY_FEW])) == ()
    assert relays_of_body(dict.fromkeys(UPLINKS, 0)) == ()


def test_relays_are_of_the_faster_half_and_each_as_often_as_its_line_is_fast() -> None:
    relays = relays_among(UPLINKS, UPLINKS)
    assert set(relays.peers) == set(PEERS[20:])
    drawn = Counter(peer for digest in DIGESTS for peer in relays.of(digest, "a"))
    assert set(drawn) == set(PEERS[20:])
    slow, fast = (sum(drawn[peer] for peer in part) for part in (PEERS[20:24], PEERS[36:]))
    assert fast / slow == pytest.approx(sum(range(37, 41)) / sum(range(21, 25)), rel=0.1)


def test_a_false_word_draws_a_few_times_its_share_at_most() -> None:
    liar = PEERS[30]
    relays = relays_among(UPLINKS, {**dict.fromkeys(UPLINKS, 100), liar: 10**6})
    assert len(relays.peers) == len(PEERS), "equal lines are all of the faster half"
    drawn = Counter(relays.of(digest, "a")[0] for digest in DIGESTS)
    share = len(DIGESTS) / len(PEERS)
    assert 2 * share < drawn[liar] < 1.3 * MOST_TIMES * share


def test_all_know_the_same_relays_and_begin_at_different_ones() -> None:
    relays = relays_among(UPLINKS, UPLINKS)
    for digest in DIGESTS[:50]:
        between = relays.of(digest, "a")
        assert 1 <= len(between) <= RELAYS
        assert "a" not in between
        starts = {relays.before(digest, "a", me)[:1] for me in PEERS if me not in between}
        assert starts == {(relay,) for relay in between}
        assert all(relays.before(digest, "a", relay) == () for relay in between)
    fast = PEERS[30:]
    assert not any(peer in relays.of(digest, peer) for digest in DIGESTS[:200] for peer in fast)
    assert in_turn((), "a") == ()


def test_the_fastest_lines_pass_a_manifest_on() -> None:
    assert relays_of_body(UPLINKS) == tuple(reversed(PEERS[-BODY_RELAYS:]))


def ahead(uplinks: dict[str, int]) -> dict[str, dict[str, tuple[str, ...]]]:
    """Peer -> digest of an expert -> the peers that it asks before the proposal."""
    rules = make_rules(experts=len(PEERS), parts=24)
    tip = found(rules, list(PEERS))
    offers = {peer: make_offer(rules, peer, tip) for peer in PEERS}
    plan = plan_roster(tip, offers, rules, (), uplinks)
    roster = Roster(Ballot(0, "a"), plan.roster_id, offers, plan.able)
    return {
        peer: {
            want.digest: want.sources
            for want in wanted_ahead(
                roster, plan.sources, plan.reducers, peer, stored=(), tip=tip, rules=rules
            )
        }
        for peer in PEERS
    }


def test_a_writer_sends_its_expert_to_its_relays_alone() -> None:
    """A few of 39 others ask the writer. All others ask these few."""
    asked = ahead(UPLINKS)
    for writer in PEERS:
        rules_digests = {
            digest
            for digest in asked[PEERS[0]] | asked[PEERS[1]]
            if any(asked[peer].get(digest) == (writer,) for peer in PEERS)
        }
        assert len(rules_digests) == 1
        (digest,) = rules_digests
        of_writer = {peer for peer in PEERS if asked[peer].get(digest) == (writer,)}
        assert 1 <= len(of_writer) <= RELAYS
        others = [asked[peer][digest] for peer in PEERS if peer not in {writer, *of_writer}]
        assert len(others) == 39 - len(of_writer)
        assert all(set(sources) == of_writer for sources in others)


def test_without_uplinks_everybody_asks_the_writer() -> None:
    asked = ahead(dict.fromkeys(PEERS, 0))
    assert all(len(sources) == 1 for each in asked.values() for sources in each.values())
    counts = Counter(sources for each in asked.values() for sources in each.values())
    assert set(counts.values()) == {39}


@pytest.fixture(scope="module")
def pump() -> Pump:
    rules = make_rules(experts=len(PEERS), parts=24)
    pump = start_swarm(PEERS, rules, fetches_ahead=True, uplinks=UPLINKS)
    pump.run_rounds(1)
    return pump


def test_a_large_proposal_names_its_relays(pump: Pump) -> None:
    sent = [
        effect.message
        for node in pump.nodes.values()
        for effect in node.effects
        if isinstance(effect, Send) and isinstance(effect.message, Propose)
    ]
    assert sent
    convener = sent[0].ballot.convener
    fast = [peer for peer in reversed(PEERS) if peer != convener][:BODY_RELAYS]
    assert {message.relays for message in sent} == {tuple(fast)}
    assert len({node.machine.tip.digest for node in pump.nodes.values()}) == 1


def test_a_proposal_is_fetched_from_relays_before_the_writer(pump: Pump) -> None:
    """This holds for blobs that were not fetched ahead: peers that reduce nothing get no roster."""
    wants = [
        (peer, want)
        for peer, node in pump.nodes.items()
        for effect in node.effects
        if isinstance(effect, Fetch) and effect.purpose is Purpose.PROPOSAL
        for want in effect.wants
        if expert_of_unit(want.unit) is not None
    ]
    assert wants
    entries = pump.tip_of(PEERS[0]).entries
    places = [want.sources.index(entries[want.unit].source) for _, want in wants]
    assert sum(place > 0 for place in places) > len(places) / 2
    assert max(places) <= RELAYS
