"""A publication's requests to the DHT."""

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from peers.actions.findings import CLOCK_LIMIT_S
from swarm.errors import Unreachable
from swarm.network.node.peer_probe import About
from swarm.network.runs import joiner
from swarm.network.runs.joiner import PeerDiscovery
from swarm.network.wire.steady_clock import LIMIT_S, SteadyClock
from swarm.peer.status import publisher
from swarm.peer.status.publisher import AGAIN_S, ClockCheck, Publisher, clock_warning
from swarm.protocol.records.records import NUM_SHARDS, PeerRecord
from tests.fake_time import Time
from tests.peer_records import peer_record


class Neighbours:
    """A node whose neighbors have scripted clocks. `None` does not answer."""

    peer_id = "me"

    def __init__(self, **ahead_s: float | None) -> None:
        self.ahead_s, self.asked = ahead_s, 0

    @property
    def neighbours(self) -> frozenset[str]:
        return frozenset(self.ahead_s)

    async def request(self, peer: str, *_: object) -> bytes:
        self.asked += 1
        ahead_s = self.ahead_s[peer]
        if ahead_s is None:
            raise Unreachable(f"{peer} does not answer")
        about = About(version="0", clock=time.time() + ahead_s, seen_at="")
        return about.model_dump_json().encode()


def said(node: Any, caplog: pytest.LogCaptureFixture, times: int = 1) -> str:
    clock = ClockCheck(node)
    with caplog.at_level(logging.WARNING):
        for _ in range(times):
            asyncio.run(clock.compare())
    return caplog.text


@pytest.mark.parametrize(("ahead_s", "words"), [(60.0, "60.0 s behind"), (-60.0, "60.0 s ahead")])
def test_a_clock_that_is_none_of_the_others_is_said_once(
    caplog: pytest.LogCaptureFixture, ahead_s: float, words: str
) -> None:
    text = said(Neighbours(a=ahead_s, b=ahead_s * 2, c=None), caplog, times=3)
    assert text.count("the clock of this peer's records is") == text.count(f"{words} ") == 1
    assert "gave the time (2)" in text and "timedatectl set-ntp true" in text


@pytest.mark.parametrize("node", [Neighbours(a=60.0, b=1.0), Neighbours(a=0.0), Neighbours()])
def test_a_clock_that_one_of_them_has_too_is_good(
    caplog: pytest.LogCaptureFixture, node: Neighbours
) -> None:
    assert not said(node, caplog)


def test_others_are_asked_until_one_has_answered(caplog: pytest.LogCaptureFixture) -> None:
    """After a power cut all peers start at once."""
    node: Any = Neighbours()
    clock = ClockCheck(node)
    asyncio.run(clock.compare())
    node.ahead_s["a"] = None
    asyncio.run(clock.compare())
    node.ahead_s["b"] = -60.0
    for _ in range(3):
        asyncio.run(clock.compare())
    assert caplog.text.count("records is 60.0 s ahead of those") == 1
    before = node.asked
    asyncio.run(clock.compare())
    assert node.asked == before


def test_clocks_are_compared_again_with_members_and_never_with_strangers() -> None:
    node, time, moved = Neighbours(a=0.0, b=0.0, stranger=60.0), Time(), list[list[float]]()
    steady = SteadyClock()
    steady.compare = lambda told: moved.append(list(told))  # type: ignore[method-assign]
    clock = ClockCheck(node, lambda: ("a", "b", "me"), time_s=time, clock=steady)  # type: ignore[arg-type]
    for ahead_s in (0.0, 4.0):
        node.ahead_s = {"a": ahead_s, "b": ahead_s, "stranger": 60.0}
        for _ in range(3):
            asyncio.run(clock.compare())
        time.sleep(AGAIN_S)
    assert [[round(ahead_s, 1) for ahead_s in told] for told in moved] == [[0.0, 0.0], [4.0, 4.0]]
    node.ahead_s = {"a": 60.0, "b": None}
    asyncio.run(clock.compare())
    assert len(moved) == 2, "one of several members moves nothing"


