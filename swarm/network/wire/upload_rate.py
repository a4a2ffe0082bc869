"""Counts the bytes of this machine's TCP connections, and how fast they are acknowledged.

The source is `struct tcp_info` of linux/tcp.h, in Linux since version 4.18.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

from swarm.protocol.timing.pace import Recent

_LAYOUT = struct.Struct("=16xI48xI48xQQ8xII16xQQQI")


class TcpInfo(NamedTuple):
    """Figures of a connection since its beginning, in the order of the kernel's fields.

    Attributes:
        packet_bytes: bytes of a full packet.
        rtt_us: the smoothed round trip, in microseconds.
        acked: bytes before the first byte that the other side has not acknowledged.
        received: bytes that arrived in order.
        unsent: bytes that wait in this machine.
        least_rtt_us: the shortest recent round trip.
        busy_us: time with bytes in flight, or waiting to be sent.
        by_receiver_us: the part of `busy_us` in which the other side had no room.
        by_buffer_us: the part of `busy_us` in which this machine's buffer had no room.
        delivered: packets that the other side has, including packets after a missing packet.
    """

    packet_bytes: int
    rtt_us: int
    acked: int
    received: int
    unsent: int
    least_rtt_us: int
    busy_us: int
    by_receiver_us: int
    by_buffer_us: int
    delivered: int


def tcp_info(connection: socket.socket) -> TcpInfo | None:
    """The kernel's current figures; None if it has none, or the connection is closed."""
    if sys.platform != "linux":
        return None
    try:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAYOUT.size)
        return TcpInfo(*_LAYOUT.unpack(info))
    except (OSError, struct.error):
        return None


class LineBytes:
    """Counts bytes of both directions together; any thread may call."""

    def __init__(self) -> None:
        """Has counted nothing yet."""
        self._lock = threading.RLock()  # reentrant: garbage collection may close a connection
        self._open: WeakSet[CountedSocket] = WeakSet()
        self._daemons: dict[int, int] = {}
        """By process: the bytes that it had moved at the last look."""
        self._ended = 0
        """Bytes of connections and daemons that have ended."""
        self._is_known: bool | None = None
        """Whether the kernel counts all bytes; None before the first daemon."""

    def connection(self, raw: socket.socket) -> CountedSocket:
        """Takes over a TCP connection and counts its bytes from its beginning."""
        counted = CountedSocket(self, raw)
        with self._lock:
            self._open.add(counted)
            if tcp_info(counted) is None:
                self._is_known = False
        return counted

    def daemon_began(self, pid: int) -> None:
        """Starts counting the bytes of a daemon of this node."""
        with self._lock:
            self._daemons[pid] = 0
            if self._is_known is not False:
                self._is_known = moved_by_process(pid) is not None

    def daemon_ends(self, pid: int) -> None:
        """Reads a daemon's count a last time, before another process may get its pid."""
        with self._lock:
            if pid in self._daemons:
                self._ended += max(self._daemons.pop(pid), moved_by_process(pid) or 0)

    def connection_ends(self, connection: CountedSocket) -> None:
        """Reads a connection's count a last time, before it is closed."""
        with self._lock:
            if connection in self._open:
                self._open.discard(connection)
                self._ended += _moved_on(connection)

    def total(self) -> int | None:
        """Bytes without the headers of TCP and IP; None if the kernel gives no count."""
        with self._lock:
            if not self._is_known:
                return None
            for pid, before in self._daemons.items():  # a dead process has no count
                self._daemons[pid] = max(before, moved_by_process(pid) or 0)
            of_connections = sum(map(_moved_on, list(self._open)))
            return self._ended + of_connections + sum(self._daemons.values())


class CountedSocket(socket.socket):
    """A TCP connection of a node; see `LineBytes.connection`."""

    def __init__(self, line: LineBytes, raw: socket.socket) -> None:
        super().__init__(raw.family, raw.type, raw.proto, fileno=raw.detach())
        self._line = line

    def close(self) -> None:
        """Counts the moved bytes, and closes the connection."""
        self._line.connection_ends(self)
        super().close()


