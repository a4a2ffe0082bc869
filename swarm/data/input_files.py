"""Files of text as they lie on disk: their kinds, by their names, and their bytes, unpacked."""

from __future__ import annotations

import enum
import gzip
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from swarm.errors import DataError

REMEDY = "fetch or make it again, or take it out of the folder"


class Kind(enum.Enum):
    """How the texts of a file are found in its bytes."""

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
"""Of the files that are read, for people."""


def kind_of(name: str) -> Kind | None:
    """The kind of a file, by the end of its name; None where it is not read."""
    return _KINDS.get(os.path.splitext(_unpacked(name))[1])


def suffix_of(name: str) -> str:
    """The end of a name that says a file's kind, in lower case; empty where there is none."""
    plain = _unpacked(name)
    return os.path.splitext(plain)[1] + name.lower()[len(plain) :]


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file's bytes, decompressed as its name says.

    Raises:
        DataError: it does not decompress, or the package that does it is not installed.
        OSError: it cannot be read.
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
    """As `opened`, for readers that jump: a packed file is unpacked into a temporary one.

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
    """The error of a file that no installed package reads."""
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
        from compression import zstd  # since Python 3.14 it is part of the language
    except ImportError:
        try:
            from backports import zstd  # optional: only folders with .zst files need it
        except ImportError as error:
            raise missing(path, "backports.zstd") from error
    return zstd
