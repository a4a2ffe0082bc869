"""Real peers with deltas of a bit or two per element: one state everywhere, even after kills."""

from pathlib import Path

import pytest

from swarm.codings import coded_bytes
from swarm.emulation.local_swarm import LocalSwarm, summary
from swarm.protocol.values.layout import layout_of
from tests.scenarios.swarms import (
    finish,
    read_record,
    read_run,
    restart_all_once_one_died,
    started_swarm,
)

pytestmark = [pytest.mark.scenario, pytest.mark.exhaustive]

CODED = [
    'wire.shared_coding="b2"',
    'wire.experts_coding="b1"',
    'wire.experts="bf16"',
    "run.peers=2",
    "round.roster_after_s=300.0",
    "round.reform_after_s=600.0",
]
"""Rounds must wait for all peers that start one after another on a busy machine."""


def check(swarm: LocalSwarm, rounds: int) -> None:
    """Checks that all have one tip, moved by the run's codings, and that no step was lost."""
    verdict, layout = summary(swarm), layout_of(read_run(swarm.run_file))
    assert (verdict["rounds"], verdict["tokens_lost"]) == (rounds, 0)
    assert set(verdict["digests_per_height"]) == {1}
    records = [read_record(peer) for peer in swarm.peers]
    assert len({record.tip.digest for record in records}) == 1
    tip, parent = records[0].tip, records[0].parent
    assert parent
    for unit in layout.units:
        entry = tip.entries[unit.unit]
        assert entry.coding == unit.coding
        assert entry.base == (parent.entries[unit.unit].digest if entry.delta else None)
        assert (entry.delta is None) == (unit.coding == "none")
    moved = sum(coded_bytes(unit) for unit in layout.units)
    assert moved < layout.num_bytes / 8
    ended = [event for peer in swarm.peers for event in peer.events() if event["event"] == "ended"]
    assert ended and not any(event["refused"].get("other_bits") for event in ended)


def test_three_rounds_of_two_peers_end_in_one_state(tmp_path: Path) -> None:
    with started_swarm(tmp_path, 2, [*CODED, "merging.alpha=0.0"]) as swarm:
        finish(swarm, 300)
        check(swarm, 3)


def test_peers_that_are_killed_in_turn_lose_nothing_and_agree(tmp_path: Path) -> None:
    """Between accept, record and swap of a round. A merge comes after the second round."""
    with started_swarm(
        tmp_path,
        2,
        [*CODED, "run.rounds=5"],
        options=["--crash", "accepted@1"],
        program="tests.scenarios.crashing_peer",
    ) as swarm:
        for crash in ("applied@2m", "applying@3", "swapped@4", ""):
            restart_all_once_one_died(swarm, crash)
        finish(swarm, 300)
        check(swarm, 5)
