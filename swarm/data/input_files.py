"""Files of text on disk: their kinds, their unpacked bytes, and digests kept between runs."""

from __future__ import annotations

import enum
import gzip
import json
import logging
import os
import shutil
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from blake3 import blake3

from swarm import durable
from swarm.errors import DataError
from swarm.progress import Reporter

logger = logging.getLogger(__name__)

BLOCK_BYTES = 2**20
SETTLED_S = 2.0
"""Seconds in which a file that has changed may change again in the same tick of its file system's
clock."""


class FileDigests:
    """Digests of the files of one text, kept in a file between starts."""

    def __init__(self, path: Path | None = None, clock: Callable[[], float] = time.time) -> None:
        """Reads the known digests. A missing or damaged file counts as empty.

        Args:
            path: path of the file. None keeps digests only within this process.
            clock: seconds since 1970.
        """
        self._path, self._clock = path, clock
        self._before: dict[str, str] = _read(path) if path else {}
        self._kept, self._used = dict(self._before), dict[str, str]()

    def of(self, root: Path, files: Iterable[str]) -> list[str]:
        """BLAKE3 digests of these files, in their order. Reports the progress of reading.

        Digests of other files are dropped.

        Raises:
            DataError: a file cannot be read.
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
        except OSError as error:  # the next start reads the text again
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


REMEDY = "fetch or make it again, or take it out of the folder"


class Kind(enum.Enum):
    """The format in which a file contains texts."""

    TEXT = enum.auto()
    LINES = enum.auto()
    JSON = enum.auto()
    HTML = enum.auto()
    TABLE = enum.auto()


_KINDS = {
    ".htm": Kind.HTML,
    ".html": Kind.HTML,
    ".json": Kind.JSON,
    ".jsonl": Kind.LINES,
    ".md": Kind.TEXT,
    ".parquet": Kind.TABLE,
    ".py": Kind.TEXT,
    ".txt": Kind.TEXT,
}
_PACKINGS = (".gz", ".zst")
SUFFIXES = f"{', '.join(_KINDS)}, each also with .gz or .zst behind it"
"""Suffixes of the files that are read, for people."""


def kind_of(name: str) -> Kind | None:
    """The kind of a file, by its suffix. None if such files are not read."""
    return _KINDS.get(os.path.splitext(_unpacked(name))[1])


def suffix_of(name: str) -> str:
    """The suffix that determines a file's kind, in lower case. Empty if there is none."""
    plain = _unpacked(name)
    return os.path.splitext(plain)[1] + name.lower()[len(plain) :]


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file's bytes, decompressed according to its name.

    Raises:
        DataError: the file cannot be decompressed, or the package for this is not installed.
        OSError: the file cannot be read.
    """
    damage: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    packing = path.suffix.lower()
    if packing == ".zst":
        zstd = _zstd(path)
        damage = (*damage, zstd.ZstdError)
        file: BinaryIO = zstd.ZstdFile(path, "rb")
    elif packing == ".gz":
        file = cast(BinaryIO, gzip.open(path, "rb"))  # noqa: SIM115 - closed below
    else:
        file = path.open("rb")
    try:
        with file:
            yield file
    except damage as error:
        raise DataError(f"{path}: damaged, it does not decompress: {error}", hint=REMEDY) from error


@contextmanager
def opened_to_seek(path: Path) -> Iterator[BinaryIO]:
    """Like `opened`, for readers that seek: a packed file is unpacked into a temporary file.

    Raises:
        DataError, OSError: see `opened`.
    """
    with opened(path) as file:
        if not path.name.lower().endswith(_PACKINGS):
            yield file
            return
        with tempfile.TemporaryFile() as plain:
            shutil.copyfileobj(file, plain)
            plain.seek(0)
            yield cast(BinaryIO, plain)


def missing(path: Path, package: str) -> DataError:
    """The error of a file that no installed package can read."""
    return DataError(
        f"{path}: the package {package} reads it, and is not installed",
        hint=f"pip install {package}, or 'moe-swarm[data]'",
    )


def _unpacked(name: str) -> str:
    """A name in lower case without .gz or .zst at its end."""
    name = name.lower()
    for packing in _PACKINGS:
        name = name.removesuffix(packing)
    return name


def _zstd(path: Path) -> Any:
    try:
        from compression import zstd  # part of the standard library since Python 3.14
    except ImportError:
        try:
            from backports import zstd  # optional: only folders with .zst files need it
        except ImportError as error:
            raise missing(path, "backports.zstd") from error
    return zstd
