"""A peer that is started again listens where it did and is called what it was."""

from pathlib import Path

import pytest

from swarm.config import PeerConfig, parse_config
from swarm.peer.kept_settings import with_kept


def given(*settings: str) -> PeerConfig:
    return parse_config(PeerConfig, "", source="x", overrides=settings)


LOOPBACK = 'network.host_maddrs=["/ip4/127.0.0.1/tcp/0"]'


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "settings"


def test_what_was_given_once_need_not_be_repeated(path: Path) -> None:
    first = with_kept(given(LOOPBACK, "peer.name=alice", "peer.capacity=2.0"), path)
    again = with_kept(given("peer.linger_s=0.0"), path)
    assert first.network.host_maddrs == again.network.host_maddrs == ("/ip4/127.0.0.1/tcp/0",)
    assert again.peer.name == "alice"
    assert again.peer.linger_s == 0.0
    assert again.peer.capacity == 1.0, "only name and addresses are kept"


def test_what_is_given_now_wins_and_is_kept_from_then_on(path: Path) -> None:
    with_kept(given(LOOPBACK, "peer.name=alice"), path)
    assert with_kept(given("peer.name=bob"), path).peer.name == "bob"
    later = with_kept(given(), path)
    assert (later.peer.name, later.network.host_maddrs) == ("bob", ("/ip4/127.0.0.1/tcp/0",))


def test_a_peer_that_was_given_nothing_keeps_nothing(path: Path) -> None:
    assert with_kept(given(), path) == PeerConfig()
    assert not path.exists()


@pytest.mark.parametrize(
    "content", ["", "[]", '{"network.host_maddrs": ["foo"]}', '{"peer.name": 5}', '{"x": 1}']
)
def test_a_damaged_file_is_passed_over(path: Path, content: str) -> None:
    path.write_text(content)
    assert with_kept(given(), path) == PeerConfig()
