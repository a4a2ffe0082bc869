"""How fast a machine without a cap sends blobs: as fast as its line, with hardly a queue before it.

A router at home queues a quarter of a second or more of what it cannot send at once, and drops what
comes then. TCP fills such a queue, and votes and signs of life wait in it. The kernel knows of each
direct connection how long a round trip takes, and the least that one took; the difference is what
queues add. The least of several receivers' differences is this machine's own queue, since what
waits on another's line delays that receiver alone. LEDBAT (RFC 6817) goes by the same signal, for
one connection; here one rate is for all, and it is kept as `--max-upload` is.

A machine whose line queues nothing is never held back. Where others send on the line too, blobs
yield to them, down to three quarters of what it was seen to carry.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from math import inf

logger = logging.getLogger(__name__)

TARGET_S = 0.1
"""What this machine's queue may hold. More delays votes; less is hard to see on a radio link."""
DECIDE_S = 1.0
"""Longer than a round trip on any line: what came of the last decision has to be seen."""
GROWTH = 0.06
"""A second, while there is no queue."""
MARGIN = 0.02
"""Where there is a queue, what goes through is what the line carries; a pace is this much below,
beside what lets the queue shrink to its target by the next decision."""
MOST_DRAINED = 0.2
"""Of the pace, at a time."""
USED = 0.8
"""A pace of which less is used bounds nothing, so that nothing is learnt of it."""
BURSTY = 0.95
"""Of the pace is taken for the line where a queue came and went: it may have been a burst."""
LEAST_SHARE = 0.75
"""Of what the line was seen to carry: acknowledgements wait, too, in the queues of receivers that
send, and that is no reason to send less."""
LEAST_MBIT = 1.0


@dataclass(frozen=True)
class Seen:
    """What was sent between two decisions.

    Attributes:
        mbit: acknowledged, in Mbit/s.
        queue_s: what queues added to round trips at the end, in s; None: nobody knows.
        is_full: whether bytes waited in the kernel all the time, so that the line was the bound.
    """

    mbit: float
    queue_s: float | None
    is_full: bool


def paced(pace_mbit: float | None, seen: Seen, carried_mbit: float) -> float | None:
    """The pace from now on.

    Args:
        pace_mbit: the pace until now, in Mbit/s; None: as fast as it goes.
        seen: what came of it.
        carried_mbit: what this line was seen to carry at least; 0: not known.

    Returns:
        In Mbit/s; None as long as there was never a queue.
    """
    is_used = pace_mbit is not None and seen.mbit >= USED * pace_mbit
    if seen.queue_s is None or not (seen.is_full or is_used):
        return pace_mbit
    room = 1 - seen.queue_s / TARGET_S
    if room >= 0:
        return pace_mbit * (1 + GROWTH * room) if pace_mbit and is_used else pace_mbit
    drained = min(MOST_DRAINED, (seen.queue_s - TARGET_S) / DECIDE_S)
    least = max(LEAST_MBIT, LEAST_SHARE * carried_mbit)
    went = seen.mbit
    if pace_mbit and not seen.is_full:
        went = max(went, BURSTY * pace_mbit)
    return max(least, min((1 - MARGIN - drained) * went, pace_mbit or inf))


@dataclass
class Pacing:
    """Decides about once a second, by what a sampler tells it.

    Attributes:
        mbit: the pace, in Mbit/s; None: as fast as it goes.
    """

    keep: Callable[[float], None]
    """Has so many Mbit/s kept from now on."""
    mbit: float | None = field(init=False, default=None)
    _began_s: float | None = field(init=False, default=None)
    _num_bytes: int = field(init=False, default=0)
    _queue_s: float | None = field(init=False, default=None)
    _is_full: bool = field(init=False, default=True)

    def pause(self) -> None:
        """Nothing is sent."""
        self._began_s = None

    def note(
        self,
        now_s: float,
        num_bytes: int,
        queues_s: Collection[float],
        *,
        is_full: bool,
        carried_mbit: float,
    ) -> None:
        """Takes in a sample.

        Args:
            now_s: when it was taken.
            num_bytes: acknowledged since the one before.
            queues_s: what queues add to a round trip, of each receiver that acknowledged some.
            is_full: whether bytes wait in the kernel.
            carried_mbit: as of `paced`.
        """
        if self._began_s is None:
            self._begin(now_s)
            return
        self._num_bytes += num_bytes
        self._is_full &= is_full
        if len(queues_s) > 1:  # of a single one nobody knows whose queue it is
            self._queue_s = min(queues_s)
        passed_s = now_s - self._began_s
        if passed_s >= DECIDE_S:
            seen = Seen(self._num_bytes * 8e-6 / passed_s, self._queue_s, self._is_full)
            self._set(paced(self.mbit, seen, carried_mbit), seen)
            self._begin(now_s)

    def _begin(self, now_s: float) -> None:
        self._began_s, self._num_bytes, self._queue_s, self._is_full = now_s, 0, None, True

    def _set(self, mbit: float | None, seen: Seen) -> None:
        if mbit is None or mbit == self.mbit:
            return
        if self.mbit is None:
            logger.info(
                "uploads are paced, now at %.3g Mbit/s: faster ones queued for %.2f s on this "
                "machine's line (--max-upload sets a rate instead)", mbit, seen.queue_s
            )  # fmt: skip
        logger.debug("pace=%.3g Mbit/s after %s", mbit, seen)
        self.mbit = mbit
        self.keep(mbit)
