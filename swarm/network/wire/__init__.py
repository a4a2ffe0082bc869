"""Connections between peers: libp2p's daemon, TCP streams, relays, and limits on a peer's cost."""
