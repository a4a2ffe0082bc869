"""How a peer founds a run: it gathers members, makes the initial state and announces it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from torch import Tensor

from swarm.background import supervised_async
from swarm.codecs import Content
from swarm.config import RunConfig
from swarm.data.tokenizer import Tokenizer
from swarm.data.tokenizer_file import FileTokenizer
from swarm.errors import StateError
from swarm.network.blobs.blob_store import BlobStore, store_content
from swarm.network.rounds.record_file import RecordFile
from swarm.network.runs.run_founding import founding_manifest, gather, keep_gathering
from swarm.peer.machine.machine_survey import Room
from swarm.peer.machine.state_directory import RunDirectory
from swarm.peer.start.entry import Started, Starter
from swarm.peer.start.host import gathering_of
from swarm.peer.start.link_monitor import measure_line
from swarm.peer.status.status import NO_DIGEST
from swarm.peer.text.agreed_model import initial_contents
from swarm.peer.text.run_request import require_closed_founding
from swarm.peer.text.run_start import founders_tokenizer, founders_weights, rounding_notice
from swarm.peer.text.run_text import FoundText
from swarm.protocol.messages.events import Record
from swarm.protocol.records.records import RunRecord, RunState
from swarm.protocol.values.digests import digest_of, digest_of_chunks
from swarm.protocol.values.invitation import GATHERING
from swarm.protocol.values.layout import layout_of
from swarm.protocol.values.manifest import Founding, Manifest, Member, PeerId, run_id
from swarm.protocol.values.texts import TokenizerFile

logger = logging.getLogger(__name__)

_KEPT = ("config.json", "founding", "text", "packs")
OPEN_GATHERING = (
    "With --open-gathering the first peers vote for good, strangers too: a majority of "
    "strangers decides everything in this run."
)
BEFORE_THE_RECORD = {*_KEPT, *(f"{name}.new" for name in (*_KEPT, "record"))}
"""Every file that a founding writes into a run's folder before the run has a record."""


def found(starter: Starter, run: RunConfig, weights: Mapping[str, Tensor] | None = None) -> Started:
    """Founds a run: gathers its peers, writes manifest 0 and announces it.

    If peers at the given addresses found the run first, this peer joins, as in `resume_or_join`.

    Args:
        starter: starter of this machine.
        run: what is trained, and how.
        weights: all tensors by Hugging Face name; None for those of the checkpoint or of the seed.

    Raises:
        CorruptState: the checkpoint is damaged.
        DataError: this machine's text is missing or too small, or its tokenizer file is unusable.
        ConfigError: the tokenizer or the checkpoint does not fit the configuration, or a run for
            invited peers alone would gather strangers.
        Stopped: the peer was asked to stop before the run was founded.
    """
    require_closed_founding(run, is_open=starter.config.peer.open_gathering)
    if joined := starter.instead(run):
        return joined
    weights = founders_weights(run, starter.wanted.initialise_from, weights)
    if notice := rounding_notice(run, weights):
        starter.observer.on_notice(notice)
    layout = layout_of(run)
    config_blob = run.canonical_json()
    tokenizer = founders_tokenizer(run, starter.wanted.tokenizer)
    with starter.stop.at_once():
        text = starter.text.found(run, tokenizer)
    if joined := starter.instead(run):  # reading a text may have taken hours
        return joined
    founding = Founding(
        founder=starter.node.peer_id,
        nonce=secrets.token_hex(16),
        config=digest_of(config_blob),
        config_bytes=len(config_blob),
        validation=digest_of(text.held_out),
        validation_bytes=len(text.held_out),
        text=text.common,
        tokenizer=_file_of(tokenizer, text),
    )
    gathering = _announcement(starter, run, founding)
    blobs = [config_blob]
    if isinstance(tokenizer, FileTokenizer):
        blobs.append(tokenizer.content)
    present = _gather(starter, run, gathering, blobs)
    remove_unfounded(starter.state.path, starter.node.peer_id)
    with _gathering_on(starter, run, gathering), starter.stop.at_once():
        # Generated twice, so that the model is never whole in memory; the folder's name needs all
        # digests.
        contents = dict(initial_contents(run, layout, weights))
        initial = {u: (digest_of_chunks(c), c.num_bytes) for u, c in contents.items()}
        capacities = {peer: member.capacity for peer, member in present.items()}
        rooms = {peer: member.room for peer, member in present.items()}
        manifest = founding_manifest(founding, run, layout, initial, capacities, rooms=rooms)
        blobs += [text.held_out, manifest.encoded]
        started = _stored(starter, run, manifest, blobs, contents.values())
    starter.host.serve(started.store)
    starter.state.current_run = started.run_id
    logger.info("founded run=%s members=%d", started.run_id, len(present))
    return started


