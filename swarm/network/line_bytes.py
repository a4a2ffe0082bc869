"""Every byte that a node's line carries, counted by the kernel and not where bytes are used.

A node has two kinds of sockets on the line: TCP connections of its own, of which the kernel counts
each byte, and those of libp2p's daemons. What a daemon moves is half of what its process reads and
writes: each byte of a call, a stream or the DHT passes it once on the line and once on the socket
between the daemon and this process. Its own talk has no second half, so half of that is missing.
"""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from weakref import WeakSet

from swarm.network.tcp_info import tcp_info


class LineBytes:
    """Counts both directions together, from any thread."""

    def __init__(self) -> None:
        """Nothing was moved yet."""
        self._lock = threading.RLock()  # a connection that is collected may be closed at any time
        self._open: WeakSet[CountedSocket] = WeakSet()
        self._daemons: dict[int, int] = {}
        """Process -> what it had moved when it was looked at last."""
        self._ended = 0
        """Moved by connections and daemons that are no more."""
        self._is_known: bool | None = None
        """Whether the kernel counts all of it; None before the first daemon."""

    def connection(self, raw: socket.socket) -> CountedSocket:
        """Takes a TCP connection over; what it moves counts from its beginning."""
        counted = CountedSocket(self, raw)
        with self._lock:
            self._open.add(counted)
            if tcp_info(counted) is None:
                self._is_known = False
        return counted

    def daemon_began(self, pid: int) -> None:
        """Counts what a daemon of this node moves."""
        with self._lock:
            self._daemons[pid] = 0
            if self._is_known is not False:
                self._is_known = moved_by_process(pid) is not None

    def daemon_ends(self, pid: int) -> None:
        """Looks at a daemon for the last time, before its number may become another's."""
        with self._lock:
            if pid in self._daemons:
                self._ended += max(self._daemons.pop(pid), moved_by_process(pid) or 0)

    def connection_ends(self, connection: CountedSocket) -> None:
        """Looks at a connection for the last time, before it is closed."""
        with self._lock:
            if connection in self._open:
                self._open.discard(connection)
                self._ended += _moved_on(connection)

    def total(self) -> int | None:
        """Bytes without the headers of TCP and IP; None where the kernel does not say."""
        with self._lock:
            if not self._is_known:
                return None
            for pid, before in self._daemons.items():  # a process that died says nothing
                self._daemons[pid] = max(before, moved_by_process(pid) or 0)
            of_connections = sum(map(_moved_on, list(self._open)))
            return self._ended + of_connections + sum(self._daemons.values())


class CountedSocket(socket.socket):
    """A TCP connection of a node; see `LineBytes.connection`."""

    def __init__(self, line: LineBytes, raw: socket.socket) -> None:
        super().__init__(raw.family, raw.type, raw.proto, fileno=raw.detach())
        self._line = line

    def close(self) -> None:
        """Counts what was moved, and closes it."""
        self._line.connection_ends(self)
        super().close()


def moved_by_process(pid: int) -> int | None:
    """Half of the bytes that a process has read and written; None where the kernel does not say."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        found = dict(line.split(": ") for line in lines)
        return (int(found["rchar"]) + int(found["wchar"])) // 2
    except (OSError, ValueError, KeyError):
        return None


def _moved_on(connection: socket.socket) -> int:
    info = tcp_info(connection)
    return info.acked + info.received if info else 0
