"""When a peer measures its line."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.peer import own_line
from swarm.peer.own_line import OwnLine
from swarm.protocol.fitness import ALWAYS_LATE


class Measured:
    """What a peer has measured, and with whom."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, up_mbit: float | None) -> None:
        self.calls: list[tuple[object, object]] = []
        self.finds: float | None = 1.0
        self.lines = SimpleNamespace(down_mbit=50.0, up_mbit=up_mbit)
        self.traffic = SimpleNamespace(sent=SimpleNamespace(mbit=None))
        self.status = SimpleNamespace(missed=0)
        monkeypatch.setattr(own_line, "present_peers", self.present)
        monkeypatch.setattr(own_line, "measured_rates", self.measure)
        self.node: Any = self
        mine: Any = self.status
        self.line = OwnLine(self.node, mine, "run")

    async def present(self, *_: object) -> dict[str, str]:
        return {"A": "its record"}

    async def measure(self, _: object, peers: object, known: object) -> None:
        self.calls.append((peers, known))
        self.lines.up_mbit = self.finds

    def heartbeats(self, *missed: int) -> list[int]:
        """How often it has measured after each heartbeat, by the rounds missed until then."""
        counts = []
        for self.status.missed in missed:
            asyncio.run(self.line.keep_measured())
            counts.append(len(self.calls))
        return counts


def test_who_is_left_out_time_and_again_measures_its_line_once_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = Measured(monkeypatch, up_mbit=1.0)
    counts = measured.heartbeats(0, 1, 2, 3, 3, 4, 5, 6, 0, 0, 1, 2, 3)
    assert ALWAYS_LATE == 3
    assert counts == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3]
    known = (50.0, 1.0)
    assert measured.calls[0] == ({"A": "its record"}, known), "what is known already counts too"


def test_a_line_that_nobody_has_measured_is_until_it_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such are those of founders, and of peers that go on from their disk."""
    measured = Measured(monkeypatch, up_mbit=None)
    measured.finds = None  # nobody answered
    assert measured.heartbeats(0, 0) == [1, 2]
    measured.finds = 20.0
    assert measured.heartbeats(0, 0, 0) == [3, 3, 3]


def test_a_line_whose_rate_shows_in_the_blobs_that_it_sends_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = Measured(monkeypatch, up_mbit=None)
    measured.traffic.sent.mbit = 18.0
    assert measured.heartbeats(0, 0) == [0, 0]
