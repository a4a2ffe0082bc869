"""Caps: the bucket alone with a fake clock, and one transfer over loopback."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
import time

import pytest

from swarm.config import NetworkSection
from swarm.emulation.links import MOST_QUEUED_S, Line
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch import blob_server
from swarm.network.fetch.blob_server import BlobServer
from swarm.network.fetch.bulk import HEAD_BYTES, PROTOCOL, Ask
from swarm.network.fetch.fetcher import PROGRESS_S, Downloads, Want
from swarm.network.node.node import Handlers, Node
from swarm.network.node.peer_probe import PROTOCOL as MEASURE
from swarm.network.node.peer_probe import Prober, measure_mbit
from swarm.network.wire.ledger import Cost, Ledger, Limit, Rate
from swarm.network.wire.streams import PROGRESS_BYTES, receive_into
from swarm.network.wire.traffic import BURST_S, LARGEST_PART_BYTES, Bucket, Throttle
from tests.network.conftest import LOOPBACK, Peers

WAIT_S = 60.0
MIB = 2**20


@pytest.mark.parametrize("num_streams", [1, 6, 40])
@pytest.mark.parametrize("mbit", [1.0, 20.0])
def test_a_cap_holds_over_a_minute_for_any_number_of_streams(mbit: float, num_streams: int) -> None:
    """Each stream takes its next part as soon as the last one is through.

    Counts arrivals in 60 s.
    """
    throttle, draw = Throttle(mbit), random.Random(num_streams)
    bucket = Bucket(mbit * 1e6 / 8)
    free_s = [draw.random() for _ in range(num_streams)]
    moved = 0
    while (now_s := min(free_s)) < 60.0:
        stream = free_s.index(now_s)
        part = draw.randint(1, throttle.part_bytes(MIB))
        free_s[stream] = now_s + bucket.take(now_s, part) + 1e-6
        moved += part if free_s[stream] <= 60.0 else 0
    assert moved * 8 / 60 / 1e6 == pytest.approx(mbit, rel=0.005)
    assert moved <= mbit * 1e6 / 8 * (60.0 + BURST_S)


def test_whoever_was_idle_has_one_burst_at_once_and_no_more() -> None:
    bucket = Bucket(1000.0, burst_s=0.25)
    assert bucket.take(100.0, 250) == 0.0
    assert bucket.take(100.0, 100) == pytest.approx(0.1)
    assert bucket.take(100.0, 100) == pytest.approx(0.2), "turns go by the order of calls"
    assert bucket.take(1000.0, 250) == 0.0
    assert bucket.take(1000.0, 1000) == pytest.approx(1.0)


@pytest.mark.parametrize("num_streams", [1, 3, 8])
@pytest.mark.parametrize("mbit", [3.0, 20.0])
def test_a_cap_below_the_line_never_fills_a_routers_queue(mbit: float, num_streams: int) -> None:
    """All streams begin at once on a machine that was idle. Headers add 4 % to the payload."""
    throttle, line = Throttle(0.92 * mbit), Line(mbit)
    bucket = Bucket(throttle.bytes_per_s)
    free_s = [0.001 * stream for stream in range(num_streams)]
    while (now_s := min(free_s)) < 20.0:
        part = throttle.part_bytes(MIB)
        free_s[free_s.index(now_s)] = sent_s = now_s + bucket.take(now_s, part) + 1e-6
        leaves_s = line.leaves_at(sent_s, round(1.04 * part))
        assert leaves_s is not None
        assert leaves_s - sent_s < 0.75 * MOST_QUEUED_S


def test_messages_never_wait_and_what_they_take_is_missing_to_the_others() -> None:
    throttle = Throttle(8.0, clock=lambda: 5.0)
    throttle.count(1_250_000)
    assert throttle.count(1) == pytest.approx(1.25 - BURST_S, abs=1e-3)


@pytest.mark.parametrize("mbit", [1.0, 3.0, 20.0, 1000.0])
def test_no_stream_of_a_capped_peer_waits_so_long_that_it_looks_dead(mbit: float) -> None:
    """With the maximum of streams, each gets twice the rate that a receiver counts as progress."""
    throttle = Throttle(mbit)
    each = mbit * 1e6 / 8 / throttle.most_streams
    assert each * PROGRESS_S >= 2 * PROGRESS_BYTES or throttle.most_streams == 2
    assert throttle.part_bytes(MIB) <= LARGEST_PART_BYTES <= PROGRESS_BYTES
    turn_s = throttle.most_streams * throttle.part_bytes(MIB) * 8 / (mbit * 1e6)
    assert turn_s <= PROGRESS_S / 2


def test_without_a_cap_nothing_waits_and_parts_are_as_large_as_ever() -> None:
    throttle = Throttle()
    assert throttle.count(10**15) == 0.0
    assert throttle.part_bytes(MIB) == MIB
    assert throttle.most_streams == float("inf")


def test_a_cap_is_set_and_lifted_on_the_way() -> None:
    throttle = Throttle(clock=lambda: 5.0)
    throttle.count(10**9)
    throttle.hold(8.0)
    assert (throttle.mbit, throttle.bytes_per_s) == (8.0, 1e6)
    waits_s = throttle.count(1_000_000)
    assert waits_s == pytest.approx(1.0 - BURST_S), "earlier bytes cost nothing"
    throttle.hold(None)
    assert (throttle.mbit, throttle.count(10**9)) == (None, 0.0)


def test_a_wait_in_a_thread_ends_when_the_download_does() -> None:
    throttle, stop = Throttle(1.0), threading.Event()
    stop.set()
    throttle.wait_in_thread(10**12, stop)


# ---------------------------------------------------------------- over loopback

CAP_MBIT = 40.0
"""A sixth of a second for each MiB."""
NUM_BYTES = 10 * MIB


def serving(peers: Peers, store: BlobStore, network: NetworkSection) -> Node:
    streams = {PROTOCOL: blob_server_of(store).serve, MEASURE: Prober().serve}
    return peers.node(Handlers(streams=streams), network=network)


def blob_server_of(store: BlobStore) -> BlobServer:
    """A blob server whose ledger refuses nothing."""
    limits = {cost: Limit(Rate(1e9), Rate(1e9), Rate(1e9)) for cost in Cost}
    server = BlobServer(ledger=Ledger(limits))
    server.attach(store)
    return server


@pytest.mark.parametrize("capped", ["max_upload_mbit", "max_download_mbit"])
def test_either_side_can_cap_a_transfer(peers: Peers, capped: str) -> None:
    """Slow machines make it slower, so only the lower bound of the time is sharp."""
    blob = random.Random(0).randbytes(NUM_BYTES)
    network = LOOPBACK.model_copy(update={capped: CAP_MBIT})
    is_up = capped == "max_upload_mbit"
    store = BlobStore()
    server = serving(peers, store, network if is_up else LOOPBACK)
    client = peers.node(network=LOOPBACK if is_up else network)
    want = Want(store.put(blob), len(blob), (server.peer_id,))
    began_s = time.monotonic()
    got = client.run(Downloads(client, BlobStore()).fetch_one(want, timeout_s=WAIT_S), WAIT_S)
    took_s = time.monotonic() - began_s
    assert got == blob
    assert took_s + BURST_S >= NUM_BYTES * 8 / (CAP_MBIT * 1e6)
    assert not client.traffic.refused
    rate = measure_mbit(client, server.peer_id, is_down=True, limit_s=5.0, num_bytes=4 * MIB)
    assert client.run(rate, WAIT_S) <= 2 * CAP_MBIT, "others measure the cap, and not loopback"


def test_a_stream_lasts_as_long_as_its_answers_get_on(
    peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Deadlines follow progress: at the cap each answer takes half a second, and all take 1.5 s."""
    monkeypatch.setattr(blob_server, "ANSWER_S", 1.0)
    store = BlobStore()
    server = serving(peers, store, LOOPBACK.model_copy(update={"max_upload_mbit": 8.0}))
    client = peers.node()
    blobs = [random.Random(seed).randbytes(500_000) for seed in range(4)]
    wants = [Want(store.put(blob), len(blob), (server.peer_id,)) for blob in blobs]
    failures: list[str] = []

    async def fetch() -> None:
        downloads = Downloads(client, BlobStore(), flows_per_peer=1)
        await downloads.fetch(wants, on_failure=lambda *failure: failures.append(failure[2]))

    client.run(fetch(), WAIT_S)
    assert failures == []


