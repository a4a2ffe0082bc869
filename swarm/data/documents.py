"""The documents of one file: which bytes are text, and where large texts are cut.

Everything here is a function of the file's bytes alone, so that equal files give equal documents
on every machine, and works through buffers of bounded size.
"""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from swarm.data.input_files import TABLE, check_table, opened, table_texts
from swarm.errors import DataError

TEXT = "text"
"""Where a .jsonl line and a .parquet row have their text, unless said otherwise."""
LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst")

MAX_DOCUMENT_BYTES = 2**16
MAX_LINE_BYTES = 2**26
"""A line of a .jsonl file is in memory as a whole."""
_READ_BYTES = 2**20
_BREAKS = ((b"\n\n", b"\n\r\n"), (b"\n",), (b" ",))
"""Where a text is cut, the best first: after a blank line, a line, a word."""


@dataclass
class Tally:
    """What became of a corpus: how much was read, and what was not, with the reason.

    Attributes:
        files: that are text and were read to their end.
        count: files, folders and lines that are skipped.
        named: the first `max_named` of them.
    """

    files: int = 0
    count: int = 0
    named: list[str] = field(default_factory=list)
    max_named: int = 3

    def add(self, what: str, reason: str) -> None:
        """Counts a file, folder or line."""
        self.count += 1
        if len(self.named) < self.max_named:
            self.named.append(f"{what}: {reason}")


def file_documents(
    path: Path, name: str, skipped: Tally, column: str = TEXT
) -> Iterator[bytes] | None:
    """The documents of a file that are not blank, in order, each of at most 64 KiB of UTF-8.

    A .jsonl file holds one text a line, in objects with a string under `column`; lines that are
    something else are skipped. A .parquet file holds one text a row, in the column of that name;
    rows without one are skipped. Any other file is one text. Texts are cut by `pieces`.

    Args:
        path: of a regular file.
        name: what `skipped` calls it.
        skipped: takes up all that is not read.
        column: where lines and rows have their text.

    Returns:
        None for a file that is skipped as a whole: unreadable, binary, or not UTF-8.

    Raises:
        DataError: the file is damaged, has no such column, or needs a package that is missing.
    """
    reason = ""
    try:
        if path.suffix == TABLE:
            check_table(path, column)
        else:
            with opened(path) as file:
                reason = _unfit(file)
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
    if reason:
        skipped.add(name, reason)
        return None
    return _documents(path, name, skipped, column)


def pieces(file: BinaryIO) -> Iterator[bytes]:
    """Cuts a text into documents of at most 64 KiB.

    A text that is longer is cut after the last blank line in the second half of its first 64 KiB,
    or else after the last line end there, the last space, or the last whole character; the rest
    likewise.
    """
    rest = b""
    while chunk := file.read(_READ_BYTES):
        rest += chunk
        begin = 0
        while len(rest) - begin > MAX_DOCUMENT_BYTES:
            piece = rest[begin : begin + _cut(rest[begin : begin + MAX_DOCUMENT_BYTES + 1])]
            begin += len(piece)
            yield piece
        rest = rest[begin:]
    yield rest


def row_documents(rows: Iterable[str | None], name: str, skipped: Tally) -> Iterator[bytes]:
    """The documents of the rows of a table; see `file_documents`."""
    return _cut_texts(_row_texts(rows, name, skipped.add))


def _unfit(file: BinaryIO) -> str:
    """Why a file is no text; empty if it is."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        while chunk := file.read(_READ_BYTES):
            if b"\0" in chunk:
                return "binary, since it has NUL bytes"
            decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return "not UTF-8"
    return ""


def _documents(path: Path, name: str, skipped: Tally, column: str) -> Iterator[bytes]:
    try:
        if path.suffix == TABLE:
            yield from row_documents(table_texts(path, column), name, skipped)
            return
        with opened(path) as file:
            is_json = path.name.endswith(LINES)
            yield from _cut_texts(
                _json_texts(file, name, skipped.add, column) if is_json else [file]
            )
    except OSError as error:
        raise DataError(f"{path}: cannot be read to its end: {error}") from error


def _cut_texts(texts: Iterable[BinaryIO]) -> Iterator[bytes]:
    for text in texts:
        yield from (piece for piece in pieces(text) if piece.strip())


def _cut(head: bytes) -> int:
    """Length of the first document of a text that begins with these 64 KiB and one byte."""
    for marks in _BREAKS:
        found = [
            head.rfind(mark, MAX_DOCUMENT_BYTES // 2, MAX_DOCUMENT_BYTES) + len(mark)
            for mark in marks
            if mark in head[MAX_DOCUMENT_BYTES // 2 : MAX_DOCUMENT_BYTES]
        ]
        if found:
            return max(found)
    end = MAX_DOCUMENT_BYTES
    while head[end] & 0xC0 == 0x80:  # inside a character
        end -= 1
    return end


def _json_texts(
    file: BinaryIO, name: str, skip: Callable[[str, str], None], column: str
) -> Iterator[io.BytesIO]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES):
        number += 1
        if not line.endswith(b"\n") and (rest := file.readline(MAX_LINE_BYTES)):
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(MAX_LINE_BYTES)
            skip(f"{name}:{number}", f"longer than {MAX_LINE_BYTES >> 20} MiB")
            continue
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            skip(f"{name}:{number}", "not valid JSON")
            continue
        text = value.get(column) if isinstance(value, dict) else None
        if not isinstance(text, str):
            skip(f"{name}:{number}", f'no object with a string under "{column}"')
            continue
        # Lone surrogates, which JSON escapes can make, have no UTF-8 form.
        yield io.BytesIO(text.encode("utf-8", errors="replace"))


def _row_texts(
    rows: Iterable[str | None], name: str, skip: Callable[[str, str], None]
) -> Iterator[io.BytesIO]:
    for number, text in enumerate(rows, start=1):
        if text is None:
            skip(f"{name}: row {number}", "no text")
        else:
            yield io.BytesIO(text.encode("utf-8", errors="replace"))
