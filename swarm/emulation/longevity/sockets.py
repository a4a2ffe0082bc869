"""Machines, their lines, and TCP sockets between them, in virtual time.

A line has a rate that may change over the month, and outages. Bytes wait for the bytes sent before
them and for the end of an outage, and then take as long as the rate says. `TCP_INFO` has a kernel's
figures, so lines are estimated from the same numbers as in production.
"""

# Stand-ins take the arguments of the originals.
# ruff: noqa: ARG002

from __future__ import annotations

import asyncio
import socket as real_socket
import struct
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Self

from swarm.emulation.longevity.kernel import Clock, Parked, Threads, VirtualLoop, running_world
from swarm.network.wire import upload_rate
from swarm.network.wire.upload_rate import LineBytes, TcpInfo

SEND_BUFFER_BYTES = 256 * 1024
PART_BYTES = 64 * 1024
DEAD_AFTER_S = 900.0
"""Seconds without a delivered byte after which the kernel ends a connection."""
CONNECT_S = 130.0
"""Seconds for which a kernel tries to connect to a host that does not answer."""
_MSS = 1448


@dataclass
class Line:
    """The connection of one machine to the network.

    Attributes:
        up_mbit: gives the rate at a moment, in seconds since the month began.
        latency_s: one-way delay to any machine.
        outages: times when the line is cut, (from, to) in the same seconds, in order.
    """

    up_mbit: Callable[[float], float] = lambda _: 100.0
    latency_s: float = 0.02
    outages: list[tuple[float, float]] = field(default_factory=list)
    free_at_s: float = 0.0
    moved_bytes: int = 0
    """All bytes that left through the line, for comparison with the peer's own count."""

    def usable_from(self, now_s: float) -> float:
        """The earliest time at which bytes that are ready now can be sent."""
        for begin_s, end_s in self.outages:
            if begin_s <= now_s < end_s:
                return end_s
        return now_s

    def is_cut(self, now_s: float) -> bool:
        """Whether the line is in an outage."""
        return self.usable_from(now_s) > now_s

    def takes(self, num_bytes: int, now_s: float) -> float:
        """Queues bytes. Returns when the last byte has left."""
        start_s = self.usable_from(max(now_s, self.free_at_s))
        self.free_at_s = start_s + num_bytes * 8e-6 / self.up_mbit(start_s)
        self.moved_bytes += num_bytes
        return self.free_at_s


@dataclass
class Machine:
    """One host: its address, its clock and its line.

    Attributes:
        host: IPv4 address.
        is_reachable: whether others can open connections to it.
        is_up: whether the machine runs.
        closed_ports: ports at which a firewall blocks connections.
    """

    host: str
    clock: Clock
    line: Line = field(default_factory=Line)
    is_reachable: bool = True
    is_up: bool = True
    listening: dict[int, Listening] = field(default_factory=dict)
    received_bytes: int = 0
    daemon_bytes: int = 0
    """The sent and received bytes that passed the libp2p daemon."""
    closed_ports: set[int] = field(default_factory=set)


here: ContextVar[Machine] = ContextVar("here")
"""The machine on which the present code runs."""


class HereClock:
    """The clocks of the machine on which the present code runs."""

    def monotonic(self) -> float:
        """Like `time.monotonic`."""
        return running_world().time()

    def boot(self) -> float:
        """Like `time.clock_gettime(CLOCK_BOOTTIME)`."""
        return here.get().clock.boot()

    def wall(self) -> float:
        """Like `time.time`."""
        return here.get().clock.wall()


class Internet:
    """All machines."""

    def __init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self.open_sockets: set[VirtualSocket] = set()

    def add(self, machine: Machine) -> Machine:
        """Adds a machine, in place of an earlier machine at its address."""
        self.machines[machine.host] = machine
        return machine

    # ------------------------------------------------ the port

    def socket(self, family: int = real_socket.AF_INET, *_: int) -> VirtualSocket:
        """Like `socket.socket`."""
        return VirtualSocket(self, here.get(), family)

    def create_server(self, address: tuple[str, int], **_: Any) -> Listening:
        """Like `socket.create_server`, but the host is ignored."""
        machine, (_host, port) = here.get(), address
        port = port or max([40_000, *machine.listening]) + 1
        if port in machine.listening:
            raise OSError(98, "Address already in use")
        machine.listening[port] = found = Listening(machine, port)
        return found

    def pair(self, one: Machine, other: Machine, family: int) -> tuple[VirtualSocket, ...]:
        """The two ends of a new connection."""
        ends = VirtualSocket(self, one, family), VirtualSocket(self, other, family)
        ends[0].join(ends[1])
        return ends


