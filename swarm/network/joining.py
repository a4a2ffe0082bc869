"""How a peer finds a run, founds one, or takes over the state of one that is under way.

Everything a stranger is told is checked: the run id binds name, configuration and manifest 0; a
tip needs a quorum's certificate; every blob has its digest.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swarm.codecs import Content, check_finite
from swarm.config import RunConfig
from swarm.errors import (
    BadManifest,
    BadMessage,
    BadRecord,
    HostileInput,
    NobodyReachable,
    RunMismatch,
)
from swarm.network.blobs import BlobStore
from swarm.network.fetch import Downloads, Want
from swarm.network.foreign import check_announcement, check_state, decode_config
from swarm.network.inbound import open_message, verified
from swarm.network.node import Node, Unreachable
from swarm.network.records import fetch_records, publish
from swarm.protocol.events import Record
from swarm.protocol.foreign import foreign_manifest
from swarm.protocol.layout import Layout
from swarm.protocol.manifest import (
    Digest,
    Kind,
    Manifest,
    PeerId,
    Unit,
    run_id,
)
from swarm.protocol.messages import Commit
from swarm.protocol.records import (
    NUM_SHARDS,
    PeerRecord,
    RunRecord,
    RunState,
    peers_key,
    runs_key,
    shard_of,
)
from swarm.protocol.rounds.checks import certificate_problem

logger = logging.getLogger(__name__)

POLL_S = 0.3
ASK_DEADLINE_S = 5.0
BLOB_DEADLINE_S = 60.0
STUCK_S = 10.0
"""A state of which nothing came for so long may have been collected everywhere."""
MAX_ASKED = 8
"""Members asked for their tip; the newest answer with a valid certificate counts."""
TIP_QUESTION = b"tip "


@dataclass(frozen=True)
class Announced:
    """A run that somebody announced, and who did."""

    record: RunRecord
    publishers: tuple[PeerId, ...]


async def announced_runs(node: Node) -> list[Announced]:
    """All runs in the DHT, running ones first, then by number of publishers."""
    records = await fetch_records(node, RunRecord, [runs_key()])
    by_run: dict[tuple[str, str], list[tuple[PeerId, RunRecord]]] = {}
    for peer, record in sorted(records.items()):
        try:
            check_announcement(record)
        except BadRecord as error:
            node.traffic.refuse(error.reason)
            logger.warning("peer=%s announcement refused: %s", peer[-6:], error)
            continue
        by_run.setdefault((record.run, record.state.value), []).append((peer, record))
    runs = [Announced(group[0][1], tuple(p for p, _ in group)) for group in by_run.values()]
    return sorted(
        runs,
        key=lambda a: (a.record.state is not RunState.RUNNING, -len(a.publishers), a.record.run),
    )


async def find_run(
    node: Node, *, fingerprint: str | None, wanted: str | None, deadline_s: float
) -> Announced | None:
    """The run to join, or None when none shows up before the deadline.

    Args:
        node: connected to the DHT.
        fingerprint: of the configuration that was asked for, if one was.
        wanted: run id that was asked for, or that this peer was in.
        deadline_s: how long to look.

    Raises:
        RunMismatch: several runs are announced and none was asked for.
    """
    end_s = time.monotonic() + deadline_s
    while True:
        found = await announced_runs(node)
        if wanted:
            found = [run for run in found if run.record.run == wanted]
        if fingerprint:
            found = [run for run in found if run.record.fingerprint == fingerprint]
        names = sorted({run.record.run for run in found})
        if len(names) > 1 and not (wanted or fingerprint):
            raise RunMismatch(
                f"several runs are announced here: {', '.join(names)}",
                hint="name one with --run-id",
            )
        if found:
            return found[0]
        if time.monotonic() > end_s:
            return None
        await asyncio.sleep(POLL_S)


async def present_peers(node: Node, run: str) -> dict[PeerId, PeerRecord]:
    """Records of the peers that are in a run now."""
    keys = [peers_key(run, shard) for shard in range(NUM_SHARDS)]
    return await fetch_records(node, PeerRecord, keys)


async def publish_peer(node: Node, run: str, record: PeerRecord) -> None:
    """Publishes a peer's presence under the shard that its id falls into."""
    await publish(node, peers_key(run, shard_of(node.peer_id)), record)


