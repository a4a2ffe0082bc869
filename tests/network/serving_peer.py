"""A process that serves one blob slowly, for tests that kill and freeze it.

python serving_peer.py FOLDER SEED NUM_BYTES SECONDS_PER_PART: prints the address, then serves.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from pathlib import Path

from swarm.config import NetworkSection
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.fetch.blob_server import BlobServer
from swarm.network.fetch.bulk import PROTOCOL
from swarm.network.node.node import Handlers, Node


class SlowStore(BlobStore):
    def __init__(self, seconds_per_part: float) -> None:
        super().__init__()
        self._seconds_per_part = seconds_per_part

    def read(self, digest: str, offset: int, length: int) -> bytes | None:
        time.sleep(self._seconds_per_part)
        return super().read(digest, offset, length)


def main() -> None:
    folder, seed, num_bytes = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    store = SlowStore(float(sys.argv[4]))
    digest = store.put(random.Random(seed).randbytes(num_bytes))
    BlobStore.index(store, digest)
    server = BlobServer()
    server.attach(store)
    node = Node.start(
        identity_path=folder / "child.key",
        network=NetworkSection(host_maddrs=("/ip4/127.0.0.1/tcp/0",)),
        handlers=Handlers(streams={PROTOCOL: server.serve}),
    )
    sys.stdout.write(f"{node.addresses[0]}\n")
    sys.stdout.flush()
    threading.Event().wait(120)


if __name__ == "__main__":
    main()
