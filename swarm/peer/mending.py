"""What a peer can mend of a damaged state directory by itself, out of its own blobs.

Its store has the configuration and manifest 0 as blobs beside the values, and the run id binds
both, so that either file can be made anew. Of the newest manifest's values, if they are damaged,
nothing can; but those of the manifest before it are in older packs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from swarm.config import RunConfig
from swarm.errors import BadManifest, CorruptState
from swarm.network.blobs import BlobStore
from swarm.network.record_file import RecordFile
from swarm.peer.state_directory import RunDirectory
from swarm.protocol import abstaining
from swarm.protocol.events import Record
from swarm.protocol.manifest import Digest, Manifest, PeerId, decode_manifest, run_id

logger = logging.getLogger(__name__)


def is_alone(me: PeerId, record: Record) -> bool:
    """Whether nobody else is a member of the run, who might have what is damaged here."""
    return set(record.tip.members) <= {me}


def settings_of(
    name: str, directory: RunDirectory, record: Record, store: BlobStore
) -> tuple[RunConfig, Manifest]:
    """Configuration and manifest 0 of a run; a file that is damaged is written anew.

    Args:
        name: the run's id.
        directory: of the run.
        record: whose tip names the configuration.
        store: of the run.

    Raises:
        CorruptState: a file is damaged, and its blob is not in the store either.
    """
    try:
        run = directory.read_config()
    except CorruptState as error:
        run = _config_in(store, record.tip.founding.config, error)
        directory.write_config(run)
        logger.warning("%s; written anew from the store", error)
    try:
        return run, directory.read_founding()
    except CorruptState as error:
        founding = _founding_in(store, name, run, error)
        directory.write_founding(founding)
        logger.warning("%s; written anew from the store", error)
        return run, founding


def drop_damaged(store: BlobStore, tip: Manifest) -> list[str]:
    """Drops every blob that was changed on the disk; 0.5 s per GB.

    Those of no tip too: a round that was under way may still agree on them.

    Returns:
        The digests of the tip that are not here, or no longer.
    """
    missing = store.verify({*store.digests(), *tip.blobs})
    return sorted(set(missing) & set(tip.blobs))


def earlier_record(record: Record, file: RecordFile, store: BlobStore) -> Record | None:
    """The newest record before this one whose blobs are all whole; None if there is none.

    The files may both have the damaged tip, since a promise or a vote is a record of its own; then
    it is the tip's parent, which they have too. Votes after it are forgotten: they were for what
    is lost.
    """
    for earlier in _before(record, file):
        if not store.verify(earlier.tip.blobs):
            logger.warning(
                "the values of round %d (height %d) are damaged and no other member has them; "
                "going on from round %d (height %d)",
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
        yield abstaining.rolled_back(Record(parent, certificate, None))


def _config_in(store: BlobStore, digest: Digest, error: CorruptState) -> RunConfig:
    blob = store.get(digest)
    if blob is None:
        raise _lost(error) from error
    try:
        return RunConfig.model_validate_json(bytes(blob))
    except ValueError as unread:  # as when another version of this program wrote it
        raise CorruptState(
            f"{error}; nor does this version understand its copy in the store",
            hint="go on with the version of swarm that the run was founded with",
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
        hint="if others are in the run, join them with a new --state-dir and --initial-peers; else "
        "found it anew with --run FILE, since nobody has the rest of it",
    )
