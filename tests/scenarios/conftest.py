"""Peers of the scenarios are forked, where nothing asks for interpreters of their own."""

from collections.abc import Iterator

import pytest

from swarm.emulation import local_peer
from tests.scenarios import forked


@pytest.fixture(scope="module", autouse=True)
def forked_peers(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not request.node.get_closest_marker("fresh"):
            patch.setattr(local_peer, "launch", forked.launch)
        yield
