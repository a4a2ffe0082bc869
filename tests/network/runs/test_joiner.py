"""A peer's search for the others of its run: all keys first, then a few in turn."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarm.errors import NobodyReachable, StateError
from swarm.network.blobs import disk_retry
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.dht.dht import StoredValue
from swarm.network.fetch.fetcher import Want
from swarm.network.runs import joiner
from swarm.network.runs.joiner import PeerDiscovery, fetch_newest_state, fetch_state, missing_bytes
from swarm.network.runs.run_founding import founding_manifest
from swarm.network.runs.tips import Shown, Trust
from swarm.protocol.messages.events import Record
from swarm.protocol.records.records import (
    HEARTBEAT_S,
    NUM_SHARDS,
    encode_record,
    look_every_s,
    peers_key,
    shard_of,
    shards_at_once,
)
from swarm.protocol.values.digests import digest_of
from swarm.protocol.values.layout import layout_of
from swarm.protocol.values.manifest import Founding, Manifest
from tests.blobs import blob_of
from tests.fake_time import Time
from tests.network.runs.test_observer import tiny_run
from tests.peer_records import peer_record

ME = "peer"
NODE: Any = SimpleNamespace(peer_id=ME, traffic=SimpleNamespace(blob_bytes_received=0))
RUN = tiny_run()
LAYOUT = layout_of(RUN)


def state() -> tuple[Manifest, dict[str, bytes]]:
    """Manifest 0 of a run, and its blobs, all of them different."""
    blobs: dict[str, bytes] = {}

    def put(blob: bytes) -> tuple[str, int]:
        blobs[digest_of(blob)] = blob
        return digest_of(blob), len(blob)

    initial = {
        unit.unit: put(
            blob_of(unit, {n: torch.full(s, float(i)) for n, s in LAYOUT.shapes.items()})
        )
        for i, unit in enumerate(LAYOUT.units)
    }
    founding = Founding(ME, "nonce", *put(RUN.canonical_json()), *put(bytes(256)))
    return founding_manifest(founding, RUN, LAYOUT, initial, {ME: 1.0}), blobs


class Source:
    """Delivers the wanted blobs in order, as `Downloads` does, and then calls `after`."""

    def __init__(self, store: BlobStore, blobs: dict[str, bytes]) -> None:
        self.store, self.blobs, self.asked = store, blobs, list[list[str]]()
        self.before: Callable[[int], None] = lambda _: None

    async def fetch(self, wants: Sequence[Want], *, on_blob, **_: object) -> None:
        self.asked.append([want.digest for want in wants])
        for number, want in enumerate(wants):
            self.before(number)
            self.store.put(self.blobs[want.digest])
            on_blob(want.digest)
            await asyncio.sleep(0)


def test_what_has_come_survives_a_kill(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(joiner, "PACK_BYTES", 1)
    manifest, blobs = state()
    store = BlobStore(tmp_path)
    synced, last = list[str](), len(blobs) - 1
    sync = store.sync
    monkeypatch.setattr(store, "sync", lambda digests: (sync(digests), synced.extend(digests)))

    class Breaks(Source):
        async def fetch(self, wants: Sequence[Want], *, on_blob, **_: object) -> None:
            for want in wants[:last]:
                store.put(blobs[want.digest])
                on_blob(want.digest)
            while len(synced) < last:
                await asyncio.sleep(0.001)
            raise asyncio.CancelledError

    async def killed_before_the_last() -> None:
        source = Breaks(store, blobs)
        fetch = fetch_state(source, store, LAYOUT, manifest, sources=[], on_blob=lambda *_: None)
        await asyncio.wait([asyncio.create_task(fetch)])

    asyncio.run(asyncio.wait_for(killed_before_the_last(), 10))
    assert len(BlobStore(tmp_path).digests()) == last


def test_a_full_disk_is_waited_for_without_refetching(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_retry, "FIRST_PAUSE_S", 0.0)
    manifest, blobs = state()
    store = BlobStore()
    source = Source(store, blobs)

    def is_full(number: int) -> None:
        if number == 2 and len(source.asked) == 1:
            raise StateError("pack") from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    source.before = is_full
    shown = Shown(Record(manifest, None, None))
    assert asyncio.run(fetch(source, shown)) is shown
    assert source.asked[1] == source.asked[0][2:]


def fetch(source: Source, shown: Shown, **times: Any) -> Coroutine[Any, Any, Shown]:
    return fetch_newest_state(
        NODE, source.store, source, LAYOUT, run=None, shown=shown,
        trust=Trust(shown.record.tip.digest), peers=[], on_blob=lambda *_: None, **times,
    )  # fmt: skip


class Lacking(Source):
    """Has all blobs but one, for which it waits."""

    async def fetch(self, wants: Sequence[Want], *, on_blob, **more: object) -> None:
        lost = next(reversed(self.blobs))
        await super().fetch([w for w in wants if w.digest != lost], on_blob=on_blob, **more)
        if any(want.digest == lost for want in wants):
            await asyncio.Event().wait()


def test_a_state_that_nobody_has_any_more_is_given_up_and_what_came_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each attempt ends by itself. The caller limits repetitions."""
    monkeypatch.setattr(joiner, "STUCK_S", 0.001)
    manifest, blobs = state()
    source, time, asked = Lacking(BlobStore(), blobs), Time(), list[float]()
    shown = Shown(Record(manifest, None, None))

    async def same_tip(*_: object) -> Shown:
        asked.append(time())
        return shown

    async def sleep(seconds: float) -> None:
        time.sleep(seconds)
        assert time() < 30 * 86_400, "it is tried forever"

    monkeypatch.setattr(joiner, "newest_tip", same_tip)
    with pytest.raises(NobodyReachable, match=r"has 1 values of round 0: nothing of it came for 1"):
        asyncio.run(fetch(source, shown, clock=time, sleep=sleep))
    assert len(source.store.digests()) == len(blobs) - 1
    assert 3600 <= time() < 3700 and len(asked) < 80


