"""A swarm in one process equals a swarm of processes in every bit."""

import sys
from pathlib import Path

import pytest
import torch

from swarm.data.corpus import standard_library_corpus
from swarm.data.loader import Loader
from swarm.data.shards import open_shards
from swarm.data.tokenizer import BYTE
from swarm.emulation.local_swarm import LocalSwarm, summary
from tests.scenarios.swarms import agreed_state, finish, read_record, read_run, write_run

pytestmark = pytest.mark.scenario

ROUNDS, PEERS = 5, 3
SETTINGS = [
    f"run.rounds={ROUNDS}",
    f"run.peers={PEERS}",
    "model.num_experts=6",
    "round.local_steps=2",
    "round.experts_every=2",
    "round.stagger=true",
    "merging.interval_steps=4",
    'wire.shared_coding="b2"',
    'wire.experts="bf16"',
    'wire.experts_coding="b1"',
    "round.roster_after_s=300.0",  # rounds wait for all peers that start one after another
    "round.reform_after_s=600.0",
]


def test_a_swarm_in_one_process_agrees_on_the_bits_of_a_real_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With deltas in 1 and 2 bits, their remainders, slices of the experts, and merges."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "scripts" / "benchmarks")
    sys.modules.pop("in_process", None)
    from in_process import InProcessSwarm  # the folder is on the path in this test alone

    run_file = write_run(tmp_path, SETTINGS)
    run = read_run(run_file)
    with LocalSwarm(tmp_path / "swarm", run_file, PEERS) as swarm:
        swarm.program = "tests.scenarios.unmeasured_peer"  # one process has no lines
        swarm.start()
        finish(swarm, 300)
        verdict = summary(swarm)
        state = agreed_state(swarm.peers[0], run)
        owners = read_record(swarm.peers[0]).tip.owners
    assert set(verdict["digests_per_height"]) == {1} and verdict["tokens_lost"] == 0
    shards = open_shards(standard_library_corpus(), tmp_path / "data", BYTE)
    with Loader(shards, run) as loader:
        alone = InProcessSwarm(run, loader, owners=owners)
        for _ in range(ROUNDS):
            alone.round()
    assert alone.merges == 2
    expected = alone.agreed
    assert [name for name in state if not torch.equal(state[name], expected[name])] == []