def test_streams_that_are_only_kept_take_nobodys_place(peers: Peers) -> None:
    store = BlobStore()
    blob_server = blob_server_of(store)
    capped = LOOPBACK.model_copy(update={"max_upload_mbit": 1.0})
    server = peers.node(Handlers(streams={PROTOCOL: blob_server.serve}), network=capped)
    client, digest = peers.node(), store.put(b"small")
    want = Want(digest, len(b"small"), (server.peer_id,))
    failures: list[str] = []

    async def answered() -> socket.socket:
        stream = await client.open_stream(server.peer_id, PROTOCOL, WAIT_S)
        await asyncio.get_running_loop().sock_sendall(stream, Ask(digest, 0, 5, False).encode())
        await receive_into(stream, memoryview(bytearray(HEAD_BYTES + 5)))
        return stream

    async def fetch_beside_those_kept() -> None:
        kept = [await answered() for _ in range(int(server.traffic.up.most_streams))]
        while blob_server._streams.num_asking:
            await asyncio.sleep(0.01)
        downloads = Downloads(client, BlobStore())
        await downloads.fetch([want], on_failure=lambda *failure: failures.append(failure[2]))
        for stream in kept:
            stream.close()

    client.run(fetch_beside_those_kept(), WAIT_S)
    assert failures == []


def test_a_peer_with_a_low_cap_turns_streams_away_rather_than_starve_all(peers: Peers) -> None:
    store = BlobStore()
    blob_server = blob_server_of(store)
    capped = LOOPBACK.model_copy(update={"max_upload_mbit": 1.0})
    server = peers.node(Handlers(streams={PROTOCOL: blob_server.serve}), network=capped)
    client, blob, large = peers.node(), b"small", bytes(8 * MIB)
    want = Want(store.put(blob), len(blob), (server.peer_id,))
    ask = Ask(store.put(large), 0, len(large), False).encode()
    failures: list[str] = []

    async def try_while_others_are_served() -> None:
        most = int(server.traffic.up.most_streams)
        taken = [await client.open_stream(server.peer_id, PROTOCOL, WAIT_S) for _ in range(most)]
        for stream in taken:
            await asyncio.get_running_loop().sock_sendall(stream, ask)
        while blob_server._streams.num_asking < most:
            await asyncio.sleep(0.01)

        def note(*failure: str) -> None:
            failures.append(failure[2])
            for stream in taken:
                stream.close()

        await Downloads(client, BlobStore()).fetch([want], on_failure=note)

    client.run(try_while_others_are_served(), WAIT_S)
    assert set(failures) == {"busy"}
    assert server.traffic.refused["streams_of_cap"] >= 1
