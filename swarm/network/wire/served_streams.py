"""Streams that others have opened to this peer; waiting ones are ended to make room.

A stream is charged to its peer's account only while it is answered. Between two requests it is
*idle* and free. In each group (members, trainees, strangers), as many streams may be idle as may be
served. A further idle stream ends the longest idle one of the network with most. After a while, a
stream whose peer takes nothing of its answer is also ended for a stream with a request.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from swarm.errors import TooCostly
from swarm.network.wire.ledger import Cost, Held, Ledger

STALLED_S = 5.0
"""A peer that takes nothing of its answer for this long may lose the stream; it may ask again."""


@dataclass(eq=False)
class ServedStream:
    """One served stream.

    Attributes:
        source: the peer that opened the stream.
        waits_since_s: since when the stream waits for its peer to ask or to take bytes; None while
            the peer waits for this side.
    """

    source: str
    _writer: asyncio.StreamWriter
    waits_since_s: float | None = None
    _held: Held | None = None
    _made_room: bool = False

    def require_open(self) -> None:
        """Raises ConnectionError if the stream was ended."""
        if self._made_room:
            raise ConnectionError("it made room for another stream")

    def end(self) -> None:
        """Ends the stream; the code that serves it gets an error."""
        self._made_room = True
        connection = self._writer.get_extra_info("socket")
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)


class ServedStreams:
    """All served streams, see the module; used in one event loop."""

    def __init__(
        self,
        ledger: Ledger,
        cost: Cost = Cost.STREAMS,
        *,
        stalled_s: float = STALLED_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Has no streams.

        Args:
            ledger: the node's; knows the members, and limits the streams of each peer.
            cost: the kind of cost as which a stream is charged.
            stalled_s: how long an answered stream may wait for its peer.
            clock: clock in seconds, never goes back.
        """
        self._ledger, self._cost = ledger, cost
        self._stalled_s, self._clock = stalled_s, clock
        self._idle: dict[ServedStream, None] = {}
        """The longest idle first."""
        self._asking: dict[ServedStream, None] = {}

    @property
    def num_asking(self) -> int:
        """Number of streams that are being answered."""
        return len(self._asking)

    @property
    def num_idle(self) -> int:
        """Number of streams that wait for a request."""
        return len(self._idle)

    @contextmanager
    def opened(self, source: str, writer: asyncio.StreamWriter) -> Iterator[ServedStream]:
        """Registers a stream of this peer while the context lasts; idle at first."""
        stream = ServedStream(source, writer)
        self.rest(stream)
        try:
            yield stream
        finally:
            self._idle.pop(stream, None)
            self._give_back(stream)

    def rest(self, stream: ServedStream) -> None:
        """Marks a stream as answered and idle; raises ConnectionError if it was ended."""
        stream.require_open()
        self._give_back(stream)
        stream.waits_since_s = self._clock()
        self._idle[stream] = None
        most = self._ledger.most_of_all(stream.source, self._cost)
        if len(self._idle) > most:
            self._end_one([one for one in self._idle if self._is_like(one, stream)], most)

    def begin(self, stream: ServedStream, most: float) -> None:
        """Called when a request has arrived; charges the stream to its peer until `rest`.

        Args:
            stream: the stream on which the request arrived.
            most: limit of streams that are answered at a time.

        Raises:
            TooCostly: too many streams are being answered, and none can be ended.
            ConnectionError: the stream was ended before the request was read.
        """
        stream.require_open()
        del self._idle[stream]
        while True:
            try:
                self._take(stream, most)
                return
            except TooCostly as error:
                if not self._makes_room(stream, error.reason.rpartition("_")[2]):
                    raise

    def _take(self, stream: ServedStream, most: float) -> None:
        if len(self._asking) >= most:
            why = "each would be too slow for the peer that waits for it"
            raise TooCostly("streams_of_cap", why)
        stream._held = self._ledger.take(stream.source, self._cost, 1, self._clock())
        stream.waits_since_s = self._clock()
        self._asking[stream] = None

    def _give_back(self, stream: ServedStream) -> None:
        self._asking.pop(stream, None)
        if stream._held:
            self._ledger.give_back(stream._held, self._clock())
            stream._held = None

    def _makes_room(self, stream: ServedStream, account: str) -> bool:
        """Ends a stream of the exhausted account that has waited long for its peer."""
        now_s, network = self._clock(), self._ledger.network_of(stream.source)
        stalled = [
            one
            for one in self._asking
            if one.waits_since_s is not None and now_s - one.waits_since_s >= self._stalled_s
        ]
        if account == "prefix":
            stalled = [one for one in stalled if self._network(one) == network]
        elif account in ("strangers", "trainees", "members"):
            stalled = [one for one in stalled if self._is_like(one, stream)]
        elif account == "cap":  # a member's link may be that slow
            stalled = [one for one in stalled if not self._ledger.is_member(one.source)]
        else:  # the peer's own account: it may end a stream itself
            return False
        return self._end_one(sorted(stalled, key=lambda one: one.waits_since_s or 0.0), 0)

    def _end_one(self, streams: list[ServedStream], most: float) -> bool:
        """If there are more than `most` streams, ends the first of the network with most."""
        if len(streams) <= most:
            return False
        counts = Counter(map(self._network, streams))
        ended = max(streams, key=lambda one: counts[self._network(one)])  # the first of those
        self._idle.pop(ended, None)
        self._give_back(ended)
        ended.end()
        return True

    def _network(self, stream: ServedStream) -> str:
        return self._ledger.network_of(stream.source)

    def _is_like(self, one: ServedStream, other: ServedStream) -> bool:
        """Whether two streams have the limits of the same group."""
        standing = self._ledger.standing_of
        return standing(one.source) == standing(other.source)
