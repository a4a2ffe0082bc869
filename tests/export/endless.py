"""For each line on stdin a process that exports round after round until it is killed.

Usage: python -m tests.export.endless FOLDER. It writes each process's id, and the signal of its
end.
"""

import os
import sys
from pathlib import Path

from swarm.export.manager import ExportManager, write_export
from swarm.network.blobs.blob_store import BlobStore
from tests.export.models import after, facts_of, found, toy_run


def export_endlessly(folder: Path) -> None:
    """Exports a model whose blobs are here, after the newest existing export."""
    run, store, manager = toy_run(), BlobStore(), ExportManager(folder, 2)
    newest = max((one.round for one in manager.exports), default=0)
    manifest = after(store, run, found(store, run), newest + 1)
    while True:
        facts = facts_of(run, manifest, store)
        manager.add(manifest.round, lambda path, facts=facts: write_export(path, facts))
        manifest = after(store, run, manifest)


def main() -> None:
    """See the module."""
    for _ in sys.stdin:
        child = os.fork()
        if child == 0:
            try:
                export_endlessly(Path(sys.argv[1]))
            finally:
                os._exit(1)
        sys.stdout.write(f"{child}\n")
        sys.stdout.flush()
        sys.stdout.write(f"{os.waitpid(child, 0)[1]}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
