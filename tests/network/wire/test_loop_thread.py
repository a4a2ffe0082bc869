from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import Awaitable, Callable
from concurrent.futures import Future

import pytest

from swarm.network.wire.loop_thread import LoopThread

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


def test_only_hivemind_may_drop_a_task_that_waits(caplog: pytest.LogCaptureFixture) -> None:
    async def drop(begin: Callable[[], Awaitable[object]]) -> None:
        task = asyncio.ensure_future(begin())
        await asyncio.sleep(0)
        del task

    async def ours() -> None:
        await asyncio.Event().wait()

    def errors_of(begin: Callable[[], Awaitable[object]]) -> int:
        caplog.clear()
        loop.run(drop(begin), 10.0)
        gc.collect()
        loop.run(asyncio.sleep(0), 10.0)
        return sum(record.levelno >= logging.ERROR for record in caplog.records)

    loop = LoopThread("test")
    try:
        assert errors_of(lambda: asyncio.Event().wait()) == 0
        assert errors_of(ours) == 1
    finally:
        loop.stop(10.0)
