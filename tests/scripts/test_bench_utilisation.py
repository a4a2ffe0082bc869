"""The measurement of utilisation: its scale, its account of a cycle, its engine and its server."""

import json
import os
import socket
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from peers.link_tables import link_named, table_for
from swarm.config import NetworkSection
from swarm.config.amounts import LinkRates
from swarm.errors import SwarmError
from swarm.model.cost import parameters
from swarm.model.link_plan import cycle_bytes, cycle_steps, setting_of

ROOT = Path(__file__).parents[2]
NUM_PEERS = 4
CYCLE_S = 60.0
LINK = "100/20mbit,100ms"
OURS = ("bench_utilisation", "utilisation_rows", "timed_peer", "parameter_server", "bench_wire")


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    for name in OURS:
        sys.modules.pop(name, None)
    import bench_utilisation  # the folder is on the path in this test alone

    return bench_utilisation


@pytest.fixture
def rows(script: ModuleType) -> ModuleType:
    return sys.modules["utilisation_rows"]


@pytest.mark.parametrize("model", ["2b", "7b", "9b"])
def test_a_row_has_the_real_runs_ratio_of_computing_to_bytes_and_its_link_uncut(
    rows: ModuleType, model: str
) -> None:
    like, compute_s = rows.like_of(model), rows.real_compute_s(model)
    for name, mode in rows.MODES.items():
        case = rows.case_of(name, LINK, model, NUM_PEERS, CYCLE_S)
        if case.sizes:
            real = rows.sizes_of(like, 1.0, NUM_PEERS)
            ratio = case.sizes.sent / real.sent
        else:
            small = rows.run_of(case.overrides)
            moved = [cycle_bytes(run, mode.setting, NUM_PEERS) for run in (small, like)]
            ratio = moved[0] / moved[1]
            counted = [parameters(run.model) for run in (small, like)]
            shares = [each.shared / each.total for each in counted]
            assert shares[0] == pytest.approx(shares[1], rel=1e-3)
        assert case.compute_s / compute_s == pytest.approx(ratio, rel=1e-6), name
        assert case.real.cycle_s * case.scale == pytest.approx(CYCLE_S, rel=0.1), name


def test_the_7b_computes_1800_s_and_the_others_as_long_as_their_operations_take(
    rows: ModuleType,
) -> None:
    assert rows.real_compute_s("7b") == 1800
    run = rows.like_of("9b")
    shorter = run.model_copy(update={"train": run.train.model_copy(update={"batch_tokens": 1024})})
    assert rows._step_flops(run) == pytest.approx(512 * rows._step_flops(shorter))


def test_each_mode_is_the_run_that_it_names_with_h_steps_a_cycle(rows: ModuleType) -> None:
    for name, mode in rows.MODES.items():
        case = rows.case_of(name, LINK, "7b", NUM_PEERS, CYCLE_S)
        assert case.steps == 50
        assert case.step_s == pytest.approx(36 * case.scale)
        if mode.server:
            continue
        run = rows.run_of(case.overrides)
        owners = min(mode.setting.owners, NUM_PEERS)
        assert setting_of(run) == replace(mode.setting, owners=owners), name
        assert cycle_steps(run) == 50


def test_the_plan_of_a_row_is_that_of_swarm_plan(rows: ModuleType) -> None:
    for name, mode in rows.MODES.items():
        if mode.server:
            continue
        case = rows.case_of(name, LINK, "7b", NUM_PEERS, CYCLE_S)
        run, link = rows.run_of(case.overrides), link_named(LINK)
        said = table_for(run, link, NetworkSection(), step_s=case.step_s, wanted=0.9).own.plan
        compute_s = case.step_s * cycle_steps(run)
        found = rows.planned(run, mode, link, compute_s, NUM_PEERS, here=False)
        assert found.utilisation == pytest.approx(said.utilisation), name
        assert found.cycle_s == pytest.approx(said.round_s * mode.setting.rounds), name
        assert case.plan.cycle_s >= found.cycle_s or os.cpu_count() > 8 * NUM_PEERS, name


