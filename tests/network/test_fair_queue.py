"""Members are served first; strangers get a quarter meanwhile, and never wait for ever."""

from __future__ import annotations

import asyncio

import pytest

from swarm.network import fair_queue
from swarm.network.fair_queue import MOST_BYTES, PER_MEMBER_BYTE, FairQueue

PART = 1000


@pytest.fixture
def some(monkeypatch: pytest.MonkeyPatch) -> FairQueue:
    """The queue of a run whose one member is called member; nobody gives up waiting."""
    monkeypatch.setattr(fair_queue, "YIELD_S", 3600.0)
    return FairQueue(lambda peer: peer == "member")


async def is_served_at_once(some: FairQueue, peer: str) -> bool:
    waiting = asyncio.create_task(some.wait(peer, PART))
    await asyncio.sleep(0)
    return waiting.done() or not waiting.cancel()


def test_nobody_waits_while_no_member_is_served(some: FairQueue) -> None:
    async def run() -> None:
        for _ in range(10):
            with some.serving("stranger"):
                assert await is_served_at_once(some, "stranger")
                assert await is_served_at_once(some, "other stranger")

    asyncio.run(run())


def test_a_stranger_goes_on_as_soon_as_the_last_member_has_its_bytes(some: FairQueue) -> None:
    async def run() -> None:
        with some.serving("member"):
            with some.serving("member"):
                assert await is_served_at_once(some, "member")
                assert await is_served_at_once(some, "stranger"), "a part came free"
                waiting = asyncio.create_task(some.wait("stranger", PART))
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not waiting.done()
        async with asyncio.timeout(30.0):
            await waiting

    asyncio.run(run())


def test_while_a_member_is_served_a_quarter_goes_to_all_strangers_together(some: FairQueue) -> None:
    sent = {"member": 0, "strangers": 0}

    async def take(stranger: str) -> None:
        while True:
            await some.wait(stranger, PART)
            sent["strangers"] += PART

    async def run() -> None:
        with some.serving("member"):
            greedy = [asyncio.create_task(take(f"stranger {number}")) for number in range(8)]
            for _ in range(600):
                await some.wait("member", PART)
                sent["member"] += PART
                for _ in range(20):
                    await asyncio.sleep(0)
            for task in greedy:
                task.cancel()

    asyncio.run(run())
    assert sent["member"] / 3 - PART <= sent["strangers"] <= sent["member"] / 3 + PART


def test_strangers_save_up_no_more_than_a_little(some: FairQueue) -> None:
    async def run() -> None:
        with some.serving("member"):
            await some.wait("member", int(100 * MOST_BYTES / PER_MEMBER_BYTE))
            await some.wait("stranger", MOST_BYTES)
            assert not await is_served_at_once(some, "stranger")

    asyncio.run(run())


def test_a_stranger_gets_a_part_where_the_member_takes_nothing(
    some: FairQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fair_queue, "YIELD_S", 0.05)

    async def run() -> None:
        with some.serving("member"):
            async with asyncio.timeout(60.0):
                await some.wait("stranger", PART)

    asyncio.run(run())
