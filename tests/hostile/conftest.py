"""Real nodes on loopback, as the network's own tests make them, and a run of one peer."""

import pytest

from tests.network.conftest import Peers, lasting_peers, peers
from tests.network.runs.test_observer import Lonely

__all__ = ["lasting_peers", "lonely", "peers"]


@pytest.fixture(scope="module")
def lonely(lasting_peers: Peers) -> Lonely:
    """A run of one peer, as far as others can see."""
    one = Lonely()
    one.start(lasting_peers)
    return one
