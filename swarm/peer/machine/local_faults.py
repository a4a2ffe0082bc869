"""Faults of this machine as typed errors: no memory, no access, a full disk."""

from __future__ import annotations

import logging
import os
import resource
import threading

from swarm.background import SYSTEM, SupervisedThread, System
from swarm.errors import OutOfMemory, StateError, SwarmError, no_access
from swarm.network.blobs.disk_retry import MENDED_BY, is_memory

logger = logging.getLogger(__name__)

UNBORN_LOOKS = 5
LOOK_S = 1.0
_REMEDY = "start it again with fewer other programs, a smaller --capacity, or a smaller micro batch"


def named_fault(error: BaseException) -> SwarmError | None:
    """The typed error for a fault of this machine; None if the cause is a bug."""
    if is_memory(error):
        return OutOfMemory("no memory is left", hint=_REMEDY)
    if isinstance(error, OSError) and error.errno in MENDED_BY:
        where = f"{error.filename}: " if error.filename else ""
        return StateError(f"{where}{error.strerror}", hint=MENDED_BY[error.errno])
    return no_access(error)


def raise_file_limit() -> None:
    """Raises this process's limit of open files to the maximum, since each stream needs one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class UnbornThreads:
    """Finds threads that were started and never ran.

    If a new thread gets no memory for its first call, CPython's `Thread.start` waits forever
    ("Exception ignored in thread started by"), while the caller holds locks.
    """

    def __init__(self) -> None:
        self._looks: dict[threading.Thread, int] = {}

    def look(self) -> list[str]:
        """Names of threads that were unborn in `UNBORN_LOOKS` looks in a row.

        Looks are counted and not seconds, since a paused process makes no looks.
        """
        unborn = [thread for thread in threading.enumerate() if thread.ident is None]
        self._looks = {thread: self._looks.get(thread, 0) + 1 for thread in unborn}
        return [thread.name for thread, looks in self._looks.items() if looks >= UNBORN_LOOKS]


def watch_for_unborn_threads(system: System = SYSTEM) -> None:
    """Ends this process, as out of memory, if a started thread never runs.

    No more is lost than by a kill -9.
    """
    unborn = UnbornThreads()

    def watch() -> None:
        while not (names := unborn.look()):
            system.wait(watching.stopping, LOOK_S)
        fault = OutOfMemory(f"no memory for the thread {', '.join(names)}", hint=_REMEDY)
        logger.error("%s", fault)
        os._exit(fault.exit_code)

    watching = SupervisedThread("unborn-threads", watch, system)
    watching.start()
