import json
import logging
from pathlib import Path

import pytest

from swarm import durable
from swarm.errors import CorruptState, StateError, StateLocked
from swarm.network.address_book import Remembered
from swarm.peer import state_directory
from swarm.peer.state_directory import (
    MAX_ENTERED_BY,
    MAX_KNOWN_PEERS,
    RunDirectory,
    StateDirectory,
)


def test_a_line_torn_by_a_kill_spoils_no_other_line(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    run.append_event("started", height=0)
    with run.events_path.open("ab") as file:
        file.write(b'{"event": "appl')
    run.append_event("started", height=3)
    lines = run.events_path.read_bytes().splitlines()
    assert len(lines) == 3
    assert [json.loads(line)["height"] for line in (lines[0], lines[2])] == [0, 3]


def test_a_history_of_weeks_is_bounded_and_its_newest_lines_are_all_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_directory, "MAX_EVENTS_BYTES", 4096)
    run = RunDirectory(tmp_path)
    for number in range(1000):
        run.append_event("applied", round=number)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 2 * 4096 + 100
    rounds = [json.loads(line)["round"] for line in durable.read_lines(run.events_path)]
    assert rounds == list(range(rounds[0], 1000)) and len(rounds) > 4096 // 60


@pytest.mark.parametrize("name", ["config.json", "founding"])
def test_a_file_of_another_user_is_not_taken_for_a_damaged_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    run = RunDirectory(tmp_path)
    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(StateError, match=f"{name}: Permission .*as the user that owns") as found:
        run.read_config() if name == "config.json" else run.read_founding()
    assert not isinstance(found.value, CorruptState), "it would be written anew"


def test_runs_of_before_that_take_much_are_named_with_their_folders(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def apparent(folder: Path) -> int:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

    caplog.set_level(logging.INFO)
    monkeypatch.setattr(durable, "bytes_on_disk", apparent)
    state = StateDirectory(tmp_path)
    for name, size in {"old-0000000000000000": 2 * 10**9, "now-1111111111111111": 10**10}.items():
        folder = state.run(name).path
        (folder / "packs").mkdir(parents=True)
        (folder / "record").touch()
        with (folder / "packs" / "0").open("wb") as file:
            file.truncate(size)  # without a byte on the disk
    state.current_run = "now-1111111111111111"
    state.name_earlier_runs()
    (line,) = (record.getMessage() for record in caplog.records)
    assert f"{tmp_path / 'runs' / 'old-0000000000000000'} 2.0 GB; remove" in line
    assert "now-" not in line
    caplog.clear()
    (state.run("old-0000000000000000").path / "packs" / "0").unlink()
    state.name_earlier_runs()
    assert not caplog.records
    state.close()


def test_an_applied_line_repeats_what_changed_and_the_first_of_a_file_says_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(tmp_path)
    for number, members in enumerate([["a", "b"], ["a", "b"], ["a"], ["a"]]):
        run.append_event("applied", round=number, members=members)
        run.append_event("progress", text="another line")
    found = [json.loads(line).get("members") for line in durable.read_lines(run.events_path)][::2]
    assert found == [["a", "b"], None, ["a"], None]
    monkeypatch.setattr(state_directory, "MAX_EVENTS_BYTES", 1)
    run.append_event("progress", text="the last one of its file")
    run.append_event("applied", round=4, members=["a"])
    assert json.loads(durable.read_lines(run.events_path)[-1])["members"] == ["a"]


def test_a_directory_in_use_is_refused_until_it_is_closed(tmp_path: Path) -> None:
    first = StateDirectory(tmp_path)
    with pytest.raises(StateLocked):
        StateDirectory(tmp_path)
    first.close()
    StateDirectory(tmp_path).close()


def test_port_run_and_known_peers_are_there_after_a_restart(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path)
    assert (state.port, state.current_run, state.known_peers) == (None, None, ())
    state.port, state.current_run = 4001, "run-0123456789abcdef"
    state.known_peers = [Remembered("a"), Remembered("b", 7.0), Remembered("a", 9.0)]
    state.close()
    again = StateDirectory(tmp_path)
    assert (again.port, again.current_run) == (4001, "run-0123456789abcdef")
    assert again.known_peers == (("a", 9.0), ("b", 7.0)), "freshest first"
    again.close()


def test_a_damaged_list_of_peers_costs_its_damaged_lines_only(tmp_path: Path) -> None:
    (tmp_path / "known_peers").write_bytes(b"a 5\n\xff\xfe too many words\nb\nc never\n\0\n")
    state = StateDirectory(tmp_path)
    assert {text for text, _ in state.known_peers} == {"a", "b", "\0"}
    state.close()


def test_only_the_freshest_peers_are_kept(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path)
    state.known_peers = [Remembered(f"peer{number}", float(number)) for number in range(500)]
    assert len(state.known_peers) == MAX_KNOWN_PEERS
    assert state.known_peers[0] == ("peer499", 499.0)
    state.close()


def test_those_by_whom_a_run_was_entered_last_are_kept(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    assert run.read_entered_by() == ()
    for number in range(MAX_ENTERED_BY + 5):
        run.add_entered_by([f"peer{number}", "always"])
    kept = run.read_entered_by()
    assert len(kept) == MAX_ENTERED_BY and kept[:3] == ("peer68", "always", "peer67")


def test_a_damaged_head_that_was_vouched_for_is_none(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert run.read_vouched() is None
    run.write_vouched("a1" * 32)
    assert run.read_vouched() == "a1" * 32
    for content in (b"", b"a1" * 31, b"\xff" * 64):
        (tmp_path / "vouched").write_bytes(content)
        assert run.read_vouched() is None
