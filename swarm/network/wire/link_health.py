"""Health of the links to other peers: which do not answer, and how long answers take.

Nothing is sent for this: it is seen from the control messages that are sent anyway.
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
"""A link is cut after so many lost messages in a row; a single one may be lost on any link."""
SILENT_S = 6.0
"""If a message waits for this long, and nothing arrived from its receiver since it was sent, the
link is cut. An answer on a working link takes less than the 5 s that are left for it."""
FORGOTTEN_S = 60.0
"""A peer to which nothing was sent for this long no longer counts."""
KEPT = 16
MAX_LINES = 4096
"""Limit of peers, not counting those with a message in progress; about 1 kB each. At most 256 new
strangers come in a second, and members get messages every few seconds, so members' entries stay."""


@dataclass
class _Line:
    at_s: float = 0.0
    """Time of the last sent message."""
    heard_s: float = -math.inf
    """Time of the last message or answer received."""
    under_way: int = 0
    """Messages without an answer so far."""
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
"""Number of uplink tests whose median counts: a test during other transfers reads too low."""
ALIKE = 1.5
"""Two tests that differ by more than this factor show different links."""
SETTLED_S = 3600.0
"""Rates seen before the last two tests, and longer ago than this, no longer count."""
MAX_FULL = 16
"""Limit of the receivers for which a rate of the full uplink is kept."""
BEFORE = "before"
"""Stands for the earlier reading of a receiver that was measured twice."""


class LinkHealth:
    """The links to all peers; written in the node's loop, read by any thread.

    Attributes:
        down_mbit: measured before this peer joined; None if it was not.
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
        """The uplink's rate by tests of the last day; None if there were none."""
        values = self._tests.of_late(self._clock())
        return values[len(values) // 2] if values else None

    @property
    def tested_mbit(self) -> float | None:
        """`up_mbit`; before the first test, the rate from an earlier start of this peer."""
        return self.up_mbit or next(iter(self._recalled.of_late(self._clock())), None)

    @property
    def is_recalled(self) -> bool:
        """Whether the uplink's rate is known only from an earlier start."""
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
        """Rates seen before this time no longer count, as no test confirms them; -inf if all do."""
        if len(self._tests.newest) < 2:
            return -math.inf
        return min(self._tests.newest[-2].at_s, self._clock() - SETTLED_S)

    @property
    def is_agreed(self) -> bool:
        """Whether the newest test agrees with the rate that counts."""
        if not self._tests.newest or (known := self.up_mbit) is None:
            return False
        newest = self._tests.newest[-1].value
        return max(newest, known) <= ALIKE * min(newest, known)

    def tested(self, mbit: float) -> None:
        """Adds the rate of a test of the uplink that has just ended; it is a lower bound."""
        self._tests.add(mbit, self._clock())

    def recall(self, mbit: float, age_s: float) -> None:
        """Adds the uplink's rate of an earlier start of this peer, with its age."""
        self._recalled.add(mbit, self._clock() - age_s)

    def full(self, receiver: str, mbit: float) -> None:
        """Adds the uplink's rate towards a receiver while the uplink was full."""
        self._full.pop(receiver, None)
        self._full[receiver] = Dated(mbit, self._clock())
        if len(self._full) > MAX_FULL:
            del self._full[next(iter(self._full))]

    def full_by_one(self, receiver: str) -> None:
        """Lets the next reading of a receiver without others agree with its earlier one."""
        if before := self._full.pop(receiver, None):
            self._full[BEFORE] = before

    def forget_full(self) -> None:
        """Forgets all readings once two have agreed: next time two new ones have to agree."""
        self._full.clear()

    @property
    def full_mbit(self) -> dict[str, float]:
        """Receiver -> rate of the uplink where it was full in the last day."""
        now_s = self._clock()
        return {k: v.value for k, v in list(self._full.items()) if now_s - v.at_s <= DAY_S}

    # ------------------------------------------------ messages

    @contextmanager
    def post(self, peer: str) -> Iterator[None]:
        """Surrounds the sending of one message, which returns when it has been handled."""
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
        """Handles a message, sent at `since_s`, that has waited for SILENT_S."""
        if line.heard_s < since_s and not line.is_cut:
            line.at_s, line.is_silent, line.silence = self._clock(), True, Silence.SILENT
            self.when_cut()

    def hearing(self, handler: OnMessage | None) -> OnMessage | None:
        """The same handler of messages, which also notes their senders."""
        if handler is None:
            return None

        async def heard(peer: str, payload: bytes) -> None:
            line = self._lines.get(peer)
            if line is not None:
                line.heard(self._clock())
            await handler(peer, payload)

        return heard

    def rtt_ms(self) -> float | None:
        """The shortest time of the last messages to each current peer; the median over peers."""
        shortest = [min(line.took_s) for line in self._talked_to().values() if line.took_s]
        return round(1e3 * statistics.median(shortest), 3) if shortest else None

    def unreached(self) -> dict[str, Silence]:
        """Peers to which the last messages were lost, the most lost first."""
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