def test_a_servers_cycle_is_what_its_line_carries_of_all_peers(rows: ModuleType) -> None:
    # A peer sends 0.1 GB and receives 0.25 GB; the server's line is shared by four.
    sizes = rows.Sizes(shared=12_500_000, own=12_500_000, peers=4)
    line = LinkRates(20, 100, 100.0, 0.0)
    assert (sizes.sent, sizes.received) == (100_000_000, 200_000_000)
    home = rows.server_plan(sizes, line, line, 10.0)
    assert home.cycle_s == pytest.approx(10 + (800 / 20 + 1600 / 5) / 0.85)
    fast = rows.server_plan(sizes, line, LinkRates(1000, 1000, 10.0, 0.0), 10.0)
    assert fast.cycle_s == pytest.approx(10 + (800 / 20 + 1600 / 100) / 0.85)
    assert fast.utilisation == pytest.approx(10 / fast.cycle_s)


def line_of(number: int, at_s: float, kind: str = "quorum") -> dict[str, Any]:
    cpu_s = 2.0 * number
    line = {"round": number, "kind": kind, "at_s": at_s, "steps": 10}
    return {**line, "private_s": 0.5, "cpu_s": cpu_s}


def event_of(number: int, *, counted: bool = True) -> dict[str, Any]:
    took = {"training": 5.5, "offering": 1.5, "averaging": 2.0, "adopting": 0.5}
    return {
        "kind": "quorum",
        "round": number,
        "counted": counted,
        "phases": {name: {"seconds": seconds} for name, seconds in took.items()},
        "blob_bytes_sent": 7,
        "blob_bytes_received": 8,
    }


def test_the_first_cycle_is_left_out_and_what_is_no_stall_of_a_name_is_other(
    rows: ModuleType,
) -> None:
    case = replace(
        rows.case_of("slices", LINK, "7b", NUM_PEERS, CYCLE_S), compute_s=25.0
    )  # of 50 steps
    lines = [line_of(n, 1000.0 if n < 5 else 950.0 + 10 * n) for n in range(1, 13)]
    lines.insert(7, line_of(7, 1019.0, "merge"))
    events = [event_of(n, counted=n not in (2, 9)) for n in range(1, 14)]
    found = rows.figures_of(lines, events, case, 1)
    assert found.cycle_s == 50
    assert found.computing == 25
    assert found.stalls == {
        "encode": 5.0,
        "private": 2.5,
        "waiting": 10.0,
        "apply": 2.5,
        "other": 5.0,
    }
    assert (found.sent, found.received, found.not_counted, found.cpu) == (35, 40, 1, 10.0)


def test_the_table_has_each_stall_and_leaves_out_what_was_not_counted(rows: ModuleType) -> None:
    case = rows.case_of("exact", LINK, "7b", NUM_PEERS, CYCLE_S)
    stalls = dict.fromkeys(rows.STALLS, 1.0)
    peers = [rows.PeerFigures(40.0, share * 40, stalls, 2e6, 3e6) for share in (0.5, 0.7)]
    row = rows.row_of(case, peers, 1, load=0.5)
    assert (row.utilisation, row.utilisation_least) == (0.6, 0.5)
    title, _, line = rows.table([row]).splitlines()
    assert title.count("|") == line.count("|")
    assert "| 60.0% |" in line
    assert "|  | 2.0 | 3.0 |  |  | 0 | 0.5 |" in line


def test_a_round_of_the_emulated_engine_moves_every_trained_element_once(
    script: ModuleType, rows: ModuleType
) -> None:
    timed = sys.modules["timed_peer"]
    case = rows.case_of("slices", "lan", "7b", NUM_PEERS, 2.0)
    run = rows.run_of(case.overrides)
    engines = [timed.TimedEngine(run, 0.0, seed) for seed in (0, 1)]
    for engine in engines:
        engine.own([0, 3])
        with torch.no_grad():
            for parameter in engine._optimizer.parameters:
                parameter.zero_()
    tokens_BT1 = torch.zeros(2, 9, dtype=torch.long)
    lr = 1e-3
    for _ in range(run.round.local_steps):
        stats = [engine.step(tokens_BT1, lr=lr, masks=None) for engine in engines]
    assert stats[0].tokens == 16
    assert stats[0].expert_tokens == ((16,) * 32,)
    values = [engine.state_dict() for engine in engines]
    assert [each.updates for each in values] == [run.round.local_steps] * 2
    assert [each.owned for each in values] == [(0, 3)] * 2
    ours, theirs = (
        torch.cat([v.flatten() for n, v in s.tensors.items() if n.startswith("master.")])
        for s in values
    )
    assert (ours != 0).float().mean() > 0.999
    assert (ours != theirs).float().mean() > 0.999
    # Once, as the deviation says: twice would be 1.4 of it.
    assert ours.std().item() == pytest.approx(lr, rel=0.05)


