"""Streams that make room, with accounts of a real ledger and addresses of emulated networks."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from swarm.errors import TooCostly
from swarm.network.wire.ledger import LIMITS, Cost, Ledger
from swarm.network.wire.served_streams import STALLED_S, ServedStream, ServedStreams

STREAMS = LIMITS[Cost.STREAMS]
STRANGERS = int(STREAMS.shared.most / 4)
NO_CAP = float("inf")


class Writer:
    """Stands in for the stream's socket too."""

    is_ended = False

    def get_extra_info(self, name: str) -> Writer:
        assert name == "socket"
        return self

    def shutdown(self, how: int) -> None:
        self.is_ended = True


class Served:
    """Streams that stay open until the test ends, with a fake clock."""

    def __init__(self, cost: Cost = Cost.STREAMS) -> None:
        self.now_s = 0.0
        self.ledger = Ledger()
        self.streams = ServedStreams(self.ledger, cost, clock=lambda: self.now_s)
        self.writers: dict[ServedStream, Writer] = {}
        self._opened: list[object] = []

    def open(self, peer: str, host: str = "") -> ServedStream:
        if host:
            self.ledger.locate(peer, f"/ip4/{host}/tcp/1")
        writer = Writer()
        opened = self.streams.opened(peer, cast(asyncio.StreamWriter, writer))
        stream = opened.__enter__()
        self._opened.append(opened)
        self.writers[stream] = writer
        self.now_s += 0.001
        return stream

    def ask(self, stream: ServedStream) -> None:
        self.streams.begin(stream, NO_CAP)

    def answered(self, stream: ServedStream) -> None:
        self.ask(stream)
        self.streams.rest(stream)

    def ended(self, streams: list[ServedStream]) -> int:
        return sum(self.writers[stream].is_ended for stream in streams)

    def attack(self, num_each: int = 4) -> list[ServedStream]:
        """16 keys in two networks, each with a number of streams and one request on each."""
        keys = [(f"key-{net}-{k}", f"192.0.{net}.{k}") for net in (1, 2) for k in range(8)]
        opened = [self.open(peer, host) for peer, host in keys for _ in range(num_each)]
        for stream in opened:
            if not self.writers[stream].is_ended:
                self.answered(stream)
        return opened


@pytest.fixture
def served() -> Served:
    return Served()


def test_a_newcomer_is_served_while_two_networks_hold_all_idle_streams(served: Served) -> None:
    attack = served.attack()
    assert len(attack) == STRANGERS and served.streams.num_idle == STRANGERS
    for _ in range(20):  # each asks repeatedly
        mine = [served.open("joiner", "198.51.100.7") for _ in range(2)]
        for stream in mine:
            served.answered(stream)
        for stream in attack:
            if not served.writers[stream].is_ended:
                served.answered(stream)
        assert not served.ended(mine)
    assert served.streams.num_idle == STRANGERS
    assert served.ended(attack) == STRANGERS // 3, "each of three networks has a third"


def test_who_opens_more_and_more_ends_its_own_streams(served: Served) -> None:
    mine = [served.open("joiner", "198.51.100.7") for _ in range(2)]
    attack = [stream for _ in range(5) for stream in served.attack()]
    assert not served.ended(mine)
    assert served.ended(attack) == len(attack) - (STRANGERS - 2)


def test_an_idle_stream_costs_nothing(served: Served) -> None:
    stream = served.open("joiner", "198.51.100.7")
    assert served.ledger.left("joiner", Cost.STREAMS, 0.0) == STREAMS.stranger.most
    served.ask(stream)
    assert served.ledger.left("joiner", Cost.STREAMS, 0.0) == STREAMS.stranger.most - 1
    served.streams.rest(stream)
    assert served.ledger.left("joiner", Cost.STREAMS, 0.0) == STREAMS.stranger.most


def test_answers_that_nobody_takes_make_room_after_a_while(served: Served) -> None:
    attack = served.attack()
    for stream in attack:
        served.ask(stream)
    mine = served.open("joiner", "198.51.100.7")
    with pytest.raises(TooCostly, match="strangers"):
        served.ask(mine)
    served.now_s += STALLED_S
    again = served.open("joiner", "198.51.100.7")
    served.ask(again)
    assert served.ended(attack) == 1 and not served.ended([again])
    for stream in attack:
        stream.waits_since_s = None  # they wait for us now, and keep their places
    third = served.open("joiner", "198.51.100.7")
    with pytest.raises(TooCostly):
        served.ask(third)


def test_streams_that_are_passed_on_and_on_which_nothing_moves_make_room() -> None:
    """Others are answered as long as they last."""
    served = Served(Cost.RELAYED)
    most = int(LIMITS[Cost.RELAYED].shared.most / 4)
    attack = [served.open(f"key-{k}", f"192.0.{k % 2}.{k // 2}") for k in range(most)]
    for stream in attack:
        served.ask(stream)
    served.now_s += STALLED_S
    mine = served.open("joiner", "198.51.100.7")
    served.ask(mine)
    assert served.ended(attack) == 1
    assert served.ledger.left("joiner", Cost.RELAYED, 0.0) == 0, "strangers have all of it"


def test_a_peer_that_has_all_its_own_places_is_refused(served: Served) -> None:
    mine = [served.open("joiner", "198.51.100.7") for _ in range(5)]
    for stream in mine[:4]:
        served.ask(stream)
    served.now_s += 2 * STALLED_S
    with pytest.raises(TooCostly, match="its stranger account"):
        served.ask(mine[4])
    assert not served.ended(mine)


def test_strangers_end_no_stream_of_members_or_trainees(served: Served) -> None:
    served.ledger.admit(["member", "trainee"], ["trainee"])
    theirs = [served.open(peer) for peer in ("member", "trainee") for _ in range(8)]
    for _ in range(3):
        served.attack()
    assert not served.ended(theirs)


def test_a_stream_that_was_ended_is_neither_answered_nor_kept(served: Served) -> None:
    attack = [stream for _ in range(2) for stream in served.attack()]
    ended = next(stream for stream in attack if served.writers[stream].is_ended)
    for meets in (served.ask, served.streams.rest):
        with pytest.raises(ConnectionError, match="made room"):
            meets(ended)
    assert served.streams.num_idle == STRANGERS
