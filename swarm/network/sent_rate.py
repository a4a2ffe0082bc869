"""How fast this machine sends: the most that others took in some seconds while they waited.

What one receiver takes may be as much as its own line carries, so it shows only what a line carries
at least: one thin joiner that fetches for a day must not make its sources look thin, and be left
out of rounds [D5]. What several take together counts also where it is less than before.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

WINDOW_S = 4.0
"""Shorter, and what buffers on the way take in would count as sent."""
KEPT = 8
"""Windows of late; of these the fastest is nearest to what the line can do, since in the others
receivers may have been the slower ones."""


class SentRate:
    """Counts what is sent; its methods run in one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing was sent yet; `clock` is in seconds."""
        self._clock = clock
        self._answers: Counter[str] = Counter()
        self._receivers: set[str] = set()
        self._began_s = 0.0
        self._num_bytes = 0
        self._rates: deque[float] = deque(maxlen=KEPT)

    @property
    def mbit(self) -> float | None:
        """In Mbit/s; None until somebody has taken something for long enough."""
        return max(self._rates, default=None)

    @contextmanager
    def sending(self, receiver: str) -> Iterator[None]:
        """While an answer is being sent; several at a time share the line."""
        if not self._answers:
            self._begin()
        self._answers[receiver] += 1
        self._receivers.add(receiver)
        try:
            yield
        finally:
            self._answers[receiver] -= 1
            if not self._answers[receiver]:
                del self._answers[receiver]

    def count(self, num_bytes: int) -> None:
        """So many bytes of an answer were sent."""
        self._num_bytes += num_bytes
        seconds = self._clock() - self._began_s
        if seconds >= WINDOW_S:
            rate = self._num_bytes * 8e-6 / seconds
            if len(self._receivers) > 1 or rate > (self.mbit or 0.0):
                self._rates.append(rate)
            self._begin()

    def _begin(self) -> None:
        self._began_s, self._num_bytes = self._clock(), 0
        self._receivers = set(self._answers)
