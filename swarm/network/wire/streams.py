"""Raw byte streams between peers, which carry blobs, and a node's handlers for them."""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from hivemind.p2p import PeerID
from hivemind.p2p.p2p_daemon_bindings.datastructures import StreamInfo
from hivemind.proto import p2pd_pb2

from swarm.errors import NoRoute, Unreachable
from swarm.network.wire.ledger import Ledger
from swarm.network.wire.traffic import Traffic

logger = logging.getLogger(__name__)

Serve = Callable[[Traffic, str, asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Serves one stream; gets the node's counters, the asking peer's id, reader and writer."""
_MAX_RESPONSE_BYTES = 65_536
_PART_BYTES = 256 * 1024
PROGRESS_BYTES = 64 * 1024
"""Bytes that must arrive within one progress deadline, so that single bytes are no progress."""


def stream_handler(
    serve: Serve, traffic: Traffic, ledger: Ledger
) -> Callable[..., Awaitable[None]]:
    """The function that the daemon's bindings call for each incoming stream."""

    async def handle(
        info: StreamInfo, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        source = str(info.peer_id.to_base58())
        ledger.locate(source, str(info.addr))
        try:
            await serve(traffic, source, reader, writer)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as error:
            logger.debug("stream of %s ended: %s", info.peer_id, error)
        finally:
            writer.close()

    return handle


async def open_stream(
    daemon_socket: str, peer: PeerID, protocol: str, timeout_s: float
) -> socket.socket:
    """A non-blocking socket to a peer's handler of `protocol`, opened by the daemon.

    Raises:
        Unreachable: no connection in time.
        NoRoute: the peer cannot be dialed, or does not serve this protocol.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        async with asyncio.timeout(timeout_s):
            await _open(connection, daemon_socket, peer, protocol)
    except TimeoutError:
        connection.close()
        raise Unreachable(f"{peer}: no stream within {timeout_s:g} s") from None
    except (OSError, DecodeError) as error:
        connection.close()
        raise NoRoute(f"{peer}: {error}") from error
    except BaseException:
        connection.close()
        raise
    return connection


async def _open(connection: socket.socket, daemon_socket: str, peer: PeerID, protocol: str) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_connect(connection, daemon_socket)
    request = p2pd_pb2.Request(
        type=p2pd_pb2.Request.STREAM_OPEN,
        streamOpen=p2pd_pb2.StreamOpenRequest(peer=peer.to_bytes(), proto=[protocol]),
    ).SerializeToString()
    await loop.sock_sendall(connection, _varint(len(request)) + request)
    num_bytes = await _read_varint(connection)
    if num_bytes > _MAX_RESPONSE_BYTES:
        raise ConnectionError(f"the daemon announces {num_bytes} bytes")
    buffer = bytearray(num_bytes)
    await receive_into(connection, memoryview(buffer))
    response = p2pd_pb2.Response.FromString(bytes(buffer))
    if response.type == p2pd_pb2.Response.ERROR:
        raise ConnectionError(response.error.msg)


async def receive_into(
    connection: socket.socket, view: memoryview, arrived: Callable[[int], None] | None = None
) -> None:
    """Fills a small buffer from the stream; `arrived` is called for each portion.

    Raises:
        ConnectionError: the stream ended early.
    """
    loop = asyncio.get_running_loop()
    start = 0
    while start < len(view):
        received = await loop.sock_recv_into(connection, view[start:])
        if not received:
            raise ConnectionError(f"the stream ended at {start} of {len(view)} bytes")
        start += received
        if arrived:
            arrived(received)


def receive_blocking(
    connection: socket.socket,
    view: memoryview,
    *,
    progress_s: float,
    arrived: Callable[[int], None],
    turn: Callable[[int], int],
) -> None:
    """Fills a large buffer, in a thread of its own; `shutdown` of the socket ends it early.

    The daemon delivers bytes in small portions. Waiting for portions in the kernel costs a fraction
    of waking the loop for each portion, and leaves Python's lock to the trainer.

    Args:
        connection: the stream.
        view: the buffer.
        progress_s: `PROGRESS_BYTES` must arrive within this time.
        arrived: called for each portion.
        turn: waits until a portion of at most this many bytes may be read; returns its size. This
            wait does not count as the other side's delay.

    Raises:
        TimeoutError: fewer than `PROGRESS_BYTES` arrived within `progress_s`.
        ConnectionError: the stream ended early.
    """
    whole_s, part_s = divmod(progress_s, 1.0)
    limit = struct.pack("ll", int(whole_s), int(part_s * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    connection.setblocking(True)
    try:
        while view:
            wanted = turn(min(len(view), _PART_BYTES))
            try:
                received = connection.recv_into(view, wanted, socket.MSG_WAITALL)
                enough = received >= min(wanted, PROGRESS_BYTES)
                ended = not received or not (enough or _bytes_follow(connection))
            except BlockingIOError:
                raise TimeoutError(f"nothing within {progress_s:g} s") from None
            arrived(received)
            if ended:
                raise ConnectionError(f"the stream ended {len(view) - received} bytes early")
            if not enough:
                raise TimeoutError(f"only {received} bytes within {progress_s:g} s")
            view = view[received:]
    finally:
        connection.setblocking(False)


def _bytes_follow(connection: socket.socket) -> bool:
    """Whether the stream is still open: False at its end."""
    try:
        return bool(connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return True


def _varint(number: int) -> bytes:
    groups = bytearray()
    while number > 0x7F:
        groups.append(number & 0x7F | 0x80)
        number >>= 7
    groups.append(number)
    return bytes(groups)


async def _read_varint(connection: socket.socket) -> int:
    """Reads byte by byte, since the bytes after the number belong to the stream."""
    number, byte = 0, bytearray(1)
    for group in range(5):
        await receive_into(connection, memoryview(byte))
        number |= (byte[0] & 0x7F) << (7 * group)
        if byte[0] < 0x80:
            return number
    raise ConnectionError("the daemon's answer has no length")


OnMessage = Callable[[str, bytes], Awaitable[None]]
OnRequest = Callable[[str, bytes], Awaitable[bytes]]


@dataclass(frozen=True)
class Handlers:
    """The node's callbacks for other peers, called in its loop; they must not block.

    Attributes:
        on_message: gets the payload, and the sender's peer id as libp2p or a signature proved it.
        on_request: gets the same, and returns the answer, at most 1 MB.
        streams: handlers of the bulk protocols.
        ledger: limits the cost of other peers; the caller sets its members.
    """

    on_message: OnMessage | None = None
    on_request: OnRequest | None = None
    streams: Mapping[str, Serve] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=Ledger)
