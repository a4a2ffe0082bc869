"""Accepts TCP connections without libp2p's daemon; both ends prove their identity."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from swarm.background import Tasks
from swarm.config import NetworkSection
from swarm.errors import BadMessage, HostileInput, NetworkDown
from swarm.network.wire.daemon import foreign_address_hint
from swarm.network.wire.identity import Identity
from swarm.network.wire.ledger import Cost, Ledger
from swarm.network.wire.relayed_messages import LENGTH, EnvelopeKind, open_sealed, seal, with_length
from swarm.network.wire.streams import Serve, receive_into
from swarm.network.wire.traffic import Traffic
from swarm.protocol.values.digests import digest_of

logger = logging.getLogger(__name__)


NONCE_BYTES = 16
MAX_LETTER_BYTES = 512


@dataclass(frozen=True)
class Introduced:
    """A dialing peer that has proved its identity; `confirm` proves this peer's identity to it.

    Attributes:
        peer_id: id of the dialing peer.
        purpose: purpose of the connection.
    """

    peer_id: str
    purpose: str
    letter: bytes

    async def confirm(self, connection: socket.socket, identity: Identity) -> None:
        """Proves the accepting side's identity; all later bytes belong to the stream."""
        await _send(connection, seal(identity, EnvelopeKind.ANSWER, digest_of(self.letter), b""))


async def introduce(
    connection: socket.socket, identity: Identity, peer_id: str, purpose: str
) -> None:
    """The dialing side's part; returns once the other side has proved to be `peer_id`.

    Raises:
        BadMessage: another peer is there, or no peer at all.
        OSError: the connection ended, for example because the other side refused it.
    """
    nonce = await _receive(connection, NONCE_BYTES)
    letter = seal(identity, EnvelopeKind.DIRECT, peer_id, f"{purpose} {nonce.hex()}".encode())
    await _send(connection, letter)
    answer = open_sealed(await _receive_letter(connection), digest_of(letter))
    if answer.kind is not EnvelopeKind.ANSWER or answer.source != peer_id:
        raise BadMessage("direct_letter", "another peer answered")


async def admit(connection: socket.socket, identity: Identity) -> Introduced:
    """The accepting side's part, up to the decision whether to confirm.

    Raises:
        BadMessage: the envelope is invalid, for another peer, or for another connection.
        OSError: the connection ended.
    """
    nonce = os.urandom(NONCE_BYTES)
    await asyncio.get_running_loop().sock_sendall(connection, nonce)
    letter = await _receive_letter(connection)
    envelope = open_sealed(letter, identity.peer_id)
    purpose, _, proof = envelope.payload.decode("ascii", "replace").rpartition(" ")
    if envelope.kind is not EnvelopeKind.DIRECT or proof != nonce.hex():
        raise BadMessage("direct_letter", "no envelope for this connection")
    return Introduced(envelope.source, purpose, letter)


async def _send(connection: socket.socket, letter: bytes) -> None:
    await asyncio.get_running_loop().sock_sendall(connection, with_length(letter))


async def _receive_letter(connection: socket.socket) -> bytes:
    (size,) = LENGTH.unpack(await _receive(connection, LENGTH.size))
    if size > MAX_LETTER_BYTES:
        raise BadMessage("direct_letter", f"an envelope of {size} bytes")
    return await _receive(connection, size)


async def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    await receive_into(connection, memoryview(buffer))
    return bytes(buffer)


ADMIT_S = 5.0
"""Limit for the proof of a dialing peer's identity; after that the connection is closed."""
BACKLOG = 128
PAUSE_S = 0.1
"""Pause after a connection that could not be accepted."""
MOST = 512
"""Most connections at a time; the ledger's limits of each peer and network are far lower."""
UNSENT_BYTES = 128 * 1024
"""Most bytes that the kernel takes beyond those in flight, since more would only wait there."""
CALLED = "called"
"""Purpose of a connection for which the accepting side has asked."""


class TcpListener:
    """Connections that others open to this peer; all in the node's loop.

    Attributes:
        port: port where this peer listens. 0 if it does not listen.
        streams: handlers of the bulk protocols.
        tasks: connections that are being served.
    """

    def __init__(
        self, identity: Identity, traffic: Traffic, ledger: Ledger, streams: Mapping[str, Serve]
    ) -> None:
        """Is closed."""
        self.port, self.streams, self.tasks = 0, streams, Tasks("the door")
        self._identity, self._traffic, self._ledger = identity, traffic, ledger
        self._listening: list[socket.socket] = []
        self._expected: dict[str, tuple[str, asyncio.Future[socket.socket]]] = {}
        """By token of a requested call: the peer that will call, and the future of its
        connection."""

    def open(self, hosts: Sequence[str], port: int) -> None:
        """Starts listening on hosts (IPv4 or IPv6 numbers), at one port; 0 takes a free one.

        Raises:
            NetworkDown: another program has the port, so this peer does not listen.
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
        """Surrounds the wait for a connection that another peer was asked to open."""
        expected = asyncio.get_running_loop().create_future()
        self._expected[token] = peer_id, expected
        try:
            yield expected
        finally:
            del self._expected[token]
            expected.cancel()

    async def serve(self, serve: Serve, source: str, connection: socket.socket) -> None:
        """Serves a peer that has proved its identity, until it closes the connection."""
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
            except OSError as error:  # no descriptors are left, or the other side has closed
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
        """The dialing peer. Until its identity is proved, its network is charged.

        A connection from the host of a member is charged to that member, so that strangers cannot
        exclude a member.
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
    """The port after libp2p's first configured port, so that people can open both beforehand.

    Returns 0, which stands for any port, if libp2p has no configured port.
    """
    ports = [int(text.rpartition("/")[2]) for text in network.host_maddrs]
    first = next((port for port in ports if port), 0)
    return first + 1 if 0 < first < 65_535 else 0


def tuned(connection: socket.socket) -> socket.socket:
    """Returns the same socket, now non-blocking and with little unsent data in the kernel."""
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with suppress(OSError, AttributeError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
    return connection
