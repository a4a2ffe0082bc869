"""Digests of whole files, remembered by what a file system says of them.

A digest is taken again once anything that `stat` tells has changed: a copy, another owner or
another machine then cost the reading of the text, and not its tokenising. An edit that keeps size
and time of modification still changes the time of status, which no program can set.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3

from swarm import durable
from swarm.errors import DataError
from swarm.progress import Reporter

logger = logging.getLogger(__name__)

BLOCK_BYTES = 2**20
SETTLED_S = 2.0
"""A file that changed so recently may change again within one tick of its file system's clock."""


class FileDigests:
    """Digests of the files of one text, kept in a file from one start to the next."""

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        """Reads what is known; a file that is missing or damaged is as good as an empty one.

        Args:
            path: of the file; None remembers within this process alone.
            clock: seconds since 1970.
        """
        self._path, self._clock = path, clock
        self._before: dict[str, str] = _read(path) if path else {}
        self._kept, self._used = dict(self._before), dict[str, str]()

    def of(self, root: Path, files: Iterable[str]) -> list[str]:
        """BLAKE3 digests of these files, in their order; says how far the reading is.

        What was not asked for is remembered no longer.

        Raises:
            DataError: one of them cannot be read.
        """
        names = list(files)
        reporter = Reporter(f"looking for changes in {root.name}", "file")
        found = [self._digest(root / name) for name in reporter.each(names, len(names))]
        self._keep()
        return found

    def _digest(self, path: Path) -> str:
        try:
            with path.open("rb") as file:
                status = os.fstat(file.fileno())
                key = _key(status)
                known = self._used.get(key) or self._before.get(key)
                digest = known or _digest_of(file)
                is_settled = _key(os.fstat(file.fileno())) == key
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from error
        changed_s = max(status.st_mtime, status.st_ctime)
        if is_settled and self._clock() - changed_s > SETTLED_S:
            self._used[key] = digest
        return digest

    def _keep(self) -> None:
        if self._path is None or self._used == self._kept:
            return
        try:
            durable.make_folder(self._path.parent)
            durable.write_file(self._path, json.dumps(self._used).encode())
        except OSError as error:  # the next start reads the text once more
            logger.warning("%s: cannot be written: %s", self._path, error.strerror)
        else:
            self._kept = dict(self._used)


def _digest_of(file: BinaryIO) -> str:
    digest = blake3()
    while block := file.read(BLOCK_BYTES):
        digest.update(block)
    return digest.hexdigest()


def _key(status: os.stat_result) -> str:
    told = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    return " ".join(map(str, told))


def _read(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    entries = found.items() if isinstance(found, dict) else ()
    return {key: digest for key, digest in entries if isinstance(digest, str)}
