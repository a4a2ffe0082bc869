"""Fetching peers: rounds wait for a late one, and fetched blobs are synced [A2, X1].

Policy: roster deadline.
"""

import pytest

from swarm.protocol.messages.events import Apply, Expected, Sync
from swarm.protocol.messages.messages import Accept
from tests.protocol.round_pump import start_swarm


def contributors_after_a_late_start(fetched_s: float) -> set[str]:
    """Contributors of a round of 20 s. C begins after 10 s, and needs 24 s for its steps."""
    pump = start_swarm("ABC")
    pump.train_times({"A": 20.0, "B": 20.0, "C": 24.0})
    pump.run_to_height(1)
    pump.kill("C")
    pump.run(pump.now + 10.0)
    pump.restart("C")
    late = pump.nodes["C"].machine
    late._work.fetched_s = fetched_s
    pump.give("C", Expected(late.tip.digest, 24.0))
    pump.run_to_height(2, "AB", within_s=60.0)
    return set(pump.tip_of("A").contributors)


@pytest.mark.parametrize("fetched_s", [0.0, 20.0])
def test_who_fetched_the_tip_for_long_is_waited_for(fetched_s: float) -> None:
    """Two peers that wait 14 s lose less than its 10 s of work and 20 s of fetching."""
    wanted = {"A", "B", "C"} if fetched_s else {"A", "B"}
    assert contributors_after_a_late_start(fetched_s) == wanted


def test_what_a_vote_was_for_is_synced_anew_where_a_value_of_it_was_lost_since() -> None:
    """A damaged value is dropped at the start. Its fetched replacement is not durable yet."""
    pump = start_swarm("ABC")
    pump.lose = lambda source, destination, message: isinstance(message, Accept)
    nodes = pump.nodes
    pump.run(pump.now + 20, lambda: all(node.record.accepted for node in nodes.values()))
    voter = next(peer for peer in "ABC" if peer != nodes["A"].machine.tip.order[0])
    vote = nodes[voter].record.accepted
    assert vote is not None
    lost = next(entry.digest for entry in vote.manifest.entries.values() if entry.version)
    pump.kill(voter)
    nodes[voter].disk.discard(lost)
    nodes[voter].effects.clear()
    pump.restart(voter)
    pump.lose = lambda source, destination, message: False
    pump.run(pump.now + 60, lambda: vote.manifest in nodes[voter].applied)
    kinds = [type(effect) for effect in nodes[voter].effects]
    assert kinds.index(Sync) < kinds.index(Apply)
