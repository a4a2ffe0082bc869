"""Files of text as they lie on disk: plain, compressed (.gz, .zst), or tables (.parquet)."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from swarm.errors import DataError

TABLE = ".parquet"
_ROWS = 1024
"""That are in memory at once."""
_REMEDY = "fetch or make it again, or take it out of the folder"


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """A file's bytes, decompressed as its name says.

    Raises:
        DataError: it does not decompress, or the package that does it is not installed.
        OSError: it cannot be read.
    """
    damage: tuple[type[Exception], ...] = (EOFError, zlib.error, gzip.BadGzipFile)
    if path.suffix == ".zst":
        zstd = _zstd(path)
        damage = (*damage, zstd.ZstdError)
        file: BinaryIO = zstd.ZstdFile(path, "rb")
    elif path.suffix == ".gz":
        file = cast(BinaryIO, gzip.open(path, "rb"))  # noqa: SIM115 - closed below
    else:
        file = path.open("rb")
    try:
        with file:
            yield file
    except damage as error:
        raise DataError(
            f"{path}: damaged, it does not decompress: {error}", hint=_REMEDY
        ) from error


def check_table(path: Path, column: str) -> None:
    """Reads the footer of a .parquet file.

    Raises:
        DataError: see `table_texts`.
    """
    with _table(path, column):
        pass


def table_texts(path: Path, column: str) -> Iterator[str | None]:
    """The texts in a column of a .parquet file, row by row; None where there is none.

    Raises:
        DataError: the file is damaged, it has no such column of text, or pyarrow is missing.
        OSError: it cannot be read.
    """
    with _table(path, column) as table:
        for rows in table.iter_batches(batch_size=_ROWS, columns=[column], use_threads=False):
            yield from rows.column(0).to_pylist()


@contextmanager
def _table(path: Path, column: str) -> Iterator[Any]:
    try:
        import pyarrow.parquet  # optional: only folders with .parquet files need it
    except ImportError as error:
        raise _missing(path, "pyarrow") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as table:
            _require_column(path, table.schema_arrow, column)
            yield table
    except pyarrow.ArrowException as error:
        raise _damaged(path, error) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise _damaged(path, error) from error  # pages that cannot be read


def _damaged(path: Path, error: Exception) -> DataError:
    said = str(error).split("\n", maxsplit=1)[0]
    return DataError(f"{path}: damaged, no whole .parquet file: {said}", hint=_REMEDY)


def _require_column(path: Path, schema: Any, column: str) -> None:
    if column not in schema.names:
        raise DataError(
            f"{path}: it has no column {column!r}, but {', '.join(map(repr, schema.names))}",
            hint="swarm-data tokenize --column NAME",
        )
    kind = str(schema.field(column).type)
    if kind not in ("string", "large_string", "string_view"):
        raise DataError(
            f"{path}: its column {column!r} has values of type {kind}, not text",
            hint="swarm-data tokenize --column NAME",
        )


def _zstd(path: Path) -> Any:
    try:
        from compression import zstd  # since Python 3.14 it is part of the language
    except ImportError:
        try:
            from backports import zstd  # optional: only folders with .zst files need it
        except ImportError as error:
            raise _missing(path, "backports.zstd") from error
    return zstd


def _missing(path: Path, package: str) -> DataError:
    return DataError(
        f"{path}: the package {package} reads it, and is not installed",
        hint=f"pip install {package}, or 'moe-swarm[data]'",
    )
