"""Held-out losses: what members have published, and what a liar among them can make of it."""

from dataclasses import replace

from swarm.protocol.losses import MAX_MANIFESTS, MAX_ROUNDS, Losses, told_losses
from swarm.protocol.manifest import Manifest, PeerId
from swarm.protocol.records import ValidationRecord
from tests.protocol.round_pump import found, make_rules

OTHER = "cd" * 32
ROUNDS = 12
LAST = 2**31 - 1


def tip_of(*peers: PeerId, trainee: PeerId = "") -> Manifest:
    tip = replace(found(make_rules(), list(peers)), run="run-1", height=ROUNDS, round=ROUNDS)
    members = {p: replace(m, votes=p != trainee) for p, m in tip.members.items()}
    return replace(tip, members=members)


def loss_of(number: int) -> float:
    return 5.0 - number / 10


def measured(tip: Manifest) -> dict[PeerId, ValidationRecord]:
    """Each round by one voter, as in an honest run; the tip by its first convener."""
    found, order = {}, tip.order
    for place, peer in enumerate(order):
        rounds = [n for n in range(1, ROUNDS) if n % len(order) == place]
        recent = tuple((number, loss_of(number)) for number in rounds)
        found[peer] = ValidationRecord(*said(recent[-1], OTHER), recent[:-1])
    newest = found[order[0]]
    recent = (*newest.recent, (newest.round, newest.val_loss))
    found[order[0]] = ValidationRecord(*said((ROUNDS, loss_of(ROUNDS)), tip.digest), recent)
    return found


def said(of_round: tuple[int, float], digest: str) -> tuple[int, str, float, int, int]:
    number, loss = of_round
    return number, digest, loss, 100, 200


CURVE = {number: loss_of(number) for number in range(1, ROUNDS + 1)}


def test_each_round_is_measured_by_one_member_and_the_curve_is_made_of_all() -> None:
    tip = tip_of(*"ABCD")
    told = told_losses(measured(tip), tip)
    assert told.by_round == CURVE
    assert told.by_manifest == {tip.digest: loss_of(ROUNDS)}
    assert told.bits_per_byte_of_nat == measured(tip)[tip.order[0]].bits_per_byte_of_nat
    assert told_losses({}, tip) == Losses()


def test_one_record_of_the_last_round_there_is_makes_no_curve() -> None:
    tip = tip_of(*"ABCD")
    honest, liar = measured(tip), tip.order[-1]
    every = tuple((number, 0.001) for number in range(ROUNDS + 1))
    for number in (LAST, ROUNDS + 1, ROUNDS, ROUNDS - 1):
        lie = ValidationRecord(number, tip.digest, 0.001, 1, 10**6, every)
        told = told_losses(honest | {liar: lie}, tip)
        measured_by_others = {n for record in others(honest, liar) for n, _ in rows(record)}
        own = set(range(ROUNDS)) - measured_by_others
        assert told.by_round == CURVE | dict.fromkeys(own, 0.001), "what nobody else has measured"
        assert told.by_manifest == {tip.digest: loss_of(ROUNDS)}
        assert told.bits_per_byte_of_nat == honest[tip.order[0]].bits_per_byte_of_nat


def others(records: dict[PeerId, ValidationRecord], liar: PeerId) -> list[ValidationRecord]:
    return [record for peer, record in records.items() if peer != liar]


def rows(record: ValidationRecord) -> tuple[tuple[int, float], ...]:
    return (*record.recent, (record.round, record.val_loss))


def test_of_two_that_contradict_each_other_alone_the_higher_counts() -> None:
    tip = tip_of(*"ABCD")
    honest, liar = measured(tip), tip.order[-1]
    target = honest[tip.order[1]]
    for claim in (0.001, 9.0):
        lies = tuple((number, claim) for number, _ in rows(target))
        told = told_losses(honest | {liar: replace(honest[liar], recent=lies)}, tip)
        changed = {n for n, loss in told.by_round.items() if loss != CURVE[n]}
        wanted = {n for n, _ in rows(target)} if claim > 5 else set()
        assert changed == wanted


def test_the_median_counts_where_three_have_measured() -> None:
    tip = tip_of(*"ABC")
    losses = {"A": 3.0, "B": 3.01, "C": 0.1}
    records = {peer: ValidationRecord(5, OTHER, loss, 1, 2) for peer, loss in losses.items()}
    assert told_losses(records, tip).by_round == {5: 3.01}


def test_of_trainees_and_strangers_nothing_counts() -> None:
    tip = tip_of(*"ABCD", trainee="D")
    every = tuple((number, 0.001) for number in range(ROUNDS))
    lie = ValidationRecord(ROUNDS - 1, tip.digest, 0.001, 1, 200, every)
    told = told_losses(measured(tip) | {"D": lie, "X": lie}, tip)
    assert told.by_round == CURVE and told.by_manifest == {tip.digest: loss_of(ROUNDS)}


def test_without_a_manifest_everybody_is_heard() -> None:
    lie = ValidationRecord(LAST, OTHER, 0.001, 1, 200, ((1, 0.0),))
    assert told_losses({"X": lie}, None).by_round == {1: 0.0, LAST: 0.001}


def test_losses_of_a_long_run_are_thinned_and_the_newest_are_all_there() -> None:
    told, last = Losses(), 10 * MAX_ROUNDS
    for first in range(0, last, 64):
        some = {number: float(number) for number in range(first, first + 64)}
        told = told.with_newer(Losses(some, {f"manifest{first}": 1.0}))
    assert MAX_ROUNDS // 2 <= len(told.by_round) <= MAX_ROUNDS
    assert len(told.by_manifest) == MAX_MANIFESTS
    newest = set(range(last - MAX_ROUNDS // 4, last))
    assert newest <= told.by_round.keys() and 0 in told.by_round
