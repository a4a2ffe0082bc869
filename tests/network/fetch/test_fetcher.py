from __future__ import annotations

import asyncio
import errno
import os
import random
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest

from swarm.codecs import Content
from swarm.errors import BadBlob, NobodyReachable, NoRoute, StateError
from swarm.network.blobs import packs
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch import fetcher as fetch_module
from swarm.network.fetch.blob_server import BlobServer
from swarm.network.fetch.bulk import ASK_BYTES, HEAD_BYTES, PROTOCOL
from swarm.network.fetch.fetcher import Downloads, Want
from swarm.network.node.node import Handlers
from swarm.network.wire.ledger import Ledger
from swarm.network.wire.traffic import Traffic
from swarm.protocol.exchange.sourcing import Limits
from swarm.protocol.values.digests import DIGEST_BYTES, PIECE_BYTES, digest_of, piece_index
from tests.network.conftest import LOOPBACK
from tests.waiting import wait_until

WAIT_S = 60.0
UPLINK_MBIT = 50.0
"""A low rate, which any machine that runs the tests exceeds."""
KIB, MIB = 2**10, 2**20


def content(seed: int, num_bytes: int) -> bytes:
    return random.Random(seed).randbytes(num_bytes)


class Fetched:
    """What one call of `fetch` reported."""

    def __init__(self) -> None:
        self.arrived: list[str] = []
        self.failures: list[tuple[str, str, str]] = []

    async def fetch(self, downloads: Downloads, wants, check=None) -> None:
        await downloads.fetch(
            wants,
            check=check,
            on_blob=self.arrived.append,
            on_failure=lambda *failure: self.failures.append(failure),
        )


@pytest.fixture(scope="module")
def trio(lasting_peers):
    """Two serving nodes with their stores, and one that downloads."""
    stores = [BlobStore(), BlobStore()]
    servers = [lasting_peers.serving(store) for store in stores]
    return stores, servers, lasting_peers.node()


@pytest.fixture
def swarm(trio):
    """The same with empty stores, for one test."""
    stores, servers, client = trio
    for store in stores:
        store.collect(set())
    return stores, servers, client


def all_sent(servers):
    """Bytes of blobs that these peers have sent.

    Waits until the last bytes are counted, because a peer counts bytes once they are out.
    """
    sent = -1
    while sent != (sent := sum(server.traffic.blob_bytes_sent for server in servers)):
        time.sleep(0.2)
    return sent


def test_every_size_makes_the_round_trip_and_counts_payload_only(swarm, tmp_path):
    (source, _), (server, _), client = swarm
    sizes = [0, 1, 256 * KIB, 256 * KIB + 1, 4 * MIB, 4 * MIB + 1, 9 * MIB]
    blobs = {digest_of(blob): blob for blob in (content(n, n) for n in sizes)}
    wants = [Want(source.put(blob), len(blob), (server.peer_id,)) for blob in blobs.values()]
    store = BlobStore(tmp_path)
    before = (server.traffic.blob_bytes_sent, client.traffic.blob_bytes_received)
    control = server.traffic.control_bytes_received, server.traffic.control_bytes_sent
    fetched = Fetched()
    client.run(fetched.fetch(Downloads(client, store), wants), WAIT_S)
    assert sorted(fetched.arrived) == sorted(blobs)
    assert fetched.failures == []
    for digest, blob in blobs.items():
        assert store.get(digest) == blob
    store.sync(blobs)
    assert BlobStore(tmp_path).verify(blobs) == []
    assert all_sent([server]) - before[0] == sum(sizes)
    assert client.traffic.blob_bytes_received - before[1] == sum(sizes)
    # 7 blobs in 10 pieces, with one request and one head each. For the two blobs of several pieces,
    # each request brings an index of at most 32 bytes per piece.
    assert server.traffic.control_bytes_received - control[0] == 10 * ASK_BYTES
    port_bytes = 2  # address for direct connections, requested once
    sent = server.traffic.control_bytes_sent - control[1] - 10 * HEAD_BYTES - port_bytes
    assert 5 * DIGEST_BYTES <= sent <= (2 * 2 + 3 * 3) * DIGEST_BYTES


