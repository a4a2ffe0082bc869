"""Direct streams that are done with and soon wanted again.

A round fetches several times from the same peers: parts, what was proposed, records. To open a
connection takes three round trips, and TCP some more until it knows what the line carries.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import NamedTuple

KEPT_S = 20.0
"""The other side ends a stream that is idle for a minute."""
MOST_OF_A_PEER = 2
MOST = 32
"""In all: where each of N peers fetches from all, each has as many idle ones of others on average,
and there are bounds on those (`served_streams.py`)."""


class _Kept(NamedTuple):
    peer_id: str
    protocol: str
    connection: socket.socket


class KeptStreams:
    """Idle streams, the newest of a peer first; in one event loop."""

    def __init__(self) -> None:
        """Has none."""
        self._streams: list[_Kept] = []
        """The oldest first."""

    def __len__(self) -> int:
        return len(self._streams)

    def keep(self, peer_id: str, protocol: str, connection: socket.socket) -> None:
        """Takes a stream on which nothing is awaited; ends it if it is not wanted in time."""
        connection.setblocking(False)  # a thread may have read from it
        kept, same = _Kept(peer_id, protocol, connection), self._of(peer_id, protocol)
        if len(same) == MOST_OF_A_PEER:
            self._end(same[0])
        elif len(self._streams) == MOST:
            self._end(self._streams[0])
        self._streams.append(kept)
        asyncio.get_running_loop().call_later(KEPT_S, self._end, kept)

    def take(self, peer_id: str, protocol: str) -> socket.socket | None:
        """One that the other side has not ended, as far as can be told; None if there is none."""
        for kept in reversed(self._of(peer_id, protocol)):
            if _is_open(kept.connection):
                self._streams.remove(kept)
                return kept.connection
            self._end(kept)
        return None

    def drop(self, peer_id: str) -> None:
        """Ends those of a peer: what became of one is likely true of all."""
        for kept in [each for each in self._streams if each.peer_id == peer_id]:
            self._end(kept)

    def close(self) -> None:
        """Ends all."""
        for kept in list(self._streams):
            self._end(kept)

    def _of(self, peer_id: str, protocol: str) -> list[_Kept]:
        return [e for e in self._streams if (e.peer_id, e.protocol) == (peer_id, protocol)]

    def _end(self, kept: _Kept) -> None:
        with suppress(ValueError):  # it was taken, or ended before
            self._streams.remove(kept)
            kept.connection.close()


def _is_open(connection: socket.socket) -> bool:
    try:
        connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False  # it was ended, or says what nobody asked for
