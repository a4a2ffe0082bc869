"""Events of a simulated peer, one after the other."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable


class Turns:
    """Does one thing after the other: what is asked for meanwhile waits until that is done.

    So does a real peer: `swarm.network.round_driver` takes events from a queue, and carries out all
    effects of one before it looks at the next. An offer that a trainer makes at once on a new tip
    comes after the `Keep` beside that tip's `Apply`, or blobs that the offer's round asks for would
    be found on the disk and then be collected.
    """

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque()
        self._is_busy = False

    def __call__(self, do: Callable[[], None]) -> None:
        """Does it, or has it done in its turn."""
        self._waiting.append(do)
        if self._is_busy:
            return
        self._is_busy = True
        try:
            while self._waiting:
                self._waiting.popleft()()
        finally:
            self._is_busy = False
