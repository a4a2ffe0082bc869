"""What has come of a state is not fetched again, however the one that fetches it ends."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarm.errors import NobodyReachable, StateError
from swarm.network import joining, patience
from swarm.network.blobs import BlobStore
from swarm.network.fetch import Want
from swarm.network.founding import founding_manifest
from swarm.network.joining import fetch_newest_state, fetch_state, missing_bytes
from swarm.network.tips import Shown, Trust
from swarm.protocol.digests import digest_of
from swarm.protocol.events import Record
from swarm.protocol.layout import layout_of
from swarm.protocol.manifest import Founding, Manifest
from tests.blobs import blob_of
from tests.fake_time import Time
from tests.network.test_observer import tiny_run

ME = "peer"
NODE: Any = SimpleNamespace(peer_id=ME, traffic=SimpleNamespace(blob_bytes_received=0))
RUN = tiny_run()
LAYOUT = layout_of(RUN)


def state() -> tuple[Manifest, dict[str, bytes]]:
    """Manifest 0 of a run, and its blobs, no two of which are the same."""
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
    """Brings what is wanted in order, as `Downloads` does, and then does `after`."""

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
    monkeypatch.setattr(joining, "PACK_BYTES", 1)
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


def test_a_full_disk_is_waited_for_and_nothing_is_fetched_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patience, "FIRST_PAUSE_S", 0.0)
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
    """Each attempt ends by itself; that the same one begins again is bounded by its caller."""
    monkeypatch.setattr(joining, "STUCK_S", 0.001)
    manifest, blobs = state()
    source, time, asked = Lacking(BlobStore(), blobs), Time(), list[float]()
    shown = Shown(Record(manifest, None, None))

    async def same_tip(*_: object) -> Shown:
        asked.append(time())
        return shown

    async def sleep(seconds: float) -> None:
        time.sleep(seconds)
        assert time() < 30 * 86_400, "it is tried for ever"

    monkeypatch.setattr(joining, "newest_tip", same_tip)
    with pytest.raises(NobodyReachable, match=r"has 1 values of round 0: nothing of it came for 1"):
        asyncio.run(fetch(source, shown, clock=time, sleep=sleep))
    assert len(source.store.digests()) == len(blobs) - 1
    assert 3600 <= time() < 3700 and len(asked) < 80


def test_a_newer_state_begins_the_attempts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "STUCK_S", 0.001)
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

    monkeypatch.setattr(joining, "newest_tip", tips)
    found = asyncio.run(fetch(source, shown, clock=time, sleep=sleep))
    assert found.record.tip is newer


def test_what_is_missing_is_what_is_neither_here_nor_arriving() -> None:
    store, there, arriving = BlobStore(None), b"x" * 100, b"y" * 1000
    store.put(there)
    store.writer(digest_of(arriving), len(arriving))
    sizes = {digest_of(blob): len(blob) for blob in (there, arriving, b"z" * 7, b"config")}
    manifest: Any = SimpleNamespace(sizes=sizes)
    assert missing_bytes(store, manifest) == 1000 + 7 + 6
