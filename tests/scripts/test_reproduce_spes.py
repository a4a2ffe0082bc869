"""The reproduction at a small scale trains like a real swarm, and a kill costs one cell."""

import json
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

from swarm.data.loader import Loader
from tests.scenarios.spes_reference import train_by_reference
from tests.train.runs import patterned_shards, same

ROOT = Path(__file__).parents[2]
SHARDS = patterned_shards()
MAIN = ("main/centralised/1", "main/spes-merging/1")


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"Line {number} of a small text.\n" * 40)
    return folder


def lines_of(path: Path) -> list[dict[str, object]]:
    """Result lines without the seconds, which differ."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if "seconds" not in k} for line in lines]


@pytest.mark.parametrize("name", ["centralised", "fedavg", "spes-merging", "eight-peers"])
def test_a_cell_is_what_the_plain_reference_of_spes_trains(script: ModuleType, name: str) -> None:
    """The same bit-exact reference as for swarms of processes."""
    from in_process import InProcessSwarm

    run = script.run_of(script.VARIANTS[name], 1, script.QUICK)
    with Loader(SHARDS, run) as loader:
        swarm = InProcessSwarm(run, loader)
        for _ in range(3):
            swarm.round()
    owners = {
        expert: [swarm.peers.index(peer) for peer in peers]
        for expert, peers in swarm.tip.owners.items()
    }
    assert same(swarm.agreed, train_by_reference(run, SHARDS, swarm.peers, owners, 3))
    assert swarm.merges == (name == "spes-merging")


def test_a_killed_reproduction_goes_on_with_the_cell_that_was_not_finished(
    script: ModuleType, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["--quick", "--corpus", str(corpus), "--cache", str(tmp_path / "tokens")]
    whole, cut = tmp_path / "whole" / "cells.jsonl", tmp_path / "cut" / "cells.jsonl"
    script.main([*common, "--out", str(whole), "--cells", *MAIN])
    script.main([*common, "--out", str(cut), "--cells", MAIN[0]])
    with cut.open("a") as file:
        file.write(whole.read_text().splitlines()[1][:40])  # killed during the write of the second
    capsys.readouterr()
    script.main([*common, "--out", str(cut), "--cells", *MAIN])
    printed = capsys.readouterr().out
    assert MAIN[0] not in printed and MAIN[1] in printed
    assert lines_of(cut) == lines_of(whole)
    assert [line["cell"] for line in lines_of(whole)] == list(MAIN)
    assert {line["tokens"] for line in lines_of(whole)} == {16 * 16 * 16}

    script.main([*common, "--out", str(cut), "--list"])
    listed = capsys.readouterr().out.splitlines()
    assert {f"{name}  done" for name in MAIN} <= set(listed)
    assert len(listed) == len(list(script.cells())) == len(set(listed))

    picture = tmp_path / "gaps.svg"
    script.main([*common, "--out", str(cut), "--cells", "--plot", str(picture)])
    table = capsys.readouterr().out
    assert "| main | SPES, merging | 1 |" in table
    root = ElementTree.parse(picture).getroot()
    assert len(root.findall("{http://www.w3.org/2000/svg}circle")) == 1  # the gap of one pair


def test_a_cell_of_other_settings_does_not_count(script: ModuleType, tmp_path: Path) -> None:
    from cells import Results, key_of

    run = script.run_of(script.VARIANTS["spes"], 1, script.QUICK)
    cell = next(cell for cell in script.cells() if cell.variant == "spes" and cell.seed == 1)
    results = Results(tmp_path / "cells.jsonl", "text")
    results.add(cell.name, key_of(run), {"losses": {"16": 5.0}})
    again = Results(tmp_path / "cells.jsonl", "text")
    assert again.get(cell.name, key_of(run))
    other = script.run_of(script.VARIANTS["spes"], 1, script.FULL)
    assert again.get(cell.name, key_of(other)) is None


def test_all_variants_see_the_same_tokens_and_steps(script: ModuleType) -> None:
    for scale in (script.QUICK, script.FULL):
        for variant in script.VARIANTS.values():
            run = script.run_of(variant, 1, scale)
            steps = run.run.rounds * run.round.local_steps
            assert steps == run.schedule_steps == scale.steps
            assert run.run.peers * run.train.batch_tokens == script.SEQUENCES * scale.length
