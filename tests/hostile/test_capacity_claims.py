"""A joiner that claims a boundless capacity owns no more than others may."""

from swarm.protocol.membership.membership import TRIAL_ROUNDS
from swarm.protocol.messages.events import Record
from swarm.protocol.values.manifest import Manifest
from tests.protocol.round_pump import Pump, in_training, make_rules

EXPERTS = 8


def owned(manifest: Manifest, peer: str) -> int:
    return sum(peer in owners for owners in manifest.owners.values())


def joined_by_the_greedy(capacity: float) -> Pump:
    """Three honest peers, and a stranger that claims this capacity."""
    pump = in_training("ABC", make_rules(experts=EXPERTS))
    model = pump.nodes["A"].machine
    node = pump.add("Z", model.tip)
    node.machine._peer.capacity = capacity
    node.record = node.machine._standing.record = Record(model.tip, None, model.record.parent)
    pump.boot("Z")
    pump.run_rounds(4, "ABC")
    return pump


def test_a_boundless_capacity_wins_the_fair_share_at_the_first_contribution() -> None:
    pump = joined_by_the_greedy(1e6)
    pump.run(pump.now + 30, lambda: "Z" in pump.tip_of("A").contributors)
    first = pump.tip_of("A")
    assert first.members["Z"].counted == 1
    assert owned(first, "Z") == EXPERTS // 4
    assert "held to 2 instead of the 8 that its capacity claims" in "".join(first.reasons)


def test_and_twice_the_fair_share_when_its_trial_is_over() -> None:
    pump = joined_by_the_greedy(1e6)
    pump.run_rounds(pump.tip_of("A").round + TRIAL_ROUNDS + 2)
    history = pump.nodes["A"].applied
    assert all(
        owned(m, "Z") <= EXPERTS // 4
        for m in history
        if "Z" not in m.members or m.members["Z"].counted < TRIAL_ROUNDS
    )
    last = history[-1]
    assert last.members["Z"].counted >= TRIAL_ROUNDS
    assert owned(last, "Z") == 2 * EXPERTS // 4
    assert all(len(owners) == 1 for owners in last.owners.values())
