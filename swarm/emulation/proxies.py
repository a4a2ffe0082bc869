"""Links without root: every peer is dialled through a TCP proxy of this process.

A peer listens on a port of its own and announces the proxy's. Whoever dials it is known by the
process that holds the other end of the connection. Rate, delay and cuts act on streams: a cut
holds bytes back, as TCP does, instead of losing packets, so losses have no effect.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

from swarm.background import SupervisedThread
from swarm.emulation.controls import INDEX_VARIABLE
from swarm.emulation.links import Cuts, Link, Shaper, one_way_s

CHUNK_BYTES = 16 * 1024
MOST_CHUNKS = 256
"""Of one direction of a connection on a line, and as many on their way."""
CUT_POLL_S = 0.1
STOP_S = 5.0
HOST = "127.0.0.1"
Chunks = asyncio.Queue[tuple[float, bytes]]
"""Each with the moment when it leaves, seconds of the monotonic clock; an empty one is the end."""


class ProxyLinks:
    """See `Links`."""

    def __init__(self, link: Link | Sequence[Link]) -> None:
        self._shape, self._cuts = Shaper(link), Cuts()
        self._ports: dict[int, tuple[int, int]] = {}
        """Peer -> (its own port, its proxy's)."""
        self._loop = asyncio.new_event_loop()
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = SupervisedThread("proxies", self._loop.run_forever)
        self._thread.start()

    def place(self, peer: int) -> tuple[list[str], list[str]]:
        """See `Links`; opens the proxy at the first call."""
        if peer not in self._ports:
            listening = socket.create_server((HOST, 0))
            self._ports[peer] = (_free_port(), listening.getsockname()[1])
            asyncio.run_coroutine_threadsafe(self._serve(peer, listening), self._loop).result(
                STOP_S
            )
        own, announced = self._ports[peer]
        return [], [
            "--host-maddrs", f"/ip4/{HOST}/tcp/{own}",
            "--announce-maddrs", f"/ip4/{HOST}/tcp/{announced}",
            "--no-direct",  # which would go past the proxy
        ]  # fmt: skip

    def cut(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Links`."""
        self._cuts.pairs = self._cuts.pairs | set(pairs)

    def mend(self, pairs: Sequence[tuple[int, int]]) -> None:
        """See `Links`."""
        self._cuts.pairs = self._cuts.pairs - set(pairs)

    def partition(self, groups: Sequence[Sequence[int]]) -> None:
        """See `Links`."""
        self._cuts.partition(groups)

    def heal(self) -> None:
        """See `Links`."""
        self._cuts.heal()

    def close(self) -> None:
        """See `Links`."""
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(STOP_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        if self._thread.stop(STOP_S):
            self._loop.close()

    # ------------------------------------------------ streams, in the loop

    async def _serve(self, peer: int, listening: socket.socket) -> None:
        async def accepted(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            self._tasks.add(task)
            try:
                await self._join(peer, reader, writer)
            finally:
                self._tasks.discard(task)

        self._servers.append(await asyncio.start_server(accepted, sock=listening))

    async def _stop(self) -> None:
        for server in self._servers:
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _join(
        self, target: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Carries one connection, both ways, until either end closes."""
        port = writer.get_extra_info("peername")[1]
        source = await asyncio.to_thread(self._dialler, port)
        try:
            inner_reader, inner_writer = await asyncio.open_connection(HOST, self._ports[target][0])
        except OSError:
            writer.close()
            return
        both = [
            asyncio.ensure_future(self._carry(source, target, reader, inner_writer)),
            asyncio.ensure_future(self._carry(target, source, inner_reader, writer)),
        ]
        try:
            # An end of one direction is passed on; an error, such as a reset, ends both.
            await asyncio.wait(both, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in both:
                task.cancel()
            await asyncio.gather(*both, return_exceptions=True)
            writer.close()
            inner_writer.close()

    async def _carry(
        self, source: int, target: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Carries one direction: each chunk goes up, down and over the distance, in this order.

        Others pass meanwhile: a chunk takes the line down only once it has left the line up.
        """
        climbing, flying = Chunks(MOST_CHUNKS), Chunks(MOST_CHUNKS)
        async with asyncio.TaskGroup() as parts:
            parts.create_task(self._send_up(source, target, reader, climbing))
            parts.create_task(self._send_down(source, target, climbing, flying))
            parts.create_task(self._deliver(source, target, flying, writer))

    async def _send_up(
        self, source: int, target: int, reader: asyncio.StreamReader, climbing: Chunks
    ) -> None:
        up, down = self._shape.access_of(source).up, self._shape.access_of(target).down
        while chunk := await reader.read(CHUNK_BYTES):
            while down.is_full(time.monotonic()):  # as TCP, which sends no more then
                await asyncio.sleep(CUT_POLL_S)
            while (left_s := up.leaves_at(time.monotonic(), len(chunk))) is None:
                await asyncio.sleep(CUT_POLL_S)
            await climbing.put((left_s, chunk))
        await climbing.put((time.monotonic(), b""))

    async def _send_down(self, source: int, target: int, climbing: Chunks, flying: Chunks) -> None:
        delay_s = one_way_s(self._shape.link_of(source), self._shape.link_of(target))
        down, chunk = self._shape.access_of(target).down, b"-"
        while chunk:
            left_s, chunk = await climbing.get()
            await _sleep_until(left_s)
            await self._while_cut(source, target)
            # It may be late as of a busy machine, not by how long a cut or a reader held it back.
            left_s = max(left_s, time.monotonic() - CUT_POLL_S)
            while (through_s := down.leaves_at(left_s, len(chunk))) is None:
                await asyncio.sleep(CUT_POLL_S)
                left_s = max(left_s, time.monotonic())
            await flying.put((through_s + delay_s, chunk))

    async def _deliver(
        self, source: int, target: int, flying: Chunks, writer: asyncio.StreamWriter
    ) -> None:
        chunk = b"-"
        while chunk:
            at_s, chunk = await flying.get()
            await _sleep_until(at_s)
            await self._while_cut(source, target)
            writer.write(chunk)
            await writer.drain()
        writer.write_eof()

    async def _while_cut(self, source: int, target: int) -> None:
        while self._cuts.loses(source, target):
            await asyncio.sleep(CUT_POLL_S)

    def _dialler(self, port: int) -> int:
        """The peer that dials from a port; -1 for others, such as a monitor."""
        for peer, (own, _) in self._ports.items():
            if port == own:  # libp2p dials from the port that it listens on, where it can
                return peer
        return _peer_of_socket(port)


async def _sleep_until(at_s: float) -> None:
    await asyncio.sleep(max(0.0, at_s - time.monotonic()))


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as probe:
        return int(probe.getsockname()[1])


def _peer_of_socket(port: int) -> int:
    """Number of the peer whose process has a socket with this local port; -1 if none has."""
    wanted = f"0100007F:{port:04X}"
    rows = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:])
    inode = next((row[9] for row in rows if row[1] == wanted and row[9] != "0"), None)
    if inode is None:
        return -1
    for process in Path("/proc").glob("[0-9]*"):
        try:
            links = (os.readlink(path) for path in (process / "fd").iterdir())
            if f"socket:[{inode}]" not in links:
                continue
            variables = (process / "environ").read_bytes().split(b"\0")
        except OSError:  # it ended, or belongs to somebody else
            continue
        name = f"{INDEX_VARIABLE}=".encode()
        return next((int(v[len(name) :]) for v in variables if v.startswith(name)), -1)
    return -1
