"""A peer's place in the network: libp2p's daemon, the DHT node, and probes of other peers."""