def test_many_small_blobs_for_several_workers_come_whole_and_once(swarm):
    stores, servers, client = swarm
    blobs = [content(seed, 1 + seed * 97 % 60_000) for seed in range(600)]
    wants = []
    for number, blob in enumerate(blobs):
        store, server = stores[number % 2], servers[number % 2]
        wants.append(Want(store.put(blob), len(blob), (server.peer_id,)))
    store = BlobStore()
    downloads = Downloads(client, store)
    calls = [Fetched() for _ in range(6)]
    # Overlapping shares: two calls want each blob.
    shares = [[w for n, w in enumerate(wants) if n % 6 in (k, (k + 1) % 6)] for k in range(6)]

    async def all_at_once() -> None:
        await asyncio.gather(
            *(call.fetch(downloads, share) for call, share in zip(calls, shares, strict=True))
        )

    before = client.traffic.blob_bytes_received
    client.run(all_at_once(), WAIT_S)
    for call, share in zip(calls, shares, strict=True):
        assert sorted(call.arrived) == sorted(want.digest for want in share)
        assert call.failures == []
    assert all(store.get(digest_of(blob)) == blob for blob in blobs)
    assert client.traffic.blob_bytes_received - before == sum(map(len, blobs))


def test_what_is_wanted_twice_or_is_here_already_is_not_asked_for(swarm):
    (source, _), (server, other), client = swarm
    digest = source.put(content(0, MIB))
    wants = [Want(digest, MIB, (other.peer_id,)), Want(digest, MIB, (server.peer_id,))]
    store = BlobStore()
    downloads = Downloads(client, store)
    before = client.traffic.blob_bytes_received
    first, second = Fetched(), Fetched()
    client.run(first.fetch(downloads, wants), WAIT_S)
    assert first.arrived == [digest]
    asks = server.traffic.control_bytes_received
    client.run(second.fetch(downloads, wants), WAIT_S)
    assert second.arrived == [digest]
    assert client.traffic.blob_bytes_received - before == MIB
    assert server.traffic.control_bytes_received == asks


def test_the_pieces_of_one_blob_come_from_several_peers(swarm):
    stores, servers, client = swarm
    blob = content(0, 64 * MIB)
    for store in stores:
        digest = store.put(blob)
    before = [server.traffic.blob_bytes_sent for server in servers]
    downloads = Downloads(client, BlobStore(), limits=Limits(bytes_per_peer=8 * MIB))
    want = Want(digest, len(blob), tuple(server.peer_id for server in servers))
    assert client.run(downloads.fetch_one(want, timeout_s=WAIT_S), WAIT_S) == blob
    assert all_sent(servers) - sum(before) == len(blob)
    sent = [s.traffic.blob_bytes_sent - b for s, b in zip(servers, before, strict=True)]
    assert min(sent) >= 8 * MIB


def test_a_peer_without_the_blob_is_passed_over_and_told_of(swarm):
    (source, _), (server, without), client = swarm
    digest = source.put(b"here")
    want = Want(digest, 4, (without.peer_id, server.peer_id))
    fetched = Fetched()
    client.run(fetched.fetch(Downloads(client, BlobStore()), [want]), WAIT_S)
    assert fetched.arrived == [digest]
    assert fetched.failures == [(digest, without.peer_id, "missing")]


def test_a_blob_that_appears_later_is_found_by_asking_again(swarm):
    (source, _), (server, _), client = swarm
    blob = content(0, 1000)
    want = Want(digest_of(blob), 1000, (server.peer_id,))
    store = BlobStore()

    async def late() -> None:
        await asyncio.sleep(0.2)
        source.put(blob)

    async def both() -> None:
        await asyncio.gather(late(), Fetched().fetch(Downloads(client, store), [want]))

    client.run(both(), WAIT_S)
    assert store.get(want.digest) == blob


def test_an_upper_bound_is_enough_where_the_size_is_unknown(swarm):
    (source, _), (server, _), client = swarm
    digest = source.put(b"manifest")
    downloads = Downloads(client, BlobStore())
    bound = Want(digest, 100, (server.peer_id,), at_most=True)
    assert client.run(downloads.fetch_one(bound, timeout_s=10), WAIT_S) == b"manifest"
    bound = Want(source.put(bytes(101)), 100, (server.peer_id,), at_most=True)
    with pytest.raises(NobodyReachable, match="blob_size"):
        client.run(downloads.fetch_one(bound, timeout_s=1.5), WAIT_S)


