"""How fast this machine's line sends: what others have acknowledged while more was waiting.

Of each direct connection the kernel knows how many bytes the other side has acknowledged, and how
many are still unsent. While some are, a line bounds it; what a cap, a disk or a queue of this
program holds back does not wait there, and neither does what buffers took in count as sent. Of
streams over libp2p nothing is known.

What one receiver takes may be as much as its own line carries, so it shows only what this line
carries at least: one thin joiner that fetches for a day must not make its sources look thin, and be
left out of rounds [D5]. What several take together counts also where it is less than before, and
what one takes where nobody else has taken anything for an hour, as in a swarm of two.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf

from swarm.network.tcp_info import tcp_info
from swarm.protocol.estimates import Recent

SAMPLE_S = 0.25
WINDOW_S = 2.0
"""Shorter, and a single burst of acknowledgements would count."""
KEPT = 8
"""Windows of late; of these the fast ones are nearest to what the line can do, since in the others
receivers may have been the slower ones. The upper quartile counts: one window may be wrong."""
ALONE_S = 3600.0
"""A receiver is the only one if nobody else has taken anything for so long."""
SHOWN_BY = 4
"""Windows that show that a line has changed."""


@dataclass
class _Watched:
    receiver: str
    acked: int


class SentRate:
    """Looks at the connections on which this machine sends; its methods run in one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing was sent yet; `clock` is in seconds."""
        self._clock = clock
        self._watched: dict[socket.socket, _Watched] = {}
        self._is_ticking = False
        self._began_s: float | None = None
        """Since when there was always something unsent; None: there is nothing."""
        self._num_bytes = 0
        self._receivers: set[str] = set()
        self._rates, self._all = Recent(KEPT), Recent(KEPT)
        """Of windows that count, and of all, also those of one receiver of several."""
        self._last, self._others_s = "", -inf
        """The receiver that took something last, and when any other one did."""

    @property
    def mbit(self) -> float | None:
        """In Mbit/s; None until the line has been the bound for long enough."""
        return self.mbit_since(-inf)

    def mbit_since(self, since_s: float) -> float | None:
        """The same by windows after a moment alone."""
        return self._rates.high(self._clock(), since_s)

    def shown_since(self, since_s: float) -> float | None:
        """What any receivers took since a moment, in Mbit/s; None of fewer than `SHOWN_BY` windows.

        The line may carry more: it is a reason to measure it.
        """
        now_s = self._clock()
        is_enough = len(self._all.of_late(now_s, since_s)) >= SHOWN_BY
        return self._all.high(now_s, since_s) if is_enough else None

    @contextmanager
    def watching(self, receiver: str, connection: socket.socket) -> Iterator[None]:
        """While a peer is served on a connection; several at a time share the line."""
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
        finally:  # a fault of one sample, which the loop logs, must not be the last of them
            self._is_ticking = bool(self._watched)
            if self._is_ticking:
                asyncio.get_running_loop().call_later(SAMPLE_S, self._tick)

    def sample(self) -> None:
        """Looks at all connections."""
        now, acked, waiting = self._clock(), 0, set[str]()
        for connection, watched in self._watched.items():
            counters = tcp_info(connection)
            if counters is None:
                continue
            newly = counters.acked - watched.acked
            watched.acked, acked = counters.acked, acked + newly
            if counters.unsent and newly:  # what waits for a receiver that is gone says nothing
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
        """Whether the receivers of a window are several, or the only one of late."""
        if len(self._receivers) > 1:
            self._others_s = now_s
            return True
        (receiver,) = self._receivers
        if receiver != self._last:
            self._last, self._others_s = receiver, now_s if self._last else self._others_s
        return now_s - self._others_s >= ALONE_S

    def _begin(self, now_s: float, waiting: set[str]) -> None:
        self._began_s, self._num_bytes, self._receivers = now_s, 0, waiting
