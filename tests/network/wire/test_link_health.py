"""The health of links: silent peers, and the time of answers."""

import asyncio

import pytest

from swarm.errors import NoRoute, Refused, Unreachable
from swarm.network.wire.link_health import FORGOTTEN_S, LinkHealth
from swarm.protocol.records.records import MAX_UNREACHED, Silence
from tests.fake_time import Time


def lose(lines: LinkHealth, peer: str, error: Exception, times: int = 1) -> None:
    for _ in range(times):
        with pytest.raises(type(error)), lines.post(peer):
            raise error


def answered(lines: LinkHealth, clock: Time, peer: str, seconds: float) -> None:
    with lines.post(peer):
        clock.now_s += seconds


def test_one_lost_message_is_nothing_and_an_answer_ends_a_silence() -> None:
    lines, clock = LinkHealth(Time()), Time()
    lose(lines, "A", NoRoute("refused"))
    assert lines.unreached() == {}
    lose(lines, "A", NoRoute("refused"))
    lose(lines, "B", Unreachable("no answer"), 3)
    assert lines.unreached() == {"B": Silence.SILENT, "A": Silence.GONE}
    answered(lines, clock, "A", 0.1)
    lose(lines, "B", Refused("busy"))
    assert lines.unreached() == {}


async def test_a_line_from_which_nothing_comes_while_a_message_waits_is_cut_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("swarm.network.wire.link_health.SILENT_S", 1.0)
    told: list[str] = []
    lines = LinkHealth()
    lines.when_cut = lambda: told.append(",".join(lines.unreached()))
    handler = lines.hearing(taken)
    assert handler

    async def waited_for_in_vain(peer: str, *, is_heard: bool) -> None:
        with pytest.raises(Unreachable), lines.post(peer):
            await asyncio.sleep(0.05)
            if is_heard:
                await handler(peer, b"")
            await asyncio.sleep(1.2)
            raise Unreachable("no answer")

    await waited_for_in_vain("A", is_heard=True)
    assert told == []
    await waited_for_in_vain("B", is_heard=False)
    assert told == ["B"], "while it waits"
    await waited_for_in_vain("A", is_heard=True)  # one way only
    assert told == ["B", "A,B"] and lines.unreached()["B"] is Silence.SILENT
    await handler("B", b"")
    assert "B" not in lines.unreached()


async def taken(peer: str, payload: bytes) -> None:
    """A handler of messages."""


def test_who_is_no_longer_talked_to_is_forgotten_and_few_are_named() -> None:
    clock = Time()
    lines = LinkHealth(clock)
    for number in range(MAX_UNREACHED + 3):
        lose(lines, f"peer-{number}", NoRoute("refused"), 2 + number)
    named = lines.unreached()
    assert len(named) == MAX_UNREACHED and "peer-0" not in named
    clock.now_s += FORGOTTEN_S + 1
    assert lines.unreached() == {} and lines.rtt_ms() is None


def test_keys_that_were_sent_something_once_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.network.wire.link_health.MAX_LINES", 100)
    lines = LinkHealth(Time())
    lose(lines, "member", NoRoute("refused"), 2)
    with pytest.raises(Unreachable), lines.post("waiting"):
        for number in range(5000):
            lose(lines, f"key-{number}", NoRoute("refused"))
            if number % 50 == 0:
                lose(lines, "member", NoRoute("refused"))
        raise Unreachable("no answer")
    assert len(lines._lines) <= 101
    assert "member" in lines.unreached()
    assert lines._lines["waiting"].lost == 1


def test_the_round_trip_is_the_shortest_to_each_peer_and_the_median_over_them() -> None:
    clock = Time()
    lines = LinkHealth(clock)
    assert lines.rtt_ms() is None
    for peer, seconds in (("A", 0.5), ("A", 0.02), ("B", 0.04), ("C", 0.3)):
        answered(lines, clock, peer, seconds)
    assert lines.rtt_ms() == pytest.approx(40.0)
