"""Three ways into a run: resume it from the state directory, join it, or found it.

Each ends with a configuration, a record with a tip, and a store that holds every blob of that tip.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from peers.run_text import RunText
from swarm.config import PeerConfig, RunConfig
from swarm.errors import CorruptState, NobodyReachable
from swarm.network.blobs import BlobStore
from swarm.network.contents import store_content
from swarm.network.fetch import Downloads
from swarm.network.finding import (
    Announced,
    Opened,
    find_run,
    open_run,
    runs_here,
    whom_to_ask,
)
from swarm.network.founding import await_founding
from swarm.network.joining import fetch_newest_state, present_peers
from swarm.network.node import Node
from swarm.network.record_file import RecordFile
from swarm.network.tips import Shown, Trust, newest_tip
from swarm.peer.agreement import require_admission, require_no_other
from swarm.peer.link_check import measured_verdict, require_link
from swarm.peer.live_model import initial_contents
from swarm.peer.mending import earlier_record, is_alone, settings_of
from swarm.peer.state_directory import RunDirectory, StateDirectory
from swarm.peer.status import PeerStatus
from swarm.progress import fetching
from swarm.protocol.abstaining import without_record
from swarm.protocol.events import Record
from swarm.protocol.invitation import Invitation
from swarm.protocol.layout import Layout, layout_of
from swarm.protocol.manifest import Digest, Manifest
from swarm.protocol.records import RunRecord, RunState

logger = logging.getLogger(__name__)

FIND_S = 60.0
"""How long a joiner without a run file looks for a run."""
FIND_BEFORE_FOUNDING_S = 6.0
BEGUN_S = 60.0
START_S = 24 * 3600.0
"""A large model over a slow link takes hours; the person may stop it at any time."""
STOP_POLL_S = 0.2

Result = TypeVar("Result")


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
    text: RunText
    """This machine's, which must be the run's before anything of the run is kept or trained."""
    announce: Callable[[RunRecord], None]
    """Keeps what others are told that ask this peer for its run."""
    invitation: Invitation | None = None
    """With what this peer asks to join."""
    founds_beside: bool = False
    """Whether it may found a run although those that it enters by are in another (`--new-run`)."""
    vouched: Digest | None = None
    """The head that the person vouches for (`--tip`); manifest 0 where there is none."""

    # ------------------------------------------------ resume

    def resume(self, run_id: str, *, may_join: bool) -> Started | None:
        """Goes on from the state directory; None when there is no record of the run.

        None too if its configuration or manifest 0 is damaged and not in the store either, if it
        `may_join` others, who have both.

        Raises:
            CorruptState: files of the run are damaged beyond what the protocol may go on from.
            DataError: the text that the run trained on is not there any more.
        """
        directory = self.state.run(run_id)
        record = RecordFile(directory.record_path).read() if directory.path.exists() else None
        if record is None:
            return None
        store = BlobStore(directory.path)
        try:
            run, founding = settings_of(run_id, directory, record, store)
        except CorruptState as error:
            if not may_join or is_alone(self.node.peer_id, record):
                raise
            logger.error("%s; joining the run anew", error)
            return None
        self.text.require(run, founding.founding.text, directory.read_text_folder())
        directory.write_text_folder(self.text.folder)
        layout = layout_of(run)
        downloads = self.serve(store)
        for blob in (run.canonical_json(), founding.encoded):
            store.put(blob)
        started = Started(run_id, run, layout, directory, store, record)
        damaged = store.verify(blobs_of(record.tip))
        if damaged:
            logger.warning("%d blobs of the tip are damaged", len(damaged))
            started = replace(started, record=self._repair(started, downloads))
        logger.info("resume run=%s height=%d", run_id, started.record.tip.height)
        return started

    def _repair(self, started: Started, downloads: Downloads) -> Record:
        """Brings the tip's blobs here again, or those of the tip that the others have by now."""
        record, directory, store = started.record, started.directory, started.store
        self._recompute_initial(record, started.run, started.layout, store)
        others = [peer for peer in record.tip.members if peer != self.node.peer_id]
        file = RecordFile(directory.record_path)
        if not others:
            if not store.verify(blobs_of(record.tip)):
                return record
            earlier = earlier_record(record, file, store, blobs_of)
            if earlier is None:
                raise CorruptState(
                    f"{directory.path}: values of round {record.tip.round} and of the one before "
                    "are damaged, and no other member has them",
                    hint="found the run anew with --run FILE and a new --state-dir",
                )
            file.write(earlier)
            return earlier
        repaired = self.wait_for(
            fetch_newest_state(
                self.node,
                store,
                downloads,
                started.layout,
                run=announcement(started.run_id, started.run, directory.read_founding()),
                shown=Shown(record),
                trust=Trust(record.tip.digest, file.read_chain(record).trusted, is_new=False),
                peers=others,
                on_blob=fetching(),
            )
        )
        if repaired.record is not record:
            file.write(repaired.record, repaired.path)
        return repaired.record

    # ------------------------------------------------ join

    def join(
        self,
        wanted: RunConfig | None,
        run_name: str | None,
        check: Callable[[RunConfig], None],
    ) -> Started | None:
        """Joins a run that members announce; None when there is none for the wanted file.

        Args:
            wanted: configuration that the run must have, if one was given.
            run_name: id that it must have, if one was given.
            check: raises RunMismatch before anything of an unwanted run is kept.

        Raises:
            NobodyReachable: no run was announced in time (only when no file was given).
            RunMismatch: the run is not what was asked for, or a file was given that no run here
                has, and there is another.
            DataError: this machine's text is not the run's.
        """
        downloads = self.serve(BlobStore(None))
        opened = self.wait_for(
            find_run(
                self.node,
                downloads,
                fingerprint=wanted.fingerprint() if wanted else None,
                wanted=run_name,
                deadline_s=FIND_BEFORE_FOUNDING_S if wanted else FIND_S,
            )
        )
        if opened is None:
            if wanted:
                if not self.founds_beside:
                    require_no_other(wanted, self.wait_for(runs_here(self.node, downloads)))
                return None
            raise NobodyReachable(
                f"no run was announced within {FIND_S:.0f} s",
                hint="check the address, or found a run with --run FILE",
            )
        check(opened.run)
        return self._join_opened(opened, downloads)

    def _join_opened(self, opened: Opened, downloads: Downloads) -> Started:
        announced, run, founding = opened.announced, opened.run, opened.founding
        gathered = founding is None
        if founding is None:
            self.text.require(run, announced.record.text, None)
            logger.info("the run gathers %d peers", announced.record.wait_for_peers)
            mine = self.status(run).record
            announced = self.wait_for(await_founding(self.node, announced.record, mine))
            founding = self.wait_for(begun(announced, downloads))
        record = announced.record
        remembered = self.state.run(record.run).read_text_folder()
        self.text.require(run, founding.founding.text, remembered)
        directory = self.new_directory(record.run, run, founding)
        layout = layout_of(run)
        store = BlobStore(directory.path)
        downloads = self.serve(store)
        for blob in (run.canonical_json(), founding.encoded):
            store.put(blob)
        present = self.wait_for(present_peers(self.node, record.run))
        peers = set(whom_to_ask(self.node, announced, present))
        trust = Trust(self.vouched or founding.digest)
        if gathered and self.node.peer_id in founding.members:
            shown = Shown(Record(founding, None, None))
        else:
            question = newest_tip(self.node, downloads, record, peers, trust)
            shown = self.wait_for(question)
            require_admission(record.run, run, shown.record.tip, self.node.peer_id, self.invitation)
            tip = self._without_old_votes(shown.record)
            if tip is shown.record:  # a member that comes back has shown that its link will do
                members = {p: present[p] for p in present if p in tip.tip.members}
                require_link(self.wait_for(measured_verdict(self.node, run, tip.tip, members)))
            shown = replace(shown, record=tip)
        self._recompute_initial(shown.record, run, layout, store)
        sources = peers | set(shown.record.tip.members)
        shown = self.wait_for(
            fetch_newest_state(
                self.node,
                store,
                downloads,
                layout,
                run=record,
                shown=shown,
                trust=trust,
                peers=sources,
                on_blob=fetching(),
            )
        )
        RecordFile(directory.record_path).write(shown.record, shown.path)
        self.state.current_run = record.run
        return Started(record.run, run, layout, directory, store, shown.record)

    def _without_old_votes(self, shown: Record) -> Record:
        """A member whose record is gone may have voted: it abstains until that is past [P5]."""
        record = without_record(self.node.peer_id, shown)
        if record is not shown:
            logger.warning("a member without its record: no vote until it has contributed again")
        return record

    # ------------------------------------------------ shared by the three

    def wait_for(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Runs a coroutine in the node's loop until it ends or the person stops this peer.

        Raises:
            Stopped: the person stopped it.
        """

        async def watched() -> Result:
            task = asyncio.ensure_future(coroutine)
            try:
                while not task.done():
                    if self.stopping():
                        raise Stopped
                    await asyncio.wait([task], timeout=STOP_POLL_S)
                return task.result()
            finally:
                task.cancel()
                await asyncio.wait([task])

        return self.node.run(watched(), START_S)

    def new_directory(self, name: str, run: RunConfig, founding: Manifest) -> RunDirectory:
        """Where a run's files are from now on, with its configuration and manifest 0."""
        directory = self.state.run(name)
        directory.write_config(run)
        directory.write_founding(founding)
        directory.write_text_folder(self.text.folder)
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
        for unit, content in initial_contents(run, layout):
            if unit in missing:
                store_content(store, content)


def announcement(run_id: str, run: RunConfig, manifest: Manifest) -> RunRecord:
    """What every member repeats about the run, so that it outlives its founder.

    Args:
        run_id: of the run.
        run: its configuration.
        manifest: manifest 0.
    """
    return RunRecord(
        run=run_id,
        name=run.run.name,
        fingerprint=run.fingerprint(),
        founder=manifest.founding.founder,
        founding=manifest.blob,
        founding_bytes=len(manifest.encoded),
        config=manifest.founding.config,
        config_bytes=manifest.founding.config_bytes,
        state=RunState.RUNNING,
        wait_for_peers=len(manifest.members),
    )


async def begun(announced: Announced, downloads: Downloads) -> Manifest:
    """Manifest 0 of a run that has just begun, as its founder announces it."""
    founding = (await open_run(announced, downloads, timeout_s=BEGUN_S)).founding
    assert founding is not None, "it is not announced as gathering"
    return founding


def blobs_of(manifest: Manifest) -> list[Digest]:
    """Every blob that a member keeps for a manifest."""
    founding = manifest.founding
    values = (entry.digest for entry in manifest.entries.values())
    return [manifest.blob, founding.config, founding.validation, *values]
