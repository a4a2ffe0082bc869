"""Peers of the scenarios are forked, except in scenarios marked `fresh`."""

from collections.abc import Iterator

import pytest

from swarm.emulation import local_peer
from tests.scenarios import forked


@pytest.fixture(scope="module", autouse=True)
def forked_peers() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(local_peer, "launch", forked.launch)
        yield


@pytest.fixture(autouse=True)
def fresh_peers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("fresh"):
        monkeypatch.setattr(local_peer, "launch", forked.launch_interpreter)
