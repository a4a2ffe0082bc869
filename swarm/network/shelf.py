"""The moments blobs that a peer keeps for others: one an expert, the newest in place of the last.

They lie in the peer's blob store, pinned; a list of them beside it makes the copies that this peer
holds for others survive its restart.
"""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from swarm import durable
from swarm.errors import BadMessage, StateError
from swarm.network.blobs import BlobStore
from swarm.protocol.manifest import Digest
from swarm.protocol.moments import Moments, decode_answer, encode_answer

logger = logging.getLogger(__name__)


class Shelf:
    """Thread-safe: the trainer puts its own moments on it, the network those of others."""

    def __init__(self, store: BlobStore, path: Path | None) -> None:
        """Takes up what an earlier life kept; `path` None: nothing is kept over a restart."""
        self.store = store
        self._path = path
        self._lock = threading.Lock()
        self._kept: dict[int, Moments] = {}
        for moments in _read(path) if path else ():
            if store.size(moments.digest) == moments.num_bytes:
                self._kept[moments.expert] = moments
                store.pin([moments.digest])

    def put(self, moments: Moments) -> None:
        """Keeps an expert's moments, whose blob is here and pinned, in place of those before.

        Raises:
            StateError: the disk is full or cannot be written.
        """
        self.store.pin([moments.digest])
        with self._lock:
            before = self._kept.get(moments.expert)
            self._kept = {**self._kept, moments.expert: moments}
            self._write()
        if before:
            self.store.unpin([before.digest])

    def drop(self, moments: Moments) -> None:
        """No longer keeps these moments, if they are still the newest here."""
        with self._lock:
            if self._kept.get(moments.expert) != moments:
                return
            self._kept = {e: kept for e, kept in self._kept.items() if e != moments.expert}
            self._write()
        self.store.unpin([moments.digest])

    def get(self, expert: int) -> Moments | None:
        """The moments of an expert that are here."""
        return self._kept.get(expert)

    def all(self) -> tuple[Moments, ...]:
        """Everything that is kept, by expert."""
        return tuple(moments for _, moments in sorted(self._kept.items()))

    def holds(self, digest: Digest) -> bool:
        """Whether a blob is one of these."""
        return any(moments.digest == digest for moments in self._kept.values())

    def _write(self) -> None:
        if self._path is None:
            return
        try:
            durable.write_file(self._path, encode_answer(self.all()))
        except OSError as error:
            raise StateError(f"{self._path}: cannot be written: {error}") from error


def _read(path: Path) -> tuple[Moments, ...]:
    try:
        return decode_answer(path.read_bytes())
    except FileNotFoundError:
        return ()
    except (OSError, BadMessage) as error:
        logger.error("%s cannot be read, so copies of moments kept here are lost: %s", path, error)
        return ()
