"""A peer that is started again listens where it did and is called what it was."""

import logging
import time
from pathlib import Path

import pytest

from swarm.config import PeerConfig, parse_config
from swarm.errors import DataQuotaSpent, StateError
from swarm.network.identity import load_or_create_identity
from swarm.network.invitations import credential_for, invite
from swarm.peer.host import Host
from swarm.peer.kept_settings import identity_path_of, keep, kept_credential, with_kept
from swarm.peer.observing import UNOBSERVED
from swarm.peer.quota import count_of
from swarm.peer.state_directory import RunDirectory, StateDirectory
from swarm.peer.way_in import path_of_key


def given(*settings: str) -> PeerConfig:
    return parse_config(PeerConfig, "", source="x", overrides=settings)


LOOPBACK = 'network.host_maddrs=["/ip4/127.0.0.1/tcp/0"]'


def start(config: PeerConfig, path: Path) -> PeerConfig:
    """What a start goes by that succeeds."""
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
    assert again.peer.capacity == 1.0, "what it computes with is not kept"


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


def test_a_peer_that_only_dialled_out_does_so_again_until_it_is_told_where_to_listen(
    path: Path,
) -> None:
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
    assert identity_path_of(state, "~/k") == Path("~/k").expanduser(), "what is named now wins"


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