async def fetch_config(announced: Announced, downloads: Downloads) -> RunConfig:
    """The run's configuration, checked against the announced fingerprint.

    Raises:
        NobodyReachable: no publisher gave it in time.
        BadBlob: it is no configuration.
        RunMismatch: what came is not what was announced.
    """
    record = announced.record
    wanted = Want(record.config, record.config_bytes, announced.publishers)
    blob = await downloads.fetch_one(wanted, timeout_s=BLOB_DEADLINE_S)
    return decode_config(blob, record)


def _log_failure(digest: Digest, peer: PeerId, reason: str) -> None:
    logger.info("blob=%s from=%s failed: %s", digest[:12], peer[-6:], reason)


async def newest_tip(
    node: Node,
    store: BlobStore,
    downloads: Downloads,
    run: RunRecord,
    peers: Collection[PeerId],
) -> Record:
    """The best tip that members show, with a certificate that holds.

    Raises:
        NobodyReachable: no member showed a valid tip.
    """
    best: Record | None = None
    asked = [peer for peer in sorted(peers) if peer != node.peer_id][:MAX_ASKED]
    answers = await asyncio.gather(*(_ask_tip(node, store, downloads, run, peer) for peer in asked))
    for record in answers:
        if record and (best is None or record.tip.code > best.tip.code):
            best = record
    if best is None:
        raise NobodyReachable(f"none of {len(asked)} members of {run.run} showed a valid tip")
    return best


async def _ask_tip(
    node: Node, store: BlobStore, downloads: Downloads, run: RunRecord, peer: PeerId
) -> Record | None:
    try:
        async with asyncio.timeout(BLOB_DEADLINE_S):
            payload = await node.request(peer, TIP_QUESTION + run.run.encode(), ASK_DEADLINE_S)
            if not payload:
                return None
            _, message = await open_message(peer, payload, store, downloads)
            message = verified(message, peer, run.run)
            return _checked_tip(message, run)
    except (TimeoutError, Unreachable) as error:
        logger.info("peer=%s showed no tip: %s", peer[-6:], error)
    except HostileInput as error:
        node.traffic.refuse(error.reason)
        logger.warning("peer=%s tip refused: %s", peer[-6:], error)
    return None


def _checked_tip(message: object, run: RunRecord) -> Record:
    if not isinstance(message, Commit):
        raise BadMessage("not_a_tip", "the answer is no tip")
    tip = message.manifest
    founding = tip.digest if tip.kind is Kind.FOUNDING else None
    if founding and founding != run.founding:
        raise BadManifest("foreign_run", "manifest 0 is not the announced one")
    if not founding and tip.run != run.run:
        raise BadManifest("foreign_run", f"the tip belongs to {tip.run}")
    if tip.founding.config != run.config:
        raise BadManifest("foreign_run", "the tip has another configuration")
    if tip.kind in (Kind.QUORUM, Kind.MERGE):
        problem = certificate_problem(message, message.parent)
        if problem:
            raise BadManifest("no_certificate", problem)
    return Record(tip, message.certificate, message.parent)


def check_run_id(record: RunRecord) -> None:
    """Refuses an announcement whose id does not bind what it announces.

    Raises:
        RunMismatch: name, fingerprint or manifest 0 is not what the id was made of.
    """
    if record.run != run_id(record.name, record.fingerprint, record.founding):
        raise RunMismatch(f"the announcement of {record.run} contradicts its own id")


