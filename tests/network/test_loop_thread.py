from __future__ import annotations

import asyncio
import socket
from concurrent.futures import Future

from swarm.network.loop_thread import LoopThread

WAIT_S = 60.0


def test_stopping_closes_the_connections_that_cancelled_calls_left_open() -> None:
    thread = LoopThread("test")
    ours, theirs = socket.socketpair()
    opened: Future[asyncio.StreamWriter] = Future()

    async def call() -> None:
        _, writer = await asyncio.open_connection(sock=ours)
        opened.set_result(writer)
        await asyncio.sleep(3600)

    asyncio.run_coroutine_threadsafe(call(), thread.loop)
    writer = opened.result(WAIT_S)
    thread.stop(WAIT_S)
    with theirs:
        theirs.settimeout(WAIT_S)
        assert theirs.recv(1) == b""
    assert writer.is_closing()
