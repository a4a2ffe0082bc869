"""Members are served first. Strangers get a quarter meanwhile, and never wait forever."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections import Counter
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch import blob_server
from swarm.network.fetch.blob_server import MOST_BYTES, PER_MEMBER_BYTE, BlobServer, FairQueue
from swarm.network.fetch.bulk import HEAD_BYTES, Ask, Head, Status
from swarm.network.wire.ledger import LIMITS, Cost, Ledger, Limit, Rate
from swarm.network.wire.streams import receive_into
from swarm.network.wire.traffic import Traffic
from swarm.protocol.values.digests import PIECE_BYTES, digest_of

MIB = 2**20


class Unhurried(asyncio.SelectorEventLoop):
    """A loop whose clock advances only when a test says so."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


@asynccontextmanager
async def served(
    server: BlobServer, source: str, traffic: Traffic | None = None
) -> AsyncIterator[socket.socket]:
    """A stream of this peer, with a small buffer of unread bytes."""
    here, there = socket.socketpair()
    here.setblocking(False)
    there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    reader, writer = await asyncio.open_connection(sock=there)
    serving = asyncio.create_task(server.serve(traffic or Traffic(), source, reader, writer))
    serving.add_done_callback(lambda _: writer.close())
    try:
        yield here
    finally:
        here.close()
        await asyncio.gather(serving, return_exceptions=True)


def test_a_reader_that_is_slow_but_makes_progress_gets_all_of_it(tmp_path: Path) -> None:
    """As one of many streams under a cap: 64 KiB in 12 s, where 15 s count as no progress."""
    blob = random.Random(0).randbytes(2 * MIB)
    ledger, store = Ledger(), BlobStore(tmp_path)
    ledger.admit(["member"])
    server = BlobServer(ledger=ledger)
    server.attach(store)
    ask = Ask(store.put(blob), 0, len(blob), False)

    async def read_slowly() -> bytes:
        loop, received = asyncio.get_running_loop(), bytearray()
        assert isinstance(loop, Unhurried)
        async with served(server, "member") as connection:
            await loop.sock_sendall(connection, ask.encode())
            await receive_into(connection, memoryview(bytearray(HEAD_BYTES)))
            while len(received) < len(blob):
                part = await loop.sock_recv(connection, 16 * 1024)
                assert part, f"cut off after {len(received)} bytes, {loop.now_s:.0f} s"
                received += part
                loop.now_s += 12.0 * len(part) / (64 * 1024)
        return bytes(received)

    loop = Unhurried()
    try:
        assert loop.run_until_complete(read_slowly()) == blob
    finally:
        loop.close()
    assert loop.now_s > blob_server.IDLE_S


MISSING = Ask("00" * 32, 0, 1, False).encode()


async def answers_to(connection: socket.socket, asks: bytes, most: int) -> list[int]:
    """The status of each answer, up to a number, to requests sent at once."""
    await asyncio.get_running_loop().sock_sendall(connection, asks)
    heads = bytearray(most * HEAD_BYTES)
    await receive_into(connection, memoryview(heads))
    return [
        Head.decode(bytes(heads[start : start + HEAD_BYTES])).status
        for start in range(0, len(heads), HEAD_BYTES)
    ]


async def test_others_have_their_turn_between_asks_that_came_together() -> None:
    turn, asked_in = 0, Counter[int]()

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count_turns())
    server = BlobServer(on_ask=lambda *_: asked_in.update([turn]))
    async with served(server, "stranger") as connection:
        assert set(await answers_to(connection, 320 * MISSING, 320)) == {Status.MISSING}
    counting.cancel()
    assert asked_in.total() == 320
    assert max(asked_in.values()) <= blob_server.ASKS_AT_ONCE


