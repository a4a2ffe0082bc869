"""The disk space that a plan counts as free."""

from pathlib import Path

import pytest

from swarm.peer.machine import engine_plan
from swarm.peer.machine.engine_plan import held_bytes, plan_run
from swarm.train.engine.hardware import Machine
from tests.train.runs import tiny_run


def test_what_the_state_directory_holds_of_the_run_needs_no_disk_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other = tiny_run(), tiny_run(run={"seed": 77})
    monkeypatch.setattr(engine_plan, "this_machine", lambda *_: Machine("cpu", 0, 64e9, 1e9))
    assert plan_run(run, folder=tmp_path / "new").machine.disk_bytes == 1e9
    for name, config in (("mine", run), ("of-others", other)):
        folder = tmp_path / "runs" / name
        (folder / "packs").mkdir(parents=True)
        (folder / "config.json").write_bytes(config.canonical_json())
        (folder / "packs" / "1").write_bytes(b"x" * (1 << 20))
    (tmp_path / "runs" / "mine" / "packs" / "2").hardlink_to(tmp_path / "runs/mine/packs/1")
    held = held_bytes(tmp_path, run)
    assert 1 << 20 <= held < 1.5 * (1 << 20)
    assert plan_run(run, folder=tmp_path).machine.disk_bytes == 1e9 + held
    assert plan_run(run, folder=tmp_path, sizes={"disk": "2GB"}).machine.disk_bytes == 2e9
