"""One stream to one peer: requests pieces ahead, receives them, delivers them."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol, TypeAlias, TypeVar

from swarm.errors import BadBlob, StateError
from swarm.network.fetch.bulk import HEAD_BYTES, Ask, Head, Status
from swarm.network.fetch.incoming import Incoming, Piece, Verdicts
from swarm.network.wire.streams import receive_blocking, receive_into
from swarm.network.wire.traffic import Traffic
from swarm.protocol.exchange.sourcing import Failure
from swarm.protocol.values.digests import DIGEST_BYTES, PIECE_BYTES, num_pieces

FIRST_ANSWER_S = 5.0
"""Limit for opening a stream, and for its first answer if the peer answers on no other stream."""
INLINE_BYTES = 256 * 1024
"""Larger pieces are received, verified and written in one call of a thread, not in the loop."""
BATCH = 64
"""If more small pieces than this are requested, further requests wait and share one message."""
BAD_SIZE = "blob_size"
"""Reason of ending a stream whose answer announces another size than expected."""


Result = TypeVar("Result")
NotTaken: TypeAlias = "BadBlob | StateError | TakeFailed"


class FlowFailed(Exception):
    """The stream cannot continue.

    Attributes:
        kind: the fault that counts for the oldest requested piece; None if none counts.
        reason: a short word by which such failures are counted.
    """

    def __init__(self, kind: Failure | None, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.reason = reason


class TakeFailed(Exception):
    """A piece arrived, but the function that verifies and keeps pieces failed.

    The peer is not at fault; `__cause__` is a fault of a check, or of this machine.
    """


class FlowOwner(Protocol):
    """The interface that a flow needs from `Downloads`."""

    def is_answering(self, peer: str) -> bool:
        """Whether the peer has answered on an open flow."""

    def next_piece(self, peer: str) -> Piece | None:
        """Takes the next piece to request from this peer."""

    def piece_missing(self, piece: Piece, peer: str) -> None:
        """The peer does not have the piece."""

    def taker(self, piece: Piece) -> Callable[[memoryview], Verdicts]:
        """A function that verifies the piece's content and keeps it, in any thread.

        It raises BadBlob for wrong bytes, StateError if the disk does not take them, and
        TakeFailed for anything else.
        """

    async def piece_taken(self, piece: Piece, content: memoryview, verdicts: Verdicts) -> None:
        """The piece was right; its buffer is reused afterwards."""

    def piece_not_taken(self, piece: Piece, error: NotTaken, peer: str) -> None:
        """The bytes were wrong, or cannot be kept here."""


class Flow:
    """One stream. `run` lasts until there are no more pieces to request.

    Attributes:
        peer: the serving peer.
        asked: pieces whose answer is not yet complete, oldest first.
        has_answer: whether any answer has arrived.
    """

    def __init__(
        self,
        owner: FlowOwner,
        peer: str,
        traffic: Traffic,
        *,
        ahead_bytes: int,
        threads: ThreadPoolExecutor,
    ) -> None:
        self.peer = peer
        self.asked: deque[Piece] = deque()
        self.has_answer = False
        self._owner = owner
        self._traffic = traffic
        self._ahead_bytes = ahead_bytes
        self._threads = threads
        self._to_come_bytes = 0
        self._connection: socket.socket | None = None
        self._unsent = b""
        self._buffer = bytearray()

    @property
    def room_bytes(self) -> int:
        """How many more bytes the flow would request now."""
        return max(0, self._ahead_bytes - self._to_come_bytes)

    async def run(self, connection: socket.socket, progress_s: float) -> None:
        """Requests and receives pieces.

        Raises:
            FlowFailed: the stream cannot continue; the fault concerns the oldest piece in `asked`,
                if any.
            TimeoutError: nothing arrived within `progress_s`.
            OSError: the stream ended early.
        """
        self._connection = connection
        try:
            self.ask()
            while self.asked:
                await self._receive(connection, progress_s)
                self.ask()
        finally:
            self._connection = None

    def ask(self) -> None:
        """Requests as many pieces as there is room for; called whenever there may be more."""
        if self._connection is None or len(self.asked) > BATCH:
            return
        while not self.asked or self.room_bytes:
            piece = self._owner.next_piece(self.peer)
            if piece is None:
                break
            self.asked.append(piece)
            self._to_come_bytes += piece.num_bytes
            start = piece.number * PIECE_BYTES
            ask = Ask(piece.blob.digest, start, PIECE_BYTES, piece.blob.needs_index)
            self._unsent += ask.encode()
        if self._unsent:
            # Requests are tiny. If the socket is full nevertheless, the rest is sent with the next
            # request. The receiving code notices an ended stream; other callers continue.
            with suppress(OSError):
                # The flag is needed because a thread may have made the socket blocking.
                sent = self._connection.send(self._unsent, socket.MSG_DONTWAIT)
                self._traffic.control_bytes_sent += sent
                self._unsent = self._unsent[sent:]

    async def _receive(self, connection: socket.socket, progress_s: float) -> None:
        piece = self.asked[0]
        is_known = self.has_answer or self._owner.is_answering(self.peer)
        head_s = progress_s if is_known else min(progress_s, FIRST_ANSWER_S)
        async with asyncio.timeout(head_s):
            size = await self._receive_head(connection, piece.blob)
        self.has_answer = True
        if size is None:
            self._answered(piece.num_bytes)
            self._owner.piece_missing(piece, self.peer)
            return
        num_bytes = max(0, min(PIECE_BYTES, size - piece.number * PIECE_BYTES))
        self._to_come_bytes += num_bytes - piece.num_bytes
        content = self._room_for(num_bytes)
        take = self._owner.taker(piece)
        try:
            if num_bytes > INLINE_BYTES:
                verdicts = await self._take_large(connection, content, take, progress_s)
            else:
                await self._fill(connection, content, progress_s)
                verdicts = take(content)
        except (BadBlob, StateError, TakeFailed) as error:
            self._answered(0)
            self._owner.piece_not_taken(piece, error, self.peer)
            if isinstance(error, BadBlob):
                raise FlowFailed(None, "refused") from error
            return
        self._answered(0)
        await self._owner.piece_taken(piece, content, verdicts)

    def _room_for(self, num_bytes: int) -> memoryview:
        """A buffer, reused for large pieces, since fresh memory costs as much time as hashing."""
        if num_bytes <= INLINE_BYTES:
            return memoryview(bytearray(num_bytes))
        if len(self._buffer) < num_bytes:
            self._buffer = bytearray(num_bytes)
        return memoryview(self._buffer)[:num_bytes]

    def _answered(self, num_bytes: int) -> None:
        self.asked.popleft()
        self._to_come_bytes -= num_bytes

    async def _receive_head(self, connection: socket.socket, blob: Incoming) -> int | None:
        """Reads and checks head and index; returns the blob's size, None if the peer lacks it."""
        encoded = bytearray(HEAD_BYTES)
        await receive_into(connection, memoryview(encoded))
        head = Head.decode(bytes(encoded))
        self._traffic.control_bytes_received += HEAD_BYTES
        if head.status == Status.MISSING:
            return None
        if head.status == Status.BUSY:
            raise FlowFailed(Failure.SILENT, "busy")
        too_large = head.num_bytes > blob.num_bytes
        if (
            head.status != Status.HERE
            or too_large
            or (blob.exact and head.num_bytes < blob.num_bytes)
        ):
            raise FlowFailed(Failure.WRONG, BAD_SIZE)
        await self._receive_index(connection, blob, head.index_bytes)
        return head.num_bytes

    async def _receive_index(
        self, connection: socket.socket, blob: Incoming, num_bytes: int
    ) -> None:
        if num_bytes not in (0, DIGEST_BYTES * num_pieces(blob.num_bytes)):
            raise FlowFailed(Failure.WRONG, "blob_index")
        index = bytearray(num_bytes)
        await receive_into(connection, memoryview(index))
        self._traffic.control_bytes_received += num_bytes
        if blob.partial is None or blob.partial.index is not None:
            return
        try:
            blob.partial.set_index(bytes(index))
        except BadBlob as error:
            raise FlowFailed(Failure.WRONG, error.reason) from error

    async def _fill(self, connection: socket.socket, view: memoryview, progress_s: float) -> None:
        """Receives a small piece."""

        def arrived(num_bytes: int) -> None:
            self._traffic.arriving.add(num_bytes)
            self._arrived(num_bytes)

        await self._traffic.down.wait(len(view))
        async with asyncio.timeout(progress_s):
            await receive_into(connection, view, arrived)

    async def _take_large(
        self,
        connection: socket.socket,
        view: memoryview,
        take: Callable[[memoryview], Verdicts],
        progress_s: float,
    ) -> Verdicts:
        """Receives, verifies and keeps a large piece, in a thread.

        One call does all this, because a change of thread costs as much time as hashing 100 kB, and
        received bytes are still in the caches. If cancelled, it returns once the thread has
        finished.
        """
        arrived, stop = 0, threading.Event()

        def count(num_bytes: int) -> None:
            nonlocal arrived
            arrived += num_bytes
            self._traffic.arriving.add(num_bytes)

        def turn(most: int) -> int:
            num_bytes = self._traffic.down.part_bytes(most)
            self._traffic.down.wait_in_thread(num_bytes, stop)
            return num_bytes

        def receive_and_take() -> Verdicts:
            receive_blocking(connection, view, progress_s=progress_s, arrived=count, turn=turn)
            return take(view)

        receiving = asyncio.get_running_loop().run_in_executor(self._threads, receive_and_take)
        try:
            return await asyncio.shield(receiving)
        except asyncio.CancelledError:
            stop.set()
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            await asyncio.gather(receiving, return_exceptions=True)
            raise
        finally:
            self._arrived(arrived)

    def _arrived(self, num_bytes: int) -> None:
        self._to_come_bytes -= num_bytes
        self._traffic.blob_bytes_received += num_bytes


async def off_loop(num_bytes: int, work: Callable[[], Result]) -> Result:
    """Runs work whose time grows with this number of bytes; in a thread if it is long."""
    if num_bytes <= INLINE_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(None, work)
