"""The door of a peer: takes TCP connections beside libp2p's, and hands them to who serves them."""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial

from swarm.background import Tasks
from swarm.config import NetworkSection
from swarm.errors import HostileInput, NetworkDown
from swarm.network.daemon import foreign_address_hint
from swarm.network.handshake import Introduced, admit
from swarm.network.identity import Identity
from swarm.network.ledger import Cost, Ledger
from swarm.network.streams import Serve
from swarm.network.traffic import Traffic

logger = logging.getLogger(__name__)

ADMIT_S = 5.0
"""Whoever has not said by then who it is, is not listened to."""
BACKLOG = 128
PAUSE_S = 0.1
"""After a connection that could not be accepted."""
MOST = 512
"""Connections at a time; the ledger bounds those of each peer, and of each network, long before."""
UNSENT_BYTES = 128 * 1024
"""What the kernel takes beyond what is on its way: more would only grow old there."""
CALLED = "called"
"""Purpose of a connection for which its accepting side has asked."""


class Door:
    """Connections that others open to this peer; all in the node's loop.

    Attributes:
        port: where it listens; 0: nowhere.
        streams: who serves which bulk protocol.
        tasks: what is being served.
    """

    def __init__(
        self, identity: Identity, traffic: Traffic, ledger: Ledger, streams: Mapping[str, Serve]
    ) -> None:
        """Is closed."""
        self.port, self.streams, self.tasks = 0, streams, Tasks("the door")
        self._identity, self._traffic, self._ledger = identity, traffic, ledger
        self._listening: list[socket.socket] = []
        self._expected: dict[str, tuple[str, asyncio.Future[socket.socket]]] = {}
        """Token of a call -> who is to call, and who waits for it."""

    def open(self, hosts: Sequence[str], port: int) -> None:
        """Begins to listen on hosts (IPv4 or IPv6 numbers), at one port; 0 takes a free one.

        Raises:
            NetworkDown: somebody else has the port; then it listens nowhere.
        """
        opened: list[socket.socket] = []
        for host in dict.fromkeys(hosts):
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
            except OSError as error:
                for listening in opened:
                    listening.close()
                hint = "choose another --direct-port, or go without: --no-direct"
                raise NetworkDown(
                    f"cannot take connections for blobs on {host} port {port}: {error.strerror}",
                    hint=foreign_address_hint(error, host, port) or hint,
                ) from error
            listening.setblocking(False)
            opened.append(listening)
            port = listening.getsockname()[1]
        self.port = port if opened else 0
        self._listening += opened
        for listening in opened:
            self.tasks.supervise(partial(self._accept, listening))

    async def close(self) -> None:
        """Ends all connections."""
        await self.tasks.stop()
        for listening in self._listening:
            listening.close()

    @contextmanager
    def expecting(self, token: str, peer_id: str) -> Iterator[asyncio.Future[socket.socket]]:
        """Waits for a connection that this peer has asked another for."""
        expected = asyncio.get_running_loop().create_future()
        self._expected[token] = peer_id, expected
        try:
            yield expected
        finally:
            del self._expected[token]
            expected.cancel()

    async def serve(self, serve: Serve, source: str, connection: socket.socket) -> None:
        """Serves a peer that has proved who it is, until it closes the connection."""
        reader, writer = await asyncio.open_connection(sock=connection)
        try:
            with self._traffic.sent.watching(source, connection):
                await serve(self._traffic, source, reader, writer)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            logger.debug("direct stream of %s ended: %s", source, error)
        finally:
            writer.close()

    async def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, address = await loop.sock_accept(listening)
            except OSError as error:  # no descriptors are left, or the other side has gone already
                logger.debug("no connection accepted: %s", error)
                await asyncio.sleep(PAUSE_S)
                continue
            if len(self.tasks) > MOST:
                self._traffic.refuse("direct_room")
                connection.close()
                continue
            self.tasks.spawn(self._enter(self._traffic.line.connection(connection), address[0]))

    async def _enter(self, connection: socket.socket, host: str) -> None:
        taken = False
        try:
            introduced = await self._introduced(tuned(connection), host)
            kind, _, token = introduced.purpose.partition(" ")
            if kind == CALLED:
                taken = await self._called(connection, introduced, token)
            elif serve := self.streams.get(introduced.purpose):
                await introduced.confirm(connection, self._identity)
                taken = True
                await self.serve(serve, introduced.peer_id, connection)
        except HostileInput as error:
            self._traffic.refuse(error.reason)
            logger.debug("connection from %s refused: %s", host, error)
        except (OSError, TimeoutError) as error:
            logger.debug("connection from %s ended: %s", host, error)
        finally:
            if not taken:
                connection.close()

    async def _introduced(self, connection: socket.socket, host: str) -> Introduced:
        """Who has come; until then it costs the network that it comes from.

        From the host of a member it costs that member, so that strangers keep no member out.
        """
        version = "ip6" if ":" in host else "ip4"
        address = f"/{version}/{host}/tcp/0"
        payer = self._ledger.member_at(address)
        if payer is None:
            self._ledger.locate(payer := address, address)
        held = self._ledger.take(payer, Cost.ADMITTING, 1, time.monotonic())
        try:
            async with asyncio.timeout(ADMIT_S):
                introduced = await admit(connection, self._identity)
        finally:
            self._ledger.give_back(held, time.monotonic())
        self._ledger.locate(introduced.peer_id, address)
        return introduced

    async def _called(self, connection: socket.socket, introduced: Introduced, token: str) -> bool:
        peer_id, expected = self._expected.get(token, ("", None))
        if expected is None or expected.done() or peer_id != introduced.peer_id:
            return False
        await introduced.confirm(connection, self._identity)
        if expected.done():
            return False
        expected.set_result(connection)
        return True


def port_beside(network: NetworkSection) -> int:
    """The port after the first that libp2p is told to take, so that two can be opened beforehand.

    0, any: it is told none.
    """
    ports = [int(text.rpartition("/")[2]) for text in network.host_maddrs]
    first = next((port for port in ports if port), 0)
    return first + 1 if 0 < first < 65_535 else 0


def tuned(connection: socket.socket) -> socket.socket:
    """The same socket, non-blocking, with little that is kept unsent in the kernel."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with suppress(OSError, AttributeError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    return connection
