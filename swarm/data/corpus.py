"""The documents of a corpus: which files, in which order, as which text.

A corpus is the Python standard library of this machine (real text that is always there) or a
folder of .txt, .md, .py and .jsonl files. Files are sorted by relative path, so that equal files
give equal corpora wherever they lie.
"""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from swarm.errors import DataError

SUFFIXES = (".jsonl", ".md", ".py", ".txt")
_OMITTED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
)
_HELD_OUT_ONE_IN = 50


@dataclass(frozen=True)
class Corpus:
    """A sorted list of files.

    Attributes:
        name: what errors and logs call it.
        root: the folder that holds the files.
        files: paths relative to `root`, with forward slashes, sorted.
    """

    name: str
    root: Path
    files: tuple[str, ...]

    def documents(self) -> Iterator[str]:
        """The documents that are not blank, in order: a file, or one line of a .jsonl file.

        Bytes that are not UTF-8 become U+FFFD, so a damaged file still counts.

        Raises:
            DataError: a file cannot be read, or a .jsonl line has no string under "text".
        """
        for file in self.files:
            path = self.root / file
            try:
                text = path.read_bytes().decode("utf-8", errors="replace")
            except OSError as error:
                raise DataError(f"{path}: cannot be read: {error.strerror}") from error
            texts = _json_lines(path, text) if path.suffix == ".jsonl" else (text,)
            yield from (text for text in texts if not text.isspace() and text)

    def fingerprint(self) -> str:
        """Digest of the list of files with their sizes and times of change (ns).

        Cheap: reads no content. Equal fingerprints mean that a cache of the corpus still holds.

        Raises:
            DataError: a file of the list is gone.
        """
        listed = []
        for file in self.files:
            try:
                status = (self.root / file).stat()
            except OSError as error:
                raise DataError(f"{self.root / file}: {error.strerror}") from error
            listed.append((file, status.st_size, status.st_mtime_ns))
        return blake3(json.dumps([str(self.root.resolve()), listed]).encode()).hexdigest()


def open_corpus(folder: str | None) -> Corpus:
    """The corpus in `folder`, or the Python standard library when there is none.

    Raises:
        DataError: the folder is missing or holds no file of a kind we read.
    """
    return standard_library_corpus() if folder is None else folder_corpus(Path(folder))


def standard_library_corpus() -> Corpus:
    """The .py sources of this interpreter's standard library, about 11 MB.

    Tests and installed packages are left out, so that machines with the same Python agree;
    `_sysconfigdata*` as well, since it is generated and describes the machine.

    Raises:
        DataError: this Python came without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = tuple(
        file
        for file in _list_files(root, (".py",))
        if not file.startswith("_sysconfigdata") and _OMITTED_FOLDERS.isdisjoint(file.split("/"))
    )
    if not files:
        raise DataError(f"{root}: holds no .py files", hint="name a folder of text: corpus.folder")
    return Corpus("the Python standard library", root, files)


def folder_corpus(folder: Path) -> Corpus:
    """All .txt, .md, .py and .jsonl files below `folder`; hidden files and folders are left out.

    Raises:
        DataError: the folder is missing or holds no file of these kinds.
    """
    if not folder.is_dir():
        raise DataError(f"{folder}: no such folder", hint="corpus.folder names a folder of text")
    files = _list_files(folder, SUFFIXES)
    if not files:
        raise DataError(f"{folder}: holds none of {', '.join(SUFFIXES)}")
    return Corpus(str(folder), folder, files)


def document_bytes(text: str) -> bytes:
    """The bytes of a document: UTF-8, lone surrogates (from JSON escapes) as "?"."""
    return text.encode("utf-8", errors="replace")


def is_held_out(content: bytes) -> bool:
    """Whether a document is never trained on: by its content alone, everywhere the same.

    Copies of a text share its fate, and no list of held-out files needs to travel.
    """
    return int.from_bytes(blake3(content).digest(), "big") % _HELD_OUT_ONE_IN == 0


def _list_files(root: Path, suffixes: tuple[str, ...]) -> tuple[str, ...]:
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if not name.startswith(".")]
        relative = Path(folder).relative_to(root)
        found += [
            (relative / name).as_posix()
            for name in names
            if name.endswith(suffixes) and not name.startswith(".")
        ]
    return tuple(sorted(found))


def _json_lines(path: Path, text: str) -> Iterator[str]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: not valid JSON: {error}") from error
        document = value.get("text") if isinstance(value, dict) else None
        if not isinstance(document, str):
            raise DataError(f'{path}:{number}: expected an object with a string under "text"')
        yield document
