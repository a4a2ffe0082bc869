"""Streams over TCP connections that this peer opens without libp2p's daemon; their pool."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError

from swarm.errors import BadMessage, NetworkDown, NoRoute, Unreachable
from swarm.network.wire.bounded_tables import recalled
from swarm.network.wire.control import Control, seen_at
from swarm.network.wire.identity import Identity
from swarm.network.wire.streams import Serve
from swarm.network.wire.tcp_listener import CALLED, TcpListener, introduce, tuned
from swarm.network.wire.upload_rate import LineBytes
from swarm.protocol.timing.backoff import backoff_s

logger = logging.getLogger(__name__)


KEPT_S = 20.0
"""How long an idle stream is kept; the other side ends it after a minute."""
MOST_OF_A_PEER = 2
MOST = 32
"""Most streams in the pool. If each of N peers fetches from all, each also has, on average, as many
idle streams that others opened, and those are limited (`served_streams.py`)."""


class _Kept(NamedTuple):
    peer_id: str
    protocol: str
    connection: socket.socket


class StreamPool:
    """Idle streams; a peer's newest is used first. For one event loop."""

    def __init__(self) -> None:
        """Has none."""
        self._streams: list[_Kept] = []
        """The oldest first."""

    def __len__(self) -> int:
        return len(self._streams)

    def keep(self, peer_id: str, protocol: str, connection: socket.socket) -> None:
        """Keeps a stream on which no answer is due. Ends the stream if it is not taken in time."""
        connection.setblocking(False)  # a thread may have read from it
        kept, same = _Kept(peer_id, protocol, connection), self._of(peer_id, protocol)
        if len(same) == MOST_OF_A_PEER:
            self._end(same[0])
        elif len(self._streams) == MOST:
            self._end(self._streams[0])
        self._streams.append(kept)
        asyncio.get_running_loop().call_later(KEPT_S, self._end, kept)

    def take(self, peer_id: str, protocol: str) -> socket.socket | None:
        """A stream that the other side has not visibly ended; None if there is none."""
        for kept in reversed(self._of(peer_id, protocol)):
            if _is_open(kept.connection):
                self._streams.remove(kept)
                return kept.connection
            self._end(kept)
        return None

    def drop(self, peer_id: str) -> None:
        """Ends the streams of a peer; if one failed, probably all have."""
        for kept in [each for each in self._streams if each.peer_id == peer_id]:
            self._end(kept)

    def close(self) -> None:
        """Ends all."""
        for kept in list(self._streams):
            self._end(kept)

    def _of(self, peer_id: str, protocol: str) -> list[_Kept]:
        return [e for e in self._streams if (e.peer_id, e.protocol) == (peer_id, protocol)]

    def _end(self, kept: _Kept) -> None:
        with suppress(ValueError):  # it was taken, or has ended
            self._streams.remove(kept)
            kept.connection.close()


def _is_open(connection: socket.socket) -> bool:
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False  # it has ended, or has unrequested bytes


OPEN_S = 4.0
"""Limit for opening a stream; after that libp2p, whose connection is open, is used."""
DIAL_S = 2.5
"""The part of `OPEN_S` for dialing (three round trips); the rest is for a call back."""
UNACKED_S = 3.0
"""If a request, sent several times, is not acknowledged for this long, the link counts as cut. On a
stream of libp2p, only the missing answer after `FIRST_ANSWER_S` shows that."""
LOOK_S = 15.0
"""Limit of the search for a direct route, which may continue after a stream was opened without it.
libp2p takes five round trips to connect, and on full links each takes half a second or more."""
FIRST_PAUSE_S = 5.0
LONGEST_PAUSE_S = 300.0
"""Longest pause between searches for a direct route; the pause doubles after each failure."""
MAX_WAYS = 1024
"""Most known routes. The least recently used are dropped; a new search takes a round trip."""
_PORT = "swarm.direct"
_CALL = "swarm.call"
_PORT_FORM = struct.Struct(">H")
_TOKEN_BYTES = 16
_NO = b"\x00"
"""The answer to a stranger that asks for a call; members are called."""
_FAILURES = (TimeoutError, OSError, Unreachable, BadMessage, NetworkDown)


