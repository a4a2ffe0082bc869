"""How messages fare: who does not answer, and how long answers take."""

import asyncio

import pytest

from swarm.errors import NoRoute, Refused, Unreachable
from swarm.network.lines import FORGOTTEN_S, Lines
from swarm.protocol.figures import MAX_UNREACHED, Silence


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lose(lines: Lines, peer: str, error: Exception, times: int = 1) -> None:
    for _ in range(times):
        with pytest.raises(type(error)), lines.post(peer):
            raise error


def answered(lines: Lines, clock: Clock, peer: str, seconds: float) -> None:
    with lines.post(peer):
        clock.now += seconds


def test_one_lost_message_is_nothing_and_an_answer_ends_a_silence() -> None:
    lines, clock = Lines(Clock()), Clock()
    lose(lines, "A", NoRoute("refused"))
    assert lines.unreached() == {}
    lose(lines, "A", NoRoute("refused"))
    lose(lines, "B", Unreachable("no answer"), 3)
    assert lines.unreached() == {"B": Silence.SILENT, "A": Silence.GONE}
    answered(lines, clock, "A", 0.1)
    lose(lines, "B", Refused("busy"))
    assert lines.unreached() == {}


def test_a_line_from_which_nothing_came_since_the_lost_message_is_cut_at_once() -> None:
    clock, told = Clock(), list[float]()
    lines = Lines(clock)
    lines.when_cut = lambda: told.append(clock.now)
    handler = lines.hearing(taken)
    assert handler

    async def hear(peer: str) -> None:
        await handler(peer, b"")

    def waited_for_in_vain(peer: str, from_peer_after_s: float | None) -> None:
        with pytest.raises(Unreachable), lines.post(peer):
            if from_peer_after_s is not None:
                clock.now += from_peer_after_s
                asyncio.run(hear(peer))
            clock.now += 5.0
            raise Unreachable("no answer")

    waited_for_in_vain("A", 1.0)
    assert lines.unreached() == {} and told == []
    waited_for_in_vain("B", None)
    assert lines.unreached() == {"B": Silence.SILENT} and told == [11.0]
    waited_for_in_vain("A", 1.0)  # one way only
    waited_for_in_vain("B", None)
    assert lines.unreached() == {"A": Silence.SILENT, "B": Silence.SILENT} and len(told) == 2


async def taken(peer: str, payload: bytes) -> None:
    """A handler of messages."""


def test_who_is_no_longer_talked_to_is_forgotten_and_few_are_named() -> None:
    clock = Clock()
    lines = Lines(clock)
    for number in range(MAX_UNREACHED + 3):
        lose(lines, f"peer-{number}", NoRoute("refused"), 2 + number)
    named = lines.unreached()
    assert len(named) == MAX_UNREACHED and "peer-0" not in named
    clock.now += FORGOTTEN_S + 1
    assert lines.unreached() == {} and lines.rtt_ms() is None


def test_the_round_trip_is_the_shortest_to_each_peer_and_the_median_over_them() -> None:
    clock = Clock()
    lines = Lines(clock)
    assert lines.rtt_ms() is None
    for peer, seconds in (("A", 0.5), ("A", 0.02), ("B", 0.04), ("C", 0.3)):
        answered(lines, clock, peer, seconds)
    assert lines.rtt_ms() == pytest.approx(40.0)
