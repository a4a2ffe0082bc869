"""Three ways into a run: resume it from the state directory, join it, or found it.

Each ends with the same thing: a configuration, a record with a tip, and a store that holds every
blob of that tip.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from peers.live_model import initial_blobs
from peers.state_directory import RunDirectory, StateDirectory
from peers.status import NO_DIGEST, PeerStatus
from swarm.config import PeerConfig, RunConfig
from swarm.errors import CorruptState, NobodyReachable, RunMismatch
from swarm.network.blobs import BlobStore
from swarm.network.fetch import Downloads
from swarm.network.founding import await_founding, founding_manifest, gather
from swarm.network.joining import (
    Announced,
    check_run_id,
    fetch_config,
    fetch_founding_manifest,
    fetch_state,
    find_run,
    newest_tip,
    present_peers,
)
from swarm.network.node import Node
from swarm.network.record_file import RecordFile
from swarm.protocol.digests import digest_of
from swarm.protocol.events import Record
from swarm.protocol.layout import Layout, layout_of
from swarm.protocol.manifest import Digest, Founding, Manifest, PeerId, run_id
from swarm.protocol.records import PeerRecord, RunRecord, RunState

logger = logging.getLogger(__name__)

FIND_S = 60.0
"""How long a joiner without a run file looks for a run."""
FIND_BEFORE_FOUNDING_S = 6.0
FETCH_S = 24 * 3600.0


class Stopped(Exception):
    """The person stopped the peer before it was in a run."""


@dataclass(frozen=True)
class Started:
    """A peer that is ready for rounds."""

    run_id: str
    run: RunConfig
    layout: Layout
    directory: RunDirectory
    store: BlobStore
    record: Record


@dataclass(frozen=True)
class Starter:
    """What all three ways need."""

    node: Node
    state: StateDirectory
    config: PeerConfig
    stopping: Callable[[], bool]
    serve: Callable[[BlobStore], Downloads]
    """Makes a store's blobs available to others and returns what fetches into it."""
    status: Callable[[RunConfig], PeerStatus]
    held_out: Callable[[RunConfig], NDArray[np.uint32]]
    """The held-out tokens of this machine's corpus: only a founder's count."""

    # ------------------------------------------------ resume

    def resume(self, run_id: str) -> Started | None:
        """Goes on from the state directory; None when there is no record of the run.

        Raises:
            CorruptState: files of the run are damaged beyond what the protocol may go on from.
        """
        directory = self.state.run(run_id)
        record = RecordFile(directory.record_path).read() if directory.path.exists() else None
        if record is None:
            return None
        run = directory.read_config()
        layout = layout_of(run)
        store = BlobStore(directory.path)
        downloads = self.serve(store)
        for blob in (run.canonical_json(), directory.read_founding().encoded):
            store.put(blob)
        damaged = store.verify(blobs_of(record.tip))
        if damaged:
            logger.warning("%d blobs of the tip are damaged and fetched again", len(damaged))
            self._recompute_initial(record, run, layout, store)
            self._refetch(record, run_id, layout, store, downloads)
        logger.info("resume run=%s height=%d", run_id, record.tip.height)
        return Started(run_id, run, layout, directory, store, record)

    def _refetch(
        self, record: Record, run_id: str, layout: Layout, store: BlobStore, downloads: Downloads
    ) -> None:
        members = [peer for peer in record.tip.members if peer != self.node.peer_id]
        if not members:
            raise CorruptState(
                "blobs of the newest manifest are damaged and no other member has them",
                hint=f"restore {self.state.run(run_id).path} from a copy",
            )
        self.node.run(
            fetch_state(downloads, store, layout, record.tip, sources=members, on_blob=_progress()),
            FETCH_S,
        )

    # ------------------------------------------------ join

    def join(self, wanted: RunConfig | None, run_name: str | None) -> Started | None:
        """Joins a run that members announce; None when there is none for the wanted file.

        Raises:
            NobodyReachable: no run was announced in time (only when no file was given).
            RunMismatch: the run is not what was asked for.
        """
        announced = self.node.run(
            find_run(
                self.node,
                fingerprint=wanted.fingerprint() if wanted else None,
                wanted=run_name,
                deadline_s=FIND_BEFORE_FOUNDING_S if wanted else FIND_S,
            ),
            FIND_S + 30,
        )
        if announced is None:
            if wanted:
                return None
            raise NobodyReachable(
                f"no run was announced within {FIND_S:.0f} s",
                hint="check the address, or found a run with --run FILE",
            )
        return self._join_announced(announced)

    def _join_announced(self, announced: Announced) -> Started:
        scratch = BlobStore(None)
        downloads = self.serve(scratch)
        run = self.node.run(fetch_config(announced, downloads), 90)
        if announced.record.state is RunState.GATHERING:
            announced = self._await_founding(announced, run)
        record = announced.record
        check_run_id(record)
        founding = self.node.run(fetch_founding_manifest(announced, downloads), 90)
        directory = self._directory(record.run, run, founding)
        layout = layout_of(run)
        store = BlobStore(directory.path)
        downloads = self.serve(store)
        for blob in (run.canonical_json(), founding.encoded):
            store.put(blob)
        present = self.node.run(present_peers(self.node, record.run), 60)
        peers = {*announced.publishers, *present}
        # In manifest 0's electorate, so it cannot have voted in this run yet.
        fresh = self.node.peer_id in founding.members
        tip = (
            Record(founding, None, None)
            if fresh
            else self.node.run(newest_tip(self.node, store, downloads, announced, peers), 120)
        )
        self._recompute_initial(tip, run, layout, store)
        sources = sorted((peers | set(tip.tip.members)) - {self.node.peer_id})
        self.node.run(
            fetch_state(downloads, store, layout, tip.tip, sources=sources, on_blob=_progress()),
            FETCH_S,
        )
        RecordFile(directory.record_path).write(tip)
        self.state.current_run = record.run
        return Started(record.run, run, layout, directory, store, tip)

    def _await_founding(self, gathering: Announced, run: RunConfig) -> Announced:
        status = self.status(run)
        logger.info("the run gathers %d peers", gathering.record.wait_for_peers)
        announced = self.node.run(
            await_founding(self.node, gathering.record, status.record, stopping=self.stopping),
            FETCH_S,
        )
        if announced is None:
            raise Stopped
        return announced

    # ------------------------------------------------ found

    def found(self, run: RunConfig) -> Started:
        """Founds a run: gathers its peers, writes manifest 0 and announces it."""
        layout = layout_of(run)
        nonce = secrets.token_hex(16)
        config_blob = run.canonical_json()
        held_out = self.held_out(run).astype("<u4").tobytes()
        founding = Founding(
            founder=self.node.peer_id,
            nonce=nonce,
            config=digest_of(config_blob),
            config_bytes=len(config_blob),
            validation=digest_of(held_out),
            validation_bytes=len(held_out),
        )
        gathering = self._announcement(run, founding)
        present = self._gather(run, gathering, config_blob)
        # Twice through the generator, so that the whole model is never in memory.
        initial = {
            unit: (digest_of(value), len(value)) for unit, value in initial_blobs(run, layout)
        }
        manifest = founding_manifest(founding, run, layout, initial, present)
        name = run_id(run.run.name, run.fingerprint(), manifest.digest)
        directory = self._directory(name, run, manifest)
        store = BlobStore(directory.path)
        for blob in (config_blob, held_out, manifest.encoded):
            store.put(blob)
        for unit, value in initial_blobs(run, layout):
            store.put(value, initial[unit][0])
        store.sync(blobs_of(manifest))
        self.serve(store)
        record = Record(manifest, None, None)
        RecordFile(directory.record_path).write(record)
        self.state.current_run = name
        logger.info("founded run=%s members=%d", name, len(present))
        return Started(name, run, layout, directory, store, record)

    def _announcement(self, run: RunConfig, founding: Founding) -> RunRecord:
        return RunRecord(
            run=f"gathering-{founding.nonce}",
            name=run.run.name,
            fingerprint=run.fingerprint(),
            founder=founding.founder,
            founding=NO_DIGEST,
            founding_bytes=0,
            config=founding.config,
            config_bytes=founding.config_bytes,
            state=RunState.GATHERING,
            wait_for_peers=self.config.peer.wait_for_peers,
        )

    def _gather(
        self, run: RunConfig, gathering: RunRecord, config_blob: bytes
    ) -> Mapping[PeerId, float]:
        if gathering.wait_for_peers == 1:
            return {self.node.peer_id: self.config.peer.capacity}
        scratch = BlobStore(None)
        scratch.put(config_blob)
        self.serve(scratch)
        status = self.status(run)

        def mine() -> PeerRecord:
            return status.record()

        present = self.node.run(gather(self.node, gathering, mine, stopping=self.stopping), FETCH_S)
        if self.stopping():
            raise Stopped
        return present

    # ------------------------------------------------ shared by the three

    def _directory(self, name: str, run: RunConfig, founding: Manifest) -> RunDirectory:
        directory = self.state.run(name)
        directory.write_config(run)
        directory.write_founding(founding)
        return directory

    def _recompute_initial(
        self, record: Record, run: RunConfig, layout: Layout, store: BlobStore
    ) -> None:
        """Values that nobody trained yet are computed here instead of fetched."""
        missing = {
            unit: entry.digest
            for unit, entry in record.tip.entries.items()
            if entry.version == 0 and record.tip.merged == 0 and not store.has(entry.digest)
        }
        if not missing:
            return
        for unit, value in initial_blobs(run, layout):
            if unit in missing and digest_of(value) == missing[unit]:
                store.put(value, missing[unit])