@dataclass
class _Way:
    """The direct route to one peer."""

    host: str = ""
    port: int = 0
    """Port of the peer's listener; 0 if the peer has to call back."""
    is_known: bool = False
    search: asyncio.Task[None] | None = None
    failures: int = 0
    """Failures in a row."""
    not_before_s: float = 0.0
    """When to search for a route, if none is known."""

    def failed(self, now_s: float) -> None:
        """No route is available for now."""
        self.is_known = False
        self.failures += 1
        self.not_before_s = now_s + backoff_s(self.failures, FIRST_PAUSE_S, LONGEST_PAUSE_S)


class TcpDialer:
    """The asking side, with the answers to other peers' questions about direct connections.

    Attributes:
        door: accepts connections of others, including those that this peer asked for.
        kept: idle streams to others.
    """

    def __init__(
        self, identity: Identity, control: Control, p2p: Callable[[], P2P], door: TcpListener
    ) -> None:
        """Begins without known routes.

        Args:
            identity: signs envelopes.
            control: asks others for their ports, and to call back.
            p2p: the living daemon; raises NetworkDown when there is none.
            door: accepts connections of others, including those that this peer asked for.
        """
        self._identity, self._control, self._p2p, self.door = identity, control, p2p, door
        self._ways: dict[str, _Way] = {}
        self.kept = StreamPool()

    async def register(self, p2p: P2P) -> None:
        """Registers the answers to questions about this peer's listener with the daemon."""
        await self._control.serve(p2p, _PORT, self._on_port)
        await self._control.serve(p2p, _CALL, self._on_call)

    async def open_stream(self, peer_id: str, protocol: str, timeout_s: float) -> socket.socket:
        """A non-blocking socket to a peer's handler of a bulk protocol.

        If `timeout_s` is too short to wait, an unknown route is searched in the background.

        Raises:
            NoRoute: there is no direct route, or none within `OPEN_S`.
        """
        if kept := self.kept.take(peer_id, protocol):
            return kept
        way = recalled(
            self._ways, peer_id, _Way, MAX_WAYS, is_in_use=lambda way: way.search is not None
        )
        try:
            async with asyncio.timeout(min(timeout_s, OPEN_S)):
                if not way.is_known:
                    await self._looked_for(way, peer_id)
                connection = impatient(await self._open(way, peer_id, protocol))
        except _FAILURES as error:
            if way.is_known:  # otherwise the search still runs, or pauses
                self._failed(way, peer_id, error)
            raise NoRoute(f"{peer_id}: {error}") from error
        way.failures = 0
        return connection

    async def close(self) -> None:
        """Ends all open streams."""
        self.kept.close()
        await self.door.close()

    def distrust(self, peer_id: str, *, for_good: bool) -> bool:
        """Drops a route on which wrong bytes arrived; False if there was no route.

        The bytes may have been changed on the path, so they prove nothing about the peer.

        Args:
            peer_id: id of the peer at the route's other end.
            for_good: whether the route is never searched again. False only pauses, as after a
                failure, because the expected value may have been wrong.
        """
        self.kept.drop(peer_id)
        way = self._ways.get(peer_id)
        if way is None or not way.is_known:
            return False
        way.failed(time.monotonic())
        if for_good:
            way.not_before_s = inf
        return True

    def doubt(self, peer_id: str) -> None:
        """Notes that a route may be cut. It is unused until the peer names its port again."""
        self.kept.drop(peer_id)
        if way := self._ways.get(peer_id):
            way.is_known = False

    def is_known(self, peer_id: str) -> bool:
        """Whether this peer knows a route that seems to work."""
        way = self._ways.get(peer_id)
        return way is not None and way.is_known

    # ------------------------------------------------ ways

    async def _looked_for(self, way: _Way, peer_id: str) -> None:
        """Returns once the route is known; the search continues if the caller gives up.

        Raises:
            NoRoute: there is none for now.
        """
        if way.search is None:
            if time.monotonic() < way.not_before_s:
                raise NoRoute("no direct way was found a short while ago")
            way.search = asyncio.create_task(self._look(way, peer_id))
            self.door.tasks.add(way.search)
        await asyncio.wait([way.search])  # it may fail, or be cancelled
        if not way.is_known:
            raise NoRoute("no direct way found")

    async def _look(self, way: _Way, peer_id: str) -> None:
        try:
            async with asyncio.timeout(LOOK_S):
                answer = await self._control.call(self._p2p(), peer_id, _PORT, b"", LOOK_S)
                way.host = await self._host_of(peer_id)
            (way.port,) = _PORT_FORM.unpack(answer) if len(answer) == _PORT_FORM.size else (0,)
            way.is_known = True
        except _FAILURES as error:
            self._failed(way, peer_id, error)
        except Exception:  # a fault of this peer; without a pause it would repeat
            logger.exception("a way to %s could not be looked for", peer_id)
            way.failed(time.monotonic())
        finally:
            way.search = None

    def _failed(self, way: _Way, peer_id: str, error: BaseException) -> None:
        way.failed(time.monotonic())
        logger.debug("no direct stream to %s: %s", peer_id, str(error) or "no answer in time")

    async def _open(self, way: _Way, peer_id: str, protocol: str) -> socket.socket:
        if way.port:
            try:
                async with asyncio.timeout(DIAL_S):
                    return await self._dialled(way.host, way.port, peer_id, protocol)
            except (TimeoutError, OSError, BadMessage) as error:
                logger.debug("door not reached: %s", str(error) or "no answer in time")
            way.port = 0
        return await self._called(peer_id, protocol)

    async def _dialled(self, host: str, port: int, peer_id: str, purpose: str) -> socket.socket:
        connection = await connect(self._control.traffic.line, host, port)
        try:
            await introduce(connection, self._identity, peer_id, purpose)
        except BaseException:
            connection.close()
            raise
        return connection

    async def _called(self, peer_id: str, protocol: str) -> socket.socket:
        if not self.door.port:
            raise NoRoute("neither side takes connections")
        token = os.urandom(_TOKEN_BYTES)
        ask = _PORT_FORM.pack(self.door.port) + token + protocol.encode()
        with self.door.expecting(token.hex(), peer_id) as expected:
            answer = await self._control.call(self._p2p(), peer_id, _CALL, ask, OPEN_S)
            if answer:
                raise NoRoute("it calls members only")
            return await expected

    async def _host_of(self, peer_id: str) -> str:
        """The host at which libp2p is connected to a peer.

        Raises:
            NoRoute: the peer is not connected, or only through others.
        """
        try:
            address = await seen_at(self._p2p(), peer_id)
        except (P2PDaemonError, asyncio.IncompleteReadError) as error:
            raise NoRoute(f"{peer_id}: {error}") from error
        if not address.startswith(("/ip4/", "/ip6/")) or "p2p-circuit" in address:
            raise NoRoute(f"{peer_id}: not known where it is")
        return address.split("/")[2]

    # ------------------------------------------------ being asked

    async def _on_port(self, _source: str, _ask: bytes) -> bytes:
        return _PORT_FORM.pack(self.door.port)

    async def _on_call(self, source: str, ask: bytes) -> bytes:
        """Dials a member at the member's host, and serves it on that connection."""
        if len(ask) <= _PORT_FORM.size + _TOKEN_BYTES:
            raise BadMessage("direct_call", "no port, token and protocol")
        (port,), token = _PORT_FORM.unpack_from(ask), ask[_PORT_FORM.size :][:_TOKEN_BYTES]
        serve = self.door.streams.get(
            ask[_PORT_FORM.size + _TOKEN_BYTES :].decode("ascii", "replace")
        )
        if serve is None or not port:
            raise BadMessage("direct_call", "nothing is served by that name, or no port is named")
        if not self._control.ledger.is_member(source):
            return _NO
        host = await self._host_of(source)
        self.door.tasks.spawn(self._call(host, port, source, token, serve))
        return b""

    async def _call(self, host: str, port: int, source: str, token: bytes, serve: Serve) -> None:
        try:
            async with asyncio.timeout(OPEN_S):
                connection = await self._dialled(host, port, source, f"{CALLED} {token.hex()}")
        except (TimeoutError, OSError, BadMessage) as error:
            logger.debug("%s not called: %s", source, str(error) or "no answer in time")
            return
        await self.door.serve(serve, source, connection)


def impatient(connection: socket.socket) -> socket.socket:
    """Returns the same socket, changed to raise TimeoutError once the link proves to be cut."""
    with suppress(OSError, AttributeError):  # only Linux has it
        limit_ms = int(1e3 * UNACKED_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, limit_ms)
    return connection


async def connect(line: LineBytes, host: str, port: int) -> socket.socket:
    """A non-blocking TCP connection, counted on this link, tuned for bulk.

    Raises:
        OSError: nobody accepts it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    connection = line.connection(socket.socket(family, socket.SOCK_STREAM))
    try:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (host, port))
    except BaseException:
        connection.close()
        raise
    return tuned(connection)
