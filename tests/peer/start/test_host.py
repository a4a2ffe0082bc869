"""The name of a machine in a run."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter

from swarm.config import PeerConfig
from swarm.errors import ConfigError, NobodyReachable
from swarm.network.runs.signed_invitations import read_invitation
from swarm.network.wire.identity import load_or_create_identity
from swarm.peer.machine.state_directory import StateDirectory
from swarm.peer.start.host import Host, gathering_of
from swarm.peer.status.observing import UNOBSERVED
from swarm.protocol.records.records import Word
from swarm.protocol.values.invitation import GATHERING, as_text
from tests.peer.machine.test_state_directory import given


def host(config: PeerConfig) -> Host:
    node: Any = SimpleNamespace(peer_id="12D3KooWabcd")
    nothing: Any = None
    return Host(config, nothing, node, nothing, True, nothing, nothing)


@pytest.mark.parametrize("length", [3, 59, 60, 64])
def test_any_hosts_name_may_be_published(monkeypatch: pytest.MonkeyPatch, length: int) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * length)
    name = host(PeerConfig()).name
    assert TypeAdapter(Word).validate_python(name) == name
    assert name.endswith("-abcd") and (length > 59 or name.startswith("h" * length))


def test_a_name_that_nobody_would_take_is_refused_at_once() -> None:
    assert host(given("peer.name='Ülker 3'")).name == "Ülker 3"
    with pytest.raises(ConfigError, match=r"peer\.name"):
        given('peer.name="a\\u001bb"')


def test_a_join_that_was_killed_does_not_wait_where_nobody_answers(tmp_path: Path) -> None:
    """It has a run but no record, so it cannot continue alone."""
    state, gone = StateDirectory(tmp_path), load_or_create_identity(tmp_path / "gone.key").peer_id
    state.current_run = "demo-0123456789abcdef"
    state.close()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # nobody listens there
        dead = f"/ip4/127.0.0.1/tcp/{free.getsockname()[1]}/p2p/{gone}"
        config = given("network.client_mode=true", f"network.initial_peers=[{dead!r}]")
        with pytest.raises(NobodyReachable, match=f"no known peer answers: {dead}"):
            Host.open(config, tmp_path, UNOBSERVED)


def test_a_founder_that_is_started_again_gathers_with_the_same_line(tmp_path: Path) -> None:
    identity = load_or_create_identity(tmp_path / "key")
    state = StateDirectory.unlocked(tmp_path)
    first = gathering_of(state, identity, 3)
    assert gathering_of(state, identity, 3) == first
    assert first.run.startswith(GATHERING) and first.invitation.invitation.uses == 2
    assert read_invitation(as_text(first.invitation)) == first.invitation
    assert (tmp_path / "gathering").stat().st_mode & 0o777 == 0o600
    state.end_gathering()
    state.end_gathering()
    second = gathering_of(state, identity, 3)
    assert second.run != first.run and second.invitation.secret != first.invitation.secret
    (tmp_path / "gathering").write_text("damaged")
    assert gathering_of(state, identity, 3).run != second.run