def moved_by_process(pid: int) -> int | None:
    """Half of the bytes that a process has read and written; None if the kernel has no count."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        found = dict(line.split(": ") for line in lines)
        return (int(found["rchar"]) + int(found["wchar"])) // 2
    except (OSError, ValueError, KeyError):
        return None


def _moved_on(connection: socket.socket) -> int:
    info = tcp_info(connection)
    return info.acked + info.received if info else 0


SAMPLE_S = 0.25
WINDOW_S = 2.0
"""Length of a window. In a shorter one, a single burst of acknowledgements would decide the
rate."""
KEPT = 8
"""Number of recent windows. Fast windows are nearest to the link's rate, since receivers may have
limited the others. The upper quartile is used, since a single window may be wrong."""
ALONE_S = 3600.0
"""A receiver counts as the only one if no other has received bytes for this long."""
SHOWN_BY = 4
"""Least number of windows that show a change of the link."""


@dataclass
class _Watched:
    receiver: str
    acked: int


class UploadRate:
    """Watches the connections on which this machine sends; its methods run in one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Has seen nothing sent; `clock` is in seconds."""
        self._clock = clock
        self._watched: dict[socket.socket, _Watched] = {}
        self._is_ticking = False
        self._began_s: float | None = None
        """Since when there have always been unsent bytes; None if there are none now."""
        self._num_bytes = 0
        self._receivers: set[str] = set()
        self._rates, self._all = Recent(KEPT), Recent(KEPT)
        """Rates of the windows that count, and rates of all windows."""
        self._last, self._others_s = "", -inf
        """The last receiver, and when any other receiver last got bytes."""

    @property
    def mbit(self) -> float | None:
        """Rate in Mbit/s; None until the link has been the limit for long enough."""
        return self.mbit_since(-inf)

    def mbit_since(self, since_s: float) -> float | None:
        """The rate as in `mbit`, but only from windows after this time."""
        return self._rates.high(self._clock(), since_s)

    def shown_since(self, since_s: float) -> float | None:
        """Rate to all receivers since a time, in Mbit/s; None with fewer than `SHOWN_BY` windows.

        The link may carry more, so a low rate is only a reason to measure the link.
        """
        now_s = self._clock()
        is_enough = len(self._all.of_late(now_s, since_s)) >= SHOWN_BY
        return self._all.high(now_s, since_s) if is_enough else None

    @contextmanager
    def watching(self, receiver: str, connection: socket.socket) -> Iterator[None]:
        """Watches a connection while a peer is served on it; several connections share the link."""
        counters = tcp_info(connection)
        if counters is None:
            yield
            return
        self._watched[connection] = _Watched(receiver, counters.acked)
        if not self._is_ticking:
            self._is_ticking = True
            asyncio.get_running_loop().call_later(SAMPLE_S, self._tick)
        try:
            yield
        finally:
            del self._watched[connection]

    def _tick(self) -> None:
        try:
            self.sample()
        finally:  # an error of one sample, which the loop logs, must not end sampling
            self._is_ticking = bool(self._watched)
            if self._is_ticking:
                asyncio.get_running_loop().call_later(SAMPLE_S, self._tick)

    def sample(self) -> None:
        """Reads the figures of all connections."""
        now, acked, waiting = self._clock(), 0, set[str]()
        for connection, watched in self._watched.items():
            counters = tcp_info(connection)
            if counters is None:
                continue
            newly = counters.acked - watched.acked
            watched.acked, acked = counters.acked, acked + newly
            if counters.unsent and newly:  # unacknowledged bytes alone prove nothing
                waiting.add(watched.receiver)
        if not waiting:
            self._began_s = None
            return
        if self._began_s is None:
            self._begin(now, waiting)
            return
        self._num_bytes += acked
        self._receivers |= waiting
        if now - self._began_s >= WINDOW_S:
            rate = self._num_bytes * 8e-6 / (now - self._began_s)
            self._all.add(rate, now)
            if self._are_all_there_are(now) or rate > (self.mbit or 0.0):
                self._rates.add(rate, now)
            self._begin(now, waiting)

    def _are_all_there_are(self, now_s: float) -> bool:
        """Whether a window has several receivers, or the only receiver of recent bytes."""
        if len(self._receivers) > 1:
            self._others_s = now_s
            return True
        (receiver,) = self._receivers
        if receiver != self._last:
            self._last, self._others_s = receiver, now_s if self._last else self._others_s
        return now_s - self._others_s >= ALONE_S

    def _begin(self, now_s: float, waiting: set[str]) -> None:
        self._began_s, self._num_bytes, self._receivers = now_s, 0, waiting


LINE_SAMPLE_S = 0.05
BOUND = 0.9
"""The link must be the limit for at least this share of the time. If the CPU is the limit, no bytes
are in flight."""
STEADY = 1.25
"""A rate that rises by more from one quarter of the time to the next is TCP's slow start."""
QUEUED_S = 0.02
"""On a full link, packets always wait for longer than this."""
ALIKE = 1.15
"""Two rates of one link differ by less than this factor; rates of busy receivers rarely do."""


