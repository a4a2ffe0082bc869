"""When a peer measures its line again."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from swarm.peer import publisher
from swarm.peer.publisher import Publisher
from swarm.protocol.fitness import ALWAYS_LATE


def test_who_is_left_out_time_and_again_measures_its_line_once_each_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[object] = []

    async def present(*_: object) -> dict[str, str]:
        return {"A": "its record"}

    async def measure(node: object, peers: object, known: object) -> None:
        measured.append((peers, known))

    monkeypatch.setattr(publisher, "present_peers", present)
    monkeypatch.setattr(publisher, "measured_rates", measure)
    node: Any = SimpleNamespace(lines=SimpleNamespace(down_mbit=50.0, up_mbit=1.0))
    status: Any = SimpleNamespace(missed=0)
    run: Any = SimpleNamespace(run="run")
    parts = (node, status, run, cast(Any, None))
    mine = Publisher(*parts, on_present=lambda _: None)
    counts = []
    for missed in (0, 1, 2, 3, 3, 4, 5, 6, 0, 0, 1, 2, 3):
        status.missed = missed
        asyncio.run(mine._measure_again())
        counts.append(len(measured))
    assert ALWAYS_LATE == 3
    assert counts == [0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 2, 3]
    assert measured[0] == ({"A": "its record"}, (50.0, 1.0)), "what is known already counts too"
