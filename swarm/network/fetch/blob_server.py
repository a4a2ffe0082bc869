"""Serves blobs to any peer that asks: members of the run first, then joiners and observers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import BinaryIO, cast

from swarm.errors import StateError, TooCostly
from swarm.network.blobs.blob_store import BlobFile, BlobStore
from swarm.network.fetch.bulk import ASK_BYTES, PART_BYTES, Ask, Head, Status
from swarm.network.wire.ledger import STRANGERS_SHARE, Cost, Ledger
from swarm.network.wire.served_streams import ServedStream, ServedStreams
from swarm.network.wire.traffic import LARGEST_PART_BYTES, Traffic
from swarm.protocol.values.digests import num_pieces

logger = logging.getLogger(__name__)


YIELD_S = 6.0
"""Longest wait of a stranger for its next 64 KiB. There is a limit because the member that is
served first may read nothing at all. It is below the limits for no progress and for a stuck
fetch."""
PER_MEMBER_BYTE = STRANGERS_SHARE / (1 - STRANGERS_SHARE)
LOOK_S = 0.03
"""Interval at which a waiting stream checks for room on the link; one part takes longer."""
MOST_BYTES = 2**20
"""Limit of the strangers' common credit and debt, so that the effect of one burst is short."""


@dataclass
class _Network:
    """The streams of one network that wait for their turn, and the lock of the turn."""

    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_streams: int = 0


class FairQueue:
    """Decides when parts of answers may be sent; its methods run in one event loop."""

    def __init__(
        self, is_member: Callable[[str], bool], network_of: Callable[[str], str] = str
    ) -> None:
        """Begins without streams.

        Args:
            is_member: whether a peer id is a member of the run.
            network_of: the network of a stranger; by default each stranger counts as a network.
        """
        self._is_member, self._network_of = is_member, network_of
        self._networks: dict[str, _Network] = {}
        self._num_members = 0
        self._allowed_bytes = 0.0
        self._free = asyncio.Event()
        self._free.set()

    @contextmanager
    def serving(self, peer: str, *, may_wait: bool = False) -> Iterator[None]:
        """Surrounds an answer to a peer. Others wait for a member's answer, unless `may_wait`."""
        if may_wait or not self._is_member(peer):
            yield
            return
        self._num_members += 1
        self._allow(0.0)
        try:
            yield
        finally:
            self._num_members -= 1
            self._allow(0.0)

    @asynccontextmanager
    async def among_strangers(self, peer: str) -> AsyncIterator[None]:
        """Surrounds a part that is sent in the turn of a stranger's network; members need no turn.

        A stranger that has waited for `YIELD_S` continues without the turn.
        """
        if self._is_member(peer):
            yield
            return
        name = self._network_of(peer)
        network = self._networks.setdefault(name, _Network())
        network.num_streams += 1
        has_turn = False
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(YIELD_S):
                    has_turn = await network.turn.acquire()
            yield
        finally:
            if has_turn:
                network.turn.release()
            network.num_streams -= 1
            if not network.num_streams:
                del self._networks[name]

    async def wait(
        self,
        peer: str,
        num_bytes: int,
        *,
        may_wait: bool = False,
        has_room: Callable[[], bool] = lambda: False,
    ) -> None:
        """Returns when a part of an answer may be sent to the peer.

        Args:
            peer: receives the answer.
            num_bytes: bytes of the part.
            may_wait: whether the part yields to others even if the peer is a member.
            has_room: whether the others leave part of this peer's link unused, for example because
                their own links are full.
        """
        if not may_wait and self._is_member(peer):
            self._allow(num_bytes * PER_MEMBER_BYTE)
            return
        loop = asyncio.get_running_loop()
        until_s = loop.time() + YIELD_S * min(1.0, num_bytes / LARGEST_PART_BYTES)
        # Another stranger may have taken the room.
        while not (self._free.is_set() or has_room()) and loop.time() < until_s:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(LOOK_S, until_s - loop.time())):
                    await self._free.wait()
        if self._num_members:
            self._allow(-num_bytes)

    def _allow(self, more_bytes: float) -> None:
        if not self._num_members:
            self._allowed_bytes = 0.0
        allowed = self._allowed_bytes + more_bytes
        self._allowed_bytes = max(-MOST_BYTES, min(MOST_BYTES, allowed))
        if self._num_members and self._allowed_bytes <= 0:
            self._free.clear()
        else:
            self._free.set()