def test_fetch_one_names_what_went_wrong(swarm, tmp_path):
    _, (server, _), client = swarm
    want = Want(digest_of(b"nobody has it"), 13, (server.peer_id, client.peer_id))
    with pytest.raises(NobodyReachable, match=f"{server.peer_id}: missing"):
        client.run(Downloads(client, BlobStore()).fetch_one(want, timeout_s=1.5), WAIT_S)


@pytest.mark.parametrize("num_bytes", [1000, PIECE_BYTES, PIECE_BYTES + 1])
def test_what_the_check_refuses_is_counted_not_kept_and_not_asked_for_again(swarm, num_bytes):
    stores, servers, client = swarm
    blob = content(0, num_bytes)
    for source in stores:
        digest = source.put(blob)
    good = stores[0].put(b"good")

    def check(digest: str, given: Content) -> None:
        if given.whole() == blob:
            raise BadBlob("not_finite", "NaN in expert 3")

    client.traffic.refused.clear()
    before = client.traffic.blob_bytes_received
    sources = tuple(server.peer_id for server in servers)
    store = BlobStore()
    fetched = Fetched()
    wants = [Want(digest, num_bytes, sources), Want(good, 4, sources[:1])]

    async def until_judged_and_a_while() -> None:
        async with asyncio.TaskGroup() as group:
            fetching = group.create_task(fetched.fetch(Downloads(client, store), wants, check))
            while not fetched.arrived or len(fetched.failures) < len(sources):
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.5)
            assert not fetching.done(), "it continues to look for a correct source"
            fetching.cancel()

    client.run(until_judged_and_a_while(), WAIT_S)
    assert fetched.arrived == [good]
    assert fetched.failures == [(digest, source, "not_finite") for source in sources]
    assert client.traffic.refused == {"not_finite": 1}
    assert not store.has(digest)
    assert client.traffic.blob_bytes_received - before == num_bytes + 4


def test_one_thread_receives_judges_and_keeps_a_large_blob(swarm, monkeypatch):
    (source, _), (server, _), client = swarm
    want = Want(source.put(content(0, MIB)), MIB, (server.peer_id,))
    store, put, threads = BlobStore(), BlobStore.put, []

    def note(*_: object) -> None:
        threads.append(threading.current_thread().name)

    def noted_put(self: BlobStore, *arguments: object) -> str:
        note()
        return put(self, *arguments)

    monkeypatch.setattr(BlobStore, "put", noted_put)
    client.run(Fetched().fetch(Downloads(client, store), [want], note), WAIT_S)
    assert len(threads) == 2
    assert len(set(threads)) == 1
    assert threads[0].startswith("swarm-receive")


def test_a_check_that_fails_by_itself_ends_the_call_instead_of_trying_for_ever(swarm):
    (source, _), (server, _), client = swarm
    digest = source.put(bytes(1000))
    broken = Mock(side_effect=ZeroDivisionError("a bug"))
    want = Want(digest, 1000, (server.peer_id,))
    with pytest.raises(ZeroDivisionError):
        client.run(Fetched().fetch(Downloads(client, BlobStore()), [want], broken), WAIT_S)


@pytest.mark.parametrize("num_bytes", [1000, PIECE_BYTES + 1])
def test_a_full_disk_ends_the_call_and_room_lets_it_succeed(
    swarm, tmp_path, monkeypatch, num_bytes
):
    (source, _), (server, _), client = swarm
    blob = content(0, num_bytes)
    want = Want(source.put(blob), num_bytes, (server.peer_id,))
    store = BlobStore(tmp_path)
    downloads = Downloads(client, store)
    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr(packs.os, "pwrite", full)
    with pytest.raises(StateError, match="free some space"):
        client.run(Fetched().fetch(downloads, [want]), WAIT_S)
    monkeypatch.undo()
    client.run(Fetched().fetch(downloads, [want]), WAIT_S)
    assert store.get(want.digest) == blob


def test_a_blob_that_came_whole_but_could_not_be_kept_is_fetched_again(swarm):
    (source, _), (server, _), client = swarm
    blob = content(0, PIECE_BYTES + 1)
    want = Want(source.put(blob), len(blob), (server.peer_id,))
    store = BlobStore()
    partial = store.writer(want.digest, len(blob))
    partial.set_index(piece_index(blob))
    for number, start in enumerate(range(0, len(blob), PIECE_BYTES)):
        partial.write_piece(number, memoryview(blob)[start : start + PIECE_BYTES])
    client.run(Fetched().fetch(Downloads(client, store), [want]), WAIT_S)
    assert store.get(want.digest) == blob


