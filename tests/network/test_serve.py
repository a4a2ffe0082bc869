"""The serving side of blobs, on streams without a network."""

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

from swarm.network import serve
from swarm.network.blobs import BlobStore
from swarm.network.bulk import HEAD_BYTES, Ask, Head, Status
from swarm.network.ledger import LIMITS, Cost, Ledger, Limit, Rate
from swarm.network.serve import BlobServer
from swarm.network.streams import receive_into
from swarm.network.traffic import Traffic
from swarm.protocol.digests import PIECE_BYTES, digest_of

MIB = 2**20


class Unhurried(asyncio.SelectorEventLoop):
    """A loop whose time goes on only when a test says so."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


@asynccontextmanager
async def served(
    server: BlobServer, source: str, traffic: Traffic | None = None
) -> AsyncIterator[socket.socket]:
    """A stream of this peer, which holds little that nobody has read."""
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
    """As one of many streams under a cap: 64 KiB in 12 s, of 15 that count as none."""
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
    assert loop.now_s > serve.IDLE_S


MISSING = Ask("00" * 32, 0, 1, False).encode()


async def answers_to(connection: socket.socket, asks: bytes, most: int) -> list[int]:
    """The status of each answer, up to so many, to asks that are sent in one go."""
    await asyncio.get_running_loop().sock_sendall(connection, asks)
    heads = bytearray(most * HEAD_BYTES)
    await receive_into(connection, memoryview(heads))
    return [
        Head.decode(bytes(heads[start : start + HEAD_BYTES])).status
        for start in range(0, len(heads), HEAD_BYTES)
    ]


def test_others_have_their_turn_between_asks_that_came_together() -> None:
    turn, asked_in = 0, Counter[int]()

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    async def ask_at_once() -> None:
        counting = asyncio.create_task(count_turns())
        server = BlobServer(on_ask=lambda *_: asked_in.update([turn]))
        async with served(server, "stranger") as connection:
            assert set(await answers_to(connection, 320 * MISSING, 320)) == {Status.MISSING}
        counting.cancel()

    asyncio.run(ask_at_once())
    assert asked_in.total() == 320
    assert max(asked_in.values()) <= serve.ASKS_AT_ONCE


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

    answers = asyncio.run(ask_too_much())
    assert answers == 32 * [Status.MISSING, Status.HERE] + [Status.BUSY]
    assert traffic.refused == {"asks_of_stranger": 1}
