"""Streams that are kept for whoever wants them next."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator

import pytest

from swarm.network import kept_streams
from swarm.network.kept_streams import MOST, MOST_OF_A_PEER, KeptStreams

BLOBS = "/blobs/1"


class Ends:
    """Pairs of sockets: what is kept, and the other side of it."""

    def __init__(self) -> None:
        self.all: list[socket.socket] = []

    def pair(self) -> tuple[socket.socket, socket.socket]:
        """This side and the other."""
        mine, others = socket.socketpair()
        self.all += (mine, others)
        return mine, others


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    for each in made.all:
        each.close()


def is_closed(connection: socket.socket) -> bool:
    return connection.fileno() == -1


def test_a_stream_is_for_its_peer_and_its_protocol(ends: Ends) -> None:
    async def scene() -> None:
        kept, (mine, _) = KeptStreams(), ends.pair()
        kept.keep("A", BLOBS, mine)
        assert kept.take("B", BLOBS) is None and kept.take("A", "/measure/1") is None
        assert kept.take("A", BLOBS) is mine
        assert kept.take("A", BLOBS) is None

    asyncio.run(scene())


def test_one_that_the_other_side_has_ended_is_not_given_out(ends: Ends) -> None:
    async def scene() -> None:
        kept, (good, _), (ended, others) = KeptStreams(), ends.pair(), ends.pair()
        kept.keep("A", BLOBS, good)
        kept.keep("A", BLOBS, ended)
        others.close()
        assert kept.take("A", BLOBS) is good
        assert is_closed(ended) and not len(kept)

    asyncio.run(scene())


def test_one_on_which_something_came_that_nobody_asked_for_is_not_given_out(ends: Ends) -> None:
    async def scene() -> None:
        kept, (mine, others) = KeptStreams(), ends.pair()
        kept.keep("A", BLOBS, mine)
        others.send(b"late")
        assert kept.take("A", BLOBS) is None and is_closed(mine)

    asyncio.run(scene())


def test_one_that_is_not_wanted_is_ended_before_the_other_side_does(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_streams, "KEPT_S", 0.05)

    async def scene() -> None:
        kept, (mine, _), (taken, _) = KeptStreams(), ends.pair(), ends.pair()
        kept.keep("A", BLOBS, mine)
        kept.keep("B", BLOBS, taken)
        assert kept.take("B", BLOBS) is taken
        await asyncio.sleep(0.2)
        assert is_closed(mine) and not is_closed(taken) and not len(kept)

    asyncio.run(scene())


def test_few_are_kept_of_a_peer_and_in_all_the_newest(ends: Ends) -> None:
    async def scene() -> None:
        kept = KeptStreams()
        of_a = [ends.pair()[0] for _ in range(MOST_OF_A_PEER + 1)]
        for each in of_a:
            kept.keep("A", BLOBS, each)
        assert [is_closed(each) for each in of_a] == [True, *[False] * MOST_OF_A_PEER]
        for number in range(MOST):
            kept.keep(f"peer {number}", BLOBS, ends.pair()[0])
        assert len(kept) == MOST and all(is_closed(each) for each in of_a)

    asyncio.run(scene())


def test_those_of_a_peer_that_is_silent_are_ended_and_others_stay(ends: Ends) -> None:
    async def scene() -> None:
        kept, (silent, _), (other, _) = KeptStreams(), ends.pair(), ends.pair()
        kept.keep("A", BLOBS, silent)
        kept.keep("B", BLOBS, other)
        kept.drop("A")
        assert is_closed(silent) and not is_closed(other)
        kept.close()
        assert is_closed(other)

    asyncio.run(scene())
