"""Held-out losses: what members have published, the newest word about each round."""

from swarm.protocol.losses import MAX_MANIFESTS, MAX_ROUNDS, Losses, told_losses
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


def test_losses_of_a_long_run_are_thinned_and_the_newest_are_all_there() -> None:
    told, last = Losses(), 10 * MAX_ROUNDS
    for first in range(0, last, 64):
        some = {number: float(number) for number in range(first, first + 64)}
        told = told.with_newer(Losses(some, {f"manifest{first}": 1.0}))
    assert MAX_ROUNDS // 2 <= len(told.by_round) <= MAX_ROUNDS
    assert len(told.by_manifest) == MAX_MANIFESTS
    newest = set(range(last - MAX_ROUNDS // 4, last))
    assert newest <= told.by_round.keys() and 0 in told.by_round
