"""Looks for the others of a run in the DHT, at a few keys at a time."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from swarm.network.joining import present_peers
from swarm.network.node import Node
from swarm.protocol.manifest import PeerId
from swarm.protocol.presence import look_every_s, shards_at_once
from swarm.protocol.records import NUM_SHARDS, PeerRecord, shard_of


class Presence:
    """The looks of one peer; it begins with all keys, then goes round from one by lot."""

    def __init__(self, node: Node, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Reads nothing yet.

        Args:
            node: of this peer.
            run: id of its run.
            clock: in seconds.
        """
        self._node, self._run, self._clock = node, run, clock
        self._found = [0] * NUM_SHARDS
        """How many peers each shard had when it was read last, this one included."""
        self._next, self._next_s = random.randrange(NUM_SHARDS), clock()
        self._has_failed = False

    async def look(self) -> dict[PeerId, PeerRecord]:
        """Records of the shards whose turn it is; of none before the next look is due.

        Raises:
            NobodyReachable: the DHT did not answer; from then on keys are read one by one, since
                one that is not to be read must not hide the others, until one was read.
            NetworkDown: the daemon is dead.
        """
        if self._clock() < self._next_s:
            return {}
        num_peers = sum(self._found)
        count = 1 if self._has_failed else shards_at_once(num_peers)
        shards = [(self._next + place) % NUM_SHARDS for place in range(count)]
        self._next, self._next_s = shards[-1] + 1, self._clock() + look_every_s(num_peers)
        self._has_failed = True
        present = await present_peers(self._node, self._run, shards)
        self._has_failed = False
        for shard in shards:
            self._found[shard] = sum(shard_of(peer) == shard for peer in present)
        return present
