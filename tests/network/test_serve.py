"""The serving side of blobs, on streams without a network."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from swarm.network import serve
from swarm.network.blobs import BlobStore
from swarm.network.bulk import HEAD_BYTES, Ask
from swarm.network.ledger import Ledger
from swarm.network.serve import BlobServer
from swarm.network.streams import receive_into
from swarm.network.traffic import Traffic

MIB = 2**20


class Unhurried(asyncio.SelectorEventLoop):
    """A loop whose time goes on only when a test says so."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


@asynccontextmanager
async def served(server: BlobServer, source: str) -> AsyncIterator[socket.socket]:
    """A stream of this peer, which holds little that nobody has read."""
    here, there = socket.socketpair()
    here.setblocking(False)
    there.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    reader, writer = await asyncio.open_connection(sock=there)
    serving = asyncio.create_task(server.serve(Traffic(), source, reader, writer))
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
