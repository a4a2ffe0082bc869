"""What a publication asks of the DHT."""

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from swarm.network import joining
from swarm.network.presence import Presence
from swarm.peer import publisher
from swarm.peer.publisher import Publisher
from swarm.protocol.records import NUM_SHARDS, PeerRecord
from tests.peer_records import peer_record

BEATS = 20


def test_a_steady_publication_reads_one_key_of_presence(monkeypatch: pytest.MonkeyPatch) -> None:
    names = sorted(f"Qm{first}{second}" for first in "abcdef" for second in "123456789")
    others = {name: peer_record(name, addresses=(f"/of/{name}",)) for name in names}
    asked: list[int] = []
    remembered: list[str] = []
    present: list[list[str]] = []

    def seen(records: Mapping[str, PeerRecord]) -> None:
        present.append(sorted(records))

    async def nothing(*_: object) -> None:
        pass

    async def fetch_records(_: object, __: object, keys: list[str]) -> dict[str, Any]:
        asked.append(len(keys))
        return others

    for name in ("publish", "publish_peer"):
        monkeypatch.setattr(publisher, name, nothing)
    monkeypatch.setattr(joining, "fetch_records", fetch_records)
    node: Any = SimpleNamespace(peer_id="Qm9", remember=remembered.extend)
    status: Any = SimpleNamespace(record=lambda: peer_record("Qm9"), validation=None, manifest=None)
    run: Any = SimpleNamespace(run="run")
    state: Any = None
    publishing = Publisher(node, status, run, state, on_present=seen, beside=nothing)
    now = 0.0
    publishing._presence = Presence(node, "run", clock=lambda: now)
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
