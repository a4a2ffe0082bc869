"""Real nodes on loopback, as the network's own tests make them, and a run of one peer."""

from pathlib import Path

import pytest

from swarm.network.node.node import Node
from tests.hostile.victim import Victim
from tests.network.conftest import Peers, lasting_peers, peers
from tests.network.runs.test_observer import Lonely

__all__ = ["lasting_peers", "lonely", "peers"]


@pytest.fixture(scope="module")
def lonely(lasting_peers: Peers) -> Lonely:
    """A run of one peer, as far as others can see."""
    one = Lonely()
    one.start(lasting_peers)
    return one


@pytest.fixture(scope="module")
def joiner(lasting_peers: Peers, lonely: Lonely) -> Node:
    return lasting_peers.node()


@pytest.fixture
def victim(peers: Peers, tmp_path: Path) -> Victim:
    return Victim(peers, tmp_path / "victim")
