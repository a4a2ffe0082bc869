"""A height that strangers claim causes no request and is not shown.

The proof of a tip is not a matter of records, and is tested elsewhere.
"""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from peers.monitor import main as monitor
from swarm.errors import BadRecord
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.node.node import Node
from swarm.network.runs.joiner import present_peers
from swarm.network.runs.observer import Observer
from swarm.protocol.records.records import decode_record, encode_record, peers_key, shard_of
from tests.hostile.false_records import WAIT_S, Stranger, store, strangers
from tests.network.conftest import Peers
from tests.network.runs.test_observer import Lonely
from tests.peer_records import peer_record

HIGHEST = 2**31 - 1
CROWD = 60


@pytest.fixture(scope="module")
def crowd() -> list[Stranger]:
    return strangers(CROWD)


@pytest.fixture(scope="module")
def attacker(lasting_peers: Peers, lonely: Lonely) -> Node:
    return lasting_peers.node()


@pytest.fixture
def besieged(lonely: Lonely, attacker: Node, crowd: list[Stranger]) -> Lonely:
    """A run among records of strangers that claim to be far ahead of it."""
    lonely.announce()
    for who in crowd:
        claims = {"height": HIGHEST, "round": HIGHEST, "rounds_total": 2**60, "reason": "believe"}
        record = encode_record(peer_record(who.peer_id, manifest_digest="ff" * 32, **claims))
        key = peers_key(lonely.id, shard_of(who.peer_id))
        assert store(attacker, lonely.node, key, [(who, record)])
    assert len(attacker.run(present_peers(attacker, lonely.id), WAIT_S)) == CROWD + 1
    return lonely


def test_a_height_that_no_run_reaches_is_no_record(crowd: list[Stranger]) -> None:
    for figure in ("height", "round"):
        with pytest.raises(BadRecord, match=figure):
            record = peer_record(crowd[0].peer_id, **{figure: 2**60})
            decode_record(type(record), encode_record(record))


def test_an_exporter_asks_the_peer_at_the_address_whatever_others_claim(besieged: Lonely) -> None:
    guest = Observer.start(besieged.node.addresses, BlobStore(), WAIT_S)
    try:
        besieged.announce()
        announced = guest.find(None, WAIT_S)
        seen = guest.look(besieged.id, WAIT_S)
        assert len(seen.peers) == CROWD + 1
        assert guest.tip(announced, seen.peers, WAIT_S) == besieged.manifest
    finally:
        guest.stop()


def test_the_monitor_shows_the_round_of_the_manifest_and_its_members_first(
    besieged: Lonely,
) -> None:
    arguments = ["--initial-peers", besieged.node.addresses[0], "--once"]
    besieged.announce()
    result = CliRunner().invoke(monitor, [*arguments, "--json"])
    assert result.exit_code == 0, result.stderr
    shown = json.loads(result.stdout)
    assert (shown["round"], shown["manifest_digest"]) == (0, besieged.manifest.digest)
    assert shown["peers"][0]["peer_id"] == besieged.node.peer_id
    screen = CliRunner().invoke(monitor, arguments).stdout
    assert "round 0/8" in screen and str(HIGHEST) not in screen.split("\n")[0]
