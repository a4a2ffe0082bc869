"""Swarms of so many voters that in some seconds a peer hears but a few of them by chance [H4]."""

from __future__ import annotations

import string

from swarm.protocol.deadlines import Timers
from swarm.protocol.events import Purpose, Topic
from swarm.protocol.manifest import Kind, PeerId
from tests.protocol.round_pump import Pump, first_of, make_rules, others, start_swarm

MANY = string.ascii_letters[:48]


def many(timers: Timers | None = None) -> Pump:
    """48 voters, each of which owns an expert, in training for the first round."""
    pump = start_swarm(MANY, make_rules(experts=len(MANY)), timers=timers)
    for node in pump.nodes.values():
        node.train_s = 20.0
    return pump


def test_a_convener_that_dies_is_replaced_among_many() -> None:
    pump = many()
    pump.run_to_height(1)
    pump.run(pump.now + 10.0)  # what they had to say about the last round is long ago
    dead = first_of(pump)
    pump.kill(dead)
    pump.run_to_height(2, others(pump, dead), within_s=40.0)


def took_over(pump: Pump) -> str:
    """What all said of takeovers, and of campaigns that ended."""
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
    """Nobody is left behind because it was not heard by chance."""
    pump = many()
    pump.run_to_height(1)
    dead = "".join(sorted(set(MANY) - set(pump.nodes["a"].machine.tip.order[-20:])))
    for peer in dead:
        pump.kill(peer)
    alive = others(pump, *dead)
    pump.run_to_height(2, alive, within_s=400.0)
    reform = next(m for m in pump.nodes[alive[0]].applied if m.kind is Kind.REFORM)
    assert sorted(reform.members) == sorted(alive)