def test_a_clock_that_stays_wrong_is_said_once_a_day(caplog: pytest.LogCaptureFixture) -> None:
    node, time = Neighbours(a=60.0), Time()
    clock = ClockCheck(node, time_s=time)  # type: ignore[arg-type]
    for _ in range(6 * 48):
        asyncio.run(clock.compare())
        time.sleep(AGAIN_S)
    assert caplog.text.count("the clock of this peer's records is 60.0 s behind") == 2


def test_the_limit_is_the_one_of_the_network_and_of_the_doctor() -> None:
    assert LIMIT_S == CLOCK_LIMIT_S == 3.0
    assert clock_warning([-3.0]) is clock_warning([]) is None
    assert clock_warning([3.1, -4.0])


def test_a_peer_compares_clocks_once_it_is_in_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = AsyncMock(return_value=None)

    async def compare() -> None:
        compared.set()

    compared = threading.Event()
    node: Any = SimpleNamespace(
        peer_id="Qm9", remember=list, known_addresses=(), run=lambda does, _: asyncio.run(does)
    )
    status: Any = SimpleNamespace(
        record=lambda: peer_record("Qm9"), validation=None, manifest=None, changed=threading.Event()
    )
    run: Any = SimpleNamespace(run="run")
    state: Any = SimpleNamespace(known_peers=())
    for name in ("publish", "publish_peer"):
        monkeypatch.setattr(publisher, name, nothing)
    publishing = Publisher(node, status, run, state, on_present=list, beside=nothing)
    presence: Any = SimpleNamespace(look=nothing)
    clock: Any = SimpleNamespace(compare=compare)
    publishing._presence, publishing._clock = presence, clock
    status.changed.set()
    publishing.start()
    try:
        assert compared.wait(20.0)
    finally:
        publishing.stop()


BEATS = 20


def test_a_steady_publication_reads_one_key_of_presence(monkeypatch: pytest.MonkeyPatch) -> None:
    names = sorted(f"Qm{first}{second}" for first in "abcdef" for second in "123456789")
    others = {name: peer_record(name, addresses=(f"/of/{name}",)) for name in names}
    asked: list[int] = []
    remembered: list[str] = []
    present: list[list[str]] = []

    def seen(records: Mapping[str, PeerRecord]) -> None:
        present.append(sorted(records))

    nothing = AsyncMock(return_value=None)

    async def fetch_records(_: object, __: object, keys: list[str]) -> dict[str, Any]:
        asked.append(len(keys))
        return others

    for name in ("publish", "publish_peer"):
        monkeypatch.setattr(publisher, name, nothing)
    monkeypatch.setattr(joiner, "fetch_records", fetch_records)
    node: Any = SimpleNamespace(peer_id="Qm9", remember=remembered.extend)
    status: Any = SimpleNamespace(record=lambda: peer_record("Qm9"), validation=None, manifest=None)
    run: Any = SimpleNamespace(run="run")
    state: Any = None
    publishing = Publisher(node, status, run, state, on_present=seen, beside=nothing)
    now = 0.0
    publishing._presence = PeerDiscovery(node, "run", clock=lambda: now)
    for _ in range(BEATS):
        asyncio.run(publishing._publish())
        asyncio.run(publishing._publish())  # something has changed meanwhile
        now += 8.0
    assert asked == [NUM_SHARDS] + [1] * (BEATS - 1)
    assert present == [names] * BEATS and remembered[:2] == ["/of/Qma1", "/of/Qma2"]


def test_rooms_are_of_peers_that_were_heard_of_lately(monkeypatch):
    monkeypatch.setattr(publisher, "MAX_THERE", 2)
    now = 0.0
    there = publisher.RoomsThere(clock=lambda: now)
    there.note({peer: peer_record(peer, room=3) for peer in ("a", "b")})
    now = 200.0
    there.note({"b": peer_record("b", room=5)})
    assert there() == {"a": 3, "b": 5}
    now = 400.0
    assert there() == {"b": 5}
    there.note({peer: peer_record(peer, room=1) for peer in ("c", "d")})
    assert there() == {"c": 1, "d": 1}
