"""A peer's place in the network: the daemon's lives, the DHT node, and probes of other peers."""