def test_a_caller_that_cancels_and_asks_again_fetches_nothing_twice(swarm):
    (source, _), (server, _), client = swarm
    blobs = [content(seed, MIB) for seed in range(24)]
    wants = [Want(source.put(blob), MIB, (server.peer_id,)) for blob in blobs]
    store = BlobStore()
    downloads = Downloads(client, store)

    async def impatient() -> None:
        while True:
            call = asyncio.create_task(Fetched().fetch(downloads, wants))
            done, _ = await asyncio.wait([call], timeout=0.02)
            if done:
                return
            call.cancel()
            await asyncio.wait([call])

    before = client.traffic.blob_bytes_received
    client.run(impatient(), WAIT_S)
    assert all(store.has(want.digest) for want in wants)
    # A thread stores a blob before the loop counts its bytes.
    assert wait_until(lambda: client.traffic.blob_bytes_received - before >= 24 * MIB)
    assert client.traffic.blob_bytes_received - before == 24 * MIB
    assert downloads._downloads == {}
    assert store._holds.held(0.0) == set()


def test_a_cancelled_download_soon_stops(swarm):
    (source, _), (server, _), client = swarm
    wants = [Want(source.put(content(n, MIB)), MIB, (server.peer_id,)) for n in range(64)]
    downloads = Downloads(client, BlobStore(), limits=Limits(bytes_per_peer=4 * MIB))

    async def briefly() -> int:
        first = asyncio.Event()
        call = asyncio.create_task(downloads.fetch(wants, on_blob=lambda _: first.set()))
        await first.wait()
        call.cancel()
        await asyncio.wait([call])
        while downloads._downloads:
            await asyncio.sleep(0.01)
        return client.traffic.blob_bytes_received

    before = client.traffic.blob_bytes_received
    # Requested pieces come in. The rest is never requested.
    assert client.run(briefly(), WAIT_S) - before <= 16 * MIB


def test_a_cancelled_download_of_several_pieces_ends_and_holds_nothing(swarm, monkeypatch):
    (source, _), (server, _), client = swarm
    blob = content(0, 12 * PIECE_BYTES)
    want = Want(source.put(blob), len(blob), (server.peer_id,))
    asked, cancelled, read = threading.Event(), threading.Event(), source.read

    def once_cancelled(digest: str, offset: int, length: int) -> memoryview | None:
        asked.set()
        cancelled.wait(WAIT_S)
        return read(digest, offset, length)

    monkeypatch.setattr(source, "read", once_cancelled)
    store = BlobStore()
    downloads = Downloads(client, store)

    async def cancel_while_some_are_on_their_way() -> None:
        call = asyncio.create_task(downloads.fetch([want]))
        while not asked.is_set():
            await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.wait([call])
        [download] = downloads._downloads.values()
        assert 1 < sum(downloads._sourcing.knows(piece) for piece in download.pieces) < 12
        cancelled.set()
        async with asyncio.timeout(WAIT_S / 2):
            while downloads._downloads:
                await asyncio.sleep(0.01)

    client.run(cancel_while_some_are_on_their_way(), WAIT_S)
    assert store._holds.held(0.0) == set()
    store.collect(())
    assert store.num_bytes == 0


def test_a_stream_that_ends_while_its_blob_is_judged_holds_no_other_peer_up(swarm):
    stores, servers, client = swarm
    pairs = zip(servers, stores, strict=True)
    # The pump serves peers in the order of their ids.
    (ending, its), (other, others) = sorted(pairs, key=lambda pair: pair[0].peer_id)
    large, small = content(0, PIECE_BYTES + 1), content(1, 1000)
    judged = Want(its.put(large), len(large), (ending.peer_id,))
    behind = Want(its.put(small), len(small), (ending.peer_id,))
    beside = Want(others.put(small[:999]), 999, (other.peer_id,))
    downloads, fetched = Downloads(client, BlobStore()), Fetched()
    begun, may_end = threading.Event(), threading.Event()

    def judge(*_: object) -> None:
        begun.set()
        may_end.wait(WAIT_S)

    async def end_it_meanwhile() -> None:
        judging = asyncio.create_task(downloads.fetch([judged], check=judge))
        while not begun.is_set():
            await asyncio.sleep(0.01)
        for flow in downloads._flows[ending.peer_id]:
            if flow._connection:
                flow._connection.shutdown(socket.SHUT_RDWR)
        fetching = asyncio.create_task(fetched.fetch(downloads, [behind, beside]))
        async with asyncio.timeout(WAIT_S / 2):
            while beside.digest not in fetched.arrived:
                await asyncio.sleep(0.01)
        assert not judging.done()
        may_end.set()
        await asyncio.gather(judging, fetching)

    try:
        client.run(end_it_meanwhile(), WAIT_S)
    finally:
        may_end.set()


