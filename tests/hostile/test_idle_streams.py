"""Idle streams through an honest relay cost the peer that opens them, not the relay."""

from __future__ import annotations

import asyncio
import socket

import pytest

from swarm.errors import Unreachable
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch import blob_server
from swarm.network.fetch.bulk import PROTOCOL
from swarm.network.fetch.fetcher import Downloads, Want
from swarm.network.node.node import Node
from swarm.network.wire import relay as relays
from swarm.network.wire.ledger import LIMITS, Cost
from tests.hostile.victim import WAIT_S, Victim, wait_until
from tests.network.conftest import Peers

ATTEMPTS = 24
"""Streams of each of two keys, through one relay."""
STREAMS = LIMITS[Cost.STREAMS]


async def open_idle(attacker: Node, relay: Node | None, victim: Node) -> list[socket.socket]:
    """As many streams as the attacker can get. None of them asks for anything."""
    opened = []
    for _ in range(ATTEMPTS):
        try:
            if relay:
                way = attacker._ways.relay.open_stream(relay.peer_id, victim.peer_id, PROTOCOL, 5.0)
            else:
                way = attacker.open_stream(victim.peer_id, PROTOCOL, 5.0)
            opened.append(await way)
        except Unreachable:
            continue
    return opened


async def ended(connection: socket.socket) -> None:
    """Returns when the other side has ended the stream. Its earlier bytes are dropped."""
    loop = asyncio.get_running_loop()
    try:
        while await loop.sock_recv(connection, 65_536):
            pass
    except ConnectionError:
        pass


def test_a_relay_is_served_while_strangers_hold_all_the_streams_they_get_through_it(
    peers: Peers, victim: Victim
) -> None:
    blob = bytes(range(256)) * 1000
    digest = victim.store.put(blob)
    relay, first, second = peers.serving(), peers.node(), peers.node()
    victim.ledger.admit([relay.peer_id])
    held = [
        (attacker, connection)
        for attacker in (first, second)
        for connection in attacker.run(open_idle(attacker, relay, victim.node), WAIT_S)
    ]
    downloads = Downloads(relay, BlobStore())
    want = Want(digest, len(blob), (victim.node.peer_id,))
    assert relay.run(downloads.fetch_one(want, timeout_s=5.0), WAIT_S) == blob
    assert victim.node.traffic.refused == {}, "none of it was refused first"
    assert len(held) <= 2 * LIMITS[Cost.RELAYED].stranger.most
    wait_until(lambda: victim.ledger.left(relay.peer_id, Cost.STREAMS, 0) == STREAMS.member.most)
    for attacker in (first, second):  # idle streams cost nobody anything
        most = STREAMS.stranger.most
        assert victim.ledger.left(attacker.peer_id, Cost.STREAMS, 0) == most
    for attacker, connection in held:
        attacker.loop.call_soon_threadsafe(connection.close)


@pytest.mark.parametrize("is_relayed", [False, True])
def test_an_idle_stream_ends_soon_and_gives_back_what_it_held(
    peers: Peers, victim: Victim, monkeypatch: pytest.MonkeyPatch, is_relayed: bool
) -> None:
    monkeypatch.setattr(blob_server, "FIRST_ASK_S", 0.3)
    monkeypatch.setattr(relays, "FIRST_BYTES_S", 0.3)
    relay = peers.serving() if is_relayed else None
    attacker = peers.node()

    async def hold() -> None:
        connections = await open_idle(attacker, relay, victim.node)
        assert connections
        try:
            async with asyncio.timeout(WAIT_S / 2):
                await asyncio.gather(*map(ended, connections))
        finally:
            for connection in connections:
                connection.close()

    attacker.run(hold(), WAIT_S)
    for ledger, cost in ((victim.ledger, Cost.STREAMS), (relay and relay.ledger, Cost.RELAYED)):
        if ledger:
            most = LIMITS[cost].stranger.most
            wait_until(lambda e=ledger, c=cost, m=most: e.left(attacker.peer_id, c, 0) == m)
