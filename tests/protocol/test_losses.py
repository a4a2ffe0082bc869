"""Held-out losses: what members have published, the newest word about each round."""

from swarm.protocol.losses import Losses, told_losses
from swarm.protocol.records import ValidationRecord

OLD, NEW = "ab" * 32, "cd" * 32


def test_the_newest_record_of_a_member_counts_and_that_of_a_stranger_does_not() -> None:
    told = {
        "QmZ": ValidationRecord(3, OLD, 2.9, 100, 200, ((1, 4.5), (2, 3.5))),
        "QmB": ValidationRecord(5, NEW, 2.3, 200, 200, ((2, 3.4), (4, 2.5))),
        "QmX": ValidationRecord(10**6, "ef" * 32, 0.001, 1, 200, ((1, 0.0), (5, 0.0))),
    }
    found = told_losses(told, ("QmB", "QmGone", "QmZ"))
    assert found.by_round == {1: 4.5, 2: 3.4, 3: 2.9, 4: 2.5, 5: 2.3}
    assert found.by_manifest == {OLD: 2.9, NEW: 2.3}
    assert found.bits_per_byte_of_nat == told["QmB"].bits_per_byte_of_nat
    assert told_losses(told, ()) == told_losses({}, told) == Losses()
    assert told_losses(told, told).by_round[10**6] == 0.001
