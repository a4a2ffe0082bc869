"""How often a peer looks for the others of its run in the DHT, and at how many keys at a time.

Each of a key's holders sends all records of it, so a look at everything costs the more the larger
the run is, and all peers look. Parts of a swarm that forgot each other meet as soon as one peer of
the one sees one of the other, so the more peers there are, the less each has to look.
"""

from __future__ import annotations

from swarm.protocol.records import HEARTBEAT_S, NUM_SHARDS

PEERS_A_HEARTBEAT = 64
"""In a run of so many one look a heartbeat takes 9 kB/s; in larger ones there are fewer."""


def shards_at_once(num_peers: int) -> int:
    """How many of the keys one look reads: all while nobody is seen, one from 16 peers on.

    Args:
        num_peers: that were seen in the DHT.
    """
    return max(1, NUM_SHARDS // max(1, num_peers))


def look_every_s(num_peers: int) -> float:
    """Seconds from one look to the next.

    Args:
        num_peers: that were seen in the DHT.
    """
    return HEARTBEAT_S * max(1, num_peers // PEERS_A_HEARTBEAT)
