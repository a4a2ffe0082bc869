"""One record of a member determines no loss curve and no model card.

The records are real ones in a real DHT, read as monitors and exporters read them.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm.monitor.snapshot import Sighting
from swarm.network.node.node import Node
from swarm.network.runs.run_records import fetch_records
from swarm.protocol.records.records import (
    ValidationRecord,
    encode_record,
    told_losses,
    validation_key,
    validation_keys,
)
from swarm.protocol.values.manifest import Manifest
from tests.hostile.false_records import WAIT_S, Stranger, store, strangers
from tests.monitor.small_swarm import project
from tests.network.runs.test_observer import Lonely
from tests.peer_records import peer_record
from tests.protocol.records.test_records import ROUNDS, loss_of, measured
from tests.protocol.round_pump import found, make_rules

RUN = "run-1"
FALSE = 0.001


@pytest.fixture(scope="module")
def crowd() -> list[Stranger]:
    """Keys of four members and of one stranger."""
    return strangers(5)


def tip_of(members: list[Stranger]) -> Manifest:
    tip = found(make_rules(), [one.peer_id for one in members])
    return replace(tip, run=RUN, height=ROUNDS, round=ROUNDS)


@pytest.mark.parametrize("newest", [2**31 - 1, ROUNDS])
def test_a_record_of_the_last_round_there_is_changes_no_curve_and_no_card(
    joiner: Node, lonely: Lonely, crowd: list[Stranger], newest: int
) -> None:
    *members, stranger = crowd
    tip = tip_of(members)
    records = measured(tip)
    liar = tip.order[-1]
    own = {number for number, _ in records[liar].recent} | {records[liar].round}
    every = tuple((number, FALSE) for number in range(1, ROUNDS))
    lie = ValidationRecord(newest, tip.digest, FALSE, 1, 10**6, every)
    records |= {liar: lie, stranger.peer_id: lie}
    for who in crowd:
        key, value = validation_key(RUN, who.peer_id), encode_record(records[who.peer_id])
        assert store(joiner, lonely.node, key, [(who, value)], life_s=60.0 + newest % 7)
    heard = joiner.run(fetch_records(joiner, ValidationRecord, validation_keys(RUN)), WAIT_S)
    assert heard == records, "the lie has arrived"
    told = told_losses(heard, tip).until(tip)
    shown = project(Sighting(RUN, "demo", {liar: peer_record(liar)}, {}, heard, tip))
    for curve in (told, shown.losses):
        assert {n: loss for n, loss in curve if n not in own} == {
            n: loss_of(n) for n in range(1, ROUNDS + 1) if n not in own
        }
        assert all(number <= ROUNDS for number, _ in curve)
