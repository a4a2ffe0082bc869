"""The simulation of rounds over lines of the internet: its lines, its bytes and its stages."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
OURS = ("internet_rounds", "bench_internet", "bench_scale")


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for name in OURS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import internet_rounds  # the folder is on the path in this test alone

    return internet_rounds


@pytest.fixture
def bench(rounds: ModuleType) -> ModuleType:
    import bench_internet

    return bench_internet


@pytest.fixture
def of(bench: ModuleType, tmp_path: Path) -> Any:
    identity = bench.load_or_create_identity(tmp_path / "identity")
    return bench.sized(40, identity)


def test_lines_follow_the_quantiles_that_have_sources(rounds: ModuleType) -> None:
    for quantile in (*rounds.UP, *rounds.DOWN):
        assert quantile.source
    for many in (rounds.UP, rounds.DOWN):
        for quantile in many:
            assert rounds.rate_at(many, quantile.share) == pytest.approx(quantile.mbit)
    lines = rounds.draw_lines([str(number) for number in range(4000)], 1)
    ups = sorted(line.up for line in lines.values())
    assert ups[2000] == pytest.approx(22.6, rel=0.1)
    assert ups[400] == pytest.approx(10.7, rel=0.1)
    assert all(line.up <= line.down for line in lines.values())
    assert rounds.draw_lines(["a"], 1) != rounds.draw_lines(["a"], 2)
    fast = rounds.draw_lines([str(number) for number in range(200)], 1, 10.0)
    assert 9.9 <= min(line.up for line in fast.values()) < 20


@pytest.mark.parametrize("mode", ["exact", "overlapped"])
def test_peers_send_what_the_formula_says_and_relays_send_no_more(
    bench: ModuleType, of: Any, mode: str
) -> None:
    """(2 S (N-1) + X (N-1)) bytes in all, for S of shared tensors and X of experts that are due."""
    ((each,), _) = bench.drawn(of, mode, 1, 0.0)
    path, others = bench.MODES[mode]
    run = bench.run_of(40, path, [*others, f"wire.part_bytes={of.part_bytes}"])
    rules = bench.Rules.of("run", run, bench.layout_of(run))
    due = rules.schedule.due(of.swarm.tip)
    shared, experts = (
        sum(rules.moved_bytes[unit] for unit in due if (unit in rules.expert_units) is is_expert)
        for is_expert in (False, True)
    )
    it = each.moved
    sent = sum(it.values.values()) + sum(it.means.values()) + sum(it.experts.values())
    assert sent == 39 * (2 * shared + experts)
    assert sum(it.received.values()) == 39 * (shared + experts)
    assert sum(it.averaged.values()) == sum(it.values.values())
    assert sum(it.passed.values()) == pytest.approx(39 * experts)
    writers = [peer for peer, num_bytes in it.experts.items() if num_bytes]
    thin = min(writers, key=lambda peer: each.lines[peer].up)
    assert it.passed[thin] <= it.experts[thin] * 4 / 39


def test_equal_lines_are_all_counted_and_a_very_slow_one_is_not(
    bench: ModuleType, rounds: ModuleType, of: Any
) -> None:
    ((each,), constants) = bench.drawn(of, "slices", 1, 0.0)
    equal = dict.fromkeys(each.lines, rounds.Line(20.0, 100.0))
    same = rounds.Round(equal, each.moved, constants)
    stages = {"all": 100.0}
    slow = {**equal, of.swarm.peers[0]: rounds.Line(20.0, 2.0)}
    num, waited_s = rounds.counted(same, stages)
    assert num == 40
    num, waited_of_slow_s = rounds.counted(rounds.Round(slow, each.moved, constants), stages)
    assert num == 39
    assert waited_of_slow_s == pytest.approx(waited_s, abs=1.0)


def test_a_manifest_takes_the_convener_less_with_relays(rounds: ModuleType, of: Any) -> None:
    ((each,), _) = __import__("bench_internet").drawn(of, "slices", 1, 0.0)
    convener = min(each.lines, key=lambda peer: each.lines[peer].up)
    outcome = each.outcome(convener, each.data(), each.flow_s())
    assert outcome.relayed["body"] < outcome.stages["body"] / 2
    assert sum(outcome.relayed.values()) < sum(outcome.stages.values())
    assert outcome.bottleneck and outcome.bottleneck_relayed


def test_the_script_says_it_in_one_object() -> None:
    ended = subprocess.run(
        [
            *(sys.executable, SCRIPTS / "bench_internet.py", "--peers", "16,40"),
            *("--seeds", "2", "--modes", "exact,overlapped", "--json"),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    told = json.loads(ended.stdout.splitlines()[-1])
    rows = told["rows"]
    assert {(row["peers"], row["mode"], row["least_up_mbit"]) for row in rows} == {
        (peers, mode, least)
        for peers in (16, 40)
        for mode in ("exact", "overlapped")
        for least in (0.0, 10.0)
    }
    for row in rows:
        assert 0 < row["computed"] <= row["computed_relayed"] <= 1
        assert 0 <= row["not_counted"] < 0.5
        assert row["relayed_s"] <= row["round_s"] <= row["round_p90_s"]
    assert len(told["lines"]) == 10
