"""What a round asks of the blob store: a manifest made durable, leases given."""

from __future__ import annotations

from swarm.errors import MissingBlobs, StateError
from swarm.network.blobs import BlobStore
from swarm.protocol.events import Record
from swarm.protocol.manifest import Digest, Manifest, PeerId


def sync_manifest(store: BlobStore, manifest: Manifest) -> None:
    """Makes a manifest and everything that it names durable.

    Its deltas, too, where they are here: who took values in their place has none.

    Raises:
        MissingBlobs: some are not in the store.
        StateError: the disk failed.
    """
    store.put(manifest.encoded, manifest.blob)
    store.sync({*manifest.blobs, *filter(store.has, manifest.deltas)})


def missing_of(error: StateError) -> tuple[Digest, ...]:
    """The blobs whose absence caused it."""
    return error.__cause__.digests if isinstance(error.__cause__, MissingBlobs) else ()


def lease_to_stranger(
    store: BlobStore, record: Record, peer: PeerId, digest: Digest, now: float
) -> None:
    """Leases a stranger that asks for a blob the manifest that it belongs to [GC].

    Members fetch only what the protocol keeps for them.
    """
    if peer in record.tip.members:
        return
    for manifest in (record.tip, record.parent):
        blobs = {entry.digest for entry in manifest.entries.values()} if manifest else set()
        if manifest and digest in blobs:
            store.lease(manifest.digest, {manifest.blob, *blobs}, now)
            return
