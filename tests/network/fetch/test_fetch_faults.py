"""Servers that lie, break off, freeze and die."""

from __future__ import annotations

import asyncio
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.errors import NobodyReachable
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch import blob_server
from swarm.network.fetch.bulk import ASK_BYTES, HEAD_BYTES, PROTOCOL, Ask, Head, Status
from swarm.network.fetch.fetcher import Downloads, Want
from swarm.network.node.node import Handlers
from swarm.network.wire.ledger import LIMITS, Cost
from swarm.network.wire.traffic import Traffic
from swarm.protocol.exchange.sourcing import Limits
from swarm.protocol.values.digests import PIECE_BYTES, digest_of, piece_index
from tests.network.conftest import LOOPBACK
from tests.network.fetch.test_fetcher import Fetched
from tests.waiting import wait_until

WAIT_S = 60.0
MIB = 2**20
SMALL = random.Random(1).randbytes(100_000)
LARGE = random.Random(2).randbytes(2 * PIECE_BYTES + 1)


class Liar:
    """Answers each request with the result of `answer`, then waits as an honest peer would."""

    def __init__(self) -> None:
        self.answer = None
        self.asks: list[Ask] = []

    async def hear(self, source: str, message: bytes) -> None:
        """Takes any message."""

    async def serve(
        self,
        traffic: Traffic,
        source: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        while True:
            ask = Ask.decode(await reader.readexactly(ASK_BYTES))
            self.asks.append(ask)
            ends = self.answer(ask, writer)
            await writer.drain()
            if ends:
                return


@pytest.fixture(scope="module")
def nodes(lasting_peers, tmp_path_factory):
    liar = Liar()
    lying = lasting_peers.node(Handlers(on_message=liar.hear, streams={PROTOCOL: liar.serve}))
    source = BlobStore(tmp_path_factory.mktemp("honest"))
    honest = lasting_peers.serving(source)
    source.put(SMALL)
    source.put(LARGE)
    # An error on a connection that others can alter is not blamed on the peer.
    network = LOOPBACK.model_copy(update={"direct": False})
    return liar, lying, honest, lasting_peers.node(network=network)


def part_of(blob: bytes, ask: Ask) -> bytes:
    return blob[ask.offset : ask.offset + ask.length]


def honest_head(blob: bytes, ask: Ask) -> bytes:
    index = piece_index(blob) if ask.with_index else b""
    return Head(Status.HERE, len(blob), len(index)).encode() + index


def wrong_content(blob, ask, writer):
    writer.write(honest_head(blob, ask) + bytes(len(part_of(blob, ask))))


def flipped_byte(blob, ask, writer):
    part = bytearray(part_of(blob, ask))
    part[len(part) // 2] ^= 1
    writer.write(honest_head(blob, ask) + part)


def too_large(blob, ask, writer):
    writer.write(Head(Status.HERE, 2**60, 0).encode())


def too_small(blob, ask, writer):
    writer.write(Head(Status.HERE, len(blob) - 1, 0).encode() + part_of(blob, ask))


def huge_index(blob, ask, writer):
    writer.write(Head(Status.HERE, len(blob), 2**32 - 1).encode())


def wrong_index(blob, ask, writer):
    index = bytes(len(piece_index(blob)))
    writer.write(Head(Status.HERE, len(blob), len(index)).encode() + index + part_of(blob, ask))


def nonsense(blob, ask, writer):
    writer.write(b"\xff" * 13)


def truncated(blob, ask, writer):
    writer.write((honest_head(blob, ask) + part_of(blob, ask))[:-1])
    return True


def closed_at_once(blob, ask, writer):
    return True


def silent(blob, ask, writer):
    pass


def dripping(blob, ask, writer):
    writer.write(honest_head(blob, ask))

    def drip() -> None:
        if not writer.is_closing():
            writer.write(b"x")
            asyncio.get_running_loop().call_later(0.05, drip)

    drip()


COUNTED = [
    (wrong_content, "blob_digest"),
    (flipped_byte, "blob_digest"),
    (too_large, "blob_size"),
    (too_small, "blob_size"),
    (huge_index, "blob_index"),
    (nonsense, "blob_size"),
    (truncated, "ended_early"),
    (closed_at_once, "ended_early"),
]
LARGE_ONLY = [(wrong_index, "blob_index")]
NOT_COUNTED = [(silent, "no_progress"), (dripping, "no_progress")]


@pytest.mark.parametrize(
    ("blob", "answer", "reason"),
    [(SMALL, *case) for case in COUNTED + NOT_COUNTED]
    + [(LARGE, *case) for case in COUNTED + LARGE_ONLY + NOT_COUNTED],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_lying_server_is_refused_and_another_source_finishes(nodes, blob, answer, reason):
    liar, lying, honest, client = nodes
    liar.answer = lambda ask, writer: answer(blob, ask, writer)
    # It answers messages, so that its streams are opened directly.
    client.run(client.post(lying.peer_id, b""), WAIT_S)
    client.traffic.refused.clear()
    store, fetched = BlobStore(), Fetched()
    limits = Limits(bytes_per_peer=64 * MIB)  # all pieces are requested from the liar first
    is_counted = (answer, reason) not in NOT_COUNTED
    progress_s = 5.0 if is_counted else 1.0  # waits for a stream without progress
    downloads = Downloads(client, store, progress_s=progress_s, limits=limits)
    digest = digest_of(blob)
    want = Want(digest, len(blob), (lying.peer_id, honest.peer_id))
    client.run(fetched.fetch(downloads, [want]), WAIT_S)
    assert store.get(digest) == blob
    assert set(fetched.failures) == {(digest, lying.peer_id, reason)}
    assert set(client.traffic.refused) == ({reason} if is_counted else set())


def test_what_is_cut_off_on_disk_comes_from_another_source(nodes, lasting_peers, tmp_path):
    *_, honest, client = nodes
    damaged_store, store = BlobStore(tmp_path), BlobStore()
    digest = damaged_store.put(LARGE)
    [pack] = (tmp_path / "packs").glob("*.pack")
    os.truncate(pack, PIECE_BYTES + 1)
    damaged = lasting_peers.serving(damaged_store)
    client.traffic.refused.clear()
    fetched = Fetched()
    downloads = Downloads(client, store, limits=Limits(bytes_per_peer=64 * MIB))
    want = Want(digest, len(LARGE), (damaged.peer_id, honest.peer_id))
    client.run(fetched.fetch(downloads, [want]), WAIT_S)
    assert store.get(digest) == LARGE
    assert {peer for _, peer, _ in fetched.failures} == {damaged.peer_id}
    assert set(client.traffic.refused) <= {"ended_early", "blob_digest"}


def test_wrong_bytes_are_not_asked_of_the_same_peer_again(nodes):
    liar, lying, _, client = nodes
    liar.asks.clear()
    liar.answer = lambda ask, writer: flipped_byte(SMALL, ask, writer)
    downloads = Downloads(client, BlobStore(), limits=Limits(rest_s=0.01))
    want = Want(digest_of(SMALL), len(SMALL), (lying.peer_id,))
    with pytest.raises(NobodyReachable, match="blob_digest"):
        client.run(downloads.fetch_one(want, timeout_s=1.5), WAIT_S)
    assert len(liar.asks) == 1


def test_one_bad_blob_does_not_spoil_the_others_of_the_same_stream(nodes):
    liar, lying, _, client = nodes
    blobs = [SMALL[start : start + 1000] for start in range(0, 100_000, 1000)]
    by_digest = {digest_of(blob): blob for blob in blobs}
    bad = digest_of(blobs[50])

    def answer(ask, writer):
        (flipped_byte if ask.digest == bad else honest_answer)(by_digest[ask.digest], ask, writer)

    def honest_answer(blob, ask, writer):
        writer.write(honest_head(blob, ask) + part_of(blob, ask))

    liar.answer = answer
    liar.asks.clear()
    store = BlobStore()
    wants = [Want(digest, 1000, (lying.peer_id,)) for digest in by_digest]
    others, refused = asyncio.Event(), asyncio.Event()

    def note(digest: str) -> None:
        if sum(map(store.has, by_digest)) == len(blobs) - 1:
            others.set()

    def note_failure(digest: str, *_: object) -> None:
        if digest == bad:
            refused.set()

    async def until_nothing_else_is_left() -> None:
        fetch = Downloads(client, store).fetch(wants, on_blob=note, on_failure=note_failure)
        async with asyncio.TaskGroup() as group:
            fetching = group.create_task(fetch)
            await others.wait()
            await refused.wait()
            assert not fetching.done(), "it continues to request the bad one"
            fetching.cancel()

    client.run(until_nothing_else_is_left(), WAIT_S)
    assert sorted(d for d in by_digest if not store.has(d)) == [bad]


def test_asks_that_make_no_sense_end_the_stream(nodes):
    *_, honest, client = nodes
    honest.traffic.refused.clear()

    async def ask(encoded: bytes, answer_bytes: int) -> bytes:
        connection = await client.open_stream(honest.peer_id, PROTOCOL, 5)
        try:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(connection, encoded)
            answer = b""
            while len(answer) < answer_bytes:
                answer += await loop.sock_recv(connection, 100)
            return answer
        finally:
            connection.close()

    bad = Head(Status.BAD).encode()
    beyond = Ask(digest_of(SMALL), len(SMALL) + 1, 1, False).encode()
    assert client.run(ask(beyond, len(bad)), WAIT_S) == bad
    assert honest.traffic.refused == {"bad_ask": 1}
    last_byte = Head(Status.HERE, len(SMALL)).encode() + SMALL[-1:]
    far = Ask(digest_of(SMALL), len(SMALL) - 1, 2**64 - 1, True).encode()
    assert client.run(ask(far, len(last_byte)), WAIT_S) == last_byte


def test_the_number_of_streams_per_peer_is_capped(nodes):
    *_, honest, client = nodes
    most = int(LIMITS[Cost.STREAMS].stranger.most)
    honest.traffic.refused.clear()

    async def open_one_too_many() -> bytes:
        loop = asyncio.get_running_loop()
        opened = [await client.open_stream(honest.peer_id, PROTOCOL, 5) for _ in range(most)]
        try:
            asks = Ask(digest_of(LARGE), 0, len(LARGE), False).encode() * 20
            for connection in opened:  # the beginning of an answer shows that it is being served
                await loop.sock_sendall(connection, asks)
                assert (await loop.sock_recv(connection, HEAD_BYTES))[0] == Status.HERE
            opened.append(await client.open_stream(honest.peer_id, PROTOCOL, 5))
            await loop.sock_sendall(opened[most], asks)
            return await loop.sock_recv(opened[most], 100)
        finally:
            for connection in opened:
                connection.close()

    assert client.run(open_one_too_many(), WAIT_S) == Head(Status.BUSY).encode()
    assert honest.traffic.refused == {"streams_of_stranger": 1}
    want = Want(digest_of(SMALL), len(SMALL), (honest.peer_id,))
    assert client.run(Downloads(client, BlobStore()).fetch_one(want, timeout_s=10), WAIT_S) == SMALL


def test_a_reader_that_takes_nothing_is_let_go(nodes, monkeypatch):
    *_, honest, client = nodes
    monkeypatch.setattr(blob_server, "IDLE_S", 0.3)

    async def ask_and_freeze() -> float:
        loop = asyncio.get_running_loop()
        connection = await client.open_stream(honest.peer_id, PROTOCOL, 5)
        begin = loop.time()
        try:
            ask = Ask(digest_of(LARGE), 0, len(LARGE), False).encode()
            await loop.sock_sendall(connection, ask * 20)
            sent = -1
            while honest.traffic.blob_bytes_sent != sent:
                sent = honest.traffic.blob_bytes_sent
                await asyncio.sleep(0.6)
            received = 0
            while part := await loop.sock_recv(connection, MIB):
                received += len(part)
            assert received < 20 * len(LARGE)
            return loop.time() - begin
        finally:
            connection.close()

    assert client.run(ask_and_freeze(), WAIT_S) < 30


NUM_BYTES = 12 * PIECE_BYTES
BLOB_SEED = 7


@pytest.fixture(scope="module")
def children(tmp_path_factory) -> Iterator[dict[signal.Signals, tuple[subprocess.Popen, str]]]:
    """For each fault, the address of a process that slowly serves a known blob of twelve pieces."""
    program = Path(__file__).parents[1] / "serving_peer.py"
    started = {}
    for fault in (signal.SIGKILL, signal.SIGSTOP):
        folder = tmp_path_factory.mktemp("child")
        arguments = [str(folder), str(BLOB_SEED), str(NUM_BYTES), "0.02"]
        started[fault] = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(program), *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        )
    try:
        for child in started.values():
            assert select.select([child.stdout], [], [], 3 * WAIT_S)[0], "the child did not start"
        yield {f: (child, child.stdout.readline().strip()) for f, child in started.items()}
    finally:
        for child in started.values():
            child.kill()
            child.wait(10)
            child.stdout.close()


def num_verified(store: BlobStore, digest: str) -> int:
    partial = store.writer(digest, NUM_BYTES)
    return sum(partial.has_piece(number) for number in range(12))


@pytest.mark.slow
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_freezes_is_replaced_without_fetching_pieces_again(
    peers, children, tmp_path, fault
):
    blob = random.Random(BLOB_SEED).randbytes(NUM_BYTES)
    digest = digest_of(blob)
    child, address = children[fault]
    child_id = address.rsplit("/", 1)[1]
    client = peers.node(known_peers=(address,))
    source = BlobStore()
    source.put(blob)
    second = peers.serving(source)
    store = BlobStore(tmp_path / "client")
    # All pieces are requested from the child, so that only its end involves the second peer.
    limits = Limits(bytes_per_peer=NUM_BYTES, rest_s=600, longest_rest_s=600)
    progress_s = 5.0 if fault == signal.SIGKILL else 1.0
    downloads = Downloads(client, store, progress_s=progress_s, limits=limits)
    wants = [Want(digest, NUM_BYTES, (child_id, second.peer_id))]
    fetched = Fetched()
    fetch = asyncio.run_coroutine_threadsafe(fetched.fetch(downloads, wants), client.loop)
    assert wait_until(lambda: num_verified(store, digest) >= 2, WAIT_S), "no piece came"
    child.send_signal(fault)
    fetch.result(WAIT_S)
    assert store.get(digest) == blob
    store.sync([digest])
    assert store.verify([digest]) == []
    reason = "ended_early" if fault == signal.SIGKILL else "no_progress"
    assert {(peer, why) for _, peer, why in fetched.failures} <= {
        (child_id, reason),
        (child_id, "unreachable"),
    }
    assert (digest, child_id, reason) in fetched.failures
    # Each piece arrives whole once. Parts of the pieces in flight at the end are wasted.
    verified_first = NUM_BYTES - second.traffic.blob_bytes_sent
    assert verified_first >= 2 * PIECE_BYTES
    assert second.traffic.blob_bytes_sent % PIECE_BYTES == 0
