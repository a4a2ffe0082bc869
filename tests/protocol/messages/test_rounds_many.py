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
from tests.protocol.round_pump import (
    Pump,
    first_of,
    last_of,
    make_rules,
    others,
    start_swarm,
    train_times,
)

MANY = string.ascii_letters[:48]


def many(timers: Timers | None = None) -> Pump:
    """48 voters with an expert each, in training for the first round."""
    pump = start_swarm(MANY, make_rules(experts=len(MANY)), timers=timers)
    for node in pump.nodes.values():
        node.train_s = 20.0
    return pump


def test_a_convener_that_dies_is_replaced_among_many() -> None:
    pump = many()
    pump.run_to_height(1)
    pump.run(pump.now + 10.0)  # their messages about the last round are long past
    dead = first_of(pump)
    pump.kill(dead)
    pump.run_to_height(2, others(pump, dead), within_s=40.0)


def took_over(pump: Pump) -> str:
    """All log lines about takeovers and ended campaigns."""
    return "".join(node.said(Topic.TAKEOVER) for node in pump.nodes.values())


def test_a_convener_whose_reducers_need_long_hears_them_all_the_same() -> None:
    pump = many(Timers(reduce_s=600.0, vote_s=600.0, attempt_s=1500.0))

    def fetch_s(peer: PeerId, purpose: Purpose) -> float:
        return 8.0 * (MANY.index(peer) % 8) if purpose is Purpose.REDUCE else 0.0

    pump.fetch_s = fetch_s
    pump.run_to_height(1)
    assert pump.now < 90.0 and not took_over(pump)


def test_a_convener_whose_voters_fetch_for_long_hears_them_all_the_same() -> None:
    pump = many(Timers(reduce_s=600.0, vote_s=600.0, attempt_s=1500.0))
    convener = first_of(pump)

    def fetch_s(peer: PeerId, purpose: Purpose) -> float:
        return 40.0 if purpose is Purpose.PROPOSAL and peer != convener else 0.0

    pump.fetch_s = fetch_s
    pump.run_to_height(1)
    assert pump.now < 75.0 and not took_over(pump)


def test_all_that_survive_a_lost_majority_go_on_together() -> None:
    """No peer is left behind because it was not heard by chance."""
    pump = many()
    pump.run_to_height(1)
    dead = "".join(sorted(set(MANY) - set(pump.nodes["a"].machine.tip.order[-20:])))
    for peer in dead:
        pump.kill(peer)
    alive = others(pump, *dead)
    pump.run_to_height(2, alive, within_s=400.0)
    reform = next(m for m in pump.nodes[alive[0]].applied if m.kind is Kind.REFORM)
    assert sorted(reform.members) == sorted(alive)


def test_voters_without_a_quorum_greet_the_others_seldom_in_the_end() -> None:
    """Otherwise half of a large swarm would greet the absent other half all the time."""
    pump = many()
    pump.run_to_height(1)
    order = pump.nodes["a"].machine.tip.order
    for peer in order[:30]:
        pump.kill(peer)
    alive = order[30:]
    for node in pump.nodes.values():
        node.machine.timers = replace(node.machine.timers, reform_s=1e9)
    pump.run(pump.now + 300.0)
    before_s, greeted = pump.now - 60.0, 0
    for peer in alive:
        greeted += sum(
            at >= before_s and isinstance(m, Hello) for at, _, m in pump.nodes[peer].sent
        )
    assert greeted / len(alive) < 300
    for peer in order[:8]:
        pump.restart(peer)
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
    for node in pump.nodes.values():
        node.train_s = 1000.0  # of the next round
    pump.run_to_height(1)
    assert not any(pump.nodes[peer].said(Topic.TAKEOVER) for peer in slow)


def test_voters_that_are_all_a_little_late_are_counted_together() -> None:
    """16 that wait for 30 s lose more than the work of each of 8, and less than that of all 8."""
    peers = MANY[:24]
    pump = swarm_of(peers, "", kind=Talking)
    train_times(pump, {peer: 330.0 if peer in peers[:8] else 300.0 for peer in peers})
    pump.run_rounds(2, within_s=1000.0)
    assert len(pump.nodes["a"].applied[1].contributors) == len(peers)


def test_a_contributor_that_loses_power_while_values_are_fetched_is_soon_left_out() -> None:
    """Its machine sends no refusals. It is silent, and is greeted while its values are missing."""
    pump = start_swarm("ABCDEF", timers=Timers(reduce_s=600.0, vote_s=600.0, attempt_s=1500.0))
    pump.run_to_height(2)
    convener = pump.nodes[first_of(pump)].machine
    dead = last_of(pump)
    pump.refuse_fetch = lambda peer, source, unit: source == dead
    assert pump.run(pump.now + 20.0, lambda: convener.campaign.stage == "reduce")
    pump.kill(dead)
    begun_s = pump.now
    pump.run_to_height(3, others(pump, dead))
    assert 30.0 < pump.now - begun_s < 70.0
    assert dead not in convener.tip.contributors


def test_a_contributor_that_answers_is_waited_for_while_its_values_are_missing() -> None:
    pump = start_swarm("ABCDEF", timers=Timers(reduce_s=100.0, vote_s=600.0, attempt_s=1500.0))
    pump.run_to_height(2)
    cut = last_of(pump)
    pump.refuse_fetch = lambda peer, source, unit: source == cut and peer != cut
    begun_s = pump.now
    pump.run_to_height(3, within_s=200.0)
    assert pump.now - begun_s > 100.0
