"""The picture of a run, drawn from events like those of peers."""

import itertools
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"
LOSSES = {0: 5.5, 1: 2.8, 2: 2.5}
SENT = {1: 2_000_000, 2: 1_500_000}
MERGE = 500_000


def write_events(folder: Path, *, measures: bool, run: str = "demo-1") -> None:
    """One peer's events of two rounds, with a merge after the second."""
    folder.mkdir(parents=True)
    events: list[dict[str, object]] = [{"event": "started", "run": run}]
    for at, sent in SENT.items():
        events.append({"event": "applied", "kind": "quorum", "round": at, "blob_bytes_sent": sent})
    events.append({"event": "applied", "kind": "merge", "round": 2, "blob_bytes_sent": MERGE})
    if measures:
        events += [
            {"event": "validation", "round": at, "val_loss": loss} for at, loss in LOSSES.items()
        ]
    lines = [json.dumps(event) for event in events]
    torn = '{"event": "applied", "kind": "quo'
    (folder / "events.jsonl").write_text("\n".join([*lines, torn]))


def plot(*places: Path, out: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "benchmarks" / "plot_run.py", *places, "--out", out],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def numbers(element: ElementTree.Element, name: str) -> float:
    return float(element.attrib[name])


def test_losses_are_points_and_traffic_bars_of_the_right_height(tmp_path):
    write_events(tmp_path / "a" / "runs" / "demo-1", measures=True)
    write_events(tmp_path / "b" / "runs" / "demo-1", measures=False)
    ended = plot(tmp_path, out=tmp_path / "run.svg")
    assert (ended.returncode, ended.stderr) == (0, "")
    drawn = ElementTree.parse(tmp_path / "run.svg").getroot()

    (line,) = drawn.iter(f"{SVG}polyline")
    points = [tuple(map(float, pair.split(","))) for pair in line.attrib["points"].split()]
    assert len(points) == len(LOSSES)
    # y grows downwards in the picture, in proportion to the loss.
    falls = [(later[1] - earlier[1]) for earlier, later in itertools.pairwise(points)]
    assert falls[0] / falls[1] == pytest.approx((5.5 - 2.8) / (2.8 - 2.5), rel=0.02)

    bars = [rect for rect in drawn.iter(f"{SVG}rect") if "x" in rect.attrib]
    heights = [numbers(bar, "height") for bar in bars]
    assert heights[0] == pytest.approx(heights[1], abs=0.2), "a merge's bytes are of its round"
    words = " ".join(text.text or "" for text in drawn.iter(f"{SVG}text"))
    assert "2.500" in words
    assert "demo-1, 2 peers" in words


@pytest.mark.parametrize("what", ["nothing there", "no round yet", "two runs"])
def test_what_cannot_be_drawn_is_said_in_a_line(tmp_path, what):
    if what == "no round yet":
        (tmp_path / "events.jsonl").write_text('{"event": "started", "run": "demo-1"}\n')
    if what == "two runs":
        write_events(tmp_path / "a", measures=True)
        write_events(tmp_path / "b", measures=True, run="demo-2")
    ended = plot(tmp_path, out=tmp_path / "run.svg")
    assert ended.returncode == 1
    assert re.fullmatch(r"plot_run: .+\n", ended.stderr)
    assert not (tmp_path / "run.svg").exists()


@pytest.mark.parametrize("path", sorted((ROOT / "scripts" / "pictures").glob("*.svg")))
def test_pictures_in_the_repository_are_svg_with_a_title(path):
    drawn = ElementTree.parse(path).getroot()
    assert drawn.tag == f"{SVG}svg"
    assert drawn.findtext(f"{SVG}title")