async def test_sources_that_nobody_reaches_leave_nothing_behind():
    class Nowhere:
        peer_id, traffic = "me", Traffic()

        def is_far(self, peer: str) -> bool:
            return False

        async def open_stream(self, peer: str, *_: object) -> socket.socket:
            raise NoRoute(peer)

    downloads = Downloads(Nowhere(), BlobStore())
    failed: set[str] = set()
    wants = [Want(f"{n:064x}", 1, (f"key-{n}",)) for n in range(500)]
    fetch = downloads.fetch(wants, on_failure=lambda _, peer, __: failed.add(peer))
    call = asyncio.create_task(fetch)
    while len(failed) < len(wants):
        await asyncio.sleep(0)
    call.cancel()
    await asyncio.wait([call])
    while downloads._tasks:
        await asyncio.sleep(0)
    downloads._pump()
    assert downloads._flows == downloads._queues == {}
    assert downloads._sourcing._waiting == {}


def test_the_store_may_be_collected_and_written_meanwhile(swarm, tmp_path):
    (source, _), (server, _), client = swarm
    blobs = [content(seed, 300_000) for seed in range(60)]
    wants = [Want(source.put(blob), len(blob), (server.peer_id,)) for blob in blobs]
    large = content(99, 3 * PIECE_BYTES)
    wants.append(Want(source.put(large), len(large), (server.peer_id,)))
    store = BlobStore(tmp_path)
    downloads = Downloads(client, store)
    with ThreadPoolExecutor(1) as pool:
        fetching = downloads.fetch(wants, on_blob=lambda digest: store.pin([digest]))
        fetch = pool.submit(client.run, fetching, WAIT_S)
        for seed in range(1000, 2000):
            store.put(content(seed, 100))
            store.collect(set())
            if fetch.done():
                break
        fetch.result(WAIT_S)
    # Arriving blobs are pinned by the fetch, and from their arrival on by the caller.
    store.collect(set())
    assert store.verify([want.digest for want in wants]) == []


def test_asks_are_told_so_that_manifests_can_be_leased(peers):
    asked = []
    server = BlobServer(on_ask=lambda peer, digest: asked.append((peer, digest)))
    store = BlobStore()
    server.attach(store)
    node = peers.node(Handlers(streams={PROTOCOL: server.serve}))
    client = peers.node()
    digest = store.put(b"manifest")
    want = Want(digest, 8, (node.peer_id,))
    client.run(Downloads(client, BlobStore()).fetch_one(want, timeout_s=10), WAIT_S)
    assert asked == [(client.peer_id, digest)]
    server.detach(store)
    with pytest.raises(NobodyReachable, match="missing"):
        client.run(Downloads(client, BlobStore()).fetch_one(want, timeout_s=1.5), WAIT_S)


def test_blobs_are_served_where_the_kernel_cannot_send_files(peers, tmp_path, monkeypatch):
    refuse = Mock(side_effect=OSError(errno.EINVAL, "this file system cannot"))
    monkeypatch.setattr(os, "sendfile", refuse)
    source = BlobStore(tmp_path)
    blob = content(7, 2 * MIB)
    want = Want(source.put(blob), len(blob), (peers.serving(source).peer_id,))
    client = peers.node()
    fetched = client.run(Downloads(client, BlobStore()).fetch_one(want, timeout_s=10), WAIT_S)
    assert fetched == blob


