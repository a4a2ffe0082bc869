"""What has come of a state is not fetched again, however the one that fetches it ends."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarm.errors import StateError
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
from tests.network.test_observer import tiny_run

ME = "peer"
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
    node = SimpleNamespace(peer_id=ME, traffic=SimpleNamespace(blob_bytes_received=0))
    fetch = fetch_newest_state(
        node, store, source, LAYOUT, run=None, shown=shown,
        trust=Trust(manifest.digest), peers=[], on_blob=lambda *_: None,
    )  # fmt: skip
    assert asyncio.run(fetch) is shown
    assert source.asked[1] == source.asked[0][2:]


def test_what_is_missing_is_what_is_neither_here_nor_arriving() -> None:
    store, there, arriving = BlobStore(None), b"x" * 100, b"y" * 1000
    store.put(there)
    store.writer(digest_of(arriving), len(arriving))
    entries = {
        str(position): SimpleNamespace(digest=digest_of(blob), num_bytes=len(blob))
        for position, blob in enumerate([there, arriving, arriving, b"z" * 7])
    }
    founding = SimpleNamespace(blobs={digest_of(b"config"): 6})
    manifest: Any = SimpleNamespace(entries=entries, founding=founding)
    assert missing_bytes(store, manifest) == 1000 + 7 + 6