def test_the_server_gives_each_peer_the_mean_and_the_experts_of_the_others(
    script: ModuleType,
) -> None:
    server = sys.modules["parameter_server"]
    sizes = server.Sizes(shared=3, own=2, peers=3)
    offers = [np.full(5, 10.0**index, np.float32) for index in range(3)]
    answers = server.answers_to([bytearray(offer.tobytes()) for offer in offers], sizes)
    found = [np.frombuffer(b"".join(answer), np.float32) for answer in answers]
    assert found[1].tolist() == [37.0, 37.0, 37.0, 1.0, 1.0, 100.0, 100.0]
    assert all(each.nbytes == sizes.received for each in found)


def test_cycles_of_a_server_and_its_peers_end_and_say_what_they_took(script: ModuleType) -> None:
    server = sys.modules["parameter_server"]
    sizes = server.Sizes(shared=1000, own=500, peers=2)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        serving = threading.Thread(target=server.serve, args=(listener, sizes, 3), daemon=True)
        serving.start()
        other = threading.Thread(target=server.train, args=(address, sizes, 3, 0.0), daemon=True)
        other.start()
        cycles = server.train(address, sizes, 3, 0.01)
        for thread in (serving, other):
            thread.join(60)
    assert len(cycles) == 3
    for cycle in cycles:
        assert cycle.computing_s == 0.01
        assert cycle.wall_s >= cycle.computing_s + cycle.exchange_s


def test_what_is_measured_without_options_is_every_mode_and_no_row_twice(
    script: ModuleType, rows: ModuleType
) -> None:
    cases = [(case.mode, case.link) for case in script.chosen(script.parsed([]))]
    assert {mode for mode, _ in cases} == set(rows.MODES)
    assert len(set(cases)) == len(cases)
    alone = script.chosen(script.parsed(["--mode", "slices", "--link", "home-world"]))
    assert [(case.mode, case.link) for case in alone] == [("slices", "home-world")]


@pytest.mark.parametrize("option", ["--link", "--last"])
def test_a_link_that_there_is_not_is_refused_in_one_line(
    script: ModuleType, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        script.parsed([option, "nosuch"])
    assert ended.value.code == 2
    assert "'nosuch'" in capsys.readouterr().err.splitlines()[-1]


def test_a_row_that_fails_costs_itself_and_is_status_1(
    script: ModuleType, rows: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(case: Any, cycles: int, folder: Path) -> list[Any]:
        if case.mode == "exact":
            raise SwarmError("5 rounds: not within 100 s")
        return [rows.PeerFigures(10.0, 9.0, dict.fromkeys(rows.STALLS, 0.2), 1e6, 1e6)]

    words = ["--quick", "--json", "--mode", "exact", "slices", "--state-dir", str(tmp_path)]
    assert script.main(words, with_peers=measured) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["utilisation"] for row in found["rows"]] == [0.9]
    assert found["failed"] == ["exact, lan: 5 rounds: not within 100 s"]


def test_a_state_that_the_disk_cannot_hold_is_refused_before_anything_starts(
    script: ModuleType, rows: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = rows.case_of("exact", LINK, "7b", NUM_PEERS, CYCLE_S)
    monkeypatch.setattr(script, "disk_bytes", lambda *_: 10**15)
    with pytest.raises(SwarmError, match=r"4000000\.0 GB of disk"):
        script.measure_swarm(case, 1, tmp_path / "row", None)


@pytest.mark.scenario
def test_the_quick_run_measures_real_processes(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert script.main(["--quick", "--json", "--state-dir", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    swarm, server = found["rows"]
    for row in (swarm, server):
        assert 0 < row["utilisation"] < 1
        # "other" is what is left of a cycle: less than nothing, if a second was counted twice.
        assert min(row["stalls"].values()) >= 0
        assert row["sent_mb"] > 1
    assert swarm["stalls"]["waiting"] > 0
    assert swarm["not_counted"] == 0
