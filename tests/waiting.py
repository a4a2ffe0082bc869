"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_until(is_so: Callable[[], object], within_s: float = 60.0) -> bool:
    """Whether a condition comes true in time."""
    end_s = time.monotonic() + within_s
    while not (found := is_so()) and time.monotonic() < end_s:
        time.sleep(0.002)
    return bool(found)
