"""The documents of one file: its text, and the cuts of large texts.

Everything here depends only on the file's bytes, so that equal files give equal documents on every
machine. Buffers have bounded sizes.
"""

from __future__ import annotations

import codecs
import io
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from swarm.data.input_files import Kind, kind_of, missing, opened
from swarm.data.tables import check_table, table_texts
from swarm.data.tally import Tally
from swarm.errors import DataError

_HIDDEN = frozenset({"iframe", "noembed", "noframes", "noscript", "script", "style", "template"})
_PARAGRAPHS = frozenset({"h1", "h2", "h3", "h4", "h5", "h6", "p"})
"""Elements with a blank line before and after them."""
_BLOCKS = frozenset(
    re.findall(
        r"\w+",
        """address article aside blockquote body center dd details dialog dir div dl dt fieldset
        figcaption figure footer form head header hgroup hr html legend li main menu nav ol optgroup
        option pre search section summary table tbody textarea tfoot thead title tr ul""",
    )
)
_CELLS = frozenset({"td", "th"})
_KEEP_SPACE = frozenset({"pre", "textarea"})
_MARKS = ("", " ", "\t", "\n", "\n\n")
"""Separators of words, the weakest first."""
_SPACE = re.compile("[ \t\n\f\r]+")


def html_text(page: str) -> str:
    """The visible text of a page, without scripts, styles and markup.

    The time is proportional to the page's length for any depth of nesting, because only tags are
    read and no tree is made.

    Source: HTML Standard, "the innerText getter"; all elements have their default style.

    Raises:
        ImportError: the package justhtml is not installed.
    """
    import justhtml  # optional: only folders with .html files need it

    lines = _Lines()
    for event, value in justhtml.stream(page):
        if event == "start":
            lines.begin(str(value[0]))
        elif event == "text":
            lines.text(str(value))
        elif event == "end":
            lines.end(str(value))
    return "".join(lines.written)


class _Lines:
    """Collects the text, and the separator before the next word."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self._before = ""
        """The separator before the next word: none, a space, a tab or line ends."""
        self._hidden = self._kept_space = 0
        """Numbers of enclosing elements that are hidden, and whose spaces count."""
        self._is_first_in_pre = False

    def begin(self, tag: str) -> None:
        """Handles the start of an element."""
        self._hidden += tag in _HIDDEN
        if tag == "br":
            self._write("\n")
        elif tag in _CELLS:
            self._set_off("\t")
        else:
            self._break(tag)
        self._kept_space += tag in _KEEP_SPACE
        self._is_first_in_pre = tag in _KEEP_SPACE

    def end(self, tag: str) -> None:
        """Handles the end of an element."""
        self._hidden -= tag in _HIDDEN and self._hidden > 0
        self._kept_space -= tag in _KEEP_SPACE and self._kept_space > 0
        self._break(tag)

    def text(self, text: str) -> None:
        """Handles a piece of text."""
        if self._hidden:
            return
        if self._kept_space:
            # A browser's parser drops a line end at the start of such an element.
            self._write(text.removeprefix("\n") if self._is_first_in_pre else text)
        else:
            for number, word in enumerate(_SPACE.split(text)):
                if number:
                    self._set_off(" ")
                self._write(word)
        self._is_first_in_pre = False

    def _break(self, tag: str) -> None:
        if tag in _PARAGRAPHS or tag in _BLOCKS:
            self._set_off("\n\n" if tag in _PARAGRAPHS else "\n")

    def _set_off(self, by: str) -> None:
        """Separates the next word at least by `by`. The first word has no separator."""
        at_line_start = not self.written or (by == " " and self.written[-1].endswith("\n"))
        if not at_line_start:
            self._before = max(self._before, by, key=_MARKS.index)

    def _write(self, text: str) -> None:
        if text and not self._hidden:
            before = self._before.lstrip(" ") if text == "\n" else self._before
            self.written += [before, text]
            self._before = ""


TEXT = "text"
"""Default key or column of the text in a JSON object and a .parquet row."""

MAX_DOCUMENT_BYTES = 2**16
MAX_LINE_BYTES = 2**26
"""Limit of a line of a .jsonl file, and of .json and .html files, which are in memory as a
whole."""
_READ_BYTES = 2**20
_BREAKS = ((b"\n\n", b"\n\r\n"), (b"\n",), (b" ",))
"""Places for a cut, the best first: after a blank line, a line, a word."""


def file_documents(
    path: Path, name: str, skipped: Tally, column: str = TEXT
) -> Iterator[bytes] | None:
    """The documents of a file in order, except blank documents, each of at most 64 KiB of UTF-8.

    A .jsonl file has one text per line, in objects with a string under `column`. A .json file is
    one such object, a list of such objects, or a .jsonl file by another name. A .parquet file has
    one text per row, in the column `column`. Lines, objects and rows without a text are skipped.
    The text of an .html file is its visible text. Any other file is one text. `pieces` cuts the
    texts.

    Args:
        path: path of a regular file.
        name: name of the file in `skipped`.
        skipped: counts all skipped input.
        column: the key or column of the text in objects and rows.

    Returns:
        None for a file that is skipped as a whole, because it is unreadable, binary, or not UTF-8.

    Raises:
        DataError: the file is damaged, has no such column, or needs a package that is missing.
    """
    kind, reason = kind_of(path.name), ""
    try:
        if kind is Kind.TABLE:
            check_table(path, column)
        else:
            with opened(path) as file:
                reason = _unfit(file, MAX_LINE_BYTES if kind is Kind.HTML else None)
    except OSError as error:
        reason = f"cannot be read: {error.strerror or error}"
    if reason:
        skipped.add(name, reason)
        return None
    return _documents(path, name, skipped, column)


def pieces(file: BinaryIO) -> Iterator[bytes]:
    """Cuts a text into documents of at most 64 KiB.

    A longer text is cut after the last blank line in the second half of its first 64 KiB. Without a
    blank line, it is cut after the last line end there, the last space, or the last whole
    character. The rest is cut in the same way.
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
    return _cut_texts(_row_texts(rows, name, skipped))


