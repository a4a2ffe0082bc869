"""Relays messages and streams between peers that cannot dial each other.

libp2p's own circuit relay takes minutes to provide a slot (measured: none after 40 s), so every
willing peer that listens relays here. Messages are signed, so a relay cannot change them. Each
message counts once, so a relay can only delay it by seconds or drop it (`relayed_messages.py`).
Blobs are named by their digests. A stream begins with a signed envelope. Relay and destination
charge the stream to the peer that asked for it, never to the relay.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

from hivemind.p2p import P2P

from swarm.errors import BadMessage, HostileInput, NoRoute, SwarmError, Unreachable
from swarm.network.wire import relayed_messages
from swarm.network.wire.control import Control, peer_of
from swarm.network.wire.identity import Identity
from swarm.network.wire.ledger import Cost
from swarm.network.wire.served_streams import ServedStream, ServedStreams
from swarm.network.wire.steady_clock import dht_clock
from swarm.network.wire.streams import Serve, open_stream, receive_into, stream_handler
from swarm.network.wire.traffic import Traffic
from swarm.protocol.values.digests import digest_of

logger = logging.getLogger(__name__)

PROTOCOL = "swarm.relay/1"
FORWARD_S = 10.0
"""A relay gives up a message after this time."""
FIRST_BYTES_S = 10.0
"""A relayed stream without a first byte is ended after this long."""
IDLE_S = 60.0
"""A relayed stream is ended when nothing has moved for this long in either direction."""
STALLED_S = 1.0
"""If there is no room, a stream on which nothing has moved for this long is ended for another."""
STREAM_S = 1800.0
MAX_LETTER_BYTES = 4096
DELIVER_PROTOCOL = "swarm.relayed/1"
_FORWARD = "swarm.relay"
_DELIVER = "swarm.relayed"
_PART_BYTES = 256 * 1024
_CLOSE_S = 5.0
_CONNECTED = b"\x01"
_WORDS = 2
"""Number of words in the envelope of a stream: protocol and relay."""


@dataclass(frozen=True)
class _Opening:
    """The envelope that opens a stream: its origin, its relay and its protocol."""

    letter: bytes
    origin: str
    protocol: str
    relay: str
    stamp: relayed_messages.Stamp


@dataclass
class Relay:
    """Both sides of relaying: asks others to relay, and relays for others if willing.

    Attributes:
        identity: signs this peer's envelopes.
        control: handles messages that others relayed to this peer; has counters and ledger.
        streams: handlers by protocol, for streams that arrive directly and through relays.
        is_willing: whether to relay for others.
        p2p: the living daemon; raises NetworkDown when there is none.
    """

    identity: Identity
    control: Control
    streams: Mapping[str, Serve]
    is_willing: bool
    p2p: Callable[[], P2P]

    def __post_init__(self) -> None:
        """Serves nobody yet, and has seen no envelope."""
        self.traffic, self.ledger = self.control.traffic, self.control.ledger
        self._letters = relayed_messages.RelayedMessages()
        self._relayed = ServedStreams(self.ledger, Cost.RELAYED, stalled_s=STALLED_S)

    async def register(self, p2p: P2P) -> None:
        """Registers relayed streams and messages, and requests to relay, with the daemon."""
        await self.control.serve(p2p, _DELIVER, self._on_delivered, Cost.LETTERS)
        await self._serve(p2p, DELIVER_PROTOCOL, self._on_delivered_stream)
        if self.is_willing:
            await self.control.serve(p2p, _FORWARD, self._on_forward)
            await self._serve(p2p, PROTOCOL, self._on_stream)
        for protocol, serve in sorted(self.streams.items()):
            await self._serve(p2p, protocol, serve)

    async def _serve(self, p2p: P2P, protocol: str, serve: Serve) -> None:
        handler = stream_handler(serve, self.traffic, self.ledger)
        await p2p.add_binary_stream_handler(protocol, handler)

    # ------------------------------------------------ asking others

    async def send(
        self,
        relay: str,
        destination: str,
        payload: bytes,
        *,
        kind: relayed_messages.EnvelopeKind,
        timeout_s: float,
    ) -> bytes:
        """Sends a message or request through a relay; returns the signed answer's content.

        Raises:
            NoRoute: this relay does not reach the destination, or does not relay.
            Unreachable: no answer in time, or the destination refused it.
        """
        sealed = self._sealed(kind, destination, payload)
        ask = bytes([len(destination)]) + destination.encode() + sealed
        try:
            answer = await self.control.call(self.p2p(), relay, _FORWARD, ask, timeout_s)
        except Unreachable as error:
            raise NoRoute(f"{destination} through {relay}: {error}") from error
        try:
            opened = relayed_messages.open_sealed(answer, digest_of(sealed))
        except BadMessage as error:
            self.traffic.refuse(error.reason)
            raise NoRoute(f"{destination} through {relay}: {error}") from error
        if opened.source != destination:
            raise NoRoute(f"{destination} through {relay}: another peer answered")
        return opened.payload

    async def open_stream(
        self, relay: str, destination: str, protocol: str, timeout_s: float
    ) -> socket.socket:
        """A stream to the destination through a relay.

        Raises:
            NoRoute: this relay does not reach the destination.
        """
        path = self.p2p().daemon_listen_maddr["unix"]
        try:
            async with asyncio.timeout(timeout_s):
                connection = await open_stream(path, peer_of(relay), PROTOCOL, timeout_s)
                try:
                    await self._ask_for(connection, relay, destination, protocol)
                except BaseException:
                    connection.close()
                    raise
        except (TimeoutError, OSError, Unreachable) as error:
            raise NoRoute(f"{destination} through {relay}: {error}") from error
        return connection

    async def _ask_for(
        self, connection: socket.socket, relay: str, destination: str, protocol: str
    ) -> None:
        letter = self._sealed(
            relayed_messages.EnvelopeKind.STREAM, destination, f"{protocol} {relay}".encode()
        )
        name = destination.encode()
        head = bytes([len(name)]) + name + relayed_messages.with_length(letter)
        await asyncio.get_running_loop().sock_sendall(connection, head)
        await receive_into(connection, memoryview(bytearray(1)))

    def _sealed(
        self, kind: relayed_messages.EnvelopeKind, destination: str, content: bytes
    ) -> bytes:
        stamped = self._letters.stamped(destination, content, dht_clock()())
        return relayed_messages.seal(self.identity, kind, destination, stamped)

    # ------------------------------------------------ being asked

    @contextmanager
    def _costing(self, peer: str, cost: Cost) -> Iterator[None]:
        held = self.ledger.take(peer, cost, 1, time.monotonic())
        try:
            yield
        finally:
            self.ledger.give_back(held, time.monotonic())

    async def _on_delivered(self, _relay: str, sealed: bytes) -> bytes:
        me = self.identity.peer_id
        opened = relayed_messages.open_sealed(sealed, me)
        if opened.kind not in (
            relayed_messages.EnvelopeKind.MESSAGE,
            relayed_messages.EnvelopeKind.REQUEST,
        ):
            raise BadMessage("envelope_letter", "the envelope holds no message")
        stamp, content = relayed_messages.split(opened.payload)
        self._letters.take(opened.source, stamp, dht_clock()())  # its sender pays for no repeat
        self.control.spend(opened.source, Cost.MESSAGES)
        answer = await self.control.handle(
            opened.source, content, is_request=opened.kind is relayed_messages.EnvelopeKind.REQUEST
        )
        return relayed_messages.seal(
            self.identity, relayed_messages.EnvelopeKind.ANSWER, digest_of(sealed), answer
        )

    async def _on_forward(self, source: str, ask: bytes) -> bytes:
        destination, sealed = _addressed(ask)
        with self._costing(source, Cost.FORWARDS):
            self.traffic.relayed_bytes += len(sealed)
            return await self.control.call(self.p2p(), destination, _DELIVER, sealed, FORWARD_S)

    async def _on_stream(
        self,
        _traffic: Traffic,
        source: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Relays a stream for its source, within the ledger's limits."""
        with self._ending(source), self._relayed.opened(source, writer) as stream:
            self._relayed.begin(stream, inf)
            async with asyncio.timeout(STREAM_S):
                await self._pass_on(stream, reader, writer)

    async def _on_delivered_stream(
        self,
        traffic: Traffic,
        relay: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Serves a relayed stream as if its origin had opened it."""
        with self._ending(relay):
            with self._costing(relay, Cost.OPENING):
                async with asyncio.timeout(FORWARD_S):
                    opened = await self._read_letter(reader, self.identity.peer_id)
                if opened.relay != relay:
                    raise BadMessage("relay_letter", "the envelope is for another relay")
                self._letters.take(opened.origin, opened.stamp, dht_clock()())
            await self.streams[opened.protocol](traffic, opened.origin, reader, writer)

    @contextmanager
    def _ending(self, peer: str) -> Iterator[None]:
        """Logs the error that ends a stream early, and counts refusals."""
        try:
            yield
        except HostileInput as why:
            self.traffic.refuse(why.reason)
            logger.debug("stream of %s refused: %s", peer, why)
        except SwarmError as why:
            logger.debug("stream passed on for %s ended: %s", peer, why)

    async def _read_letter(self, reader: asyncio.StreamReader, destination: str) -> _Opening:
        """Reads the envelope at the beginning of a stream.

        Raises:
            BadMessage: it is invalid, for another peer, or for a stream that is not relayed.
        """
        (size,) = relayed_messages.LENGTH.unpack(
            await reader.readexactly(relayed_messages.LENGTH.size)
        )
        if size > MAX_LETTER_BYTES:
            raise BadMessage("relay_letter", f"an envelope of {size} bytes")
        letter = await reader.readexactly(size)
        envelope = relayed_messages.open_sealed(letter, destination)
        stamp, content = relayed_messages.split(envelope.payload)
        words = content.decode("ascii", "replace").split(" ")
        if envelope.kind is not relayed_messages.EnvelopeKind.STREAM or len(words) != _WORDS:
            raise BadMessage("relay_letter", "no envelope for a stream")
        if words[0] not in self.streams:
            raise BadMessage("relay_protocol", f"{words[0]!r} is not passed on")
        return _Opening(letter, envelope.source, words[0], words[1], stamp)

    async def _pass_on(
        self, stream: ServedStream, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        async with asyncio.timeout(FORWARD_S):
            (size,) = await reader.readexactly(1)
            destination = (await reader.readexactly(size)).decode("ascii", "replace")
            opened = await self._read_letter(reader, destination)
        if opened.origin != stream.source:
            raise BadMessage("relay_letter", "another peer signed the envelope")
        path = self.p2p().daemon_listen_maddr["unix"]
        connection = await open_stream(path, peer_of(destination), DELIVER_PROTOCOL, FORWARD_S)
        try:
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(connection, relayed_messages.with_length(opened.letter))
            writer.write(_CONNECTED)
            await self._splice(stream, reader, writer, connection)
        finally:
            connection.close()

    async def _splice(
        self,
        stream: ServedStream,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        connection: socket.socket,
    ) -> None:
        """Runs until the asking side closes, or the tail might be lost."""
        loop, up, down = asyncio.get_running_loop(), self.traffic.up, self.traffic.down
        most = up.part_bytes(down.part_bytes(_PART_BYTES))
        async with asyncio.timeout(FIRST_BYTES_S) as idle:

            async def may_pass(num_bytes: int) -> None:
                idle.reschedule(loop.time() + IDLE_S)
                await down.wait(num_bytes)
                await up.wait(num_bytes)
                stream.waits_since_s = time.monotonic()

            async def there() -> None:
                while data := await reader.read(most):
                    await may_pass(len(data))
                    await loop.sock_sendall(connection, data)

            async def back() -> None:
                while data := await loop.sock_recv(connection, most):
                    await may_pass(len(data))
                    self.traffic.relayed_bytes += len(data)
                    writer.write(data)
                    await writer.drain()

            asking, answering = asyncio.create_task(there()), asyncio.create_task(back())
            try:
                await asyncio.wait({asking, answering}, return_when=asyncio.FIRST_COMPLETED)
                if not asking.done():
                    await asyncio.wait({asking}, timeout=_CLOSE_S)
            finally:
                for task in (asking, answering):
                    task.cancel()
                await asyncio.gather(asking, answering, return_exceptions=True)


def _addressed(ask: bytes) -> tuple[str, bytes]:
    """Destination and envelope of a message to relay."""
    end = 1 + (ask[0] if ask else 0)
    if not ask or len(ask) < end:
        raise BadMessage("envelope_schema", "no destination")
    return ask[1:end].decode("ascii", "replace"), ask[end:]