def remove_unfounded(state_folder: Path, me: PeerId) -> None:
    """Removes the files of an earlier founding that was killed before the run had a record.

    No peer knows of such a run or can open it. A folder with files other than `BEFORE_THE_RECORD`
    belongs to a run that was announced, and is kept.

    Args:
        state_folder: the state directory.
        me: this peer.
    """
    for folder in state_folder.glob("runs/*"):
        try:
            names = {path.name for path in folder.iterdir()}
            if not {"founding"} <= names <= BEFORE_THE_RECORD:
                continue
            if RunDirectory(folder).read_founding().founding.founder == me:
                shutil.rmtree(folder)
                logger.info("removed %s: this peer ended before it had founded the run", folder)
        except (OSError, StateError) as error:
            logger.warning("%s is left as it is: %s", folder, error)


def _stored(
    starter: Starter,
    run: RunConfig,
    manifest: Manifest,
    blobs: Iterable[bytes],
    contents: Iterable[Content],
) -> Started:
    """Writes a run to disk; removes its files if the record cannot be written."""
    name, record = (
        run_id(run.run.name, run.fingerprint(), manifest.blob),
        Record(manifest, None, None),
    )
    with ExitStack() as undo:
        undo.callback(shutil.rmtree, starter.state.run(name).path, ignore_errors=True)
        directory = starter.new_directory(name, run, manifest)
        store = BlobStore(directory.path)
        for blob in blobs:
            store.put(blob)
        for content in contents:
            store_content(store, content)
        store.sync(manifest.blobs)
        RecordFile(directory.record_path).write(record)
        undo.pop_all()
    starter.state.end_gathering()
    return Started(name, run, layout_of(run), directory, store, record, starter.text.shards)


def _file_of(tokenizer: Tokenizer, text: FoundText) -> TokenizerFile | None:
    if not isinstance(tokenizer, FileTokenizer):
        return None
    content = tokenizer.content
    return TokenizerFile(
        digest_of(content), len(content), tokenizer.end_of_text, text.held_out_bytes
    )


def _announcement(starter: Starter, run: RunConfig, founding: Founding) -> RunRecord:
    wait_for_peers, name, key = starter.config.peer.wait_for_peers, GATHERING + founding.nonce, ""
    if wait_for_peers > 1 and not starter.config.peer.open_gathering:
        gathering = gathering_of(starter.state, starter.node.identity, wait_for_peers)
        name, key = gathering.run, gathering.invitation.invitation.key
    return RunRecord(
        run=name,
        name=run.run.name,
        fingerprint=run.fingerprint(),
        founder=founding.founder,
        founding=NO_DIGEST,
        founding_bytes=0,
        config=founding.config,
        config_bytes=founding.config_bytes,
        state=RunState.GATHERING,
        wait_for_peers=wait_for_peers,
        key=key,
        text=founding.text,
        tokenizer=founding.tokenizer,
    )


def _gather(
    starter: Starter, run: RunConfig, gathering: RunRecord, blobs: Sequence[bytes]
) -> dict[PeerId, Member]:
    if not gathering.key and gathering.wait_for_peers > 1:
        starter.observer.on_notice(OPEN_GATHERING)
    if gathering.wait_for_peers == 1:
        room = Room(run, starter.config.compute, starter.state.path)
        return {starter.node.peer_id: Member(0, starter.config.peer.capacity, room=room())}
    scratch = BlobStore(None)
    for blob in blobs:
        scratch.put(blob)
    starter.host.serve(scratch)
    starter.host.reception.announce(gathering)
    gathered = starter.wait_for(gather(starter.node, gathering, starter.status(run).record))
    starter.wait_for(measure_line(starter.host, gathering.run))
    return {peer: Member(0, said.capacity, room=said.room) for peer, said in gathered.items()}


@contextmanager
def _gathering_on(starter: Starter, run: RunConfig, gathering: RunRecord) -> Iterator[None]:
    """Repeats the announcement while the initial state is made, which takes minutes for a 7B."""
    if gathering.wait_for_peers == 1:
        yield
        return
    announcing = partial(keep_gathering, starter.node, gathering, starter.status(run).record)
    task = asyncio.run_coroutine_threadsafe(
        supervised_async("announcing the run", announcing), starter.node.loop
    )
    try:
        yield
    finally:
        task.cancel()
