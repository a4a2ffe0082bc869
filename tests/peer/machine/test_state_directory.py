"""A restarted peer listens at its old port and keeps its name."""

import json
import logging
import time
from pathlib import Path

import pytest

from swarm import durable
from swarm.config import PeerConfig, parse_config
from swarm.errors import CorruptState, DataQuotaSpent, StateError, StateLocked
from swarm.network.runs.signed_invitations import credential_for, invite
from swarm.network.wire.address_book import Remembered
from swarm.network.wire.identity import load_or_create_identity
from swarm.peer.machine import state_directory
from swarm.peer.machine.state_directory import (
    MAX_ENTERED_BY,
    MAX_KNOWN_PEERS,
    RunDirectory,
    StateDirectory,
    identity_path_of,
    keep,
    kept_credential,
    with_kept,
)
from swarm.peer.start.host import Host
from swarm.peer.start.quota import count_of
from swarm.peer.start.start_checks import path_of_key
from swarm.peer.status.observing import UNOBSERVED


def given(*settings: str) -> PeerConfig:
    return parse_config(PeerConfig, "", source="x", overrides=settings)


LOOPBACK = 'network.host_maddrs=["/ip4/127.0.0.1/tcp/0"]'


def start(config: PeerConfig, path: Path) -> PeerConfig:
    """The settings of a start that succeeds."""
    whole = with_kept(config, path)
    keep(config, path)
    return whole


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "settings"


def test_what_was_given_once_need_not_be_repeated(path: Path) -> None:
    first = start(given(LOOPBACK, "peer.name=alice", "peer.capacity=2.0"), path)
    again = start(given("peer.linger_s=0.0"), path)
    assert first.network.host_maddrs == again.network.host_maddrs == ("/ip4/127.0.0.1/tcp/0",)
    assert again.peer.name == "alice"
    assert again.peer.linger_s == 0.0
    assert again.peer.capacity == 1.0, "its hardware is not kept"


def test_what_is_given_now_wins_and_is_kept_from_then_on(path: Path) -> None:
    start(given(LOOPBACK, "peer.name=alice"), path)
    assert start(given("peer.name=bob"), path).peer.name == "bob"
    later = start(given(), path)
    assert (later.peer.name, later.network.host_maddrs) == ("bob", ("/ip4/127.0.0.1/tcp/0",))


def test_a_peer_that_was_given_nothing_keeps_nothing(path: Path) -> None:
    assert start(given(), path) == PeerConfig()
    assert not path.exists()


@pytest.mark.parametrize(
    "content", ["", "[]", '{"network.host_maddrs": ["foo"]}', '{"peer.name": 5}', '{"x": 1}']
)
def test_a_damaged_file_is_passed_over(path: Path, content: str) -> None:
    path.write_text(content)
    assert start(given(), path) == PeerConfig()


def test_a_peer_that_only_dialled_out_does_so_until_told_where_to_listen(path: Path) -> None:
    start(given("network.client_mode=true"), path)
    assert start(given(), path).network.client_mode
    assert start(given("peer.name=home"), path).network.client_mode
    assert not start(given(LOOPBACK), path).network.client_mode
    assert not start(given(), path).network.client_mode


def test_what_its_line_may_carry_holds_for_later_starts_too_and_is_said(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    limits = {"data_quota_gb": 200.0, "max_upload_mbit": 20.0, "max_download_mbit": 100.0}
    ports = {"direct_port": 31_400}
    start(given(*(f"network.{key}={value}" for key, value in (limits | ports).items())), path)
    assert not caplog.text, "all of it is of this start"
    again = start(given("network.max_upload_mbit=10.0"), path).network
    assert again.model_dump(include={*limits, *ports}) == {
        **limits, **ports, "max_upload_mbit": 10.0,
    }  # fmt: skip
    kept = "network.data_quota_gb=200.0, network.direct_port=31400, network.max_download_mbit=100.0"
    assert caplog.messages == [f"settings kept from an earlier start: {kept}"]


def test_a_quota_of_an_earlier_start_is_looked_at_before_anything_is_moved(tmp_path: Path) -> None:
    state = StateDirectory(tmp_path)
    start(given("network.data_quota_gb=1.0"), state.settings_path)
    count = count_of(state)
    count.add(2 * 10**9, time.time())
    count.write()
    state.close()
    with pytest.raises(DataQuotaSpent, match="2 of 1 GB"):
        Host.open(given("network.client_mode=true"), tmp_path, UNOBSERVED)


def test_a_key_that_is_elsewhere_is_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, there = tmp_path / "state", tmp_path / "there"
    state.mkdir()
    there.mkdir()
    monkeypatch.chdir(there)
    assert identity_path_of(state, None) == state / "identity.key"
    first = start(given("network.identity_path=mine.key"), state / "settings")
    monkeypatch.chdir(tmp_path)
    again = start(given(), state / "settings")
    assert first.network.identity_path == again.network.identity_path == str(there / "mine.key")
    assert identity_path_of(state, None) == there / "mine.key"
    assert identity_path_of(state, "~/k") == Path("~/k").expanduser(), "the new value wins"


def test_a_peer_whose_key_is_missing_does_not_come_back_as_a_stranger(tmp_path: Path) -> None:
    here, elsewhere = given("network.client_mode=true"), tmp_path / "mine.key"
    moved = given("network.client_mode=true", f"network.identity_path={str(elsewhere)!r}")
    run = tmp_path / "state" / "runs" / "demo-0123456789abcdef"
    run.mkdir(parents=True)
    (run / "record").write_bytes(b"a record")
    for config, key in ((here, tmp_path / "state" / "identity.key"), (moved, elsewhere)):
        with pytest.raises(StateError, match=f"{key} is missing.*{run.name}") as refused:
            Host.open(config, tmp_path / "state", UNOBSERVED)
        assert "--identity-path" in refused.value.hint and not key.exists()
        in_place = tmp_path / "state" / "identity.key"
        assert identity_path_of(tmp_path / "state", None) == in_place, "no wrong path is kept"
    state = StateDirectory(tmp_path / "state")
    load_or_create_identity(elsewhere)
    assert path_of_key(str(elsewhere), state) == elsewhere
    (run / "record").unlink()
    assert path_of_key(None, state) == state.identity_path
    state.close()


def test_a_member_that_comes_back_has_its_invitation_still(tmp_path: Path) -> None:
    identity = load_or_create_identity(tmp_path / "identity.key")
    first, second = (
        credential_for(invite(identity, "run-1", uses=1, last_round=9), identity) for _ in range(2)
    )
    directory = RunDirectory(tmp_path)
    assert kept_credential(None, directory) is None
    assert kept_credential(first, directory) == first
    assert kept_credential(None, directory) == first
    assert kept_credential(second, directory) == second
    assert kept_credential(None, directory) == second


def test_a_damaged_invitation_is_none(tmp_path: Path) -> None:
    identity = load_or_create_identity(tmp_path / "identity.key")
    directory = RunDirectory(tmp_path)
    private = invite(identity, "run-1", uses=1, last_round=9)
    kept_credential(credential_for(private, identity), directory)
    whole = (tmp_path / "credential").read_bytes()
    assert (tmp_path / "credential").stat().st_mode & 0o777 == 0o600
    assert private.secret.encode() not in whole
    for content in (b"", whole[:-9], b"{" + whole, b"\xff" * 80):
        (tmp_path / "credential").write_bytes(content)
        assert kept_credential(None, directory) is None


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
    assert not isinstance(found.value, CorruptState), "it would be written again"


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
