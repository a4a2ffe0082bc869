"""Control messages: unary calls of libp2p, small and answered at once, never for bulk data."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.control import P2PDaemonError, P2PHandlerError

from swarm.background import Tasks
from swarm.errors import BadMessage, HostileInput, NoRoute, Refused, Unreachable
from swarm.network.wire.identity import public_key_of
from swarm.network.wire.ledger import Cost, Ledger
from swarm.network.wire.streams import OnMessage, OnRequest
from swarm.network.wire.traffic import Traffic

MAX_CALL_BYTES = 256 * 1024
MAX_ANSWER_BYTES = 1_000_000
"""An answer over 4 MiB would make the caller wait forever (measured)."""
HANDLER_S = 60.0
LOCATE_EVERY_S = 2.0
"""Least interval between questions to the daemon for the addresses of strangers."""
_MESSAGE = "swarm.message"
_REQUEST = "swarm.request"

Result = TypeVar("Result")


@dataclass(frozen=True)
class _Payload:
    """Bytes in place of the protobuf message that hivemind expects."""

    data: bytes

    @classmethod
    def FromString(cls, data: bytes) -> _Payload:
        return cls(data)

    def SerializeToString(self) -> bytes:
        return self.data


def peer_of(peer_id: str) -> PeerID:
    """libp2p's form of a base58 peer id; Unreachable if it is none."""
    if public_key_of(peer_id) is None:
        raise Unreachable(f"{peer_id[:80]!r} is no peer id")
    return PeerID.from_base58(peer_id)


async def seen_at(p2p: P2P, peer_id: str) -> str:
    """Transport address at which this peer sees a connected peer; "" if not connected."""
    peers = await p2p.list_peers()
    found = (str(p.addrs[0]) for p in peers if p.addrs and p.peer_id.to_base58() == peer_id)
    return next(found, "")


