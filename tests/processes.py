"""Processes that end with their test, whatever its result."""

import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

LIMIT_S = 300.0
"""Less than the time after which a test counts as hung."""


@contextmanager
def running(
    command: Sequence[Any], *, limit_s: float = LIMIT_S, **options: Any
) -> Iterator[subprocess.Popen[Any]]:
    """A process that is killed at the end of the block, and after a limit at the latest.

    `subprocess.Popen` as a context waits forever for the end of its process, also after an assert
    has failed. A test that reads a line of a silent process waits as long.

    Args:
        command: the program and its arguments.
        limit_s: seconds after which it is killed, so that a reader of its output returns.
        options: those of `subprocess.Popen`.
    """
    with subprocess.Popen(command, **options) as process:
        limit = threading.Timer(limit_s, process.kill)
        limit.daemon = True
        limit.start()
        try:
            yield process
        finally:
            limit.cancel()
            process.kill()
