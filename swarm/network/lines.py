"""How a peer's messages to others fare: who does not answer, and how long answers take.

Nothing is sent for it: it looks at the control messages that there are anyway.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from swarm.errors import NoRoute, Refused, Unreachable
from swarm.protocol.figures import MAX_UNREACHED, Silence

LOST_IN_A_ROW = 2
"""One message may be lost on any line; but if nothing came from there either since it was sent,
for the seconds that it was waited for, there is no line."""
FORGOTTEN_S = 60.0
"""A peer to which nothing was sent for so long is no longer talked to."""
KEPT = 16

OnMessage = Callable[[str, bytes], Awaitable[None]]


@dataclass
class _Line:
    """One line; times are when a message was sent last, heard last, and sent and lost first."""

    at_s: float = 0.0
    heard_s: float = -math.inf
    lost_s: float = 0.0
    lost: int = 0
    silence: Silence = Silence.SILENT
    took_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    @property
    def is_cut(self) -> bool:
        if self.silence is Silence.SILENT and self.heard_s < self.lost_s:
            return self.lost > 0
        return self.lost >= LOST_IN_A_ROW


class Lines:
    """The lines to all peers; written in the node's loop, read by anyone.

    Attributes:
        down_mbit: measured before this peer joined; None if it was not.
        up_mbit: likewise.
        when_cut: called when a line turns out to be cut.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.down_mbit: float | None = None
        self.up_mbit: float | None = None
        self.when_cut: Callable[[], None] = lambda: None
        self._clock = clock
        self._lines: dict[str, _Line] = {}

    @contextmanager
    def post(self, peer: str) -> Iterator[None]:
        """Around the sending of one message, which returns once it was handled."""
        line = self._lines.setdefault(peer, _Line())
        began_s = self._clock()
        try:
            yield
        except Refused:
            line.lost = 0
            raise
        except Unreachable as error:
            was_cut = line.is_cut
            line.lost_s = began_s if not line.lost else min(line.lost_s, began_s)
            line.lost += 1
            line.silence = Silence.GONE if isinstance(error, NoRoute) else Silence.SILENT
            if line.is_cut and not was_cut:
                self.when_cut()
            raise
        else:
            line.lost = 0
            line.took_s.append(self._clock() - began_s)
        finally:
            line.at_s = self._clock()

    def hearing(self, handler: OnMessage | None) -> OnMessage | None:
        """The same handler of messages, which notes from whom they come."""
        if handler is None:
            return None

        async def heard(peer: str, payload: bytes) -> None:
            line = self._lines.get(peer)
            if line is not None:
                line.heard_s = self._clock()
            await handler(peer, payload)

        return heard

    def rtt_ms(self) -> float | None:
        """The shortest of the last messages to each peer that is talked to; median over peers."""
        shortest = [min(line.took_s) for line in self._talked_to().values() if line.took_s]
        return round(1e3 * statistics.median(shortest), 3) if shortest else None

    def unreached(self) -> dict[str, Silence]:
        """Peers to which the last messages were lost, those that were lost most first."""
        lost = [(peer, line) for peer, line in self._talked_to().items() if line.is_cut]
        lost.sort(key=lambda item: (-item[1].lost, item[0]))
        return {peer: line.silence for peer, line in lost[:MAX_UNREACHED]}

    def _talked_to(self) -> dict[str, _Line]:
        now_s = self._clock()
        return {k: v for k, v in list(self._lines.items()) if now_s - v.at_s <= FORGOTTEN_S}
