"""The measurement of bytes: its model, its windows and its verdict, without a swarm."""

import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from swarm.config import RunConfig, parse_config
from swarm.errors import SwarmError
from swarm.model.cost import parameters
from swarm.model.link_plan import cycle_bytes, setting_of

ROOT = Path(__file__).parents[2]
RUN_7B = ROOT / "configs" / "runs" / "spes_7b.toml"
NUM_PEERS = 4
INTERFACES = """Inter-|   Receive                      |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop
    lo:     100       1    0    0    0     0          0         0      100       1    0    0
   tun0:   5000       7    0    0    0     0          0         0     3000       6    0    0
   tun1:     20       1    0    0    0     0          0         0       10       1    0    0
"""


def run_for(script: ModuleType, mode: Any, layers: int = 1) -> RunConfig:
    return script.run_of(script.overrides_of(mode.setting, NUM_PEERS, layers, 6))


def mode_of(script: ModuleType, name: str) -> Any:
    return next(mode for mode in script.MODES if mode.name == name)


@pytest.mark.parametrize("layers", [1, 6])
def test_the_small_model_has_the_7bs_ratios_of_bytes_in_every_mode(
    script: ModuleType, layers: int
) -> None:
    large = parse_config(RunConfig, RUN_7B.read_text(), source="7B")
    for mode in script.MODES:
        small = run_for(script, mode, layers)
        ratios = [
            cycle_bytes(run, script.DILOCO, NUM_PEERS) / cycle_bytes(run, mode.setting, NUM_PEERS)
            for run in (small, large)
        ]
        assert ratios[0] == pytest.approx(ratios[1], rel=2e-3), mode.name
        assert script.exact_share(small) == pytest.approx(script.exact_share(large), rel=0.05)
        assert parameters(small.model).total > layers * 3.5e6


def test_each_mode_is_the_run_that_it_names_and_lasts_whole_cycles(script: ModuleType) -> None:
    for mode in script.MODES:
        run, setting = run_for(script, mode), mode.setting
        period = max(setting.rounds, setting.shared_every, setting.experts_every)
        expected = replace(setting, owners=min(setting.owners, NUM_PEERS), rounds=period)
        assert setting_of(run) == expected, mode.name
        counted = script.counted_rounds(setting, 6)
        assert counted >= 6
        assert counted % period == 0
        # The last round of slices exchanges everything, so it is never counted.
        assert run.run.rounds > counted + 1


def test_a_round_without_somebody_is_refused_and_the_first_one_is_not_counted(
    script: ModuleType,
) -> None:
    history = [{"round": n, "contributors": ["a", "b"]} for n in range(1, 6)]
    assert [event["round"] for event in script.window_of(history, 3, 2)] == [2, 3, 4]
    history[2]["contributors"] = ["a"]
    with pytest.raises(SwarmError, match="round 3 went without 1 of 2 peers"):
        script.window_of(history, 3, 2)


def test_bytes_of_interfaces_are_those_of_all_but_the_loopback(script: ModuleType) -> None:
    assert script.interface_bytes(INTERFACES) == (3010, 5020)


@pytest.mark.parametrize(
    ("name", "share", "status"),
    [("b2", 1.02, 0), ("b2", 1.04, 1), ("b2", 0.96, 1), ("recommended", 1.0, 0)],
)
def test_a_figure_that_is_off_its_formula_is_status_1(
    script: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    share: float,
    status: int,
) -> None:
    name = script.RECOMMENDED if name == "recommended" else name

    def swarm(mode: Any, overrides: list[str], num_peers: int, *_: object) -> object:
        blobs = share * cycle_bytes(script.run_of(overrides), mode.setting, num_peers)
        return script.Measured(blobs, 1e4, 2 * blobs, 3 * blobs)

    words = ["--json", "--modes", name, "--state-dir", str(tmp_path)]
    assert script.main(words, with_swarm=swarm) == status
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    (row,) = found["rows"]
    assert bool(found["problems"]) == bool(status)
    assert row["interface_ratio"] == pytest.approx(row["ratio"] / 3)


@pytest.mark.parametrize("name, ratio", [("RECOMMENDED", 16), ("THIN", 32)])
def test_a_recommended_mode_above_its_part_of_diloco_is_a_problem(
    script: ModuleType, name: str, ratio: int
) -> None:
    mode = mode_of(script, getattr(script, name))
    run = run_for(script, mode)
    whole = cycle_bytes(run, script.DILOCO, NUM_PEERS)
    row = script.row_of(mode, run, NUM_PEERS, script.Measured(whole / (ratio - 1), 0.0, None, None))
    near = replace(row, off=0.0)
    (problem,) = script.problems([near])
    assert f"1/{ratio - 1}.0 of fp32 DiLoCo, above 1/{ratio}" in problem
    assert script.problems([replace(near, mode="b2")]) == []


def test_a_swarm_that_fails_costs_its_row_and_is_status_1(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def swarm(*_: object) -> object:
        raise SwarmError("round 3 went without 1 of 4 peers")

    words = ["--json", "--modes", "b2", "b1", "--state-dir", str(tmp_path)]
    assert script.main(words, with_swarm=swarm) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["rows"] == []
    assert len(found["failed"]) == 2
