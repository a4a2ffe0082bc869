"""How a peer leaves: it finishes its round and hands its experts over, before a deadline."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf

from swarm.errors import SwarmError
from swarm.network.rounds.round_driver import RoundDriver
from swarm.peer.training.expert_moments import ExpertMoments
from swarm.protocol.timing.deadlines import finishes_in_time
from swarm.protocol.values.manifest import Manifest

logger = logging.getLogger(__name__)

POLL_S = 0.2
SERVE_LOOK_S = 0.5
MAX_SERVING_S = 86_400.0
COURTESY_S = 30.0
"""Longest wait for the manifest without this peer, once there is nothing left to hand over."""


class Stopped(Exception):
    """The peer was asked to stop before it was in a run."""


class StopAsked(Exception):
    """The person asked this peer to stop, and its round is over or cannot be finished."""

    has_saved = False
    """Whether the steps since the last offer are in the private state."""


class Stop:
    """The request to leave, from any thread or a signal handler, with its time limit."""

    def __init__(self, leave_timeout_s: float) -> None:
        self.leave_timeout_s = leave_timeout_s
        self._asked = threading.Event()
        self._asked_s = inf
        self._why: SwarmError | None = None
        self.ends_at_once = False
        """Whether a signal may interrupt the main thread's work."""

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Marks long work before a run, such as reading a text, that a stop may interrupt.

        A signal that asks to stop interrupts this work if the main thread does it.

        Raises:
            Stopped: this peer was asked to stop before the work, or by a signal during it.
        """
        if self():
            self.raise_why()
            raise Stopped
        self.ends_at_once = threading.current_thread() is threading.main_thread()
        try:
            yield
        finally:
            self.ends_at_once = False

    def ask(self, why: SwarmError | None = None) -> None:
        """Asks the peer to leave after its round, or at the time limit. Later calls do nothing.

        Args:
            why: raised by `Peer.train` once the peer has left; None if a person has asked.
        """
        if not self._asked.is_set():
            self._asked_s, self._why = time.monotonic(), why
            self._asked.set()

    def __call__(self) -> bool:
        """Whether the peer was asked to stop."""
        return self._asked.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Waits to be asked; returns whether it was."""
        return self._asked.wait(timeout_s)

    def raise_why(self) -> None:
        """Raises the reason with which the peer was asked to leave, if there is one."""
        if self._why:
            raise self._why

    @property
    def remaining_s(self) -> float:
        """Seconds until a peer that was asked to stop leaves, even if its work is unfinished."""
        return max(self._asked_s + self.leave_timeout_s - time.monotonic(), 0.0)

    def lacks_time(self, steps_left: int, step_s: float) -> bool:
        """Whether a peer that was asked to stop cannot finish its round; logs the reason.

        Args:
            steps_left: steps left in the round.
            step_s: mean seconds of a step so far; 0 before the first.
        """
        if not self():
            return False
        finishes, reason = finishes_in_time(steps_left, step_s, self.remaining_s)
        if not finishes:
            logger.info("%s", reason)
        return not finishes


def serving(stop: Stop, sent: Callable[[], int], seconds: float) -> Iterator[None]:
    """Yields twice a second while a finished peer still serves others, a day at most.

    At first only a quorum has the last round, and over slow links the others may need hours to
    fetch it. If all peers that have the round left, the others would train it again as a new
    generation.

    Args:
        stop: ends the serving.
        sent: returns how many bytes of blobs others have fetched so far.
        seconds: the serving ends this long after the last fetch.
    """
    last_s = began_s = time.monotonic()
    before = sent()
    while time.monotonic() < min(last_s + seconds, began_s + MAX_SERVING_S):
        if stop.wait(SERVE_LOOK_S):
            return
        yield
        if sent() > before:
            before, last_s = sent(), time.monotonic()


def leave(driver: RoundDriver, moments: ExpertMoments, adopted: Manifest, stop: Stop) -> str:
    """Leaves the run and hands experts over; returns the outcome in a sentence.

    The masters either are agreed values already, or travel with the moments. The manifest without
    this peer names new owners, which request the moments and fetch them.

    Args:
        driver: driver of the rounds.
        moments: moments of the experts.
        adopted: the manifest that the engine is at.
        stop: limits the total time.
    """
    driver.leave()
    began_s, is_handing_over = time.monotonic(), False
    while stop.remaining_s > 0:
        may_go = driver.left is not None or time.monotonic() - began_s > COURTESY_S
        tip = driver.tip  # read after `left`: the tip without this peer
        if not is_handing_over and moments.model.me not in tip.members:
            is_handing_over = True
            moments.leave(adopted, tip)
        moments.hand_over()
        if may_go and moments.all_handed_over():
            break
        driver.wait_for_tip(tip.digest, POLL_S)
        time.sleep(POLL_S if driver.left else 0)  # `wait_for_tip` returns at once then
    why = driver.left or "the others did not answer in time"
    return f"{why}; {moments.summary()}"
