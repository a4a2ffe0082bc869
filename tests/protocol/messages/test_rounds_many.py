"""Large swarms, in which a peer by chance hears only a few voters in some seconds.

Policy: liveness tracking.
"""

from __future__ import annotations

import string
from dataclasses import replace

from swarm.protocol.messages.events import Purpose, Topic
from swarm.protocol.messages.messages import Hello
from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.values.manifest import Kind, PeerId
from tests.protocol.messages.test_rounds_trainees import Talking, swarm_of
from tests.protocol.round_pump import Pump, in_training, make_rules, start_swarm

MANY = string.ascii_letters[:48]


def many(timers: Timers | None = None) -> Pump:
    """48 voters with an expert each, in training for the first round."""
    pump = start_swarm(MANY, make_rules(experts=len(MANY)), timers=timers)
    pump.train_times(20.0)
    return pump


def test_a_convener_that_dies_is_replaced_among_many() -> None:
    pump = many()
    pump.run_to_height(1)
    pump.run(pump.now + 10.0)  # their messages about the last round are long past
    dead = pump.first
    pump.kill(dead)
    pump.run_to_height(2, pump.others(dead), within_s=40.0)


def test_a_convener_whose_reducers_need_long_hears_them_all_the_same() -> None:
    pump = many(Timers(reduce_s=600.0, vote_s=600.0, attempt_s=1500.0))

    def fetch_s(peer: PeerId, purpose: Purpose) -> float:
        return 8.0 * (MANY.index(peer) % 8) if purpose is Purpose.REDUCE else 0.0

    pump.fetch_s = fetch_s
    pump.run_to_height(1)
    assert pump.now < 90.0 and not pump.said(Topic.TAKEOVER)


def test_a_convener_whose_voters_fetch_for_long_hears_them_all_the_same() -> None:
    pump = many(Timers(reduce_s=600.0, vote_s=600.0, attempt_s=1500.0))
    convener = pump.first

    def fetch_s(peer: PeerId, purpose: Purpose) -> float:
        return 40.0 if purpose is Purpose.PROPOSAL and peer != convener else 0.0

    pump.fetch_s = fetch_s
    pump.run_to_height(1)
    assert pump.now < 75.0 and not pump.said(Topic.TAKEOVER)


def test_all_that_survive_a_lost_majority_go_on_together() -> None:
    """No peer is left behind because it was not heard by chance."""
    pump = many()
    pump.run_to_height(1)
    pump.kill(*set(MANY) - set(pump.order[-20:]))
    alive = pump.alive
    pump.run_to_height(2, alive, within_s=400.0)
    reform = next(m for m in pump.nodes[alive[0]].applied if m.kind is Kind.REFORM)
    assert sorted(reform.members) == sorted(alive)


def test_voters_without_a_quorum_greet_the_others_seldom_in_the_end() -> None:
    """Otherwise half of a large swarm would greet the absent other half all the time."""
    pump = many()
    pump.run_to_height(1)
    dead, alive = pump.order[:30], pump.order[30:]
    pump.kill(*dead)
    for node in pump.nodes.values():
        node.machine.timers = replace(node.machine.timers, reform_s=1e9)
    pump.run(pump.now + 300.0)
    sent = [each for peer in alive for each in pump.nodes[peer].sent]
    greeted = sum(at >= pump.now - 60.0 and isinstance(m, Hello) for at, _, m in sent)
    assert greeted / len(alive) < 300
    pump.restart(*dead[:8])
    pump.run_to_height(2, "".join(alive), within_s=150.0)


def test_who_fetches_what_was_decided_does_not_convene_meanwhile() -> None:
    """A unit of a large model counts when it is whole, which takes half a minute on a slow line."""
    pump = many(Timers(reduce_s=600.0, vote_s=600.0, attempt_s=1500.0, reform_s=6000.0))
    slow = set(MANY[:20])

    def fetch_s(peer: PeerId, purpose: Purpose) -> float:
        is_tip = purpose in (Purpose.PROPOSAL, Purpose.CATCH_UP)
        return 60.0 if is_tip and peer in slow else 0.0

    pump.fetch_s = fetch_s
    pump.run(10.0)
    pump.train_times(1000.0)  # of the next round
    pump.run_to_height(1)
    assert not any(pump.nodes[peer].said(Topic.TAKEOVER) for peer in slow)


def test_voters_that_are_all_a_little_late_are_counted_together() -> None:
    """16 that wait for 30 s lose more than the work of each of 8, and less than that of all 8."""
    peers = MANY[:24]
    pump = swarm_of(peers, "", kind=Talking)
    pump.train_times({peer: 330.0 if peer in peers[:8] else 300.0 for peer in peers})
    pump.run_rounds(2, within_s=1000.0)
    assert len(pump.nodes["a"].applied[1].contributors) == len(peers)


def test_a_contributor_that_loses_power_while_values_are_fetched_is_soon_left_out() -> None:
    """Its machine sends no refusals. It is silent, and is greeted while its values are missing."""
    pump = in_training("ABCDEF", timers=Timers(reduce_s=600.0, vote_s=600.0, attempt_s=1500.0))
    convener = pump.nodes[pump.first].machine
    dead = pump.last
    pump.refuse_fetch = lambda peer, source, unit: source == dead
    assert pump.run(pump.now + 20.0, lambda: convener.campaign.stage == "reduce")
    pump.kill(dead)
    assert 30.0 < pump.run_to_height(3, pump.others(dead)) < 70.0
    assert dead not in convener.tip.contributors


def test_a_contributor_that_answers_is_waited_for_while_its_values_are_missing() -> None:
    pump = in_training("ABCDEF", timers=Timers(reduce_s=100.0, vote_s=600.0, attempt_s=1500.0))
    cut = pump.last
    pump.refuse_fetch = lambda peer, source, unit: source == cut and peer != cut
    assert pump.run_to_height(3, within_s=200.0) > 100.0
