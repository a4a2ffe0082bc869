"""Streams over TCP connections of their own, beside libp2p's daemon.

Between two peers libp2p has one connection, on which a vote waits behind all the bytes of blobs
that were handed to it before: seconds on a thin uplink. And each byte passes two more processes. So
bulk goes over connections of its own where one side can dial the other, and over libp2p where not.

A peer asks another over the control path which port takes such connections, and dials it at the
host where libp2p reaches it. Where that fails, it has itself called: so both ways are open with one
peer behind NAT. A way that is not there is looked for again after a while.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from hivemind.p2p import P2P
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError

from swarm.errors import BadMessage, NetworkDown, NoRoute, Unreachable
from swarm.network.control import Control, seen_at
from swarm.network.direct_door import CALLED, Door, Serve, tuned
from swarm.network.handshake import introduce
from swarm.network.identity import Identity

logger = logging.getLogger(__name__)

OPEN_S = 3.0
"""A connection that takes longer is no better than libp2p's, which is there already."""
AGAIN_S = 30.0
"""After this a way that was lost is looked for again,"""
NONE_S = 300.0
"""and after this one to a peer to which there was none."""
_PORT = "swarm.direct"
_CALL = "swarm.call"
_PORT_FORM = struct.Struct(">H")
_TOKEN_BYTES = 16


@dataclass
class _Way:
    """What is known of the way to one peer; `lock` is held while it is looked for."""

    host: str = ""
    port: int = 0
    """Of its door; 0: it is asked to call."""
    not_before_s: float = 0.0
    """When to look for a way, if there is none."""
    is_known: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Direct:
    """The asking side, and what a peer answers others over the control path for it.

    Attributes:
        door: takes connections of others, those that this peer asked for too.
    """

    def __init__(
        self, identity: Identity, control: Control, p2p: Callable[[], P2P], door: Door
    ) -> None:
        """Knows no way yet.

        Args:
            identity: signs letters.
            control: asks others for their ports, and to call.
            p2p: the living daemon; raises NetworkDown when there is none.
            door: takes connections of others, those that this peer asked for too.
        """
        self._identity, self._control, self._p2p, self.door = identity, control, p2p, door
        self._ways: dict[str, _Way] = {}

    async def register(self, p2p: P2P) -> None:
        """Lets the daemon deliver what others ask about this peer's door."""
        await self._control.serve(p2p, _PORT, self._on_port)
        await self._control.serve(p2p, _CALL, self._on_call)

    async def open_stream(self, peer_id: str, protocol: str, timeout_s: float) -> socket.socket:
        """A non-blocking socket to a peer's handler of a bulk protocol.

        Raises:
            NoRoute: there is no such way, or not within `OPEN_S`.
        """
        way = self._ways.setdefault(peer_id, _Way())
        try:
            async with asyncio.timeout(min(timeout_s, OPEN_S)):
                if way.is_known:
                    return await self._open(way, peer_id, protocol)
                async with way.lock:
                    return await self._find(way, peer_id, protocol)
        except (TimeoutError, OSError, Unreachable, BadMessage, NetworkDown) as error:
            pause_s = AGAIN_S if way.is_known else NONE_S
            if not isinstance(error, _NotNow):
                logger.debug(
                    "no direct stream to %s: %s", peer_id, str(error) or "no answer in time"
                )
                way.is_known, way.not_before_s = False, time.monotonic() + pause_s
            raise NoRoute(f"{peer_id}: {error}") from error

    def distrust(self, peer_id: str) -> bool:
        """Gives up a way on which wrong bytes came; False if there was none.

        Whoever is on the line may have changed them, which says nothing about the peer.
        """
        way = self._ways.get(peer_id)
        if way is None or not way.is_known:
            return False
        way.is_known, way.not_before_s = False, float("inf")
        return True

    # ------------------------------------------------ ways

    async def _find(self, way: _Way, peer_id: str, protocol: str) -> socket.socket:
        """Opens a stream by the first way that there is, which is known from then on."""
        if way.is_known:  # somebody else has found it meanwhile
            return await self._open(way, peer_id, protocol)
        if time.monotonic() < way.not_before_s:
            raise _NotNow("looked for in vain a short while ago")
        answer = await self._control.call(self._p2p(), peer_id, _PORT, b"", OPEN_S)
        (port,) = _PORT_FORM.unpack(answer) if len(answer) == _PORT_FORM.size else (0,)
        way.host = await self._host_of(peer_id)
        connection = None
        if port:
            way.port = port
            connection = await self._tried(self._dialled(way.host, port, peer_id, protocol))
        if connection is None:
            way.port = 0
            connection = await self._called(peer_id, protocol)
        way.is_known = True
        return connection

    async def _open(self, way: _Way, peer_id: str, protocol: str) -> socket.socket:
        if way.port:
            return await self._dialled(way.host, way.port, peer_id, protocol)
        return await self._called(peer_id, protocol)

    async def _tried(self, dialling: Awaitable[socket.socket]) -> socket.socket | None:
        try:
            async with asyncio.timeout(OPEN_S / 2):  # the rest is for being called
                return await dialling
        except (TimeoutError, OSError, BadMessage) as error:
            logger.debug("door not reached: %s", str(error) or "no answer in time")
            return None

    async def _dialled(self, host: str, port: int, peer_id: str, purpose: str) -> socket.socket:
        connection = await connect(host, port)
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
            await self._control.call(self._p2p(), peer_id, _CALL, ask, OPEN_S)
            return await expected

    async def _host_of(self, peer_id: str) -> str:
        """The host at which libp2p is connected to a peer.

        Raises:
            NoRoute: it is connected to none, or through others.
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
        """Dials a member at its own host, and serves it on that connection."""
        if len(ask) <= _PORT_FORM.size + _TOKEN_BYTES:
            raise BadMessage("direct_call", "no port, token and protocol")
        (port,), token = _PORT_FORM.unpack_from(ask), ask[_PORT_FORM.size :][:_TOKEN_BYTES]
        serve = self.door.streams.get(
            ask[_PORT_FORM.size + _TOKEN_BYTES :].decode("ascii", "replace")
        )
        if serve is None or not port or not self._control.ledger.is_member(source):
            raise BadMessage("direct_call", "calls go to members, for what is served")
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


class _NotNow(NoRoute):
    """It is not time to look for a way again."""


async def connect(host: str, port: int) -> socket.socket:
    """A non-blocking TCP connection, tuned for bulk.

    Raises:
        OSError: nobody takes it.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, (host, port))
    except BaseException:
        connection.close()
        raise
    return tuned(connection)