SMALL_BYTES = 64 * 1024
"""Blobs up to this size are read and written, which is cheaper than a call of sendfile."""
FIRST_ASK_S = 10.0
"""A stream without a first ask is ended after this long, since an honest peer asks at once."""
IDLE_S = 60.0
"""A stream without another ask is ended only after this long, since its last answer may still cross
a slow link. A stream whose reader takes less than `PART_BYTES` in this time is ended too; the
asking side does not count less as progress."""
ANSWER_S = 1800.0
"""Limit of one answer, however fast it is. A stream may last as long as its answers progress."""
ASKS_AT_ONCE = 32
"""So many asks that have arrived are answered before other tasks of the loop run."""
TURNED_AWAY = 64
"""Most streams that are refused for lack of room at a time; each refusal takes up to 5 s."""
_REFUSED_S = 5.0


class BlobServer:
    """The serving side of the bulk protocol; `serve` is one of `Handlers.streams`."""

    def __init__(
        self,
        *,
        on_ask: Callable[[str, str], None] | None = None,
        ledger: Ledger | None = None,
        is_control: Callable[[str], bool] | None = None,
        is_moments: Callable[[str], bool] | None = None,
        may_wait: Callable[[str], bool] | None = None,
    ) -> None:
        """Serves nothing yet.

        Args:
            on_ask: called with peer id and digest of every ask, for leases.
            ledger: the node's; limits the streams of a peer, and knows the members, for which
                others wait.
            is_control: whether a blob belongs to a control message (an offer, a manifest), so
                that its bytes count as control bytes.
            is_moments: whether a blob is offered moments, whose bytes are counted separately.
            may_wait: whether a blob yields to other blobs that members ask for.
        """
        self._is_control = is_control or (lambda _: False)
        self._is_moments = is_moments or (lambda _: False)
        self._may_wait = may_wait or (lambda _: False)
        self._stores: list[BlobStore] = []
        self._on_ask = on_ask
        self._ledger = ledger or Ledger()
        self._turned_away = 0
        self._streams = ServedStreams(self._ledger)
        self._queue = FairQueue(self._ledger.is_member, self._ledger.network_of)

    def attach(self, store: BlobStore) -> None:
        """Serves this store's blobs too."""
        self._stores.append(store)

    def detach(self, store: BlobStore) -> None:
        """Stops serving this store."""
        self._stores.remove(store)

    async def serve(
        self,
        traffic: Traffic,
        source: str,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """Answers one stream until the other side closes it."""
        try:
            with self._streams.opened(source, writer) as stream:
                await self._answer_all(traffic, stream, reader, writer)
        except TooCostly as error:
            traffic.refuse(error.reason)
            await self._turn_away(reader, writer)

    async def _turn_away(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers that there is no room, or nothing if too many streams wait for this answer."""
        if self._turned_away >= TURNED_AWAY:
            return
        self._turned_away += 1
        try:
            await _refuse(Status.BUSY, reader, writer)
        finally:
            self._turned_away -= 1

    async def _answer_all(
        self,
        traffic: Traffic,
        stream: ServedStream,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        source = stream.source
        for number in count(1):
            async with asyncio.timeout(FIRST_ASK_S if number == 1 else IDLE_S):
                encoded = await reader.readexactly(ASK_BYTES)
            self._streams.begin(stream, traffic.up.most_streams)
            self._ledger.take(source, Cost.ASKS, 1, time.monotonic())
            if number % ASKS_AT_ONCE == 0:
                await asyncio.sleep(0)
            traffic.control_bytes_received += ASK_BYTES
            ask = Ask.decode(encoded)
            if self._on_ask:
                self._on_ask(source, ask.digest)
            async with asyncio.timeout(ANSWER_S):
                is_sound = await self._answer(ask, traffic, stream, writer)
            if not is_sound:
                traffic.refuse("bad_ask")
                await _refuse(Status.BAD, reader, writer)
                return
            self._streams.rest(stream)

    async def _answer(
        self, ask: Ask, traffic: Traffic, stream: ServedStream, writer: asyncio.StreamWriter
    ) -> bool:
        """Sends one answer; returns False for an ask beyond the blob's end."""
        store = next((store for store in self._stores if store.has(ask.digest)), None)
        size = store.size(ask.digest) if store else None
        if store is None or size is None:
            await _send(Head(Status.MISSING).encode(), writer)
            return True
        if ask.offset > size:
            return False
        stream.waits_since_s = None
        index = await _index(store, ask, size)
        stream.waits_since_s = time.monotonic()
        head = Head(Status.HERE, size, len(index)).encode() + index
        traffic.control_bytes_sent += len(head)
        await _send(head, writer)
        span = range(ask.offset, min(size, ask.offset + ask.length))
        may_wait = self._may_wait(ask.digest)
        with self._queue.serving(stream.source, may_wait=may_wait):
            turn = partial(self._turn, traffic, stream, ask.digest)
            most = traffic.up.part_bytes(PART_BYTES)
            async for sent in _send_content(store, ask.digest, span, writer, turn=turn, most=most):
                self._count(ask.digest, sent, traffic)
        return True

    async def _turn(
        self, traffic: Traffic, stream: ServedStream, digest: str, num_bytes: int
    ) -> None:
        """Returns when a part may be sent; after that the stream waits for its peer."""
        stream.waits_since_s = None
        if self._is_control(digest):  # small, and decisions wait for them
            traffic.up.count(num_bytes)
        else:
            source, up = stream.source, traffic.up
            may_wait, has_room = self._may_wait(digest), lambda: up.has_room
            async with self._queue.among_strangers(source):
                await self._queue.wait(source, num_bytes, may_wait=may_wait, has_room=has_room)
                await up.wait(num_bytes)
        stream.waits_since_s = time.monotonic()

    def _count(self, digest: str, num_bytes: int, traffic: Traffic) -> None:
        if self._is_control(digest):
            traffic.control_bytes_sent += num_bytes
        elif self._is_moments(digest):
            traffic.moments_bytes_sent += num_bytes
        else:
            traffic.blob_bytes_sent += num_bytes


async def _send_content(
    store: BlobStore,
    digest: str,
    span: range,
    writer: asyncio.StreamWriter,
    *,
    turn: Callable[[int], Awaitable[None]],
    most: int,
) -> AsyncIterator[int]:
    """Sends a range of a blob, each part in its turn; yields the size of each part.

    Raises:
        ConnectionError: the blob was removed or truncated during the transfer. The head has been
            sent, so the asking side learns of this only by the stream's early end.
    """
    file = store.file_of(digest) if len(span) > SMALL_BYTES else None
    for start in span[::most]:
        part_bytes = min(most, span.stop - start)
        await turn(part_bytes)
        if file:
            await _send_file(file, start, part_bytes, writer)
        else:
            part = store.read(digest, start, part_bytes)
            if part is None:
                raise ConnectionError(f"blob {digest} is no longer here")
            await _send(part, writer)
        yield part_bytes


async def _send_file(
    file: BlobFile, start: int, num_bytes: int, writer: asyncio.StreamWriter
) -> None:
    """Sends by the kernel, which takes 6 % less CPU time a round (`bench_averaging.py`)."""
    send = asyncio.get_running_loop().sendfile
    pack, offset = cast(BinaryIO, file.pack), file.offset + start
    try:
        async with asyncio.timeout(IDLE_S):
            sent = await send(writer.transport, pack, offset, num_bytes, fallback=False)
    except asyncio.SendfileNotAvailableError:  # the file system lacks it, or the stream ended
        await _send(file.pack.read(offset, 0, num_bytes), writer)
        return
    if sent < num_bytes:
        raise ConnectionError(f"{file.pack.path} ends early")


async def _index(store: BlobStore, ask: Ask, size: int) -> bytes:
    """The piece index if the asking peer needs one; hashing runs off the loop."""
    if not ask.with_index or num_pieces(size) < 2:
        return b""
    if known := store.known_index(ask.digest):
        return known
    try:
        index = await asyncio.get_running_loop().run_in_executor(None, store.index, ask.digest)
    except StateError as error:
        raise ConnectionError(str(error)) from error
    if index is None:
        raise ConnectionError(f"blob {ask.digest} is no longer here")
    return index


async def _send(data: bytes | memoryview, writer: asyncio.StreamWriter) -> None:
    writer.write(data)
    async with asyncio.timeout(IDLE_S):
        await writer.drain()


async def _refuse(
    status: Status, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    """Sends a refusal, then waits for the other side to close, or the head might be lost."""
    await _send(Head(status).encode(), writer)
    async with asyncio.timeout(_REFUSED_S):
        while await reader.read(PART_BYTES):
            pass
