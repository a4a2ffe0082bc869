"""Passes messages and streams on between peers that cannot dial each other.

libp2p's own circuit relay needs minutes until a slot is there (measured: none after 40 s), so any
willing peer that listens does it here. Messages are signed, so a relay can delay and drop them but
not change them; blobs are named by their digests.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from hivemind.p2p import P2P

from swarm.errors import BadMessage, NoRoute, SwarmError, Unreachable
from swarm.network.control import Control, peer_of
from swarm.network.envelope import Letter, open_sealed, seal
from swarm.network.identity import Identity
from swarm.network.streams import open_stream, receive_into
from swarm.network.traffic import Traffic
from swarm.protocol.digests import digest_of

logger = logging.getLogger(__name__)

PROTOCOL = "swarm.relay/1"
FORWARD_S = 10.0
"""A relay gives up on a message after this."""
IDLE_S = 60.0
STREAM_S = 1800.0
LETTERS_PER_PEER = 16
STREAMS_PER_PEER = 8
STREAMS = 64
_FORWARD = "swarm.relay"
_DELIVER = "swarm.relayed"
_PART_BYTES = 256 * 1024
_CLOSE_S = 5.0
_CONNECTED = b"\x01"


@dataclass
class Relay:
    """Both sides: asks others to pass on, and passes on for others if it is willing.

    Attributes:
        identity: seals what this peer sends.
        control: takes what others had passed on to this peer.
        traffic: counters.
        protocols: streams that may be passed on.
        is_willing: whether to pass on for others.
        p2p: the living daemon; raises NetworkDown when there is none.
    """

    identity: Identity
    control: Control
    traffic: Traffic
    protocols: frozenset[str]
    is_willing: bool
    p2p: Callable[[], P2P]

    def __post_init__(self) -> None:
        """Nobody is being served yet."""
        self._letters: Counter[str] = Counter()
        self._streams: Counter[str] = Counter()

    async def register(self, p2p: P2P) -> None:
        """Lets the daemon deliver what others pass on, and ask for it if this peer is willing."""
        await self.control.serve(p2p, _DELIVER, self._on_delivered)
        if self.is_willing:
            await self.control.serve(p2p, _FORWARD, self._on_forward)
            await p2p.add_binary_stream_handler(PROTOCOL, self._on_stream)

    # ------------------------------------------------ asking others

    async def send(
        self, relay: str, destination: str, payload: bytes, *, letter: Letter, timeout_s: float
    ) -> bytes:
        """Has a message or request delivered; returns the signed answer's content.

        Raises:
            NoRoute: this relay does not reach the destination, or passes nothing on.
            Unreachable: no answer in time, or the destination refused it.
        """
        sealed = seal(self.identity, letter, destination, payload)
        ask = bytes([len(destination)]) + destination.encode() + sealed
        try:
            answer = await self.control.call(self.p2p(), relay, _FORWARD, ask, timeout_s)
        except Unreachable as error:
            raise NoRoute(f"{destination} through {relay}: {error}") from error
        try:
            opened = open_sealed(answer, digest_of(sealed))
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
                    await _ask_for(connection, destination, protocol)
                except BaseException:
                    connection.close()
                    raise
        except (TimeoutError, OSError, Unreachable) as error:
            raise NoRoute(f"{destination} through {relay}: {error}") from error
        return connection

    # ------------------------------------------------ being asked

    async def _on_delivered(self, _relay: str, sealed: bytes) -> bytes:
        me = self.identity.peer_id
        opened = open_sealed(sealed, me)
        answer = await self.control.handle(
            opened.source, opened.payload, is_request=opened.letter is Letter.REQUEST
        )
        return seal(self.identity, Letter.ANSWER, digest_of(sealed), answer)

    async def _on_forward(self, source: str, ask: bytes) -> bytes:
        destination, sealed = _addressed(ask)
        if self._letters[source] >= LETTERS_PER_PEER:
            raise BadMessage("relay_busy", "too many messages to be passed on")
        self._letters[source] += 1
        try:
            self.traffic.relayed_bytes += len(sealed)
            return await self.control.call(self.p2p(), destination, _DELIVER, sealed, FORWARD_S)
        finally:
            self._letters[source] -= 1
            self._letters = +self._letters

    async def _on_stream(
        self, info: object, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        source = str(getattr(info, "peer_id", ""))
        if self._streams[source] >= STREAMS_PER_PEER or self._streams.total() >= STREAMS:
            self.traffic.refuse("too_many_flows")
            writer.close()
            return
        self._streams[source] += 1
        try:
            async with asyncio.timeout(STREAM_S):
                await self._pass_on(reader, writer)
        except (OSError, asyncio.IncompleteReadError, TimeoutError, SwarmError) as why:
            logger.debug("stream passed on for %s ended: %s", source, why)
        finally:
            self._streams[source] -= 1
            self._streams = +self._streams
            writer.close()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async with asyncio.timeout(FORWARD_S):
            sizes = await reader.readexactly(2)
            destination = (await reader.readexactly(sizes[0])).decode("ascii", "replace")
            protocol = (await reader.readexactly(sizes[1])).decode("ascii", "replace")
        if protocol not in self.protocols:
            raise BadMessage("relay_protocol", f"{protocol!r} is not passed on")
        path = self.p2p().daemon_listen_maddr["unix"]
        connection = await open_stream(path, peer_of(destination), protocol, FORWARD_S)
        try:
            writer.write(_CONNECTED)
            await self._splice(reader, writer, connection)
        finally:
            connection.close()

    async def _splice(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: socket.socket
    ) -> None:
        """Until the asking side closes: a tail is lost if the serving side closes first."""
        loop = asyncio.get_running_loop()

        async def there() -> None:
            while data := await reader.read(_PART_BYTES):
                await loop.sock_sendall(connection, data)

        async def back() -> None:
            while True:
                async with asyncio.timeout(IDLE_S):
                    data = await loop.sock_recv(connection, _PART_BYTES)
                if not data:
                    return
                self.traffic.relayed_bytes += len(data)
                writer.write(data)
                async with asyncio.timeout(IDLE_S):
                    await writer.drain()

        asking, answering = asyncio.create_task(there()), asyncio.create_task(back())
        try:
            await asyncio.wait({asking, answering}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                await asyncio.wait({asking}, timeout=_CLOSE_S)
        finally:
            for task in (asking, answering):
                task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(asking, answering, return_exceptions=True)


async def _ask_for(connection: socket.socket, destination: str, protocol: str) -> None:
    names = destination.encode(), protocol.encode()
    head = bytes(len(name) for name in names) + b"".join(names)
    await asyncio.get_running_loop().sock_sendall(connection, head)
    await receive_into(connection, memoryview(bytearray(1)))


def _addressed(ask: bytes) -> tuple[str, bytes]:
    """Destination and sealed envelope of what is to be passed on."""
    end = 1 + (ask[0] if ask else 0)
    if not ask or len(ask) < end:
        raise BadMessage("envelope_schema", "no destination")
    return ask[1:end].decode("ascii", "replace"), ask[end:]
