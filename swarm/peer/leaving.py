"""How a peer leaves: it finishes its round and hands over, within a time."""

from __future__ import annotations

import logging
import threading
import time
from math import inf

from swarm.network.round_driver import RoundDriver
from swarm.peer.moments import MomentsKeeper
from swarm.protocol.manifest import Manifest

logger = logging.getLogger(__name__)

POLL_S = 0.2
COURTESY_S = 30.0
"""With nothing left to hand over, a peer waits for the manifest without it no longer than this."""


class Stop:
    """The wish that a peer leaves, from any thread or a signal handler, and its time-out."""

    def __init__(self, leave_timeout_s: float) -> None:
        self.leave_timeout_s = leave_timeout_s
        self._asked = threading.Event()
        self._asked_s = inf

    def ask(self) -> None:
        """The peer leaves as soon as its round is over, or the time is; asking again is nothing."""
        if not self._asked.is_set():
            self._asked_s = time.monotonic()
            self._asked.set()

    def __call__(self) -> bool:
        """Whether the peer was asked to stop."""
        return self._asked.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Waits to be asked; returns whether it was."""
        return self._asked.wait(timeout_s)

    @property
    def remaining_s(self) -> float:
        """Seconds until a peer that was asked to stop goes, whatever is not done by then."""
        return max(self._asked_s + self.leave_timeout_s - time.monotonic(), 0.0)


def leave(driver: RoundDriver, keeper: MomentsKeeper, adopted: Manifest, stop: Stop) -> str:
    """Says good-bye and hands over; returns what became of it, in a sentence.

    The masters are agreed values already, or go with the moments. Whoever owns the experts by the
    manifest without this peer, or would adopt them until there is one, is told of them and fetches.

    Args:
        driver: of the rounds.
        keeper: has the moments.
        adopted: the manifest that the engine is at.
        stop: bounds all of it.
    """
    driver.leave()
    began_s, offered_at = time.monotonic(), None
    while stop.remaining_s > 0:
        tip = driver.tip
        if offered_at is None or (tip.digest != offered_at and keeper.model.me not in tip.members):
            if adopted.digest != tip.digest or keeper.model.me in tip.members:
                keeper.leave(adopted, tip)
            offered_at = tip.digest
        keeper.hand_over(stop.remaining_s)
        may_go = driver.left is not None or time.monotonic() - began_s > COURTESY_S
        if may_go and keeper.all_handed_over():
            break
        driver.wait_for_tip(tip.digest, POLL_S)
        time.sleep(POLL_S if driver.left else 0)  # it no longer waits once this peer has left
    why = driver.left or "the others did not answer in time"
    return f"{why}; {keeper.summary()}"
