"""How far a peer's local steps of a round are: in its log, its history and its record."""

from __future__ import annotations

import time
from collections.abc import Callable

from swarm.progress import Reporter
from swarm.train.engine import StepStats


class StepProgress:
    """Follows the local steps of one round after the other.

    Attributes:
        tokens_per_s: of the steps under way, since the first of them began; None before.
        loss: mean cross-entropy of those that were finite, nats per token; None before.
    """

    def __init__(
        self, say: Callable[[str], object], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Prepares.

        Args:
            say: told, whenever a line is due, what the line says.
            clock: seconds, of any beginning.
        """
        self._say, self._clock = say, clock
        self._reporter = Reporter("", "step", clock)
        self._done = self._to_do = self._tokens = self._finite = 0
        self._begin_s = clock()
        self._loss_sum = 0.0
        self.tokens_per_s: float | None = None
        self.loss: float | None = None

    def begin(self, number: int, rounds: int) -> None:
        """The local steps of a round begin, or go on after an interruption."""
        self._reporter = Reporter(f"round {number}/{rounds}", "step", self._clock)
        self._begin_s = self._clock()
        self._done = self._to_do = self._tokens = self._finite = 0
        self._loss_sum, self.tokens_per_s, self.loss = 0.0, None, None

    def planned(self, done: int, to_do: int) -> None:
        """Of this round so many steps are done, and so many are still to be."""
        self._done, self._to_do = done, to_do

    def stepped(self, stats: StepStats) -> None:
        """A step was done, after `planned`."""
        seconds = max(self._clock() - self._begin_s, 1e-9)
        self._tokens += stats.tokens
        self.tokens_per_s = self._tokens / seconds
        if not stats.skipped:
            self._finite += 1
            self._loss_sum += stats.cross_entropy
            self.loss = self._loss_sum / self._finite
        loss = "none" if self.loss is None else f"{self.loss:.4f}"
        step_s = seconds * stats.tokens / max(self._tokens, 1)
        done, total = self._done + 1, self._done + self._to_do
        details = f"loss {loss}, {self.tokens_per_s:,.0f} tokens/s"
        if said := self._reporter.at(done, total, details, step_s * (total - done)):
            self._say(str(said))
