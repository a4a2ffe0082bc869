"""A swarm of four processes equals SPES's plain arithmetic bit for bit."""

from pathlib import Path

import pytest

from swarm.emulation.local_swarm import applied, summary
from tests.scenarios.spes_reference import assert_equals_the_reference
from tests.scenarios.swarms import NOBODY_LEFT_OUT, finish, read_record, started_swarm

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
    with started_swarm(tmp_path, 4, [dealt, trained, *NOBODY_LEFT_OUT]) as swarm:
        finish(swarm, 150)
        verdict = summary(swarm)
        tip = read_record(swarm.peers[0]).tip
        merges = applied(swarm.peers[0].events(), "merge")
    assert len(verdict["manifest_digests"]) == 1
    assert verdict["tokens_lost"] == 0
    assert len(merges) == 1
    assert verdict["rounds"] == 3
    assert_equals_the_reference(swarm, tmp_path / "data")
    assert all(len(owners) == owners_per_expert for owners in tip.owners.values())
