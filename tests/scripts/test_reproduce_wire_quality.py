"""Ways to exchange at a small scale: their bytes, and resuming a killed reproduction."""

import json
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
TWO = ("main/exact/1", "main/home/1")


def test_bytes_are_those_of_the_wanted_shares(script: ModuleType) -> None:
    share = {name: script.share_of_diloco(script.VARIANTS[name]) for name in script.VARIANTS}
    assert share["diloco"] == 1
    assert share["home"] == share["home-late"] < 1 / 16
    assert share["two-owners"] < 1 / 16
    assert share["home-half"] < 1 / 32
    assert share["b1"] < share["b2-b1"] < share["b2"] < share["exact"]


def test_variants_differ_in_their_exchange_alone(script: ModuleType) -> None:
    """All take the same number of steps and tokens, and merge after the same steps."""
    for variant in script.VARIANTS.values():
        run = script.run_of(variant, 1, script.FULL)
        assert run.run.rounds * run.round.local_steps == run.schedule_steps == script.FULL.steps
        assert run.run.peers * run.train.batch_tokens == script.SEQUENCES * script.FULL.length
        assert run.merging.interval_steps % run.round.local_steps == 0


def test_a_killed_reproduction_goes_on_and_a_cell_counts_with_its_delay_alone(
    script: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"Line {number} of a small text.\n" * 40)
    out, svg = tmp_path / "cells.jsonl", tmp_path / "wire.svg"
    common = ["--quick", "--corpus", str(folder), "--out", str(out)]
    script.main([*common, "--cells", TWO[0]])
    script.main([*common, "--cells", *TWO, "--plot", str(svg)])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [line["cell"] for line in lines] == list(TWO)
    assert {line["tokens"] for line in lines} == {16 * 16 * 20}
    printed = capsys.readouterr().out
    assert "| shared b2, experts b1, 5 slices | 1/18.4 | 1 |" in printed
    assert (
        len(ElementTree.parse(svg).getroot().findall("{http://www.w3.org/2000/svg}circle")) == 2
    )  # exact SPES too

    from cells import key_of  # the folder is on the path only in this test

    home, late = (script.VARIANTS[name] for name in ("home", "home-late"))
    run = script.run_of(home, 1, script.QUICK)
    assert run == script.run_of(late, 1, script.QUICK)
    assert key_of(run, home.delay) == lines[1]["run"]
    assert key_of(run, late.delay) != lines[1]["run"]
