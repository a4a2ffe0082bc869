"""Members are served first; strangers wait for them, but not for ever."""

from __future__ import annotations

import asyncio

import pytest

from swarm.network import turns
from swarm.network.turns import Turns

YIELD_S = 0.2


@pytest.fixture
def some(monkeypatch: pytest.MonkeyPatch) -> Turns:
    """Turns of a run whose one member is called member."""
    monkeypatch.setattr(turns, "YIELD_S", YIELD_S)
    return Turns(lambda peer: peer == "member")


async def is_served_at_once(some: Turns, peer: str) -> bool:
    waiting = asyncio.create_task(some.wait(peer))
    await asyncio.sleep(0)
    return waiting.done() or not waiting.cancel()


async def waited_s(some: Turns, peer: str) -> float:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await some.wait(peer)
    return loop.time() - began_s


def test_nobody_waits_while_no_member_is_served(some: Turns) -> None:
    async def run() -> None:
        with some.serving("stranger"):
            assert await is_served_at_once(some, "stranger")
            assert await is_served_at_once(some, "other stranger")

    asyncio.run(run())


def test_a_stranger_goes_on_as_soon_as_the_last_member_has_its_bytes(
    some: Turns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "YIELD_S", 60.0)

    async def run() -> None:
        with some.serving("member"):
            with some.serving("member"):
                assert await is_served_at_once(some, "member")
                waiting = asyncio.create_task(some.wait("stranger"))
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.05)
            assert not waiting.done()
        async with asyncio.timeout(30.0):
            await waiting

    asyncio.run(run())


def test_a_stranger_gets_its_turn_where_members_are_served_all_the_time(some: Turns) -> None:
    async def run() -> None:
        with some.serving("member"):
            assert await waited_s(some, "stranger") >= YIELD_S
            assert await is_served_at_once(some, "stranger"), "its turn lasts a while"
            some.forget("stranger")
            assert await waited_s(some, "stranger") >= YIELD_S

    asyncio.run(run())


def test_a_turn_ends(some: Turns, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "TURN_S", 0.05)

    async def run() -> None:
        with some.serving("member"):
            assert await waited_s(some, "stranger") >= YIELD_S
            await asyncio.sleep(0.1)
            assert await waited_s(some, "stranger") >= YIELD_S

    asyncio.run(run())