def announcement(started: Started) -> RunRecord:
    """What every member repeats about the run, so that it outlives its founder."""
    manifest = started.directory.read_founding()
    return RunRecord(
        run=started.run_id,
        name=started.run.run.name,
        fingerprint=started.run.fingerprint(),
        founder=manifest.founding.founder,
        founding=manifest.digest,
        founding_bytes=len(manifest.encoded),
        config=manifest.founding.config,
        config_bytes=manifest.founding.config_bytes,
        state=RunState.RUNNING,
        wait_for_peers=len(manifest.members),
    )


def explain_difference(asked: RunConfig, running: RunConfig) -> str:
    """Settings in which a joiner's file differs from the run, for the person to see."""
    asked_flat, running_flat = _flat(asked.model_dump()), _flat(running.model_dump())
    return ", ".join(
        f"{key}: asked {asked_flat.get(key)!r}, the run has {running_flat.get(key)!r}"
        for key in sorted(asked_flat.keys() | running_flat.keys())
        if asked_flat.get(key) != running_flat.get(key)
    )


def require_settings(run: RunConfig, overrides: Mapping[str, object]) -> None:
    """Refuses `--rounds` and `--set` of a joiner unless they equal the run's settings.

    Raises:
        RunMismatch: names every difference.
    """
    have = _flat(run.model_dump())
    wrong = [
        f"{key}: asked {value!r}, the run has {have.get(key)!r}"
        for key, value in overrides.items()
        if have.get(key) != value
    ]
    if wrong:
        raise RunMismatch("; ".join(wrong), hint="leave the option out to join as it is")


def _flat(values: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def blobs_of(manifest: Manifest) -> list[Digest]:
    """Every blob that a member keeps for a manifest."""
    founding = manifest.founding
    values = (entry.digest for entry in manifest.entries.values())
    return [manifest.digest, founding.config, founding.validation, *values]


def _progress() -> Callable[[int, int], None]:
    said_s = time.monotonic()

    def say(here: int, total: int) -> None:
        nonlocal said_s
        if time.monotonic() - said_s > 5 or here == total:
            said_s = time.monotonic()
            logger.info("fetched %.1f of %.1f MB of the model", here / 1e6, total / 1e6)

    return say
