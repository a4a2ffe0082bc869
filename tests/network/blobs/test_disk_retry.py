"""Reactions to a disk's failure, waiting or giving up, with a fake clock."""

from __future__ import annotations

import asyncio
import errno
from unittest.mock import Mock

import pytest

from swarm.errors import CorruptState, StateError
from swarm.network.blobs.disk_retry import (
    LONGEST_PAUSE_S,
    MEMORY_PATIENCE_S,
    MENDED_BY,
    PATIENCE_S,
    after_failure,
    awaited,
    patiently,
    patiently_async,
)
from swarm.network.blobs.packs import _state_error


def failure(number: int) -> OSError:
    return OSError(number, "it failed")


@pytest.mark.parametrize("number", sorted(MENDED_BY))
def test_what_a_person_can_mend_is_waited_for_and_the_remedy_is_said(number: int) -> None:
    pause = after_failure(failure(number), 0, 0.0)
    assert pause.seconds == 0.5
    assert pause.reason.endswith(f"({MENDED_BY[number]})")


@pytest.mark.parametrize(
    "error",
    [failure(errno.EACCES), OSError("no number"), StateError("no cause"), CorruptState("x")],
)
def test_what_does_not_pass_by_itself_is_given_up_at_once(error: OSError | StateError) -> None:
    assert after_failure(error, 0, 0.0).seconds is None


def test_the_cause_behind_a_state_error_counts(tmp_path) -> None:
    try:
        raise _state_error(tmp_path, failure(errno.ENOSPC)) from failure(errno.ENOSPC)
    except StateError as error:
        pause = after_failure(error, 0, 0.0)
    assert pause.seconds is not None
    assert pause.reason.count("free some space") == 1


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("can't start new thread"), RuntimeError("out of memory")]
)
def test_memory_is_waited_for_only_a_minute(error: Exception) -> None:
    assert after_failure(error, 0, 0.0).seconds == 0.5
    assert after_failure(error, 9, MEMORY_PATIENCE_S).seconds is None
    with pytest.raises(StopIteration):
        patiently(Mock(side_effect=error), "record", Mock(side_effect=StopIteration))


def test_a_bug_keeps_its_type() -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        patiently(Mock(side_effect=RuntimeError("a bug")), "record")


def test_pauses_grow_to_a_limit_and_patience_ends() -> None:
    pauses = [after_failure(failure(errno.ENOSPC), n, 0.0).seconds for n in range(8)]
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, *[LONGEST_PAUSE_S] * 3]
    last = after_failure(failure(errno.ENOSPC), 9, PATIENCE_S)
    assert last.seconds is None and "gave up after 1800 s" in last.reason


def test_a_write_is_repeated_until_it_succeeds() -> None:
    write = Mock(side_effect=[failure(errno.ENOSPC), failure(errno.EROFS), "written"])
    slept = []
    assert patiently(write, "record", slept.append) == "written"
    assert slept == [0.5, 1.0]


def test_a_write_that_cannot_succeed_is_a_state_error_at_once() -> None:
    write = Mock(side_effect=failure(errno.EACCES))
    with pytest.raises(StateError, match="record: "):
        patiently(write, "record", lambda _: pytest.fail("not waited for"))


FULL = "No space left on device (free some space)"


async def test_a_call_that_is_cancelled_while_it_waits_waits_for_nothing_any_more() -> None:
    """As with a fetch that a newer manifest makes useless. The disk has room by then."""

    async def write() -> None:
        raise failure(errno.ENOSPC)

    fetching = asyncio.create_task(patiently_async(write, "blobs"))
    while not awaited():
        await asyncio.sleep(0)
    assert awaited() == f"blobs: {FULL}"
    fetching.cancel()
    await asyncio.wait([fetching])
    assert fetching.cancelled() and awaited() == ""


def test_a_call_that_comes_to_its_end_leaves_what_others_wait_for() -> None:
    write, inner = Mock(side_effect=[failure(errno.ENOSPC), None]), list[str]()

    def meanwhile(_: float) -> None:
        patiently(lambda: None, "blobs")
        inner.append(awaited())

    patiently(write, "blobs", meanwhile)
    assert inner == [f"blobs: {FULL}"] and awaited() == ""
