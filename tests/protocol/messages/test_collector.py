"""Offers for a roster, in isolation: the READYs that count, and the reset with a new roster."""

from random import Random

from swarm.protocol.messages.events import Record
from swarm.protocol.messages.messages import Ballot, Ready, ReducedUnit
from swarm.protocol.rounds import LocalPeer, RoundMachine
from swarm.protocol.rounds.campaign import Campaign, Stage
from swarm.protocol.rounds.collector import Collector
from swarm.protocol.timing.deadlines import Timers
from tests.protocol.round_pump import found, make_offer, make_rules

RULES = make_rules()
TIP = found(RULES, list("ABC"))
BALLOT = Ballot(0, "A")


def collector() -> Collector:
    peer = LocalPeer("A", 1.0, RULES, Timers(), now=0.0, random=Random(0))
    return RoundMachine(peer, Record(TIP, None, None), stored=[])._convener.collector


def offered(peer: str) -> Ready:
    return Ready(BALLOT, make_offer(RULES, peer, TIP), None, 1.0)


def test_only_a_member_that_does_not_leave_without_its_wish_is_heard_as_one() -> None:
    part, campaign = collector(), Campaign(BALLOT, 0.0, 1.5)
    assert part.take(campaign, "B", offered("B"))
    assert not part.take(campaign, "C", Ready(BALLOT, None, None, 1.0, leave=True))
    assert not part.take(campaign, "D", Ready(BALLOT, None, None, 1.0)), "a stranger"
    assert campaign.in_time == {"B"} and campaign.seen.keys() == {"B"}
    assert campaign.grounds.last.keys() == {"B", "D"}


def test_what_came_in_for_a_roster_is_forgotten_with_the_next() -> None:
    part, campaign = collector(), Campaign(BALLOT, 0.0, 1.5)
    for peer in "AB":
        part.take(campaign, peer, offered(peer))
    part.close_if_due(campaign)
    assert campaign.closed is None, "C is waited for"
    part.take(campaign, "C", offered("C"))
    part.close_if_due(campaign)
    first = campaign.roster
    assert campaign.stage is Stage.REDUCE and first.plan.contributors == ("A", "B", "C")
    unit = next(iter(first.plan.reducers))
    first.results[unit] = ReducedUnit("0" * 64, 100)
    first.extensions = 2
    campaign.excluded = {"C": "its values are missing"}
    campaign.enter(Stage.COLLECT, part.now)
    part.close_if_due(campaign)
    second = campaign.roster
    assert second.plan.contributors == ("A", "B")
    assert (second.results, second.extensions) == ({}, 0)
