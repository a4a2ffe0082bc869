"""Three ways into a run: resume it from the state directory, join it, or found it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Iterable, Iterator, Set
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from swarm.config import RunConfig
from swarm.data.shards import Shards
from swarm.errors import BadManifest, CorruptState, NobodyReachable, RunMismatch
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch.fetcher import Downloads
from swarm.network.rounds.record_file import RecordFile
from swarm.network.runs.joiner import fetch_newest_state, missing_bytes, present_peers
from swarm.network.runs.run_founding import await_founding
from swarm.network.runs.run_records import heard
from swarm.network.runs.run_search import Announced, Opened, open_run, whom_to_ask
from swarm.network.runs.signed_invitations import credential_for
from swarm.network.runs.tips import Shown, Trust, newest_tip
from swarm.peer.machine.machine_survey import Room
from swarm.peer.machine.state_directory import RunDirectory, credential_to
from swarm.peer.start.bootstrap_search import goes_first, look_for_run, others_at, runs_there
from swarm.peer.start.host import Host
from swarm.peer.start.link_monitor import measure_line, measured_verdict, require_link
from swarm.peer.start.start_checks import require_finished, run_on_disk, with_way_back
from swarm.peer.status.observing import PeerObserver
from swarm.peer.status.publisher import announcement
from swarm.peer.status.status import PeerStatus
from swarm.peer.text.agreed_model import recompute_initial
from swarm.peer.text.run_request import Wanted, require_admission
from swarm.peer.text.run_text import FETCH_S, RunText, given_tokenizer, wanted_tokenizer
from swarm.peer.training.leaving import Stopped
from swarm.progress import fetching
from swarm.protocol.chain import chain_record
from swarm.protocol.chain.chain_record import moved_on, without_record
from swarm.protocol.messages.events import Record
from swarm.protocol.records.records import RunRecord
from swarm.protocol.values.digests import Buffer
from swarm.protocol.values.layout import Layout, layout_of
from swarm.protocol.values.manifest import (
    Digest,
    Founding,
    Manifest,
    PeerId,
    decode_manifest,
    run_id,
)

logger = logging.getLogger(__name__)


def is_alone(me: PeerId, record: Record) -> bool:
    """Whether no other member of the run could have a copy of the damaged files here."""
    return set(record.tip.members) <= {me}


def settings_of(
    name: str, directory: RunDirectory, record: Record, store: BlobStore
) -> tuple[RunConfig, Manifest]:
    """Configuration and manifest 0 of a run; a damaged file is rewritten.

    Args:
        name: the run's id.
        directory: directory of the run.
        record: the record whose tip names the configuration.
        store: store of the run.

    Raises:
        CorruptState: a file is damaged, and its blob is not in the store either.
    """
    try:
        run = directory.read_config()
    except CorruptState as error:
        run = _config_in(store, record.tip.founding.config, error)
        directory.write_config(run)
        logger.warning("%s; rewritten from the store", error)
    try:
        return run, directory.read_founding()
    except CorruptState as error:
        founding = _founding_in(store, name, run, error)
        directory.write_founding(founding)
        logger.warning("%s; rewritten from the store", error)
        return run, founding


def drop_damaged(store: BlobStore, tip: Manifest) -> list[str]:
    """Drops every blob whose bytes on disk have changed; 0.5 s per GB.

    Blobs outside the tip are checked too, since a round in progress may still agree on them.

    Returns:
        Digests of the tip's blobs that this peer lacks, or has just dropped.
    """
    missing = store.verify({*store.digests(), *tip.blobs})
    return sorted(set(missing) & set(tip.blobs))


def earlier_record(record: Record, file: RecordFile, store: BlobStore) -> Record | None:
    """The newest earlier record whose blobs are all whole. None if there is none.

    Each promise and each vote writes a record, so both record files may have the damaged tip. Then
    the tip's parent is used, which both files have. Votes after the parent are dropped, since their
    values are lost.
    """
    for earlier in _before(record, file):
        if not store.verify(earlier.tip.blobs):
            logger.warning(
                "the values of round %d (height %d) are damaged and no other member has them; "
                "continuing from round %d (height %d)",
                record.tip.round, record.tip.height, earlier.tip.round, earlier.tip.height,
            )  # fmt: skip
            return earlier
    return None


def _before(record: Record, file: RecordFile) -> Iterator[Record]:
    known = file.read_earlier()
    if known and known.tip.height < record.tip.height:
        yield known
    links = {link.head.digest: link for link in file.chain.read()}
    parent = record.parent
    link = links.get(parent.digest) if parent else None
    if parent and (link or parent.height == 0):
        certificate = link.certificate if link else None
        yield chain_record.rolled_back(Record(parent, certificate, None))


def _config_in(store: BlobStore, digest: Digest, error: CorruptState) -> RunConfig:
    blob = store.get(digest)
    if blob is None:
        raise _lost(error) from error
    try:
        return RunConfig.model_validate_json(bytes(blob))
    except ValueError as unread:  # for example, another version of this program wrote it
        raise CorruptState(
            f"{error}; nor does this version understand its copy in the store",
            hint="use the version of swarm with which the run was founded",
        ) from unread


def _founding_in(store: BlobStore, name: str, run: RunConfig, error: CorruptState) -> Manifest:
    fingerprint = run.fingerprint()
    for digest in store.digests():
        if run_id(run.run.name, fingerprint, digest) == name and (blob := store.get(digest)):
            try:
                return decode_manifest(bytes(blob))
            except BadManifest:
                break
    raise _lost(error) from error


def _lost(error: CorruptState) -> CorruptState:
    return CorruptState(
        f"{error}; it is not in the store either",
        hint="if the run has other peers, join them with a new --state-dir and --initial-peers; "
        "otherwise found it again with --run FILE, since no copy of its state is left",
    )


BEGUN_S = 60.0
STOP_POLL_S = 0.2

Result = TypeVar("Result")


@dataclass(frozen=True)
class Started:
    """A peer that is ready for rounds."""

    run_id: str
    run: RunConfig
    layout: Layout
    directory: RunDirectory
    store: BlobStore
    record: Record
    shards: Shards
    """This machine's text, which is the run's."""


class Starter:
    """The state that all three ways use: the machine, the wanted run and the request to stop."""

    def __init__(self, host: Host, wanted: Wanted, observer: PeerObserver) -> None:
        self.host, self.wanted, self.stop, self.observer = host, wanted, host.stop, observer
        self.node, self.state, self.config = host.node, host.state, host.config
        private = wanted.invitation
        self.credential = credential_for(private, self.node.identity) if private else None
        corpus = self.config.corpus
        self.text = RunText(
            corpus.folder,
            self.state.data_path,
            say=observer.on_notice,
            follow_links=corpus.follow_links,
            list_skipped=corpus.list_skipped,
        )

    def status(
        self, run: RunConfig, directory: RunDirectory | None = None, room: Room | None = None
    ) -> PeerStatus:
        """The status that this peer publishes in a run."""
        return PeerStatus(
            self.node,
            run,
            name=self.host.name,
            capacity=self.config.peer.capacity,
            directory=directory,
            observer=self.observer,
            room_of=room or Room(run, self.config.compute, self.state.path),
        )

    def resume_or_join(self) -> Started | None:
        """Resumes the run on disk, or joins one; None if the wanted run has to be founded.

        Raises:
            RunMismatch: the run is not the wanted one; or a new run would be founded in place of
                an unfinished one on disk.
            NobodyReachable: no run was announced, and none may be founded; or no peer at a new
                address answers.
            CorruptState, DataError: see `resume` and `join`.
        """
        wanted, current = self.wanted, self._run_to_resume()
        if current and (started := self.resume(current, may_join=wanted.run is None)):
            wanted.require(started.run)
            return started
        if wanted.run is None or current or self.config.network.initial_peers:
            is_meant = wanted.run is None  # a run file may mean a run that was founded again
            try:
                joined = self.join(wanted.run_id or (current if is_meant else None), begun=current)
            except (NobodyReachable, RunMismatch) as error:
                raise with_way_back(error, wanted, current, self.state) from error
            if joined:
                return joined
        require_finished(wanted, self.state)
        return None

    def _run_to_resume(self) -> str | None:
        """The run on disk; None if options, or peers at the given addresses, name another."""
        wanted, here = self.wanted, run_on_disk(self.wanted, self.state)
        if here is None or wanted.run or wanted.run_id or not self.config.network.initial_peers:
            return here
        return here if self.wait_for(runs_there(self.host, here)) else None

    # ------------------------------------------------ resume

    def resume(self, run_id: str, *, may_join: bool) -> Started | None:
        """Resumes from the state directory; None if there is no record of the run.

        Also None if the configuration or manifest 0 is damaged both on disk and in the store, and
        the peer `may_join`, since other peers have these files.

        Raises:
            CorruptState: files of the run are too damaged to continue safely.
            DataError: the text that the run trained on is missing.
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
            logger.error("%s; joining the run again", error)
            return None
        downloads, folder = self.host.serve(store), directory.read_text_folder()
        self._open_text(run, founding.founding, downloads, record.tip.members, folder)
        directory.write_text_folder(self.text.folder)
        layout = layout_of(run)
        for blob in (run.canonical_json(), founding.encoded):
            store.put(blob)
        started = Started(run_id, run, layout, directory, store, record, self.text.shards)
        with self.stop.at_once():
            damaged = drop_damaged(store, record.tip)
        if damaged:
            logger.warning("%d blobs of the tip are damaged", len(damaged))
            started = replace(started, record=self._repair(started, downloads))
        self.wait_for(measure_line(self.host, run_id, record.tip.members))
        logger.info("resume run=%s height=%d", run_id, started.record.tip.height)
        return started

    def _repair(self, started: Started, downloads: Downloads) -> Record:
        """Fetches the tip's blobs again, or the blobs of a newer tip of the other peers."""
        record, directory, store = started.record, started.directory, started.store
        recompute_initial(record.tip, started.run, started.layout, store)
        others = [peer for peer in record.tip.members if peer != self.node.peer_id]
        file = RecordFile(directory.record_path)
        if not others:
            if not store.verify(record.tip.blobs):
                return record
            earlier = earlier_record(record, file, store)
            if earlier is None:
                raise CorruptState(
                    f"{directory.path}: values of round {record.tip.round} and of the one before "
                    "are damaged, and no other member has them",
                    hint="found the run again with --run FILE and a new --state-dir",
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
                trust=Trust.own(file.read_chain(record)),
                peers=others,
                on_blob=fetching(self.observer.on_fetched),
            )
        )
        if repaired.record is record:
            return record
        newer = moved_on(record, repaired.record)
        file.write(newer, repaired.path)
        return newer

    # ------------------------------------------------ join

    def join(self, run_id: str | None, begun: str | None = None) -> Started | None:
        """Joins an announced run; None if no announced run has the wanted configuration.

        Args:
            run_id: the id that the run must have; None for any.
            begun: the run that this peer had begun to join, which is preferred.

        Raises:
            NobodyReachable: no run was announced in time (only when no file was given); or none of
                the given addresses answers.
            RunMismatch: the run is not the wanted one (and no file of it is kept); or only runs
                with other configurations are announced.
            DataError: this machine's text is not the run's.
            DataQuotaSpent: the run's state is larger than the rest of the month's quota.
        """
        self.observer.on_joining()
        downloads = self.host.serve(BlobStore(None))
        looking = look_for_run(self.host, downloads, self.wanted, run_id, begun)
        opened = self.wait_for(looking)
        if opened is None:
            return None
        self.wanted.require(opened.run)
        return self._join_opened(opened, downloads)

    def instead(self, run: RunConfig) -> Started | None:
        """Joins a run of peers at the given addresses, or a run that they have precedence to found.

        From now on this peer answers that it prepares the run. None if this peer has to found the
        run, because no peer at these addresses is in a run or has precedence. Raises the errors of
        `join`.
        """
        reception, are_new = self.host.reception, True
        reception.prepare(run.fingerprint())
        while self.wait_for(goes_first(self.host, self.wanted, by_runs=are_new)):
            reception.prepare(None)
            if joined := self.join(self.wanted.run_id):
                return joined
            reception.prepare(run.fingerprint())
            are_new = False  # the announcement proved false
        return None

    def _join_opened(self, opened: Opened, downloads: Downloads) -> Started:
        announced, run, founding = opened.announced, opened.run, opened.founding
        gathered = founding is None
        if founding is None:
            self._open_text(run, announced.record, downloads, announced.publishers, None)
            logger.info("the run gathers %d peers", announced.record.wait_for_peers)
            announced = self.wait_for(self._gathered(announced.record, run))
            founding = self.wait_for(begun(announced, downloads))
        record = announced.record
        remembered = self.state.run(record.run).read_text_folder()
        kept = self._open_text(run, founding.founding, downloads, announced.publishers, remembered)
        directory = self.new_directory(record.run, run, founding)
        layout = layout_of(run)
        store = BlobStore(directory.path)
        downloads = self.host.serve(store)
        for blob in (run.canonical_json(), founding.encoded, *kept):
            store.put(blob)
        present = self.wait_for(heard(present_peers(self.node, record.run), {}))
        peers = set(whom_to_ask(self.node, announced, present))
        trust = Trust(self.wanted.vouched or directory.read_vouched() or founding.digest)
        if is_new := gathered and self.node.peer_id in founding.members:
            shown = Shown(Record(founding, None, None))
        else:
            question = newest_tip(self.node, downloads, record, peers, trust)
            shown = self.wait_for(question)
            tip = shown.record.tip
            credential = credential_to(run, self.credential, directory)
            require_admission(record.run, run, tip, self.node.peer_id, credential)
            if self.node.peer_id not in tip.members:  # a member's link is known to suffice
                members = {p: present[p] for p in present if p in tip.members}
                require_link(self.wait_for(measured_verdict(self.node, run, tip, members)))
            self.wait_for(measure_line(self.host, record.run, tip.members))
        with self.stop.at_once():
            drop_damaged(store, shown.record.tip)  # a killed join may have left many
            recompute_initial(shown.record.tip, run, layout, store)
        self.host.quota.require_room(run, missing_bytes(store, shown.record.tip))
        self._remember(record.run, directory, {*opened.announced.publishers, *announced.publishers})
        shown = self.wait_for(
            fetch_newest_state(
                self.node,
                store,
                downloads,
                layout,
                run=record,
                shown=shown,
                trust=trust,
                peers=peers | set(shown.record.tip.members),
                on_blob=fetching(self.observer.on_fetched),
            )
        )
        # Only now is the tip final, since a newer one may have replaced the first during the fetch.
        mine = shown.record if is_new else self._without_old_votes(shown)
        RecordFile(directory.record_path).write(mine, shown.path)
        return Started(record.run, run, layout, directory, store, mine, self.text.shards)

    async def _gathered(self, gathering: RunRecord, run: RunConfig) -> Announced:
        """The run, once its founder announces it. Until then, measures this peer's link."""
        status, possession = self.status(run), self.credential.possession if self.credential else ""
        founded = await_founding(
            self.node, gathering, lambda: replace(status.record(), possession=possession)
        )
        announced, _ = await asyncio.gather(founded, measure_line(self.host, gathering.run))
        return announced

    def _remember(self, run_id: str, directory: RunDirectory, members: Set[PeerId]) -> None:
        """Saves facts about the run, so that after a kill no options are needed to join.

        Gigabytes are fetched after this, and the record is written only once all of them are here.
        """
        if self.credential:
            directory.write_credential(self.credential)
        if self.wanted.vouched:
            directory.write_vouched(self.wanted.vouched)
        directory.add_entered_by(peer for peer in others_at(self.host) if peer in members)
        self.state.current_run = run_id
        self.host.remember_peers()

    def _without_old_votes(self, shown: Shown) -> Record:
        """A voter without its record may have voted, so it abstains until it contributes [P5]."""
        record = without_record(self.node.peer_id, shown.record, shown.path)
        if record is not shown.record:
            logger.warning(
                "this voter has no record: it does not vote until it has contributed again"
            )
        return record

    # ------------------------------------------------ shared by the three

    def wait_for(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        """Runs a coroutine in the node's loop until it ends or a person stops this peer.

        There is no deadline, since a large model over a slow link may take days, and a founder may
        wait for peers for days.

        Raises:
            Stopped: the person stopped this peer.
            DataQuotaSpent: the month's quota was used up before the end.
        """

        async def watched() -> Result:
            task = asyncio.ensure_future(coroutine)
            try:
                while not task.done():
                    if self.stop():
                        self.stop.raise_why()
                        raise Stopped
                    await asyncio.wait([task], timeout=STOP_POLL_S)
                return task.result()
            finally:
                task.cancel()
                await asyncio.wait([task])

        return self.node.run(watched(), None)

    def _open_text(
        self,
        run: RunConfig,
        fixed: Founding | RunRecord,
        downloads: Downloads,
        sources: Iterable[PeerId],
        folder: str | None,
    ) -> list[Buffer]:
        """Opens this machine's text, which must be the run's; returns the run's tokenizer file."""
        others = [peer for peer in sources if peer != self.node.peer_id]
        wanted = wanted_tokenizer(run, fixed.tokenizer, others, downloads.store)
        content = self.wait_for(downloads.fetch_one(wanted, timeout_s=FETCH_S)) if wanted else None
        tokenizer = given_tokenizer(run, fixed.tokenizer, content, self.wanted.tokenizer)
        with self.stop.at_once():
            self.text.require(run, tokenizer, fixed.text, folder)
        return [content] if content else []

    def new_directory(self, name: str, run: RunConfig, founding: Manifest) -> RunDirectory:
        """Makes the run's directory, with its configuration and manifest 0."""
        directory = self.state.run(name)
        directory.write_config(run)
        directory.write_founding(founding)
        directory.write_text_folder(self.text.folder)
        return directory


async def begun(announced: Announced, downloads: Downloads) -> Manifest:
    """Manifest 0 of a run that has just begun, as its founder announces it."""
    founding = (await open_run(announced, downloads, timeout_s=BEGUN_S)).founding
    assert founding is not None, "it is not announced as gathering"
    return founding
