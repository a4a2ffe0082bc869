"""Connections between peers: libp2p's daemon, TCP streams, relays, and what a peer may cost."""
