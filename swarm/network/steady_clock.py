"""The DHT's time: the wall clock's at the start, and from then on the time that has passed.

Records expire by wall time everywhere, and hivemind asks the wall clock each time: after a jump of
minutes a peer would take all records of others for expired, or its own would be for them.
"""

from __future__ import annotations

import logging
import threading
import time

from hivemind.dht import node, protocol, routing
from hivemind.utils import timed_storage

logger = logging.getLogger(__name__)

LIMIT_S = float(timed_storage.MAX_DHT_TIME_DISCREPANCY_SECONDS)
"""So far the clocks of two peers may differ."""
JUMP_S = 2.0
HIVEMIND = (timed_storage, protocol, routing, node)
"""Its modules that ask for the time; each holds the function under the name `get_dht_time`."""

_lock = threading.Lock()


class SteadyClock:
    """Seconds since 1970 that do not follow jumps of the wall clock, but count suspended time."""

    def __init__(self) -> None:
        self._offset_s = time.time() - passed_s()
        self._said_s = 0.0

    def __call__(self) -> float:
        """The time now."""
        return passed_s() + self._offset_s

    def look(self) -> float:
        """How far the wall clock is ahead of this one; says so when that changed by seconds."""
        ahead_s = time.time() - self()
        if abs(ahead_s - self._said_s) > JUMP_S:
            logger.warning(
                "this machine's clock jumped by %+.1f s; records go on by the time since the start",
                ahead_s - self._said_s,
            )
            self._said_s = ahead_s
        return ahead_s


def passed_s() -> float:
    """Seconds since the machine was started, those included that it was suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_clock: SteadyClock | None = None


def dht_clock() -> SteadyClock:
    """The clock of this process, which hivemind's DHT goes by from the first call on."""
    global _clock
    with _lock:
        if _clock is None:
            _clock = SteadyClock()
            for module in HIVEMIND:
                module.get_dht_time = _clock
    return _clock
