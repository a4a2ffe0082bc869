"""Real nodes on loopback, as the network's own tests make them."""

from tests.network.conftest import lasting_peers, peers

__all__ = ["lasting_peers", "peers"]
