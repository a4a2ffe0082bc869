"""How a peer looks for the others of its run: at everything first, then at a little in turn."""

import asyncio
from collections import Counter
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.errors import NobodyReachable
from swarm.network.dht import StoredValue
from swarm.network.presence import Presence
from swarm.protocol.presence import look_every_s, shards_at_once
from swarm.protocol.records import HEARTBEAT_S, NUM_SHARDS, encode_record, peers_key, shard_of
from tests.peer_records import peer_record


def names(stem: str, count: int) -> list[str]:
    """Of peers; there is no 0 in base58."""
    return [f"Qm{stem}{number}".replace("0", "x") for number in range(count)]


class Counting:
    """A node that counts the keys it is asked for; time passes by heartbeats."""

    def __init__(self, num_peers: int) -> None:
        self.records: dict[str, dict[str, StoredValue]] = {}
        self.traffic = SimpleNamespace(refuse=lambda _: None)
        self.asked: list[list[str]] = []
        self.seen: set[str] = set()
        self.silent: set[str] = set()
        """Keys near which nobody answers."""
        self.now = 0.0
        for peer in names("Peer", num_peers):
            self.comes(peer)
        node: Any = self
        self.presence = Presence(node, "run", clock=lambda: self.now)

    def comes(self, peer: str) -> None:
        stored = StoredValue(encode_record(peer_record(peer)), 1e10)
        self.records.setdefault(peers_key("run", shard_of(peer)), {})[peer] = stored

    async def get_many(self, keys: list[str]) -> dict[str, dict[str, StoredValue]]:
        self.asked.append(list(keys))
        if self.silent & set(keys):
            raise NobodyReachable("the DHT did not answer")
        return {key: self.records.get(key, {}) for key in keys}

    def beats(self, count: int) -> list[int]:
        """Looks so many times; returns how many keys each look asked for."""
        numbers = []
        for _ in range(count):
            before = len(self.asked)
            with suppress(NobodyReachable):
                self.seen |= asyncio.run(self.presence.look()).keys()
            numbers.append(sum(map(len, self.asked[before:])))
            self.now += HEARTBEAT_S
        return numbers


@pytest.mark.parametrize("num_peers", [16, 64, 256])
def test_a_peer_of_many_reads_one_key_a_heartbeat_at_most(num_peers: int) -> None:
    node = Counting(num_peers)
    assert node.beats(1) == [NUM_SHARDS], "all of them at the start"
    assert len(node.seen) == num_peers
    every = round(look_every_s(num_peers) / HEARTBEAT_S)
    node.asked.clear()
    steady = node.beats(NUM_SHARDS * every)
    assert max(steady) == 1 and sum(steady) == NUM_SHARDS
    assert Counter(map(tuple, node.asked)) == {
        (peers_key("run", shard),): 1 for shard in range(NUM_SHARDS)
    }, "each once a round"


def test_a_newcomer_of_any_shard_is_seen_after_as_many_heartbeats_as_there_are_shards() -> None:
    node = Counting(48)
    node.beats(5)
    newcomers = {shard_of(peer): peer for peer in names("New", 100)}
    assert len(newcomers) == NUM_SHARDS
    for peer in newcomers.values():
        node.comes(peer)
    node.beats(NUM_SHARDS)
    assert set(newcomers.values()) <= node.seen


def test_whoever_is_alone_reads_all_keys_each_time_and_few_see_each_other_soon() -> None:
    alone = Counting(1)
    assert alone.beats(3) == [NUM_SHARDS] * 3
    alone.comes("QmNew")
    alone.beats(1)
    assert "QmNew" in alone.seen
    four = Counting(4)
    assert four.beats(4) == [NUM_SHARDS, 4, 4, 4]


def test_a_key_that_cannot_be_read_hides_no_other() -> None:
    node = Counting(48)
    node.silent = {peers_key("run", 3)}
    node.beats(NUM_SHARDS + 2)
    hidden = node.records[peers_key("run", 3)].keys()
    assert node.seen == set(names("Peer", 48)) - hidden


def test_the_larger_the_run_the_rarer_a_look_and_never_more_often_than_a_heartbeat() -> None:
    assert [shards_at_once(n) for n in (0, 1, 2, 4, 15, 16, 1024)] == [16, 16, 8, 4, 1, 1, 1]
    seconds = [look_every_s(n) for n in (0, 1, 64, 127, 128, 256, 1024)]
    assert seconds == [8.0, 8.0, 8.0, 8.0, 16.0, 32.0, 128.0]
