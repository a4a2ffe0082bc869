"""A stranger's greedy streams and floods of messages harm only strangers."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch.bulk import HEAD_BYTES, PROTOCOL, Ask, Head, Status
from swarm.network.fetch.fetcher import Downloads, Want
from swarm.network.node.node import Node
from swarm.network.wire.ledger import LIMITS, Cost
from swarm.network.wire.streams import receive_into
from swarm.protocol.messages.message_bytes import encode
from swarm.protocol.messages.messages import Hello
from tests.hostile.victim import WAIT_S, Victim, post, wait_until
from tests.network.conftest import Peers
from tests.protocol.round_pump import found, header_of, make_rules

MIB = 2**20
GREEDY = 8
HELLOS = 600
UPLINK_MBIT = 50.0
"""The contended rate. Any machine that runs the tests is faster."""
TIP = found(make_rules(), ["A", "B"])
HELLO, _ = encode(header_of(TIP), Hello(ask=False))


def test_a_flood_of_messages_is_dropped_unread_and_members_are_heard(
    peers: Peers, victim: Victim
) -> None:
    attacker, member = peers.node(), peers.node()
    victim.ledger.admit([member.peer_id])
    began_s = time.monotonic()
    taken = post(attacker, victim, *[HELLO] * HELLOS)
    limit = LIMITS[Cost.MESSAGES].stranger
    most = limit.most + limit.per_s * (time.monotonic() - began_s)
    assert limit.most <= taken == victim.heard <= most, "the rest is not examined"
    assert victim.node.traffic.refused == {"messages_of_stranger": HELLOS - taken}
    assert post(member, victim, *[HELLO] * 20) == 20
    victim.settle()
    assert victim.received_from(member) == 20
    wait_until(lambda: victim.ledger.is_located(attacker.peer_id))


async def be_greedy(attacker: Node, victim: Node, digest: str, busy: list[bytes]) -> None:
    """Requests the same blob repeatedly, as fast as it comes."""
    connection = await attacker.open_stream(victim.peer_id, PROTOCOL, 10.0)
    loop = asyncio.get_running_loop()
    buffer = memoryview(bytearray(4 * MIB))
    try:
        while True:
            await loop.sock_sendall(connection, Ask(digest, 0, 4 * MIB, False).encode())
            head = bytearray(HEAD_BYTES)
            await receive_into(connection, memoryview(head))
            if Head.decode(bytes(head)).status != Status.HERE:
                busy.append(bytes(head))
                return
            await receive_into(connection, buffer)
    finally:
        connection.close()


def test_greedy_streams_get_less_than_the_members_that_they_compete_with(
    peers: Peers, tmp_path: Path
) -> None:
    greedy = random.Random(0).randbytes(4 * MIB)
    theirs: set[str] = set()
    victim = Victim(peers, tmp_path / "victim", theirs.__contains__, UPLINK_MBIT)
    theirs.add(digest := victim.store.put(greedy))
    attacker, member = peers.node(), peers.node()
    victim.ledger.admit([member.peer_id])
    wants = []
    for seed in range(1, 17):
        blob = random.Random(seed).randbytes(MIB)
        wants.append(Want(victim.store.put(blob), len(blob), (victim.node.peer_id,)))
    busy: list[bytes] = []
    streams = (be_greedy(attacker, victim.node, digest, busy) for _ in range(GREEDY))
    attack = [asyncio.run_coroutine_threadsafe(each, attacker.loop) for each in streams]
    traffic = victim.node.traffic
    wait_until(lambda: traffic.moments_bytes_sent > 2 * MIB)
    fetch = Downloads(member, BlobStore()).fetch(wants, on_failure=lambda *_: None)
    fetching = asyncio.run_coroutine_threadsafe(fetch, member.loop)
    wait_until(lambda: traffic.blob_bytes_sent > 0)
    before = traffic.moments_bytes_sent
    fetching.result(WAIT_S)
    wait_until(lambda: traffic.blob_bytes_sent == 16 * MIB)
    assert traffic.moments_bytes_sent - before < traffic.blob_bytes_sent / 2, "a third, and a bit"
    assert len(busy) == GREEDY - LIMITS[Cost.STREAMS].stranger.most
    for stream in attack:
        stream.cancel()
