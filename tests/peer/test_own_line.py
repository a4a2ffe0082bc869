"""When a peer measures its line."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.errors import NetworkDown
from swarm.peer import own_line
from swarm.peer.own_line import OwnLine, measure_line
from swarm.protocol.fitness import ALWAYS_LATE


class Measured:
    """What a peer has measured, and with whom."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, up_mbit: float | None) -> None:
        self.calls: list[object] = []
        self.finds: float | None = 1.0
        self.lines = SimpleNamespace(up_mbit=up_mbit)
        self.traffic = SimpleNamespace(sent=SimpleNamespace(mbit=None))
        self.status = SimpleNamespace(missed=0)
        monkeypatch.setattr(own_line, "present_peers", self.present)
        monkeypatch.setattr(own_line, "measure_uplink", self.measure)
        self.node: Any = self
        mine: Any = self.status
        self.line = OwnLine(self.node, mine, "run")

    async def present(self, *_: object) -> dict[str, str]:
        return {"A": "its record"}

    async def measure(self, _: object, peers: object) -> None:
        self.calls.append(peers)
        self.lines.up_mbit = self.finds

    def heartbeats(self, *missed: int) -> list[int]:
        """How often it has measured after each heartbeat, by the rounds missed until then."""
        counts = []
        for self.status.missed in missed:
            asyncio.run(self.line.measure_again())
            counts.append(len(self.calls))
        return counts


def test_who_is_left_out_time_and_again_measures_its_line_once_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = Measured(monkeypatch, up_mbit=1.0)
    counts = measured.heartbeats(0, 1, 2, 3, 3, 4, 5, 6, 0, 0, 1, 2, 3)
    assert ALWAYS_LATE == 3
    assert counts == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3]
    assert measured.calls[0] == {"A": "its record"}


def test_a_line_is_measured_before_the_first_round_unless_it_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """That of a joiner is, and that of a peer that has sent blobs since it started."""
    measured = Measured(monkeypatch, up_mbit=None)
    measured.finds = 20.0
    asyncio.run(measure_line(measured.node, "run"))
    assert measured.calls == [{"A": "its record"}]
    asyncio.run(measure_line(measured.node, "run"))
    measured.lines.up_mbit, measured.traffic.sent.mbit = None, 18.0
    asyncio.run(measure_line(measured.node, "run"))
    assert len(measured.calls) == 1


def test_a_line_that_cannot_be_measured_keeps_nobody_from_starting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured = Measured(monkeypatch, up_mbit=None)

    async def down(*_: object) -> None:
        raise NetworkDown("the daemon is gone")

    monkeypatch.setattr(own_line, "present_peers", down)
    asyncio.run(measure_line(measured.node, "run"))
    assert not measured.calls
