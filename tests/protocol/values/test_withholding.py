"""A peer that offers but serves nobody costs one round in nine (withholding exclusion)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.protocol.messages.events import Topic
from swarm.protocol.rounds.withholding import LEFT_OUT_ROUNDS, left_out_after
from swarm.protocol.timing.deadlines import Timers
from swarm.protocol.values.manifest import Kind, Manifest, PeerId
from tests.protocol.round_pump import Pump, found, make_rules, start_swarm

RULES = make_rules(parts=8)
"""So that every peer averages a part."""
TIMERS = Timers(reduce_s=12.0)


def decided(number: int, peers: str = "ABCDE", *, contributors: str = "") -> Manifest:
    founding = found(RULES, list(peers))
    return replace(
        founding, kind=Kind.QUORUM, round=number, contributors=tuple(contributors or peers)
    )


def test_it_is_left_out_of_eight_rounds_and_then_tried_again() -> None:
    known = left_out_after({}, ["E"], decided(5, contributors="ABCD"))
    assert known == {"E": 5 + LEFT_OUT_ROUNDS}
    for number in range(6, 13):
        known = left_out_after(known, [], decided(number, contributors="ABCD"))
        assert known == {"E": 13}
    assert left_out_after(known, [], decided(13, contributors="ABCD")) == {}


@pytest.mark.parametrize(
    ("tip", "left"),
    [
        (decided(6), {}),  # another convener tried it, and it served
        (decided(6, "ABCD"), {}),  # it is no member
        (decided(6, contributors="ABCD"), {"E": 13}),
        (replace(decided(6), kind=Kind.MERGE), {"E": 13}),  # nobody was tried
    ],
)
def test_it_is_forgotten_once_it_serves_or_goes(tip: Manifest, left: dict[PeerId, int]) -> None:
    assert left_out_after({"E": 13}, [], tip) == left


def test_fewer_than_half_of_the_members_are_left_out_the_last_to_withhold() -> None:
    known = {"A": 13, "B": 13}
    tip = decided(6, contributors="E")
    assert left_out_after(known, ["C"], tip) == {"C": 14, "A": 13}
    assert left_out_after({}, ["A"], decided(6, "AB", contributors="B")) == {}


def swarm_with_mute(**options: object) -> tuple[Pump, PeerId, list[float]]:
    """The lengths of rounds in a swarm whose last peer serves nobody from round 3 on."""
    pump = start_swarm("ABCDE", RULES, timers=TIMERS, **options)
    pump.run_rounds(2)
    mute = pump.last
    pump.refuse_fetch = lambda peer, source, unit: source == mute and peer != mute
    seconds = [pump.run_rounds(number, pump.others(mute)) for number in range(3, 14)]
    return pump, mute, seconds


def test_it_holds_up_one_round_in_nine() -> None:
    pump, mute, seconds = swarm_with_mute()
    assert seconds[0] > TIMERS.reduce_s, "the attack did not even arrive"
    assert max(seconds[1:9]) < TIMERS.reduce_s / 2
    assert sum(each > TIMERS.reduce_s / 2 for each in seconds) == 2, "it is tried again"
    rounds = [m for m in pump.nodes[pump.others(mute)[0]].applied if m.round > 2]
    assert all(mute not in m.contributors for m in rounds)
    assert all(mute in m.members for m in rounds), "it votes on"
    told = f"peer {mute} left out: it offered values and served none"
    assert told in pump.said(Topic.ROUND)


def test_a_peer_that_falls_silent_is_waited_for_in_the_next_round() -> None:
    """It has died, or is cut off. Its offer after its return counts."""
    pump = start_swarm("ABCDE", RULES, timers=TIMERS)
    pump.run_rounds(2)
    victim = pump.last
    lose = pump.lose
    pump.refuse_fetch = lambda peer, source, unit: victim in (source, peer)
    machines = [node.machine for node in pump.nodes.values()]
    pump.run(pump.now + 20.0, lambda: any(m.campaign.stage == "reduce" for m in machines))
    pump.lose = lambda source, destination, message: victim in (source, destination)
    pump.run_rounds(3, pump.others(victim))
    assert victim not in pump.tip_of(pump.others(victim)[0]).contributors
    pump.lose, pump.refuse_fetch = lose, lambda peer, source, unit: False
    pump.run_rounds(5)
    assert all(not n.machine._withholding.until for n in pump.nodes.values())
    assert victim in pump.tip_of(victim).contributors


def test_one_peer_that_cannot_fetch_from_another_has_no_others_leave_it_out() -> None:
    """It may be cut off from that one, or lie."""
    pump = start_swarm("ABCDE", RULES, timers=TIMERS)
    pump.run_rounds(2)
    named, alone = pump.order[-2:]
    pump.refuse_fetch = lambda peer, source, unit: (peer, source) == (alone, named)
    pump.run_rounds(4)
    leave_out = {p for p, n in pump.nodes.items() if n.machine._withholding.until}
    assert leave_out <= {alone}


def test_a_peer_that_reaches_nobody_leaves_nobody_out() -> None:
    pump = start_swarm("ABCDE", RULES, timers=TIMERS)
    pump.run_rounds(2)
    alone = pump.last
    pump.refuse_fetch = lambda peer, source, unit: peer == alone
    pump.run_rounds(4, pump.others(alone), within_s=200.0)
    assert not pump.nodes[alone].machine._withholding.until
