"""What a joiner still has to fetch."""

from types import SimpleNamespace
from typing import Any

from swarm.network.blobs import BlobStore
from swarm.network.joining import missing_bytes
from swarm.protocol.digests import digest_of


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