async def fetch_newest_state(
    node: Node,
    store: BlobStore,
    downloads: Downloads,
    layout: Layout,
    *,
    run: RunRecord,
    record: Record,
    peers: Collection[PeerId],
    on_blob: Callable[[int, int], None],
) -> Record:
    """Fetches the state of a tip, or of a newer one when the tip's blobs are no longer to be had.

    Args:
        node: whose peers are asked.
        store: where blobs go.
        downloads: fetches into it.
        layout: what a value must look like.
        run: as announced.
        record: with the tip to begin with.
        peers: that may have the state.
        on_blob: told how many of how many bytes are here.

    Returns:
        The record whose tip is here, whole and durable.
    """
    sources = [peer for peer in sorted(peers) if peer != node.peer_id]
    while True:
        tip = record.tip
        fetch = fetch_state(downloads, store, layout, tip, sources=sources, on_blob=on_blob)
        if await _comes(fetch, node, store, tip):
            return record
        try:
            newer = await newest_tip(node, store, downloads, run, sources)
        except NobodyReachable as error:
            logger.info("height=%d is still being fetched: %s", tip.height, error)
            continue
        if newer.tip.code > tip.code:
            logger.info("height=%d is fetched instead of %d", newer.tip.height, tip.height)
            record = newer
            sources = sorted({*sources, *newer.tip.members} - {node.peer_id})


async def _comes(
    fetch: Coroutine[Any, Any, None], node: Node, store: BlobStore, manifest: Manifest
) -> bool:
    """Fetches a state; returns False, and gives it up, when nothing of it came for `STUCK_S`."""
    fetching = asyncio.create_task(fetch)
    try:
        while not fetching.done():
            before = node.traffic.blob_bytes_received
            await asyncio.wait([fetching], timeout=STUCK_S)
            is_here = all(store.has(entry.digest) for entry in manifest.entries.values())
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

    Args:
        downloads: fetches.
        store: where blobs go.
        layout: what a value must look like.
        manifest: the state to take over.
        sources: members that may have it.
        on_blob: told how many of how many bytes are here.

    Raises:
        BadManifest: its blobs are not those of this layout.
    """
    check_state(manifest, layout)
    sizes = {entry.digest: entry.num_bytes for entry in manifest.entries.values()}
    units = {entry.digest: unit for unit, entry in manifest.entries.items()}
    founding = manifest.founding
    sizes |= {founding.config: founding.config_bytes}
    sizes |= {founding.validation: founding.validation_bytes}
    here = sum(size for digest, size in sizes.items() if store.has(digest))
    total = sum(sizes.values())

    def arrived(digest: Digest) -> None:
        nonlocal here
        here += sizes[digest]
        on_blob(here, total)

    def check(digest: Digest, content: Content) -> None:
        if digest in units:
            check_finite(layout.by_unit[units[digest]], content)

    wants = [
        Want(digest, sizes[digest], _rotated(sources, position))
        for position, digest in enumerate(_shared_first(sizes, units))
        if not store.has(digest)
    ]
    if wants:
        await downloads.fetch(wants, check=check, on_blob=arrived, on_failure=_log_failure)
    store.put(manifest.encoded, manifest.digest)
    await asyncio.get_running_loop().run_in_executor(None, store.sync, [*sizes, manifest.digest])


def _shared_first(digests: Iterable[Digest], units: Mapping[Digest, Unit]) -> list[Digest]:
    return sorted(digests, key=lambda d: (not units.get(d, "shared").startswith("shared"), d))


def _rotated(sources: Sequence[PeerId], by: int) -> tuple[PeerId, ...]:
    shift = by % max(len(sources), 1)
    return (*sources[shift:], *sources[:shift])


async def fetch_founding_manifest(announced: Announced, downloads: Downloads) -> Manifest:
    """Manifest 0 of an announced run.

    Raises:
        NobodyReachable: no publisher gave it in time.
        BadManifest: it is none.
    """
    record = announced.record
    wanted = Want(record.founding, record.founding_bytes, announced.publishers)
    return foreign_manifest(bytes(await downloads.fetch_one(wanted, timeout_s=BLOB_DEADLINE_S)))
