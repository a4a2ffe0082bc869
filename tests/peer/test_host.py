"""What a machine is called in a run."""

import socket
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter

from swarm.config import PeerConfig
from swarm.errors import ConfigError
from swarm.peer.host import Host
from swarm.protocol.figures import Word
from tests.peer.test_kept_settings import given


def host(config: PeerConfig) -> Host:
    node: Any = SimpleNamespace(peer_id="12D3KooWabcd")
    nothing: Any = None
    return Host(config, nothing, node, nothing, True, nothing, nothing)


@pytest.mark.parametrize("length", [3, 59, 60, 64])
def test_the_name_of_any_host_may_be_published(
    monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "h" * length)
    name = host(PeerConfig()).name
    assert TypeAdapter(Word).validate_python(name) == name
    assert name.endswith("-abcd") and (length > 59 or name.startswith("h" * length))


def test_a_name_that_nobody_would_take_is_refused_at_once() -> None:
    assert host(given("peer.name='Ülker 3'")).name == "Ülker 3"
    with pytest.raises(ConfigError, match=r"peer\.name"):
        given('peer.name="a\\u001bb"')