def test_a_known_index_is_told_while_all_helpers_wait_for_the_disk() -> None:
    blob, store = random.Random(0).randbytes(PIECE_BYTES + 1), BlobStore()
    ask = Ask(store.put(blob), 0, 0, True).encode()
    store.index(digest_of(blob))
    goes_on = threading.Event()

    async def ask_beside() -> list[int]:
        loop, server = asyncio.get_running_loop(), BlobServer()
        loop.set_default_executor(ThreadPoolExecutor(1))
        server.attach(store)
        held = loop.run_in_executor(None, goes_on.wait, 4)
        try:
            async with served(server, "member") as connection:
                return await asyncio.wait_for(answers_to(connection, ask, 1), 2)
        finally:
            goes_on.set()
            await held

    assert asyncio.run(ask_beside()) == [Status.HERE]


def test_asks_are_charged_whether_or_not_the_blob_is_here() -> None:
    limits = {**LIMITS, Cost.ASKS: Limit(Rate(1024), Rate(512), Rate(64))}
    store, traffic = BlobStore(), Traffic()
    server = BlobServer(ledger=Ledger(limits))
    server.attach(store)
    nothing_of = Ask(store.put(b"here"), 0, 0, False).encode()

    async def ask_too_much() -> list[int]:
        async with served(server, "stranger", traffic) as connection:
            return await answers_to(connection, 35 * (MISSING + nothing_of), 65)

    assert asyncio.run(ask_too_much()) == 32 * [Status.MISSING, Status.HERE] + [Status.BUSY]
    assert traffic.refused == {"asks_of_stranger": 1}


PART = 1000


@pytest.fixture
def some(monkeypatch: pytest.MonkeyPatch) -> FairQueue:
    """The queue of a run whose one member is called "member". Nobody gives up waiting."""
    monkeypatch.setattr(blob_server, "YIELD_S", 3600.0)
    return FairQueue(lambda peer: peer == "member")


async def is_served_at_once(some: FairQueue, peer: str) -> bool:
    waiting = asyncio.create_task(some.wait(peer, PART))
    await asyncio.sleep(0)
    return waiting.done() or not waiting.cancel()


async def test_nobody_waits_while_no_member_is_served(some: FairQueue) -> None:
    for _ in range(10):
        with some.serving("stranger"):
            assert await is_served_at_once(some, "stranger")
            assert await is_served_at_once(some, "other stranger")


async def test_a_stranger_goes_on_as_soon_as_the_last_member_has_its_bytes(some: FairQueue) -> None:
    with some.serving("member"):
        with some.serving("member"):
            assert await is_served_at_once(some, "member")
            assert await is_served_at_once(some, "stranger"), "a part came free"
            waiting = asyncio.create_task(some.wait("stranger", PART))
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
    async with asyncio.timeout(30.0):
        await waiting


async def test_while_a_member_is_served_strangers_share_a_quarter(some: FairQueue) -> None:
    sent = {"member": 0, "strangers": 0}

    async def take(stranger: str) -> None:
        while True:
            await some.wait(stranger, PART)
            sent["strangers"] += PART

    with some.serving("member"):
        greedy = [asyncio.create_task(take(f"stranger {number}")) for number in range(8)]
        for _ in range(600):
            await some.wait("member", PART)
            sent["member"] += PART
            for _ in range(20):
                await asyncio.sleep(0)
        for task in greedy:
            task.cancel()
    assert sent["member"] / 3 - PART <= sent["strangers"] <= sent["member"] / 3 + PART


async def test_strangers_save_up_no_more_than_a_little(some: FairQueue) -> None:
    with some.serving("member"):
        await some.wait("member", int(100 * MOST_BYTES / PER_MEMBER_BYTE))
        await some.wait("stranger", MOST_BYTES)
        assert not await is_served_at_once(some, "stranger")


async def test_a_stranger_gets_a_part_where_the_member_takes_nothing(
    some: FairQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blob_server, "YIELD_S", 0.05)
    with some.serving("member"):
        async with asyncio.timeout(60.0):
            await some.wait("stranger", PART)
