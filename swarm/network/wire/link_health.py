"""Health of the links to other peers: which peers do not answer, and how long answers take.

No messages are sent for this; the control messages that are sent anyway show it.
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
"""Lost messages in a row after which a link counts as cut. Any link may lose a single message."""
SILENT_S = 6.0
"""If a message has no answer for this long, and nothing else arrived from its receiver, the link
counts as cut. On a working link an answer takes less than 5 s."""
FORGOTTEN_S = 60.0
"""After this long without a message to a peer, its link is no longer reported."""
KEPT = 16
MAX_LINES = 4096
"""Most peers, not counting those with a message in progress; about 1 kB each. At most 256 new
strangers come in a second, and members get messages every few seconds, so the entries of members
are kept."""


@dataclass
class _Line:
    at_s: float = 0.0
    """Time of the last sent message."""
    heard_s: float = -math.inf
    """Time of the last message or answer received."""
    under_way: int = 0
    """Number of messages without an answer so far."""
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
"""Number of uplink tests of which the median counts, since a test during other transfers reads too
low."""
ALIKE = 1.5
"""Two tests that differ by more than this factor count as tests of different links."""
SETTLED_S = 3600.0
"""Rates from before the last two tests, and older than this, no longer count."""
MAX_FULL = 16
"""Most receivers for which a rate of the full uplink is kept."""
BEFORE = "before"
"""The name of the earlier reading of a receiver that was measured twice."""


class LinkHealth:
    """The links to all peers; written in the node's loop, read by any thread.

    Attributes:
        down_mbit: download rate measured before this peer joined; None if not measured.
        when_cut: called when a link proves to be cut.
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
        """The uplink's rate by tests of the last day; None if there were no tests."""
        values = self._tests.of_late(self._clock())
        return values[len(values) // 2] if values else None

    @property
    def tested_mbit(self) -> float | None:
        """`up_mbit`; before the first test, the rate from an earlier start of this peer."""
        return self.up_mbit or next(iter(self._recalled.of_late(self._clock())), None)

    @property
    def is_recalled(self) -> bool:
        """Whether the uplink's rate is known from an earlier start only."""
        return self.up_mbit is None and self.tested_mbit is not None

    @property
    def tested_s(self) -> float:
        """Time of the newest test; -inf if there was none."""
        return self._tests.newest[-1].at_s if self._tests.newest else -math.inf

    @property
    def test_age_s(self) -> float:
        """Seconds since the newest test; inf if there was none."""
        return self._clock() - self.tested_s

    @property
    def settled_s(self) -> float:
        """Rates from before this time no longer count, as no test confirms them; or -inf."""
        if len(self._tests.newest) < 2:
            return -math.inf
        return min(self._tests.newest[-2].at_s, self._clock() - SETTLED_S)

    @property
    def is_agreed(self) -> bool:
        """Whether the newest test agrees with the rate in use."""
        if not self._tests.newest or (known := self.up_mbit) is None:
            return False
        newest = self._tests.newest[-1].value
        return max(newest, known) <= ALIKE * min(newest, known)

    def tested(self, mbit: float) -> None:
        """Adds the rate, a lower bound, of an uplink test that has just ended."""
        self._tests.add(mbit, self._clock())

    def recall(self, mbit: float, age_s: float) -> None:
        """Adds the uplink's rate from an earlier start of this peer, with its age."""
        self._recalled.add(mbit, self._clock() - age_s)

    def full(self, receiver: str, mbit: float) -> None:
        """Adds the uplink's rate towards a receiver while the uplink was full."""
        self._full.pop(receiver, None)
        self._full[receiver] = Dated(mbit, self._clock())
        if len(self._full) > MAX_FULL:
            del self._full[next(iter(self._full))]

    def full_by_one(self, receiver: str) -> None:
        """Keeps a receiver's reading beside its next one, which would otherwise replace it.

        A rate counts once two readings agree. If only one peer listens, both come from that peer.
        """
        if before := self._full.pop(receiver, None):
            self._full[BEFORE] = before

    def forget_full(self) -> None:
        """Drops all readings once two have agreed, so that later two new readings have to agree."""
        self._full.clear()

    @property
    def full_mbit(self) -> dict[str, float]:
        """By receiver: the uplink's rate when it was full, in the last day."""
        now_s = self._clock()
        return {k: v.value for k, v in list(self._full.items()) if now_s - v.at_s <= DAY_S}

    # ------------------------------------------------ messages

    @contextmanager
    def post(self, peer: str) -> Iterator[None]:
        """Surrounds the sending of one message, until the receiver has handled it."""
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
        """Handles a message, sent at `since_s`, that has had no answer for SILENT_S."""
        if line.heard_s < since_s and not line.is_cut:
            line.at_s, line.is_silent, line.silence = self._clock(), True, Silence.SILENT
            self.when_cut()

    def hearing(self, handler: OnMessage | None) -> OnMessage | None:
        """Makes from a handler of messages one that also notes that their senders were heard."""
        if handler is None:
            return None

        async def heard(peer: str, payload: bytes) -> None:
            line = self._lines.get(peer)
            if line is not None:
                line.heard(self._clock())
            await handler(peer, payload)

        return heard

    def rtt_ms(self) -> float | None:
        """The median over current peers of the shortest round trip of their last messages."""
        shortest = [min(line.took_s) for line in self._talked_to().values() if line.took_s]
        return round(1e3 * statistics.median(shortest), 3) if shortest else None

    def unreached(self) -> dict[str, Silence]:
        """Peers to which the last messages were lost, those with most losses first."""
        lost = [(peer, line) for peer, line in self._talked_to().items() if line.is_cut]
        lost.sort(key=lambda item: (-item[1].lost, item[0]))
        return {peer: line.silence for peer, line in lost[:MAX_UNREACHED]}

    def _talked_to(self) -> dict[str, _Line]:
        now_s = self._clock()
        return {k: v for k, v in list(self._lines.items()) if now_s - v.at_s <= FORGOTTEN_S}


def _later(seconds: float, action: Callable[[], None]) -> asyncio.TimerHandle | None:
    """Schedules a call in the node's loop; does nothing outside of it."""
    try:
        return asyncio.get_running_loop().call_later(seconds, action)
    except RuntimeError:
        return None