def test_members_have_their_bytes_before_strangers_have_theirs(peers, tmp_path):
    """The stranger asks first, for as much through as many streams. The uplink is scarce."""
    ledger, asked = Ledger(), threading.Event()
    began: list[int] = []

    def on_ask(source: str, _: str) -> None:
        if source == member.peer_id and not asked.is_set():
            began.append(server_bytes(node))
            asked.set()

    server = BlobServer(ledger=ledger, on_ask=on_ask)
    source = BlobStore(tmp_path)
    server.attach(source)
    network = LOOPBACK.model_copy(update={"max_upload_mbit": UPLINK_MBIT})
    node = peers.node(Handlers(streams={PROTOCOL: server.serve}), network=network)
    stranger, member = peers.node(), peers.node()
    ledger.admit([member.peer_id])
    wants = []
    for seed in range(24):
        blob = content(seed, MIB // 2)
        wants.append(Want(source.put(blob), len(blob), (node.peer_id,)))
    ended = {}

    def download(client) -> None:
        client.run(Fetched().fetch(Downloads(client, BlobStore()), wants), WAIT_S)
        ended[client.peer_id] = server_bytes(node)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(download, stranger)
        while server_bytes(node) == 0:
            time.sleep(0.001)
        pool.submit(download, member).result(WAIT_S)
        first.result(WAIT_S)
    total = sum(want.num_bytes for want in wants)
    assert total <= ended[member.peer_id] - began[0] < 1.5 * total, "a third more, at most"


def server_bytes(node) -> int:
    return node.traffic.blob_bytes_sent


@pytest.mark.parametrize(
    "fault",
    [
        OverflowError("int too large to convert to float"),
        RuntimeError("can't start new thread"),
        MemoryError(),
        asyncio.CancelledError("something that it waited for"),
    ],
)
def test_a_fault_that_is_met_with_one_source_costs_no_blob_of_the_others(
    swarm, monkeypatch, caplog, fault
):
    (source, _), (server, _), client = swarm
    blobs = [content(seed, 100_000) for seed in range(4)]
    wants = [Want(source.put(b), len(b), ("faulty", server.peer_id)) for b in blobs]
    opens, store, fetched = client.open_stream, BlobStore(), Fetched()

    async def open_stream(peer: str, *rest: object) -> socket.socket:
        if peer == "faulty":
            raise fault
        return await opens(peer, *rest)

    monkeypatch.setattr(client, "open_stream", open_stream)
    client.run(fetched.fetch(Downloads(client, store), wants), WAIT_S)
    assert sorted(fetched.arrived) == sorted(want.digest for want in wants)
    assert {(peer, why) for _, peer, why in fetched.failures} == {("faulty", "own_fault")}
    assert "a stream of faulty failed by a fault of this peer" in caplog.text
    assert type(fault).__name__ in caplog.text, "with its traceback"


def test_a_fault_while_pieces_are_handed_out_costs_no_blob(swarm, monkeypatch, caplog):
    (source, _), (server, _), client = swarm
    want = Want(source.put(bytes(1000)), 1000, (server.peer_id,))
    downloads, faults = Downloads(client, BlobStore()), [MemoryError(), RuntimeError("a bug")]
    assign, serve = downloads._sourcing.assign, downloads._serve_queue

    def failing_once(*arguments):
        if faults:
            raise faults.pop()
        return assign(*arguments)

    def failing_for_one(peer):
        if peer == "a":
            raise ZeroDivisionError("a bug")
        serve(peer)

    monkeypatch.setattr(fetch_module, "PUMP_AGAIN_S", 0.01)
    monkeypatch.setattr(downloads._sourcing, "assign", failing_once)
    monkeypatch.setattr(downloads, "_serve_queue", failing_for_one)
    other = Want(source.put(bytes(2000)), 2000, ("a", server.peer_id))
    client.run(Fetched().fetch(downloads, [want, other]), WAIT_S)
    assert caplog.text.count("pieces could not be asked for") == 2
    assert "a stream of a failed by a fault of this peer" in caplog.text


def test_a_caller_that_cannot_hear_of_failures_ends_alone(swarm):
    stores, servers, client = swarm
    digest = stores[1].put(bytes(1000))
    want = Want(digest, 1000, tuple(server.peer_id for server in servers))
    deaf = Mock(side_effect=ZeroDivisionError("a bug"))
    downloads = Downloads(client, BlobStore())

    async def both() -> list[BaseException | None]:
        calls = (downloads.fetch([want], on_failure=hears) for hears in (deaf, lambda *_: None))
        return await asyncio.gather(*calls, return_exceptions=True)

    fault, none = client.run(both(), WAIT_S)
    assert isinstance(fault, ZeroDivisionError) and none is None
    assert downloads.store.has(digest)