def _unfit(file: BinaryIO, limit: int | None) -> str:
    """Why a file is no text within a limit of bytes. Empty if it is one."""
    decoder, size = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        while chunk := file.read(_READ_BYTES):
            size += len(chunk)
            if b"\0" in chunk:
                return "binary, because it has NUL bytes"
            if limit is not None and size > limit:
                return _too_long()
            decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return "not UTF-8"
    return ""


def _too_long() -> str:
    return f"longer than {MAX_LINE_BYTES >> 20} MiB"


def _documents(path: Path, name: str, skipped: Tally, column: str) -> Iterator[bytes]:
    kind = kind_of(path.name)
    try:
        if kind is Kind.TABLE:
            yield from row_documents(table_texts(path, column), name, skipped)
            return
        with opened(path) as file:
            yield from _cut_texts(_texts(file, path, name, skipped, column))
    except OSError as error:
        raise DataError(f"{path}: cannot be read to its end: {error}") from error


def _texts(
    file: BinaryIO, path: Path, name: str, skipped: Tally, column: str
) -> Iterator[BinaryIO]:
    """The texts of an open file that is no table."""
    match kind_of(path.name):
        case Kind.LINES:
            yield from _line_texts(file, name, skipped, column)
        case Kind.JSON:
            yield from _json_texts(file, name, skipped, column)
        case Kind.HTML:
            try:
                text = html_text(file.read().decode("utf-8-sig"))
            except ImportError as error:
                raise missing(path, "justhtml") from error
            yield _bytes_of(text)
        case _:
            yield file


def _cut_texts(texts: Iterable[BinaryIO]) -> Iterator[bytes]:
    for text in texts:
        yield from (piece for piece in pieces(text) if piece.strip())


def _cut(head: bytes) -> int:
    """Length of the first document of a text, given its first 64 KiB and one byte."""
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


def _json_texts(file: BinaryIO, name: str, skipped: Tally, column: str) -> Iterator[io.BytesIO]:
    """The texts of a .json file: of its one object, its list of objects, or its lines."""
    content = file.read(MAX_LINE_BYTES + 1)
    if _begins_with_a_line(content):
        file.seek(0)
        yield from _line_texts(file, name, skipped, column)
        return
    if len(content) > MAX_LINE_BYTES:
        skipped.add(name, f"{_too_long()}: write it as .jsonl")
        return
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        skipped.add(name, "not valid JSON")
        return
    for number, item in enumerate(value if isinstance(value, list) else [value], start=1):
        place = f"{name}: item {number}" if isinstance(value, list) else name
        yield from _object_texts(item, place, skipped, column)


def _begins_with_a_line(content: bytes) -> bool:
    """Whether the first line is a complete object, and others follow."""
    lines = filter(bytes.strip, io.BytesIO(content))
    first, second = itertools.islice(itertools.chain(lines, (b"", b"")), 2)
    if not second:
        return False
    try:
        return isinstance(json.loads(first), dict)
    except (ValueError, RecursionError):
        return False


def _line_texts(file: BinaryIO, name: str, skipped: Tally, column: str) -> Iterator[io.BytesIO]:
    number = 0
    while line := file.readline(MAX_LINE_BYTES):
        number += 1
        if not line.endswith(b"\n") and (rest := file.readline(MAX_LINE_BYTES)):
            while rest and not rest.endswith(b"\n"):
                rest = file.readline(MAX_LINE_BYTES)
            skipped.add(f"{name}:{number}", _too_long())
            continue
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            skipped.add(f"{name}:{number}", "not valid JSON")
            continue
        yield from _object_texts(value, f"{name}:{number}", skipped, column)


def _object_texts(value: object, place: str, skipped: Tally, column: str) -> Iterator[io.BytesIO]:
    """The text of one object, if any."""
    text = value.get(column) if isinstance(value, dict) else None
    if isinstance(text, str):
        yield _bytes_of(text)
    else:
        skipped.add(place, f'no object with a string under "{column}"')


def _row_texts(rows: Iterable[str | None], name: str, skipped: Tally) -> Iterator[io.BytesIO]:
    for number, text in enumerate(rows, start=1):
        if text is None:
            skipped.add(f"{name}: row {number}", "no text")
        else:
            yield _bytes_of(text)


def _bytes_of(text: str) -> io.BytesIO:
    # JSON escapes can make lone surrogates, which have no UTF-8 form.
    return io.BytesIO(text.encode("utf-8", errors="replace"))
