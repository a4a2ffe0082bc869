"""A stranger floods the DHT's keys, but runs and peers are found nevertheless."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from peers.monitor import main as monitor
from swarm.config import NetworkSection
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.dht.local_storage import MAX_HELD_BYTES
from swarm.network.node.node import Node
from swarm.network.runs.joiner import present_peers, publish_peer
from swarm.network.runs.observer import Observer
from swarm.network.runs.run_search import announced_runs
from swarm.network.wire.ledger import LIMITS, Cost
from swarm.protocol.records.records import (
    MAX_RUN_RECORD_BYTES,
    encode_record,
    peers_key,
    runs_key,
    runs_keys,
    shard_of,
)
from tests.hostile.false_records import IN_ONE_CALL, WAIT_S, Stranger, store, strangers
from tests.hostile.victim import wait_until
from tests.network.conftest import Peers
from tests.network.runs.test_observer import Lonely
from tests.peer_records import peer_record

FLOOD = 165
"""So many records of 32 kB exceeded the 4 MiB of an answer with all records of a key."""
LARGEST = 20_400
"""With its signature, the largest record that a peer stores. Formerly 32 kB."""


@pytest.fixture(scope="module")
def crowd() -> list[Stranger]:
    return strangers(FLOOD)


@pytest.fixture(scope="module")
def lonely(lonely: Lonely) -> Lonely:
    lonely.announce()
    return lonely


@pytest.fixture(scope="module")
def honest(lasting_peers: Peers, lonely: Lonely) -> Node:
    """A peer that is no member yet."""
    node = lasting_peers.node()
    node.run(publish_peer(node, lonely.id, peer_record(node.peer_id)), WAIT_S)
    return node


@pytest.fixture(scope="module")
def attacker(lasting_peers: Peers, honest: Node) -> Node:
    """Stores nothing itself, so all records that it reads come from the two flooded peers."""
    return lasting_peers.node(network=NetworkSection(client_mode=True))


def run_program(lonely: Lonely) -> dict:
    result = CliRunner().invoke(
        monitor, ["--initial-peers", lonely.node.addresses[0], "--once", "--json"]
    )
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


@pytest.mark.parametrize("size", [LARGEST, MAX_RUN_RECORD_BYTES])
def test_however_large_the_records_are_the_run_and_its_peers_are_seen(
    lonely: Lonely, honest: Node, attacker: Node, crowd: list[Stranger], size: int
) -> None:
    flood = [(who, b"x" * size) for who in crowd]
    for key in (runs_key(lonely.node.peer_id), peers_key(lonely.id, shard_of(honest.peer_id))):
        for holder in (lonely.node, honest):
            store(attacker, holder, key, flood)
    lonely.announce()  # every peer does, each heartbeat
    honest.run(publish_peer(honest, lonely.id, peer_record(honest.peer_id)), WAIT_S)
    runs = attacker.run(announced_runs(attacker), WAIT_S)
    assert [run.record.run for run in runs] == [lonely.id]
    present = attacker.run(present_peers(attacker, lonely.id), WAIT_S)
    assert set(present) == {lonely.node.peer_id, honest.peer_id}
    seen = run_program(lonely)
    assert seen["run_id"] == lonely.id and len(seen["peers"]) == 2
    assert lonely.node._substrate.dht._node.protocol.storage.num_bytes <= MAX_HELD_BYTES


def test_whoever_stores_is_known_and_pays(
    lonely: Lonely, lasting_peers: Peers, crowd: list[Stranger]
) -> None:
    """With real nodes: one sender has a bound, for any number of keys."""
    sender = lasting_peers.node(network=NetworkSection(client_mode=True))
    storage = lonely.node._substrate.dht._node.protocol.storage
    before = lonely.node.traffic.refused["records_of_stranger"]
    flood = [(who, b"x" * LARGEST) for who in crowd]
    kept = store(sender, lonely.node, peers_key(lonely.id, 0), flood)
    assert kept <= LIMITS[Cost.RECORDS].stranger.most // LARGEST + IN_ONE_CALL
    assert lonely.node.traffic.refused["records_of_stranger"] > before
    assert storage.num_bytes <= MAX_HELD_BYTES

    def is_located() -> bool:  # networks are looked up every few seconds, on a store
        store(sender, lonely.node, peers_key(lonely.id, 0), flood[:1])
        return lonely.node.ledger.is_located(sender.peer_id)

    wait_until(is_located)


def test_one_record_in_hivemind_s_cache_does_not_hide_the_others(
    lonely: Lonely, attacker: Node, crowd: list[Stranger]
) -> None:
    lonely.announce()
    for key in runs_keys():
        assert not store(attacker, lonely.node, key, [(crowd[0], b"x")], in_cache=True)
    assert [r.record.run for r in attacker.run(announced_runs(attacker), WAIT_S)] == [lonely.id]


def test_who_has_an_address_needs_no_record_to_find_the_run(
    lonely: Lonely, honest: Node, attacker: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    lonely.told = encode_record(lonely.record())
    for node in (lonely.node, honest, attacker):
        monkeypatch.setattr(node._substrate.dht._node.protocol.storage, "get", lambda _: None)
    assert not attacker.run(announced_runs(attacker), WAIT_S)
    guest = Observer.start(lonely.node.addresses, BlobStore(), WAIT_S)
    try:
        assert guest.find(None, WAIT_S).record == lonely.record()
    finally:
        guest.stop()