class Listening:
    """A listening socket."""

    def __init__(self, machine: Machine, port: int) -> None:
        self.machine, self.port = machine, port
        self.waiting: deque[VirtualSocket] = deque()
        self.arrived = asyncio.Event()

    def setblocking(self, flag: bool) -> None:
        """Does nothing, since this socket never blocks."""

    def getsockname(self) -> tuple[str, int]:
        """Like `socket.getsockname`."""
        return self.machine.host, self.port

    def close(self) -> None:
        """Refuses connections from now on."""
        self.machine.listening.pop(self.port, None)


class VirtualSocket:
    """One end of a connection, like a `socket.socket`."""

    def __init__(self, internet: Internet, machine: Machine, family: int) -> None:
        self.internet, self.machine, self.family = internet, machine, family
        self.other: VirtualSocket | None = None
        self.inbox, self.has_ended, self.is_closed = bytearray(), False, False
        self.unsent = self.acked = self.delivered = self.received = 0
        self.counted_on: LineBytes | None = None
        self.busy_s, self.busy_since_s = 0.0, 0.0
        self.queued_s = 0.0
        self.timeout_s: float | None = None
        self.on_change: list[Callable[[], None]] = []
        """Callbacks, each called once, when bytes arrive or leave, or the stream ends."""
        internet.open_sockets.add(self)

    @property
    def loop(self) -> VirtualLoop:
        """The loop of the month."""
        return running_world()

    def join(self, other: VirtualSocket) -> None:
        """Makes two sockets the ends of one connection."""
        self.other, other.other = other, self

    def changed(self) -> None:
        """Wakes all that wait for this socket."""
        waiting, self.on_change = self.on_change, []
        for each in waiting:
            each()

    # ------------------------------------------------ sending

    def push(self, data: bytes | memoryview) -> None:
        """Puts bytes into the kernel's buffer, even if it is full."""
        self._require_open()
        for start in range(0, len(data), PART_BYTES):
            part = bytes(data[start : start + PART_BYTES])
            now_s = self.loop.now_s
            left_s = self.machine.line.takes(len(part), now_s)
            there_s = left_s + self.machine.line.latency_s
            if self.other is not None:
                there_s = self.other.machine.line.usable_from(there_s)
            if not self.unsent:
                self.busy_since_s = now_s
            if self.family == real_socket.AF_UNIX:
                self.machine.daemon_bytes += len(part)
            self.unsent += len(part)
            self.queued_s = left_s - now_s
            self.loop.call_at(self.loop.time() + left_s - now_s, self._left, len(part))
            self.loop.call_at(self.loop.time() + there_s - now_s, self._arrived, part)

    def _left(self, num_bytes: int) -> None:
        self.unsent -= num_bytes
        if not self.unsent:
            self.busy_s += self.loop.now_s - self.busy_since_s
        self.changed()

    def _arrived(self, part: bytes) -> None:
        other = self.other
        if other is None or other.is_closed or not other.machine.is_up:
            self.has_ended = True
            self.changed()
            return
        self.acked += len(part)
        self.delivered += -(-len(part) // _MSS)
        other.machine.received_bytes += len(part)
        if self.family == real_socket.AF_UNIX:
            other.machine.daemon_bytes += len(part)
        other.received += len(part)
        other.inbox += part
        other.changed()

    def send(self, data: bytes | memoryview, flags: int = 0) -> int:
        """Like `socket.send`, non-blocking."""
        if self.unsent > SEND_BUFFER_BYTES:
            raise BlockingIOError(11, "Resource temporarily unavailable")
        self.push(data)
        return len(data)

    def _require_open(self) -> None:
        if self.is_closed:
            raise OSError(9, "Bad file descriptor")
        if self.other is None or self.has_ended:
            raise BrokenPipeError(32, "Broken pipe")

    # ------------------------------------------------ receiving

    def recv(self, num_bytes: int, flags: int = 0) -> bytes:
        """Like `socket.recv`, non-blocking."""
        if not self.inbox:
            if self.has_ended or self.is_closed:
                return b""
            raise BlockingIOError(11, "Resource temporarily unavailable")
        found = bytes(self.inbox[:num_bytes])
        if not flags & real_socket.MSG_PEEK:
            del self.inbox[:num_bytes]
        return found

    def recv_into(self, view: memoryview, num_bytes: int = 0, flags: int = 0) -> int:
        """Like `socket.recv_into` in a thread with MSG_WAITALL: waits up to `SO_RCVTIMEO`."""
        wanted = num_bytes or len(view)
        least = wanted if flags & real_socket.MSG_WAITALL else 1
        end_s = None if self.timeout_s is None else self.loop.now_s + self.timeout_s
        while len(self.inbox) < least and not (self.has_ended or self.is_closed):
            left_s = None if end_s is None else end_s - self.loop.now_s
            if left_s is not None and left_s <= 0:
                break
            parked: Parked = Threads.of(self.loop).park(left_s)
            self.on_change.append(parked.wake)
            parked.wait()
        if not self.inbox and not (self.has_ended or self.is_closed):
            raise BlockingIOError(11, "Resource temporarily unavailable")
        return self._taken(view, wanted)

    def _taken(self, view: memoryview, most: int) -> int:
        count = min(len(self.inbox), most, len(view))
        view[:count] = self.inbox[:count]
        del self.inbox[:count]
        return count

    # ------------------------------------------------ options and end

    def setblocking(self, flag: bool) -> None:
        """Does nothing, since the caller decides which calls wait."""

    def setsockopt(self, level: int, option: int, value: Any) -> None:
        """Sets the time-out of reads. Other options change nothing here."""
        if (level, option) == (real_socket.SOL_SOCKET, real_socket.SO_RCVTIMEO):
            seconds, micros = struct.unpack("ll", value)
            self.timeout_s = seconds + micros * 1e-6

    def getsockopt(self, level: int, option: int, size: int = 0) -> Any:
        """`TCP_INFO` only."""
        if self.family == real_socket.AF_UNIX or option != real_socket.TCP_INFO:
            raise OSError(95, "Operation not supported")
        busy_s = self.busy_s + (self.loop.now_s - self.busy_since_s if self.unsent else 0.0)
        least_us = int(2e6 * self.machine.line.latency_s)
        queued_us = int(1e6 * self.queued_s) if self.unsent else 0
        info = TcpInfo(
            packet_bytes=_MSS, rtt_us=least_us + queued_us, acked=self.acked,
            received=self.received, unsent=self.unsent, least_rtt_us=least_us,
            busy_us=int(1e6 * busy_s), by_receiver_us=0, by_buffer_us=0, delivered=self.delivered,
        )  # fmt: skip
        return upload_rate._LAYOUT.pack(*info)

    def getsockname(self) -> tuple[str, int]:
        """Like `socket.getsockname`."""
        return self.machine.host, 0

    def connect(self, _: object) -> None:
        """Lets a datagram socket learn its own address. Sends nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """-1, since this socket has no descriptor."""
        return -1

    def shutdown(self, how: int) -> None:
        """Ends both directions."""
        self._end()

    def close(self) -> None:
        """Like `socket.close`."""
        if self.is_closed:
            return
        if self.counted_on:
            self.counted_on.connection_ends(self)  # type: ignore[arg-type]
        self._end()
        self.is_closed = True
        self.internet.open_sockets.discard(self)
        self.changed()

    def _end(self) -> None:
        self.has_ended = True
        other = self.other
        if other is not None and not other.has_ended:
            line, now_s = self.machine.line, self.loop.now_s
            wait_s = max(line.free_at_s, line.usable_from(now_s)) - now_s + line.latency_s
            self.loop.call_later(max(wait_s, 0.0), other._heard_end)
        self.changed()

    def _heard_end(self) -> None:
        self.has_ended = True
        self.changed()


def counted(line: LineBytes, raw: VirtualSocket) -> VirtualSocket:
    """Replaces `upload_rate.CountedSocket`: the same socket, which reports its end to `line`."""
    raw.counted_on = line
    return raw


class SocketLoop(VirtualLoop):
    """The loop of a month, with virtual sockets."""

    def __init__(self, internet: Internet) -> None:
        super().__init__()
        self.internet = internet

    async def _change(self, sock: VirtualSocket) -> None:
        future = self.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        sock.on_change.append(wake)
        try:
            await future
        finally:
            if wake in sock.on_change:
                sock.on_change.remove(wake)

    async def sock_connect(self, sock: Any, address: Any) -> None:
        """Like asyncio's. A firewall, or a machine that is off, does not answer."""
        host, port = address[0], address[1]
        line = sock.machine.line
        await asyncio.sleep(line.usable_from(self.now_s) - self.now_s + 2 * line.latency_s)
        target = self.internet.machines.get(host)
        is_shut = target is None or not target.is_reachable or port in target.closed_ports
        if target is None or is_shut or not target.is_up or target.line.is_cut(self.now_s):
            await asyncio.sleep(CONNECT_S)
            raise TimeoutError(110, "Connection timed out")
        listening = target.listening.get(port)
        if listening is None:
            raise ConnectionRefusedError(111, "Connection refused")
        accepted = VirtualSocket(self.internet, target, real_socket.AF_INET)
        sock.join(accepted)
        accepted.caller = sock.machine.host  # type: ignore[attr-defined]
        listening.waiting.append(accepted)
        listening.arrived.set()

    async def sock_accept(self, sock: Any) -> tuple[Any, Any]:
        """As asyncio's."""
        while not sock.waiting:
            sock.arrived.clear()
            await sock.arrived.wait()
        accepted = sock.waiting.popleft()
        return accepted, (accepted.caller, 50_000)

    async def sock_recv_into(self, sock: Any, buf: Any) -> int:
        """As asyncio's."""
        while not sock.inbox and not (sock.has_ended or sock.is_closed):
            await self._change(sock)
        return int(sock._taken(buf, len(buf)))

    async def sock_recv(self, sock: Any, nbytes: int) -> bytes:
        """As asyncio's."""
        buffer = bytearray(nbytes)
        return bytes(buffer[: await self.sock_recv_into(sock, memoryview(buffer))])

    async def sock_sendall(self, sock: Any, data: Any) -> None:
        """As asyncio's."""
        view = memoryview(data)
        while view:
            while sock.unsent >= SEND_BUFFER_BYTES and not (sock.has_ended or sock.is_closed):
                await self._change(sock)
            sock.push(view[:PART_BYTES])
            view = view[PART_BYTES:]

    async def create_connection(self, protocol_factory: Any, *_: Any, **named: Any) -> Any:
        """A transport on a virtual socket, since there are no others here."""
        protocol = protocol_factory()
        transport = SocketTransport(self, named["sock"], protocol)
        return transport, protocol

    async def sendfile(self, *_: Any, **__: Any) -> int:
        """Raises, so that a server falls back to reading and writing."""
        raise asyncio.SendfileNotAvailableError("virtual sockets have no descriptors")


class SocketTransport(asyncio.Transport):
    """The transport to which `asyncio.open_connection(sock=...)` writes."""

    def __init__(self, loop: SocketLoop, sock: VirtualSocket, protocol: Any) -> None:
        super().__init__({"socket": sock, "peername": (sock.machine.host, 0)})
        self._loop, self._sock, self._protocol = loop, sock, protocol
        self._is_closing, self._is_paused, self._is_reading = False, False, True
        protocol.connection_made(self)
        self._watch()

    def _watch(self) -> None:
        self._sock.on_change.append(self._look)
        self._loop.call_soon(self._look_again)

    def _look_again(self) -> None:
        self._take_in()

    def _look(self) -> None:
        if self._is_closing:
            return
        self._sock.on_change.append(self._look)
        self._take_in()

    def _take_in(self) -> None:
        sock = self._sock
        if self._is_closing:
            return
        if self._is_paused and sock.unsent < SEND_BUFFER_BYTES // 2:
            self._is_paused = False
            self._protocol.resume_writing()
        if self._is_reading and sock.inbox:
            data = bytes(sock.inbox)
            sock.inbox.clear()
            self._protocol.data_received(data)
        if sock.has_ended and not sock.inbox:
            self._protocol.eof_received()
            self._lost(None)

    def write(self, data: Any) -> None:
        """Sends data, and asks for a pause once the buffer is full."""
        if self._is_closing:
            return
        try:
            self._sock.push(data)
        except OSError as error:
            self._lost(error)
            return
        if self._sock.unsent > SEND_BUFFER_BYTES and not self._is_paused:
            self._is_paused = True
            self._protocol.pause_writing()

    def pause_reading(self) -> None:
        """Called when the reader's buffer is full."""
        self._is_reading = False

    def resume_reading(self) -> None:
        """Called when the reader's buffer has room."""
        self._is_reading = True
        self._take_in()

    def is_closing(self) -> bool:
        """Whether the transport closes or is closed."""
        return self._is_closing

    def can_write_eof(self) -> bool:
        """False: no user here ends only one direction."""
        return False

    def close(self) -> None:
        """Ends the connection after all written data."""
        self._lost(None)

    def abort(self) -> None:
        """Ends the connection."""
        self._lost(None)

    def _lost(self, error: Exception | None) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        self._sock.close()
        self._loop.call_soon(self._protocol.connection_lost, error)