class Control:
    """Sends and receives control messages over one daemon.

    libp2p proves the sender of a message; a name in the payload never counts.
    """

    def __init__(
        self,
        traffic: Traffic,
        ledger: Ledger,
        on_message: OnMessage | None,
        on_request: OnRequest | None,
    ) -> None:
        self.traffic, self.ledger = traffic, ledger
        self._message_handler = on_message
        self._request_handler = on_request
        self._locating = Tasks("the ledger")
        self._located_s = 0.0

    async def register(self, p2p: P2P) -> None:
        """Registers this peer's handlers with the daemon."""
        if self._message_handler:
            await self.serve(p2p, _MESSAGE, self._on_message)
        if self._request_handler:
            await self.serve(p2p, _REQUEST, self._on_request)

    async def serve(
        self,
        p2p: P2P,
        name: str,
        answer: Callable[[str, bytes], Any],
        cost: Cost = Cost.MESSAGES,
    ) -> None:
        """Lets `answer(source, payload)` answer the calls of this name, with at most 1 MB each.

        A call over the limits of its sender is refused before it is read.
        """

        async def paid(source: str, payload: bytes) -> bytes:
            self.spend(source, cost)
            return bytes(await answer(source, payload))

        async def answered(payload: _Payload, context: P2PContext) -> _Payload:
            source = self._receive(payload, context)
            self.locate(p2p, source)
            data = await self._bounded(paid(source, payload.data))
            assert len(data) <= MAX_ANSWER_BYTES, f"answer of {len(data)} bytes"
            self._count_sent(len(data))
            return _Payload(data)

        await p2p.add_protobuf_handler(name, answered, _Payload)

    def spend(self, source: str, cost: Cost) -> None:
        """Charges one call to a peer.

        Raises:
            TooCostly: the peer has called too often.
        """
        self.ledger.take(source, cost, 1, time.monotonic())

    def locate(self, p2p: P2P, source: str) -> None:
        """Starts a lookup of all connected peers' networks if the source's network is not known."""
        now_s = time.monotonic()
        if self.ledger.is_located(source):
            return
        if now_s - self._located_s >= LOCATE_EVERY_S:
            self._located_s = now_s
            self._locating.spawn(self._locate_all(p2p))

    async def _locate_all(self, p2p: P2P) -> None:
        try:
            async with asyncio.timeout(HANDLER_S):
                peers = await p2p.list_peers()
        except (TimeoutError, P2PDaemonError, OSError, asyncio.IncompleteReadError):
            return  # the daemon is ending
        for peer in peers:
            for address in peer.addrs[:1]:
                self.ledger.locate(str(peer.peer_id.to_base58()), str(address))

    async def handle(self, source: str, payload: bytes, *, is_request: bool) -> bytes:
        """Handles a message that a third peer relayed like one that arrived directly.

        Raises:
            BadMessage: this peer has no handler for it.
        """
        if is_request and self._request_handler:
            return await self._on_request(source, payload)
        if not is_request and self._message_handler:
            return await self._on_message(source, payload)
        raise BadMessage("no_handler", "this peer has no handler for such a message")

    async def post(self, p2p: P2P, peer_id: str, payload: bytes, timeout_s: float) -> None:
        """Delivers a message; see `Node.post`."""
        await self.call(p2p, peer_id, _MESSAGE, payload, timeout_s)

    async def request(self, p2p: P2P, peer_id: str, payload: bytes, timeout_s: float) -> bytes:
        """Asks a question; see `Node.request`."""
        return await self.call(p2p, peer_id, _REQUEST, payload, timeout_s)

    async def call(
        self, p2p: P2P, peer_id: str, name: str, payload: bytes, timeout_s: float
    ) -> bytes:
        """Calls a peer's handler.

        Raises:
            NoRoute: the peer cannot be dialed.
            Refused: its handler did not take the call.
            Unreachable: no answer in time.
        """
        assert len(payload) <= MAX_CALL_BYTES, f"control message of {len(payload)} bytes"
        peer = peer_of(peer_id)
        if peer == p2p.peer_id:
            raise Unreachable("a peer does not call itself")
        self.traffic.control_messages_sent += 1
        self._count_sent(len(payload))
        try:
            async with asyncio.timeout(timeout_s):
                answer = await p2p.call_protobuf_handler(peer, name, _Payload(payload), _Payload)
        except TimeoutError:
            raise Unreachable(f"{peer_id}: no answer within {timeout_s:g} s") from None
        except P2PHandlerError as error:
            raise Refused(f"{peer_id}: {error}") from error
        except (P2PDaemonError, OSError) as error:
            raise NoRoute(f"{peer_id}: {error}") from error
        self.traffic.control_bytes_received += len(answer.data)
        return bytes(answer.data)

    async def _on_message(self, source: str, payload: bytes) -> bytes:
        assert self._message_handler is not None
        await self._message_handler(source, payload)
        return b""

    async def _on_request(self, source: str, payload: bytes) -> bytes:
        assert self._request_handler is not None
        return await self._request_handler(source, payload)

    def _count_sent(self, num_bytes: int) -> None:
        self.traffic.control_bytes_sent += num_bytes
        self.traffic.up.count(num_bytes)  # messages never wait, but delay blobs

    def _receive(self, payload: _Payload, context: P2PContext) -> str:
        self.traffic.control_messages_received += 1
        self.traffic.control_bytes_received += len(payload.data)
        if len(payload.data) > MAX_CALL_BYTES:
            self.traffic.refuse("message_size")
            raise ValueError(f"refused: over {MAX_CALL_BYTES} bytes")
        source = str(context.remote_id.to_base58())
        if public_key_of(source) is None:
            self.traffic.refuse("peer_key")
            raise ValueError("refused: a peer has an Ed25519 key")
        return source

    async def _bounded(self, handled: Awaitable[Result]) -> Result:
        try:
            async with asyncio.timeout(HANDLER_S):
                return await handled
        except HostileInput as error:
            self.traffic.refuse(error.reason)
            raise
