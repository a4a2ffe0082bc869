"""Retries errors of this machine that an operator can fix: a full disk, too many open files.

A read-only disk is retried too. Lack of memory is retried only briefly, since other parts of the
process may fail next.

A waiting peer sends nothing in the rounds, as if it were paused, and other peers continue. This is
safe, because the waiting peer has sent no promise or vote that is not durable.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NoReturn, Self, TypeVar

from swarm.errors import CorruptState, OutOfMemory, StateError, SwarmError, lacks_memory
from swarm.protocol.timing.backoff import backoff_s

logger = logging.getLogger(__name__)

PATIENCE_S = 1800.0
MEMORY_PATIENCE_S = 60.0
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 10.0
MENDED_BY = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or raise the quota",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EROFS: "mount the file system writable again",
    errno.EIO: "check the disk",
    errno.EMFILE: "close what holds files open, or raise the limit (ulimit -n)",
    errno.ENFILE: "close programs that hold files open",
    errno.ENOMEM: "stop other programs",
}
"""Errors that may be temporary, with the remedy for a person."""
_NO_THREAD = "can't start new thread"
_MAY_PASS = (OSError, StateError, MemoryError, RuntimeError)

Result = TypeVar("Result")
_waiting: dict[_Tries, str] = {}
"""Failed calls that are being retried, and why; for the whole process, like disk and memory."""


def awaited() -> str:
    """The faults in this process that wait for a person; "" for none."""
    return "; ".join(sorted({*_waiting.copy().values()}))


@dataclass(frozen=True)
class Pause:
    """The decision after a failure.

    Attributes:
        seconds: until the next try; None to give up.
        reason: the fault, and its remedy.
    """

    seconds: float | None
    reason: str


def is_memory(error: BaseException) -> bool:
    """Whether memory was short; a thread that cannot be started counts too."""
    return lacks_memory(error) or (isinstance(error, RuntimeError) and _NO_THREAD in str(error))


def raise_typed(error: BaseException, who: str) -> NoReturn:
    """Raises the error that stopped a part of the peer, as an error with an exit code.

    Raises:
        SwarmError: always; `OutOfMemory` if memory was short.
    """
    if isinstance(error, SwarmError):
        raise error
    if is_memory(error):
        raise OutOfMemory(f"no memory is left for {who}") from error
    raise SwarmError(f"{who} stopped: {error!r}") from error


def after_failure(error: Exception, attempt: int, waited_s: float) -> Pause:
    """Decides whether a failed call is retried.

    Args:
        error: error of the call.
        attempt: 0 for the first.
        waited_s: since the first.
    """
    number = _number(error)
    if isinstance(error, CorruptState) or number not in MENDED_BY:
        return Pause(None, str(error))
    reason = f"{error if isinstance(error, StateError) else os.strerror(number)}"
    mended_by = MENDED_BY[number]
    reason = reason if mended_by in reason else f"{reason} ({mended_by})"
    if waited_s >= (MEMORY_PATIENCE_S if number == errno.ENOMEM else PATIENCE_S):
        return Pause(None, f"{reason}; gave up after {waited_s:.0f} s")
    return Pause(backoff_s(attempt + 1, FIRST_PAUSE_S, LONGEST_PAUSE_S), reason)


def _number(error: BaseException) -> int:
    """The system's number of an error or of its cause; 0 if there is none."""
    if isinstance(error, OSError):
        return error.errno or 0
    if is_memory(error):
        return errno.ENOMEM
    return _number(error.__cause__) if error.__cause__ else 0


def patiently(
    write: Callable[[], Result], what: str, sleep: Callable[[float], None] = time.sleep
) -> Result:
    """Calls `write` until the machine allows it; the written values must not change.

    Args:
        write: may fail for lack of disk, descriptors or memory, and must be repeatable then.
        what: name of the written thing, for the log.
        sleep: waits; may raise to end the retries.

    Raises:
        StateError: the error is not temporary, or lasts for half an hour.
        OutOfMemory: memory stays short for a minute.
    """
    with _Tries(what) as tries:
        while True:
            try:
                return write()
            except _MAY_PASS as error:
                pause_s = tries.pause_s(error)
            sleep(pause_s)


async def patiently_async(write: Callable[[], Awaitable[Result]], what: str) -> Result:
    """Does the same as `patiently`, for a coroutine in an asyncio loop."""
    with _Tries(what) as tries:
        while True:
            try:
                return await write()
            except _MAY_PASS as error:
                pause_s = tries.pause_s(error)
            await asyncio.sleep(pause_s)


class _Tries:
    """The tries of one call, which counts as waiting until it ends in any way."""

    def __init__(self, what: str) -> None:
        self._what, self._attempt, self._began_s = what, 0, time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _waiting.pop(self, None)

    def pause_s(self, error: Exception) -> float:
        """Seconds until the next try; raises the error of `patiently` if there is none."""
        if isinstance(error, RuntimeError) and not is_memory(error):
            raise error  # a bug
        pause = after_failure(error, self._attempt, time.monotonic() - self._began_s)
        if pause.seconds is None:
            kind = OutOfMemory if _number(error) == errno.ENOMEM else StateError
            raise kind(f"{self._what}: {pause.reason}") from error
        number = _number(error)  # no path: other peers read this
        _waiting[self] = f"{self._what}: {os.strerror(number)} ({MENDED_BY[number]})"
        logger.error("%s: %s; tried again in %.1f s", self._what, pause.reason, pause.seconds)
        self._attempt += 1
        return pause.seconds
