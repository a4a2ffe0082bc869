"""A swarm of four processes equals SPES's plain arithmetic bit for bit."""

from pathlib import Path

import pytest
import torch

from swarm.data.corpus import standard_library_corpus
from swarm.data.shards import open_shards
from swarm.data.tokenizer import BYTE
from swarm.emulation.local_swarm import LocalSwarm, applied, summary
from tests.scenarios.spes_reference import train_by_reference
from tests.scenarios.swarms import (
    NOBODY_LEFT_OUT,
    agreed_state,
    finish,
    peer_id,
    read_record,
    read_run,
    write_run,
)

pytestmark = pytest.mark.scenario


@pytest.mark.parametrize(
    ("owners_per_expert", "engine", "optimizer"),
    [
        pytest.param(1, "resident", "adamw", id="R=1"),
        pytest.param(2, "resident", "adamw", id="R=2", marks=pytest.mark.fresh),
        pytest.param(4, "resident", "adamw", id="R=N"),
        pytest.param(1, "resident", "muon", id="Muon"),
        pytest.param(2, "streaming", "adamw", id="streaming", marks=pytest.mark.exhaustive),
        pytest.param(2, "streaming", "muon", id="streaming, Muon", marks=pytest.mark.exhaustive),
    ],
)
def test_three_rounds_with_a_merge_equal_the_reference(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    owners_per_expert: int,
    engine: str,
    optimizer: str,
) -> None:
    monkeypatch.setenv("SWARM_ENGINE", engine)
    dealt = f"ownership.owners_per_expert={owners_per_expert}"
    trained = f'optimizer.kind="{optimizer}"'
    run_file = write_run(tmp_path, [dealt, trained, *NOBODY_LEFT_OUT])
    run = read_run(run_file)
    with LocalSwarm(tmp_path / "swarm", run_file, 4) as swarm:
        swarm.start()
        finish(swarm, 150)
        verdict = summary(swarm)
        ordered = sorted(peer_id(peer) for peer in swarm.peers)
        states = [agreed_state(peer, run) for peer in swarm.peers]
        tip = read_record(swarm.peers[0]).tip
        merges = applied(swarm.peers[0].events(), "merge")
    assert len(verdict["manifest_digests"]) == 1
    assert verdict["tokens_lost"] == 0
    assert len(merges) == 1
    shards = open_shards(standard_library_corpus(), tmp_path / "data", BYTE)
    expected = train_by_reference(
        run,
        shards,
        ordered,
        {e: [ordered.index(peer) for peer in owners] for e, owners in tip.owners.items()},
        rounds=3,
    )
    for state in states:
        assert state.keys() == expected.keys()
        different = [name for name in expected if not torch.equal(state[name], expected[name])]
        assert not different
    assert all(len(owners) == owners_per_expert for owners in tip.owners.values())
