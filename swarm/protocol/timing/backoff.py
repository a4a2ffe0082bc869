"""The pause after failures: twice as long after each further failure, up to a limit."""

from __future__ import annotations


def backoff_s(failures: int, first_s: float, longest_s: float) -> float:
    """Seconds of pause after a number of failures in a row, at least one failure."""
    return min(first_s * 2.0 ** min(failures - 1, 30), longest_s)