def test_a_newer_state_begins_the_attempts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joiner, "STUCK_S", 0.001)
    manifest, blobs = state()
    time, source = Time(), Lacking(BlobStore(), blobs)
    lost, first = next(reversed(blobs)), next(iter(manifest.entries))
    there = dataclasses.replace(manifest.entries[first], version=1)
    founding = dataclasses.replace(manifest.founding, validation=there.digest,
                                   validation_bytes=there.num_bytes)  # fmt: skip
    newer = dataclasses.replace(manifest, height=1, round=1, founding=founding)
    assert lost not in newer.blobs
    shown = Shown(Record(manifest, None, None))

    async def tips(*_: object) -> Shown:
        return shown if time() < 3000 else Shown(Record(newer, None, None))

    async def sleep(seconds: float) -> None:
        time.sleep(seconds)

    monkeypatch.setattr(joiner, "newest_tip", tips)
    assert asyncio.run(fetch(source, shown, clock=time, sleep=sleep)).record.tip is newer


def test_what_is_missing_is_what_is_neither_here_nor_arriving() -> None:
    store, there, arriving = BlobStore(None), b"x" * 100, b"y" * 1000
    store.put(there)
    store.writer(digest_of(arriving), len(arriving))
    sizes = {digest_of(blob): len(blob) for blob in (there, arriving, b"z" * 7, b"config")}
    manifest: Any = SimpleNamespace(sizes=sizes)
    assert missing_bytes(store, manifest) == 1000 + 7 + 6


def names(stem: str, count: int) -> list[str]:
    """Names of peers, without 0, which base58 does not have."""
    return [f"Qm{stem}{number}".replace("0", "x") for number in range(count)]


class Counting:
    """A node that counts requested keys. Time passes by heartbeats."""

    def __init__(self, num_peers: int) -> None:
        self.records: dict[str, dict[str, StoredValue]] = {}
        self.traffic = SimpleNamespace(refuse=lambda _: None)
        self.asked: list[list[str]] = []
        self.seen: set[str] = set()
        self.silent: set[str] = set()
        """Keys without answering nodes nearby."""
        self.now = 0.0
        for peer in names("Peer", num_peers):
            self.comes(peer)
        node: Any = self
        self.presence = PeerDiscovery(node, "run", clock=lambda: self.now)

    def comes(self, peer: str) -> None:
        stored = StoredValue(encode_record(peer_record(peer)), 1e10)
        self.records.setdefault(peers_key("run", shard_of(peer)), {})[peer] = stored

    async def get_many(self, keys: list[str]) -> dict[str, dict[str, StoredValue]]:
        self.asked.append(list(keys))
        if self.silent & set(keys):
            raise NobodyReachable("the DHT did not answer")
        return {key: self.records.get(key, {}) for key in keys}

    def beats(self, count: int) -> list[int]:
        """Looks a number of times. Returns the number of keys that each look requested."""
        numbers = []
        for _ in range(count):
            before = len(self.asked)
            with suppress(NobodyReachable):
                self.seen |= asyncio.run(self.presence.look()).keys()
            numbers.append(sum(map(len, self.asked[before:])))
            self.now += HEARTBEAT_S
        return numbers


@pytest.mark.parametrize("num_peers", [16, 64, 256])
def test_a_peer_of_many_reads_one_key_a_heartbeat_at_most(num_peers: int) -> None:
    node = Counting(num_peers)
    assert node.beats(1) == [NUM_SHARDS], "all of them at the start"
    assert len(node.seen) == num_peers
    every = round(look_every_s(num_peers) / HEARTBEAT_S)
    node.asked.clear()
    steady = node.beats(NUM_SHARDS * every)
    assert max(steady) == 1 and sum(steady) == NUM_SHARDS
    assert Counter(map(tuple, node.asked)) == {
        (peers_key("run", shard),): 1 for shard in range(NUM_SHARDS)
    }, "each once a round"


def test_a_newcomer_of_any_shard_is_seen_after_as_many_heartbeats_as_there_are_shards() -> None:
    node = Counting(48)
    node.beats(5)
    newcomers = {shard_of(peer): peer for peer in names("New", 100)}
    assert len(newcomers) == NUM_SHARDS
    for peer in newcomers.values():
        node.comes(peer)
    node.beats(NUM_SHARDS)
    assert set(newcomers.values()) <= node.seen


def test_whoever_is_alone_reads_all_keys_each_time_and_few_see_each_other_soon() -> None:
    alone = Counting(1)
    assert alone.beats(3) == [NUM_SHARDS] * 3
    alone.comes("QmNew")
    alone.beats(1)
    assert "QmNew" in alone.seen
    assert Counting(4).beats(4) == [NUM_SHARDS, 4, 4, 4]


def test_a_key_that_cannot_be_read_hides_no_other() -> None:
    node = Counting(48)
    node.silent = {peers_key("run", 3)}
    node.beats(NUM_SHARDS + 2)
    hidden = node.records[peers_key("run", 3)].keys()
    assert node.seen == set(names("Peer", 48)) - hidden


def test_the_larger_the_run_the_rarer_a_look_and_never_more_often_than_a_heartbeat() -> None:
    assert [shards_at_once(n) for n in (0, 1, 2, 4, 15, 16, 1024)] == [16, 16, 8, 4, 1, 1, 1]
    seconds = [look_every_s(n) for n in (0, 1, 64, 127, 128, 256, 1024)]
    assert seconds == [8.0, 8.0, 8.0, 8.0, 16.0, 32.0, 128.0]
