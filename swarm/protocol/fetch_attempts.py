"""Attempts to fetch the values of one manifest: how long they continue, without a clock.

The caller of the fetch holds them, so that no new call begins the time limits again. Values may be
lost for good: the last peer that had them has collected them, or has left.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from swarm.protocol.backoff import backoff_s

STALLED_S = 3600.0
"""A state of which nothing came for so long is lost: peers restart within minutes."""
WHOLE_S = 24 * 3600.0
"""A state that is not whole after so long is given up, also while bytes of it come."""
FIRST_REST_S = 10.0
LONGEST_REST_S = 900.0


@dataclass(frozen=True)
class FetchAttempts:
    """Failed attempts to fetch one manifest. Times are seconds of one monotonic clock.

    Attributes:
        begin_s: when the first attempt began.
        most_bytes: the most bytes that were here after any attempt.
        moved_s: when that last rose.
        failures: attempts in a row that brought nothing.
        next_s: when the next attempt begins.
        whole_s: how long the state has to become whole.
        longest_rest_s: between two attempts.
    """

    begin_s: float
    most_bytes: int
    moved_s: float
    failures: int = 0
    next_s: float = 0.0
    whole_s: float = WHOLE_S
    longest_rest_s: float = LONGEST_REST_S

    @staticmethod
    def begun(
        now_s: float,
        num_bytes: int,
        *,
        whole_s: float = WHOLE_S,
        longest_rest_s: float = LONGEST_REST_S,
    ) -> FetchAttempts:
        """Before the first attempt, with so many bytes here."""
        return FetchAttempts(now_s, num_bytes, now_s, 0, now_s, whole_s, longest_rest_s)

    def failed(self, now_s: float, num_bytes: int) -> FetchAttempts:
        """After an attempt that ended with so many bytes here, and not with all of them.

        Only more bytes than ever count: a sender of wrong bytes makes the number fall and rise.
        """
        if num_bytes > self.most_bytes:
            return replace(self, most_bytes=num_bytes, moved_s=now_s, failures=0, next_s=now_s)
        failures = self.failures + 1
        rest_s = backoff_s(failures, FIRST_REST_S, self.longest_rest_s)
        return replace(self, failures=failures, next_s=now_s + rest_s)

    @property
    def has_failed(self) -> bool:
        """Whether any attempt has failed."""
        return self.failures > 0 or self.moved_s > self.begin_s

    def left_s(self, now_s: float) -> float:
        """Seconds that the state has left to become whole; not positive once it is given up."""
        return self.begin_s + self.whole_s - now_s

    def why_given_up(self, now_s: float) -> str | None:
        """Why no further attempt is made; None while one is."""
        if now_s - self.moved_s >= STALLED_S:
            return f"nothing of it came for {(now_s - self.moved_s) / 3600:.1f} h"
        if self.left_s(now_s) <= 0:
            return f"it is not whole after {(now_s - self.begin_s) / 3600:.1f} h"
        return None
