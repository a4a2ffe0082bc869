"""Seconds of what one rank does: by the clock of the host, or of a GPU by events in its queue."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

PIPELINE, STAGE = "pipeline", "stage"
"""Names of what is no operation between ranks: a pipeline's schedule, and in it all of its stage's
forwards and backwards."""


class Watch:
    """Adds up seconds by name.

    Of a GPU they are those between two events in its queue of work, so that nothing waits for it
    until the seconds are taken, once a step.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def timing(self, name: str, device: torch.device) -> Iterator[None]:
        """Counts what is done within, on this device; also if it fails."""
        if device.type == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            try:
                yield
            finally:
                end.record()
                self._events.append((name, begin, end))
            return
        began_s = time.perf_counter()
        try:
            yield
        finally:
            self._add(name, time.perf_counter() - began_s)

    def take(self) -> dict[str, float]:
        """Seconds by name, and begins anew; waits for a GPU that has not come so far."""
        for name, begin, end in self._events:
            end.synchronize()
            self._add(name, begin.elapsed_time(end) / 1000)
        found, self._seconds = self._seconds, {}
        self._events.clear()
        return found

    def _add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds
