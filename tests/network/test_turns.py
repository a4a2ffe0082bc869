"""Members are served first; strangers wait for them, but not for ever."""

from __future__ import annotations

import asyncio

import pytest

from swarm.network import turns
from swarm.network.turns import Turns


@pytest.fixture
def two(monkeypatch):
    """Turns of a run whose one member is called member; strangers wait 0.2 s, then get 0.2 s."""
    monkeypatch.setattr(turns, "YIELD_S", 0.2)
    monkeypatch.setattr(turns, "TURN_S", 0.2)
    return Turns(lambda peer: peer == "member")


async def waited_s(some: Turns, peer: str) -> float:
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await some.wait(peer)
    return loop.time() - began_s


def test_nobody_waits_while_no_member_is_served(two: Turns) -> None:
    async def run() -> None:
        with two.serving("stranger"):
            assert await waited_s(two, "stranger") < 0.1
            assert await waited_s(two, "other stranger") < 0.1

    asyncio.run(run())


def test_a_stranger_goes_on_as_soon_as_the_last_member_has_its_bytes(two: Turns) -> None:
    async def run() -> None:
        with two.serving("member"):
            with two.serving("member"):
                assert await waited_s(two, "member") < 0.1
                waiting = asyncio.create_task(waited_s(two, "stranger"))
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.05)
            assert not waiting.done()
        assert 0.1 <= await waiting < 0.2

    asyncio.run(run())


def test_a_stranger_gets_its_turn_where_members_are_served_all_the_time(two: Turns) -> None:
    async def run() -> None:
        with two.serving("member"):
            assert await waited_s(two, "stranger") >= 0.2
            assert await waited_s(two, "stranger") < 0.1, "its turn lasts a while"
            await asyncio.sleep(0.25)
            assert await waited_s(two, "stranger") >= 0.2
            two.forget("stranger")
            assert await waited_s(two, "stranger") >= 0.2

    asyncio.run(run())