@dataclass(frozen=True)
class Sample:
    """Figures of one connection since its beginning.

    Attributes:
        at_s: time of the sample.
        num_bytes: bytes that the other side has, including bytes after a missing packet.
        bound_s: time in which bytes were in flight and only the link was the limit.
        queued_s: recent queueing time of packets.
    """

    at_s: float
    num_bytes: int
    bound_s: float
    queued_s: float


def fill(connection: socket.socket) -> None:
    """Makes a connection send until packets are lost: cubic may stop early, bbr leaves no queue."""
    if sys.platform != "linux":
        return
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


@contextmanager
def sampled(connection: socket.socket) -> Iterator[list[Sample]]:
    """Samples of a connection while it sends; none if the kernel gives no figures."""
    samples: list[Sample] = []
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def look() -> None:
        nonlocal timer
        if sample := sample_of(connection):
            samples.append(sample)
            timer = loop.call_later(LINE_SAMPLE_S, look)

    look()
    try:
        yield samples
    finally:
        if timer:
            timer.cancel()


def sample_of(connection: socket.socket) -> Sample | None:
    """The kernel's current figures of a TCP connection; None if the kernel has none."""
    info = tcp_info(connection)
    if info is None:
        return None
    return Sample(
        time.monotonic(),
        info.packet_bytes * info.delivered,
        (info.busy_us - info.by_receiver_us - info.by_buffer_us) * 1e-6,
        (info.rtt_us - info.least_rtt_us) * 1e-6,
    )


def full_rate_mbit(samples: Sequence[Sample]) -> float | None:
    """The rate of a full link in the second half of the time, in Mbit/s; None if not full.

    Args:
        samples: in their order, `SAMPLE_S` or so apart.
    """
    if len(samples) < 8:  # too few for two in each quarter
        return None
    last = len(samples) - 1
    begin, middle, end = [samples[last * k // 4] for k in (2, 3, 4)]
    if end.bound_s - begin.bound_s < BOUND * (end.at_s - begin.at_s):
        return None
    if min(sample.queued_s for sample in samples[last // 2 :]) < QUEUED_S:
        return None
    is_steady = _mbit(middle, end) <= STEADY * _mbit(begin, middle)
    return _mbit(begin, end) if is_steady else None


def agreed_mbit(rates: Mapping[str, float]) -> float | None:
    """The lower of the two highest rates that agree, by receiver; None if no two do."""
    ordered = sorted(rates.values(), reverse=True)
    return next((b for a, b in pairwise(ordered) if a <= ALIKE * b), None)


def _mbit(first: Sample, last: Sample) -> float:
    return (last.num_bytes - first.num_bytes) * 8e-6 / (last.at_s - first.at_s)
