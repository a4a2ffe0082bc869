"""Rounds without failures: the agreement and its result."""

import pytest

from swarm.protocol.messages.events import Topic
from swarm.protocol.messages.messages import (
    Accept,
    Commit,
    Hello,
    Prepare,
    Propose,
    Ready,
    Reduced,
    Roster,
)
from swarm.protocol.values.manifest import Kind
from tests.protocol.round_pump import in_training, start_swarm


@pytest.mark.parametrize("peers", ["A", "AB", "ABCD", "ABCDEFG"])
def test_all_members_apply_the_same_rounds(peers: str) -> None:
    pump = in_training(peers, height=5)
    assert all(len(pump.digests_at(height)) == 1 for height in range(1, 6))
    tip = pump.nodes["A"].applied[4]
    assert tip.kind is Kind.QUORUM
    assert tip.contributors == tuple(peers)
    assert (tip.round, tip.step, tip.tokens) == (5, 50, 5 * 1000 * len(peers))


def test_a_fault_free_round_waits_for_no_timer() -> None:
    pump = start_swarm("ABCD", tick_s=0.0)  # without ticks: events alone drive it
    pump.run(60.0)
    # All have heard manifest 0. After that only work, latency and syncs take time.
    assert all(len(node.applied) >= 25 for node in pump.nodes.values())


def test_a_lone_member_decides_at_once() -> None:
    pump = start_swarm("A", tick_s=0.0)
    pump.run(10.0)
    assert len(pump.nodes["A"].applied) >= 9  # a second of training each, nothing else


def test_messages_of_a_round_are_as_few_as_the_page_says() -> None:
    pump = in_training("ABCD", height=10)
    sizes = {
        kind: pump.count_sent(kind) / 10
        for kind in (Ready, Roster, Reduced, Propose, Accept, Commit, Prepare, Hello)
    }
    # 5 (N - 1), one of each kind to or from every other member, and the reducers' answers. Rosters
    # go only to the reducers, at most all members. Gossip and polls come on top.
    assert sum(sizes[kind] for kind in (Ready, Roster, Propose, Accept, Commit)) <= 5 * 3 + 1
    assert sizes[Reduced] <= 3


def test_a_lone_member_is_never_overtaken_however_long_it_trains() -> None:
    pump = start_swarm("A")
    pump.nodes["A"].train_s = 200.0
    pump.run_to_height(3, within_s=500.0)
    assert pump.nodes["A"].said(Topic.TAKEOVER) == ""
