"""Texts of .parquet files, row by row, in at most 256 MB of memory for any file.

A column of a file is a sequence of pages, which pyarrow decompresses one at a time. The page
headers have the decompressed sizes. A page of more than 64 MiB is refused. The densest page limits
the rows of a batch. One text in a dictionary page may fill every row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from swarm.data.input_files import REMEDY, missing, opened_to_seek
from swarm.errors import DataError

MAX_PAGE_BYTES = 2**26
_BATCH_BYTES = 2**24
_MAX_ROWS = 1024
"""Most rows that are read as one batch."""
_READ_BYTES = 2**20
_STRINGS = ("string", "large_string", "string_view")


class _Page(NamedTuple):
    """A page of a column: its decompressed bytes, and the least number of texts in it."""

    num_bytes: int
    num_values: int


def check_table(path: Path, column: str) -> None:
    """Checks the footer of a .parquet file, and the page headers of its text column.

    Raises:
        DataError: see `table_texts`.
    """
    with _opened_column(path, column):
        pass


def table_texts(path: Path, column: str) -> Iterator[str | None]:
    """The texts in a column of a .parquet file, row by row. None for a row without text.

    Raises:
        DataError: the file is damaged or has no such text column, a page is too large, or pyarrow
            is missing.
        OSError: the file cannot be read.
    """
    with _opened_column(path, column) as (table, rows_at_once):
        for group, num_rows in enumerate(rows_at_once):
            batches = table.iter_batches(
                batch_size=num_rows, row_groups=[group], columns=[column], use_threads=False
            )
            for rows in batches:
                yield from rows.column(0).to_pylist()


@contextmanager
def _opened_column(path: Path, column: str) -> Iterator[tuple[Any, list[int]]]:
    """An open file, and the number of rows per read in each row group."""
    try:
        import pyarrow.parquet  # optional: only folders with .parquet files need it
    except ImportError as error:
        raise missing(path, "pyarrow") from error
    try:
        with opened_to_seek(path) as file:
            table = pyarrow.parquet.ParquetFile(file, buffer_size=_READ_BYTES)
            _require_column(path, table.schema_arrow, column)
            rows_at_once = [
                _rows_at_once(path, _pages(file, chunk))
                for chunk in _chunks(table.metadata, column)
            ]
            yield table, rows_at_once
    except (pyarrow.ArrowException, EOFError, UnicodeDecodeError) as error:
        raise _damaged(path, error) from error
    except OSError as error:
        if error.errno is not None:
            raise
        raise _damaged(path, error) from error  # pages that cannot be read


def _damaged(path: Path, error: Exception) -> DataError:
    said = str(error).split("\n", maxsplit=1)[0]
    return DataError(f"{path}: damaged, no whole .parquet file: {said}", hint=REMEDY)


def _require_column(path: Path, schema: Any, column: str) -> None:
    if column not in schema.names:
        raise DataError(
            f"{path}: it has no column {column!r}, but {', '.join(map(repr, schema.names))}",
            hint="swarm-data tokenize --column NAME",
        )
    kind = schema.field(column).type
    kind = str(getattr(kind, "value_type", kind))  # texts of a dictionary
    if kind not in _STRINGS:
        raise DataError(
            f"{path}: its column {column!r} has values of type {kind}, not text",
            hint="swarm-data tokenize --column NAME",
        )


def _chunks(metadata: Any, column: str) -> Iterator[Any]:
    """The place of the column in each row group."""
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        named = (row_group.column(number) for number in range(row_group.num_columns))
        yield next(chunk for chunk in named if chunk.path_in_schema == column)


def _rows_at_once(path: Path, pages: Iterable[_Page]) -> int:
    """Rows of a batch with at most 16 MiB of text, at least one row."""
    num_rows = _MAX_ROWS
    for page in pages:
        if page.num_bytes > MAX_PAGE_BYTES:
            raise DataError(
                f"{path}: one page of it has {page.num_bytes / 2**20:,.0f} MiB, and at most "
                f"{MAX_PAGE_BYTES >> 20} MiB are read at once",
                hint="write it again with write_batch_size=1 of pyarrow, or as .jsonl.zst",
            )
        num_rows = min(num_rows, _BATCH_BYTES * page.num_values // page.num_bytes)
    return max(1, num_rows)


def _pages(file: BinaryIO, chunk: Any) -> Iterator[_Page]:
    """The pages of a column in a row group, its dictionary included.

    Raises:
        EOFError: the file ends before its pages.
    """
    place = chunk.data_page_offset
    if chunk.has_dictionary_page and chunk.dictionary_page_offset:
        place = min(place, chunk.dictionary_page_offset)
    end = place + chunk.total_compressed_size
    while place < end:
        file.seek(place)
        header = _thrift_struct(file)
        num_bytes, num_packed = header.get(2, 0), header.get(3, 0)
        if min(num_bytes, num_packed) < 0:
            raise EOFError("a page of negative size")
        described = header.get(5) or header.get(8)  # pages of texts, version 1 or 2
        # One text may contain all bytes of a dictionary.
        yield _Page(max(num_bytes, 1), described.get(1, 0) if described else 1)
        place = file.tell() + num_packed


_STOP, _TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _STRUCT = 0, 1, 2, 3, 7, 8, 12
_INTEGERS = (4, 5, 6)
_MAX_DEPTH = 8


def _thrift_struct(file: BinaryIO, depth: int = 0) -> dict[int, Any]:
    """A struct in Thrift's compact encoding: numbers and structs by their field ids.

    Source: apache/thrift, doc/specs/thrift-compact-protocol.md. Page headers have no lists.

    Raises:
        EOFError: the bytes are no struct, or no page's header.
    """
    if depth > _MAX_DEPTH:
        raise EOFError("no header of a page")
    fields: dict[int, Any] = {}
    number = 0
    while (head := _byte(file)) != _STOP:
        kind, step = head & 15, head >> 4
        number = number + step if step else _zigzag(file)
        if kind in _INTEGERS:
            fields[number] = _zigzag(file)
        elif kind == _STRUCT:
            fields[number] = _thrift_struct(file, depth + 1)
        elif kind == _BINARY:
            file.seek(_varint(file), 1)
        elif kind in (_BYTE, _DOUBLE):
            file.seek(1 if kind == _BYTE else 8, 1)
        elif kind not in (_TRUE, _FALSE):
            raise EOFError("no header of a page")
    return fields


def _zigzag(file: BinaryIO) -> int:
    value = _varint(file)
    return (value >> 1) ^ -(value & 1)


def _varint(file: BinaryIO) -> int:
    value = shift = 0
    while True:
        byte = _byte(file)
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value
        if shift > 63:
            raise EOFError("no header of a page")


def _byte(file: BinaryIO) -> int:
    read = file.read(1)
    if not read:
        raise EOFError("it ends before its pages")
    return read[0]
