"""Losses and events from before the monitor's first look, from the histories of peers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

from peers.monitor_files import Earlier, HistoryFile
from swarm.errors import ConfigError
from swarm.monitor.earlier import earlier_of
from swarm.monitor.history import with_history
from swarm.monitor.snapshot import Topic
from tests.monitor.crowds import crowd
from tests.monitor.test_replay import applied

FIRST = crowd(4, 8, 9, seen_rounds=1)
NOW_S = FIRST.at


def line(**fields: Any) -> str:
    return json.dumps(fields)


def history(run: str | None = None) -> str:
    zeros = dict.fromkeys(
        ("blobs_sent", "blobs_received", "control_sent", "control_received"), 0
    ) | dict.fromkeys(("moments_sent", "moments_received"), 0)
    started = {"event": "started", "time": NOW_S - 900, "run": run or FIRST.run_id}
    merge = applied(2, "c", at=NOW_S - 800) | {"kind": "merge", "height": 3}
    loss = {"event": "validation", "digest": "a", "bits_per_byte": 1.0}
    return "\n".join([
        line(**started, peer_id="QmA", height=0, digest="a", **zeros),
        line(**applied(1, "a", at=NOW_S - 890)),
        line(**loss, time=NOW_S - 889, round=0, val_loss=5.5),
        line(**applied(2, "b", at=NOW_S - 850)),
        line(**loss, time=NOW_S - 849, round=9, val_loss=99.0),
        line(**merge),
        '{"event": "appl',
        "",
    ])  # fmt: skip


def test_histories_tell_losses_rounds_and_merges_once(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).write_text(history())
    found = Earlier([tmp_path / "one", tmp_path / "two"], None)
    before = found.before(FIRST)
    seen = with_history(FIRST, before)
    assert dict(seen.losses)[0] == 5.5, "records have forgotten it"
    assert dict(seen.losses)[9] == dict(FIRST.losses)[9], "a record is newer than a history"
    assert [event.topic for event in seen.events] == [Topic.ROUND, Topic.ROUND, Topic.MERGE]
    assert seen.events[0].text == "round 1 decided, with 2 of 2 members"
    assert [point.round for point in seen.rounds] == [9]


def test_what_the_monitor_itself_has_seen_comes_first(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text(history())
    kept = HistoryFile(tmp_path / "history")
    own = with_history(crowd(4, 8, 10, seen_rounds=1), FIRST)
    kept.keep(own)
    both = Earlier([tmp_path / "events.jsonl"], HistoryFile(tmp_path / "history"))
    seen = both.before(FIRST)
    assert seen and seen.events[-len(own.events) :] == own.events
    assert len(seen.events) == len(own.events) + 3 and seen.rounds == own.rounds


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (history("other-0000000000000000"), "they are of other-0000000000000000, and this is"),
        (history() + history("other-0000000000000000"), "several runs"),
        ('{"event": "applied", "time": 1.0}', "generation"),
        ("{}", "no event"),
    ],
)
def test_files_of_other_runs_and_versions_are_told(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=str(path)) as refused:
        Earlier([path], None).before(FIRST)
    assert said in str(refused.value) or said == "generation"
    assert "events.jsonl" in str(refused.value)


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_left_out(loss: float) -> None:
    """A peer writes down whatever its model gave; no JSON of the page has a place for it."""
    common = {"event": "validation", "time": NOW_S, "digest": "a", "bits_per_byte": 1.0}
    lines = [line(**common, round=k, val_loss=v) for k, v in ((1, 2.5), (2, loss))]
    assert earlier_of(lines).losses == ((1, 2.5),)


def test_no_line_is_no_history() -> None:
    assert earlier_of([]).run is None
