"""How a peer's messages to others fare: who does not answer, and how long answers take.

Nothing is sent for it: it looks at the control messages that there are anyway.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from swarm.errors import NoRoute, Refused, Unreachable
from swarm.network.wire.bounded_tables import recalled
from swarm.network.wire.streams import OnMessage
from swarm.protocol.records.records import MAX_UNREACHED, Silence
from swarm.protocol.timing.pace import DAY_S, Dated, Recent

LOST_IN_A_ROW = 2
"""One message may be lost on any line."""
SILENT_S = 6.0
"""But if a message waits for so long, and nothing came from there since it was sent, there is no
line: an answer on a living one takes less than the 5 s that are left for it."""
FORGOTTEN_S = 60.0
"""A peer to which nothing was sent for so long is no longer talked to."""
KEPT = 16
MAX_LINES = 4096
"""Not counting those with a message under way; about 1 kB each. Strangers make at most 256 new ones
a second, and members are talked to every few seconds, so those of members stay."""


@dataclass
class _Line:
    at_s: float = 0.0
    """When a message was sent last."""
    heard_s: float = -math.inf
    """When a message or an answer came last."""
    under_way: int = 0
    """Messages that have not been answered."""
    lost: int = 0
    is_silent: bool = False
    silence: Silence = Silence.SILENT
    took_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))

    @property
    def is_cut(self) -> bool:
        return self.is_silent or self.lost >= LOST_IN_A_ROW

    def heard(self, now_s: float) -> None:
        self.heard_s, self.is_silent = now_s, False


TESTS = 3
"""Tests of the uplink whose median counts: a test during other transfers shows too little."""
ALIKE = 1.5
"""Two tests that differ by more do not show the same line."""
SETTLED_S = 3600.0
"""What was seen before two tests, and before so long, is not the line of now."""
MAX_FULL = 16
"""Receivers at which the uplink was full, of late."""
BEFORE = "before"
"""Stands for a receiver that was measured twice."""


class LinkHealth:
    """The lines to all peers; written in the node's loop, read by anyone.

    Attributes:
        down_mbit: measured before this peer joined; None if it was not.
        when_cut: called when a line turns out to be cut.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.down_mbit: float | None = None
        self._tests, self._recalled = Recent(TESTS), Recent(1)
        self._full: dict[str, Dated] = {}
        self.when_cut: Callable[[], None] = lambda: None
        self._clock = clock
        self._lines: dict[str, _Line] = {}

    # ------------------------------------------------ the uplink

    @property
    def up_mbit(self) -> float | None:
        """What tests of the last day have shown of the uplink; None if there were none."""
        values = self._tests.of_late(self._clock())
        return values[len(values) // 2] if values else None

    @property
    def tested_mbit(self) -> float | None:
        """The same; before the first test, the rate from an earlier life of this peer."""
        return self.up_mbit or next(iter(self._recalled.of_late(self._clock())), None)

    @property
    def is_recalled(self) -> bool:
        """Whether nothing but an earlier life is known of the uplink."""
        return self.up_mbit is None and self.tested_mbit is not None

    @property
    def tested_s(self) -> float:
        """When the newest test was made; -inf if there was none."""
        return self._tests.newest[-1].at_s if self._tests.newest else -math.inf

    @property
    def test_age_s(self) -> float:
        """Seconds since the newest test; inf if there was none."""
        return self._clock() - self.tested_s

    @property
    def settled_s(self) -> float:
        """What sending showed before this moment was not confirmed by tests; -inf: all counts."""
        if len(self._tests.newest) < 2:
            return -math.inf
        return min(self._tests.newest[-2].at_s, self._clock() - SETTLED_S)

    @property
    def is_agreed(self) -> bool:
        """Whether the newest test shows the line that counts."""
        if not self._tests.newest or (known := self.up_mbit) is None:
            return False
        newest = self._tests.newest[-1].value
        return max(newest, known) <= ALIKE * min(newest, known)

    def tested(self, mbit: float) -> None:
        """A test of the uplink ended now: it carries so much at least."""
        self._tests.add(mbit, self._clock())

    def recall(self, mbit: float, age_s: float) -> None:
        """In an earlier life of this peer, so long ago, the uplink carried so much."""
        self._recalled.add(mbit, self._clock() - age_s)

    def full(self, receiver: str, mbit: float) -> None:
        """The uplink was full towards a receiver, and carried so much."""
        self._full.pop(receiver, None)
        self._full[receiver] = Dated(mbit, self._clock())
        if len(self._full) > MAX_FULL:
            del self._full[next(iter(self._full))]

    def full_by_one(self, receiver: str) -> None:
        """With no other receiver, its earlier reading may agree with its next one."""
        if before := self._full.pop(receiver, None):
            self._full[BEFORE] = before

    def forget_full(self) -> None:
        """Two have agreed; the next time two new ones have to."""
        self._full.clear()

    @property
    def full_mbit(self) -> dict[str, float]:
        """Receiver -> rate of the uplink where it was full in the last day."""
        now_s = self._clock()
        return {k: v.value for k, v in list(self._full.items()) if now_s - v.at_s <= DAY_S}

    # ------------------------------------------------ messages

    @contextmanager
    def post(self, peer: str) -> Iterator[None]:
        """Around the sending of one message, which returns once it was handled."""
        line = recalled(
            self._lines, peer, _Line, MAX_LINES, is_in_use=lambda line: line.under_way > 0
        )
        line.under_way += 1
        began_s = self._clock()
        timer = _later(SILENT_S, lambda: self._waits(line, began_s))
        try:
            yield
        except Refused:
            line.heard(self._clock())
            line.lost = 0
            raise
        except Unreachable as error:
            was_cut = line.is_cut
            line.lost += 1
            line.silence = Silence.GONE if isinstance(error, NoRoute) else Silence.SILENT
            if line.is_cut and not was_cut:
                self.when_cut()
            raise
        else:
            line.heard(self._clock())
            line.lost = 0
            line.took_s.append(self._clock() - began_s)
        finally:
            line.under_way -= 1
            line.at_s = self._clock()
            if timer:
                timer.cancel()

    def _waits(self, line: _Line, since_s: float) -> None:
        """A message has waited for SILENT_S, and was sent at `since_s`."""
        if line.heard_s < since_s and not line.is_cut:
            line.at_s, line.is_silent, line.silence = self._clock(), True, Silence.SILENT
            self.when_cut()

    def hearing(self, handler: OnMessage | None) -> OnMessage | None:
        """The same handler of messages, which notes from whom they come."""
        if handler is None:
            return None

        async def heard(peer: str, payload: bytes) -> None:
            line = self._lines.get(peer)
            if line is not None:
                line.heard(self._clock())
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


def _later(seconds: float, action: Callable[[], None]) -> asyncio.TimerHandle | None:
    """Has something done in the node's loop; outside of it nothing."""
    try:
        return asyncio.get_running_loop().call_later(seconds, action)
    except RuntimeError:
        return None
