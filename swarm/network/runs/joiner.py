"""How a peer takes over the state of an active run, and discovers its other peers."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from swarm.codecs import Content, check_finite
from swarm.errors import (
    NobodyReachable,
    StateError,
)
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.blobs.disk_retry import patiently_async
from swarm.network.blobs.packs import PACK_BYTES
from swarm.network.fetch.fetcher import Downloads, Want
from swarm.network.node.node import Node
from swarm.network.runs.run_records import check_state, fetch_records, publish
from swarm.network.runs.tips import Shown, Trust, newest_tip
from swarm.protocol.exchange.sourcing import FetchAttempts
from swarm.protocol.records.records import (
    NUM_SHARDS,
    PeerRecord,
    RunRecord,
    look_every_s,
    peers_key,
    shard_of,
    shards_at_once,
)
from swarm.protocol.values.layout import Layout
from swarm.protocol.values.manifest import Digest, Manifest, PeerId, Unit

logger = logging.getLogger(__name__)

STUCK_S = 10.0
"""After this long without progress, a state's blobs may have been deleted at all peers."""
LONGEST_REST_S = 60.0
"""Longest pause between two attempts, each of which may cost a peer seconds for a proof."""


async def present_peers(
    node: Node, run: str, shards: Iterable[int] = range(NUM_SHARDS)
) -> dict[PeerId, PeerRecord]:
    """Records of a run's present peers.

    Args:
        node: sends the request.
        run: id of the run.
        shards: parts of the record keys to read; all together cost megabytes in a large run.

    Raises:
        NobodyReachable: the DHT did not answer.
        NetworkDown: the daemon is dead.
    """
    return await fetch_records(node, PeerRecord, [peers_key(run, shard) for shard in shards])


async def publish_peer(node: Node, run: str, record: PeerRecord) -> None:
    """Publishes a peer's presence under the shard that its id falls into."""
    await publish(node, peers_key(run, shard_of(node.peer_id)), record)


def _log_failure(digest: Digest, peer: PeerId, reason: str) -> None:
    logger.info("blob=%s from=%s failed: %s", digest[:12], peer[-6:], reason)


