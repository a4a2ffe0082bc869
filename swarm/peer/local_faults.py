"""Faults of this machine, by their proper names: memory that ran out, a disk that takes nothing."""

from __future__ import annotations

import resource

from swarm.errors import OutOfMemory, StateError, SwarmError
from swarm.network.patience import MENDED_BY, is_memory

_REMEDY = "start it again with less beside it, a smaller --capacity, or a smaller micro batch"


def named_fault(error: BaseException) -> SwarmError | None:
    """The typed error for a fault of this machine; None for what is our own bug."""
    if is_memory(error):
        return OutOfMemory("no memory is left", hint=_REMEDY)
    if isinstance(error, OSError) and error.errno in MENDED_BY:
        where = f"{error.filename}: " if error.filename else ""
        return StateError(f"{where}{error.strerror}", hint=MENDED_BY[error.errno])
    return None


def raise_file_limit() -> None:
    """Lets this process open as many files as it may: each stream of a peer is one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
