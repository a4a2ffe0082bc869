"""A finished run is shown from the histories of its peers, manifest by manifest."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from peers.actions.monitor_files import HistoryFile, Replay
from peers.monitor import main
from swarm.errors import ConfigError, SwarmError
from swarm.monitor.health import REMEDIES, Fault
from swarm.monitor.history import decode_kept, encode_kept, kept_of, with_history
from swarm.monitor.schema import as_json
from swarm.monitor.snapshot import Agreement, Snapshot
from tests.monitor.crowds import WORKERS, crowd, sighting
from tests.monitor.small_swarm import project

RUN = "demo-0123456789abcdef"


def applied(round_: int, digest: str, *, counted: bool = True, at: float = 0.0) -> dict[str, Any]:
    return {
        "event": "applied", "time": at or 1000.0 + 10 * round_, "generation": "0",
        "height": round_, "round": round_, "kind": "quorum", "digest": digest * 64,
        "step": 5 * round_, "tokens": 100 * round_, "members": ["QmA", "QmB"],
        "contributors": ["QmA", "QmB"] if counted else ["QmA"], "owned": [0],
        "owners": {"0": ["QmA"], "1": ["QmB"], "10": ["QmA", "QmB"]},
        "trained_tokens": 50, "counted": counted, "tokens_lost": 0, "wait_s": 1.0, "steps": 5,
        "training_s": 2.0, "seconds": 10.0, "blob_bytes_sent": 7, "blob_bytes_received": 8,
        "control_bytes_sent": 9, "moments_bytes_sent": 0, "reason": f"round {round_} decided",
        "routing": {"max_load": 1.5, "idle_experts": 0, "dropped": 0.0, "similarity": None,
                    "shares": [200, 300, 500], "pairs": [[0, 2, 0.25]]},
        "why_not": "" if counted else "too late: still training", "grad_norm": 1.0,
        "grad_spikes": 0,
        "phases": {"training": {"seconds": 2.0, "peak_rss_bytes": 1}},
    }  # fmt: skip


def write(folder: Path, peer: str, events: list[dict[str, Any]], torn: str = "") -> Path:
    run = folder / "runs" / RUN
    run.mkdir(parents=True)
    (folder / "current_run").write_text(f"{RUN}\n")
    lines = [{"event": "started", "time": 999.0, "peer_id": peer}, *events]
    text = "".join(json.dumps(line) + "\n" for line in lines) + torn
    (run / "events.jsonl").write_text(text)
    return folder


@pytest.fixture
def swarm(tmp_path: Path) -> Path:
    """A swarm of two peers. The second is late in the second round, and killed after it."""
    loss = [{"event": "validation", "time": 1011.0, "round": 1, "digest": "a", "val_loss": 3.5}]
    late = applied(2, "b", counted=False, at=1021.0)
    last = applied(3, "c") | {"workers": json.loads(json.dumps(asdict(WORKERS))) | {"ranks": []}}
    write(tmp_path / "peer-0", "QmA", [applied(1, "a"), *loss, late, last])
    write(tmp_path / "peer-1", "QmB", [applied(1, "a", at=1010.5), late], torn='{"event": "app')
    return tmp_path


def rounds_of(replay: Replay) -> list[Snapshot]:
    return [replay.look() for _ in range(3)]


def test_each_manifest_is_a_frame_and_the_last_one_stays(swarm: Path) -> None:
    replay = Replay(swarm)
    first, second, third = rounds_of(replay)
    assert [frame.round for frame in (first, second, third)] == [1, 2, 3]
    assert replay.look() == third
    assert (first.run_id, first.name, first.rounds_total) == (RUN, "demo", 3)
    assert [row.expert for row in first.experts] == [0, 1, 10]
    assert first.losses == ((1, 3.5),) and second.left_out == ("QmB",)
    assert [row.agreement for row in third.peers] == [Agreement.EQUAL, Agreement.BEHIND]
    assert all(row.agreement is Agreement.EQUAL for row in (*first.peers, *second.peers))
    assert not as_json(third)["live"]
    assert [cause["text"] for cause in as_json(second)["causes"]] == [
        f"round 2 went without peer-1: too late: still training ({REMEDIES[Fault.LATE]})"
    ]
    assert first.peers[0].record.routing and first.peers[0].record.routing.pairs == ((0, 2, 250),)
    assert [row.record.workers for row in third.peers] == [WORKERS, None]
    assert [row.record.name for row in third.peers] == ["peer-0", "peer-1"]
    assert third.events[-1].text.startswith("round 3 decided")
    json.dumps(as_json(third), allow_nan=False)


def test_one_peers_folder_is_enough(swarm: Path) -> None:
    assert [len(frame.peers) for frame in rounds_of(Replay(swarm / "peer-0"))] == [1, 1, 1]


def test_a_loss_that_is_no_number_is_left_out(tmp_path: Path) -> None:
    lost = {"event": "validation", "time": 1011.0, "round": 1, "digest": "a", "val_loss": math.nan}
    frame = Replay(write(tmp_path / "peer", "QmA", [applied(1, "a"), lost])).look()
    assert frame.losses == () and json.dumps(as_json(frame), allow_nan=False)


def test_a_folder_without_history_and_one_of_another_version_are_told(tmp_path: Path) -> None:
    with pytest.raises(SwarmError, match="knows of no run"):
        Replay(tmp_path)
    old = applied(1, "a")
    del old["owners"]
    write(tmp_path / "peer", "QmA", [old])
    with pytest.raises(ConfigError, match=r"another version: 'owners'"):
        Replay(tmp_path / "peer")
    write(tmp_path / "fresh", "QmA", [])
    with pytest.raises(ConfigError, match="no manifest was applied yet"):
        Replay(tmp_path / "fresh")


def test_the_program_shows_a_run_that_is_over(swarm: Path) -> None:
    result = CliRunner().invoke(main, ["--replay", str(swarm), "--once", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["round"] == 3, "as it ended"
    result = CliRunner().invoke(main, ["--replay", str(swarm), "--once"])
    assert result.exit_code == 0 and "round 3/3" in result.stdout


# ---------------------------------------------------------------- history


def test_what_is_kept_reads_back_as_it_was() -> None:
    kept = kept_of(crowd(4, 8, 9))
    assert kept.losses and kept.merges and kept.rounds and kept.events
    assert decode_kept(encode_kept(kept)) == kept


def test_history_goes_on_after_a_restart_of_the_monitor(tmp_path: Path) -> None:
    path, before = tmp_path / "history.json", crowd(4, 8, 9)
    HistoryFile(path).keep(before)
    first = project(sighting(4, 8, 11))
    again = HistoryFile(path)
    found = with_history(first, again.before(first))
    assert found.rounds[: len(before.rounds)] == before.rounds
    last = found.rounds[-1]
    assert (last.round, last.seconds) == (11, 20.0), "the mean over the round that was missed"
    assert set(before.events) <= set(found.events) and set(before.losses) <= set(found.losses)
    again.keep(found)
    kept = HistoryFile(path).before(first)
    assert kept is not None and kept.rounds == found.rounds


def test_the_history_of_another_run_is_left_aside(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    HistoryFile(path).keep(crowd(4, 8, 9))
    other = project(replace(sighting(4, 8, 9), run=RUN))
    assert HistoryFile(path).before(other) is None


def test_what_cannot_be_read_of_a_history_is_passed_over_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Older histories have sums of strangers' figures, which could be infinite: null in JSON."""
    path, before = tmp_path / "history.json", crowd(4, 8, 9)
    HistoryFile(path).keep(before)
    found = json.loads(path.read_bytes())
    found["rounds"][1]["tokens_per_s"] = None
    found["rounds"].append({})
    found["losses"] = [[-1, 1.7e308], *found["losses"], [10**6, None]]
    path.write_text(json.dumps(found))
    first = project(sighting(4, 8, 11))
    kept = HistoryFile(path).before(first)
    assert kept is not None
    assert (kept.losses, kept.events) == (before.losses, before.events)
    assert kept.rounds == (before.rounds[0], *before.rounds[2:])
    assert "4 entries of the history (losses, rounds) cannot be read" in caplog.text


@pytest.mark.parametrize("change", [{"run_id": 7}, {"losses": None}, {"rounds": {}}])
def test_a_history_that_is_another_object_is_no_history(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "history.json"
    path.write_text(json.dumps(json.loads(encode_kept(kept_of(crowd(4, 8, 9)))) | change))
    with pytest.raises(ConfigError, match="--history"):
        HistoryFile(path)


def test_a_file_that_is_no_history_is_told_and_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary")
    with pytest.raises(ConfigError, match="--history"):
        HistoryFile(path)
    assert path.read_text() == "dear diary"