async def fetch_newest_state(
    node: Node,
    store: BlobStore,
    downloads: Downloads,
    layout: Layout,
    *,
    run: RunRecord,
    shown: Shown,
    trust: Trust,
    peers: Collection[PeerId],
    on_blob: Callable[[int, int], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Shown:
    """Fetches the state of a tip, or of a newer tip if the first one's blobs are gone.

    A slow link has unlimited time, but a state without any progress is given up in the end.

    Args:
        node: the node whose peers are asked.
        store: gets the blobs.
        downloads: fetches into this store.
        layout: sizes that the values must have.
        run: the run as announced.
        shown: has the first tip to fetch.
        trust: where the proof of a newer tip must start.
        peers: peers that may have the state.
        on_blob: called with the bytes that are here and all bytes.
        clock: monotonic seconds.
        sleep: waits between attempts.

    Returns:
        The tip whose state is here, complete and durable.

    Raises:
        NobodyReachable: nothing of the tip arrived for an hour, and nobody showed a newer one.
        StateError: the disk failed, or was still full after the last retry.
    """
    sources = [peer for peer in sorted(peers) if peer != node.peer_id]

    async def comes(tip: Manifest) -> bool:
        fetch = fetch_state(downloads, store, layout, tip, sources=sources, on_blob=on_blob)
        return await _comes(fetch, node, store, tip)

    attempts = _attempts_for(store, shown.record.tip, clock())
    while True:
        tip = shown.record.tip
        if await patiently_async(partial(comes, tip), "the state of the run"):
            return shown
        now_s = clock()
        attempts = attempts.failed(now_s, _bytes_here(store, tip))
        if newer := await _newer_than(tip, newest_tip(node, downloads, run, sources, trust)):
            shown = newer
            sources = sorted({*sources, *newer.record.tip.members} - {node.peer_id})
            attempts = _attempts_for(store, newer.record.tip, now_s)
            continue
        if why := attempts.why_given_up(now_s):
            raise _lost(store, tip, why)
        await sleep(max(0.0, attempts.next_s - now_s))


async def _newer_than(tip: Manifest, asking: Awaitable[Shown]) -> Shown | None:
    """The tip that members show, if newer than this one."""
    try:
        newer = await asking
    except NobodyReachable as error:
        logger.info("height=%d is still being fetched: %s", tip.height, error)
        return None
    if newer.record.tip.code <= tip.code:
        return None
    logger.info("height=%d is fetched instead of %d", newer.record.tip.height, tip.height)
    return newer


def _attempts_for(store: BlobStore, tip: Manifest, now_s: float) -> FetchAttempts:
    """The record of attempts to fetch a tip, before the first attempt; a fetch may take days."""
    return FetchAttempts.begun(
        now_s, _bytes_here(store, tip), whole_s=math.inf, longest_rest_s=LONGEST_REST_S
    )


def _lost(store: BlobStore, tip: Manifest, why: str) -> NobodyReachable:
    missing = sum(not store.has(digest) for digest in tip.sizes)
    return NobodyReachable(
        f"no peer that answers has {missing} values of round {tip.round}: {why}",
        hint="start again once more peers of the run are present; received values are kept",
    )


async def _comes(
    fetch: Coroutine[Any, Any, None], node: Node, store: BlobStore, manifest: Manifest
) -> bool:
    """Fetches a state; returns False if nothing of it arrived for `STUCK_S`."""
    fetching = asyncio.create_task(fetch)
    try:
        while not fetching.done():
            before = node.traffic.blob_bytes_received
            await asyncio.wait([fetching], timeout=STUCK_S)
            is_here = all(map(store.has, manifest.sizes))
            if not (fetching.done() or is_here or node.traffic.blob_bytes_received > before):
                return False
        fetching.result()
        return True
    finally:
        fetching.cancel()
        await asyncio.wait([fetching])


async def fetch_state(
    downloads: Downloads,
    store: BlobStore,
    layout: Layout,
    manifest: Manifest,
    *,
    sources: Sequence[PeerId],
    on_blob: Callable[[int, int], None],
) -> None:
    """Fetches every blob of a manifest from several members, shared parts first, and syncs them.

    The arrived blobs are synced after each `PACK_BYTES`, so that a killed process resumes there.

    Args:
        downloads: fetches blobs.
        store: gets the blobs.
        layout: sizes that the values must have.
        manifest: the state to take over.
        sources: members that may have the state.
        on_blob: called with the bytes that are here and all bytes.

    Raises:
        BadManifest: the manifest's blobs do not fit this layout.
        StateError: the disk failed.
    """
    check_state(manifest, layout)
    sizes = manifest.sizes
    units = {entry.digest: unit for unit, entry in manifest.entries.items()}
    here = sum(size for digest, size in sizes.items() if store.has(digest))
    total = sum(sizes.values())
    keeping = _Keeping(store)

    def arrived(digest: Digest) -> None:
        nonlocal here
        here += sizes[digest]
        keeping.arrived(digest, sizes[digest])
        on_blob(here, total)

    def check(digest: Digest, content: Content) -> None:
        if digest in units:
            check_finite(layout.by_unit[units[digest]], content)

    wants = [
        Want(digest, sizes[digest], _rotated(sources, position))
        for position, digest in enumerate(_shared_first(sizes, units))
        if not store.has(digest)
    ]
    try:
        if wants:
            await downloads.fetch(wants, check=check, on_blob=arrived, on_failure=_log_failure)
    finally:
        await keeping.end()
    store.put(manifest.encoded, manifest.blob)
    await asyncio.get_running_loop().run_in_executor(None, store.sync, [*sizes, manifest.blob])


def missing_bytes(store: BlobStore, manifest: Manifest) -> int:
    """Bytes of a manifest's blobs, minus the blobs and pieces already in a store."""
    return sum(manifest.sizes.values()) - _bytes_here(store, manifest)


def _bytes_here(store: BlobStore, manifest: Manifest) -> int:
    return sum(store.bytes_here(*each) for each in manifest.sizes.items())


class _Keeping:
    """Makes arrived blobs durable, a pack at a time, while others still arrive."""

    def __init__(self, store: BlobStore) -> None:
        self._store = store
        self._new: list[Digest] = []
        self._num_bytes = 0
        self._syncing: asyncio.Task[None] | None = None

    def arrived(self, digest: Digest, num_bytes: int) -> None:
        """Notes a blob that is here, and begins a sync once a pack is full."""
        self._new.append(digest)
        self._num_bytes += num_bytes
        if self._num_bytes >= PACK_BYTES and (self._syncing is None or self._syncing.done()):
            self._syncing = asyncio.create_task(self._sync())

    async def end(self) -> None:
        """Waits until no sync is under way."""
        if self._syncing:
            await asyncio.wait([self._syncing])

    async def _sync(self) -> None:
        loop = asyncio.get_running_loop()
        while self._num_bytes >= PACK_BYTES:
            digests, self._new, self._num_bytes = self._new, [], 0
            try:
                await loop.run_in_executor(None, self._store.sync, digests)
            except StateError as error:  # if the error lasts, the last sync reports it
                logger.warning("received values are not durable yet: %s", error)


def _shared_first(digests: Iterable[Digest], units: Mapping[Digest, Unit]) -> list[Digest]:
    return sorted(digests, key=lambda d: (not units.get(d, "shared").startswith("shared"), d))


def _rotated(sources: Sequence[PeerId], by: int) -> tuple[PeerId, ...]:
    shift = by % max(len(sources), 1)
    return (*sources[shift:], *sources[:shift])


class PeerDiscovery:
    """Reads presence keys: first all of them, then one by one, from a random key on."""

    def __init__(self, node: Node, run: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Reads nothing yet.

        Args:
            node: node of this peer.
            run: id of its run.
            clock: clock in seconds.
        """
        self._node, self._run, self._clock = node, run, clock
        self._found = [0] * NUM_SHARDS
        """Peers in each shard at its last read, this one included."""
        self._next, self._next_s = random.randrange(NUM_SHARDS), clock()
        self._has_failed = False

    async def look(self) -> dict[PeerId, PeerRecord]:
        """Records of the shards that are due; none before the next due time.

        Raises:
            NobodyReachable: the DHT did not answer. After that, keys are read one by one until one
                succeeds, so that an unreadable key does not hide the others.
            NetworkDown: the daemon is dead.
        """
        if self._clock() < self._next_s:
            return {}
        num_peers = sum(self._found)
        count = 1 if self._has_failed else shards_at_once(num_peers)
        shards = [(self._next + place) % NUM_SHARDS for place in range(count)]
        self._next, self._next_s = shards[-1] + 1, self._clock() + look_every_s(num_peers)
        self._has_failed = True
        present = await present_peers(self._node, self._run, shards)
        self._has_failed = False
        for shard in shards:
            self._found[shard] = sum(shard_of(peer) == shard for peer in present)
        return present
