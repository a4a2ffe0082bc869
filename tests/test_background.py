"""Work under way is kept, ended together, and its failures are heard of."""

import asyncio
import logging

import pytest

from swarm.background import Tasks


async def for_ever() -> None:
    await asyncio.Event().wait()


async def failing() -> None:
    raise ValueError("a bug")


def test_stop_ends_everything_that_runs() -> None:
    async def work() -> None:
        tasks, other = Tasks("a test"), asyncio.create_task(for_ever())
        tasks.spawn(for_ever())
        tasks.add(other)
        assert len(tasks) == 2
        await tasks.stop()
        assert other.cancelled()
        assert len(tasks) == 0

    asyncio.run(work())


def test_a_failure_that_nobody_waits_for_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        tasks = Tasks("a test")
        tasks.spawn(failing())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(tasks) == 0

    with caplog.at_level(logging.ERROR):
        asyncio.run(work())
    assert "a task of a test failed" in caplog.text
