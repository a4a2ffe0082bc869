"""swarm-data info of a run: the share of its text that was read, by the agreed state."""

import dataclasses
import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from peers.actions import text_coverage
from peers.data import main
from swarm.config import RunConfig, parse_config
from swarm.errors import DataError, NobodyReachable, StateError
from swarm.monitor.snapshot import Coverage, Sighting, snapshot_of
from swarm.network.rounds.record_file import RecordFile
from swarm.network.runs.run_founding import founding_manifest
from swarm.peer.machine.state_directory import StateDirectory
from swarm.protocol.messages.events import Record
from swarm.protocol.values.digests import digest_of
from swarm.protocol.values.layout import layout_of
from swarm.protocol.values.manifest import Founding
from swarm.protocol.values.texts import Text
from swarm.run_files import find_file, read_text
from tests.peer_records import peer_record

RUN_ID = "demo-0123456789abcdef"
TEXT = Text("books", "byte", digest_of(b"text"), 500, 64_000, 1000)


def invoke(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    return result.exit_code, result.output


def a_state(folder: Path, text: Text | None, cursor: int) -> Path:
    run = parse_config(RunConfig, read_text(find_file(Path("demo"), "runs")), source="demo")
    layout = layout_of(run)
    initial = {unit.unit: (digest_of(unit.unit.encode()), unit.num_bytes) for unit in layout.units}
    config = digest_of(b"config")
    founding = Founding("QmA", "nonce", config, 10, digest_of(b"x"), 1, text)
    manifest = founding_manifest(founding, run, layout, initial, {"QmA": 1.0})
    if text:
        dealt = {"QmA": ((cursor - 100, cursor),)}
        manifest = dataclasses.replace(manifest, cursor=cursor, holes=((10, 14),), dealt=dealt)
    state = StateDirectory(folder)
    directory = state.run(RUN_ID)
    directory.write_config(run)
    RecordFile(directory.record_path).write(Record(manifest, None, None))
    state.current_run = RUN_ID
    state.close()
    return folder


@pytest.mark.parametrize(
    ("cursor", "covered", "repeated"), [(500, 396, 0), (1104, 1000, 0), (2500, 1000, 1396)]
)
def test_a_stopped_peers_directory_says_what_is_covered_open_and_repeated(
    tmp_path: Path, cursor: int, covered: int, repeated: int
) -> None:
    code, said = invoke("info", a_state(tmp_path / "state", TEXT, cursor), "--json")
    assert code == 0, said
    found = json.loads(said)
    assert found == {
        "run": "demo, round 0",
        "windows": 1000,
        "covered": covered,
        "being_read": 100,
        "open": 4,
        "repeated": repeated,
    }


def test_a_run_without_a_common_text_and_a_running_peer_are_errors(tmp_path: Path) -> None:
    state = a_state(tmp_path / "state", None, 0)
    code, said = invoke("info", state)
    assert code == DataError.exit_code and "no agreed text" in said
    holder = StateDirectory(state)
    code, said = invoke("info", state)
    holder.close()
    assert code == StateError.exit_code and "--initial-peers ADDRESS" in said


def test_a_runs_peers_are_asked_and_one_of_both_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Seen:
        name, round, step, coverage = "demo", 7, 70, Coverage(1000, 300, 100, 0)

    asked: list[object] = []
    monkeypatch.setattr(text_coverage, "look", lambda *args: asked.append(args) or Seen)
    code, said = invoke("info", "--initial-peers", "/ip4/127.0.0.1/tcp/1/p2p/QmA", "--run-id", "r")
    assert code == 0 and "demo, round 7" in said and "300" in said
    assert asked == [(("/ip4/127.0.0.1/tcp/1/p2p/QmA",), "r")]
    assert invoke("info")[0] == 2
    assert invoke("info", "x", "--initial-peers", "/ip4/127.0.0.1/tcp/1/p2p/QmA")[0] == 2


def test_peers_that_give_no_agreed_state_are_not_taken_for_peers_with_texts_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_state(tmp_path, None, 0)
    record = RecordFile(tmp_path / "runs" / RUN_ID / "record").read()
    assert record is not None
    for tip, fault, words in (
        (None, NobodyReachable, "none of its peers gave the agreed state"),
        (record.tip, DataError, "no agreed text is known"),
    ):
        seen = snapshot_of(Sighting(RUN_ID, "demo", {"QmA": peer_record("QmA")}, {}, {}, tip))
        monkeypatch.setattr(text_coverage, "look", lambda *_, seen=seen: seen)
        code, said = invoke("info", "--initial-peers", "/ip4/127.0.0.1/tcp/1/p2p/QmA")
        assert code == fault.exit_code and words in said
