"""Time that passes only when a test says so."""

from __future__ import annotations


class Time:
    """A clock that sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def __call__(self) -> float:
        return self.now_s
