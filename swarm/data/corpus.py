"""The documents of a corpus: which files, in which order, and which of them are held out.

A corpus is the Python standard library of this machine (real text that is always there) or a
folder of files with one of `SUFFIXES`. Files are taken in the order of their relative
paths, by bytes; beyond this order their names do not matter, nor does where the folder lies. So
equal files give equal corpora.
"""

from __future__ import annotations

import json
import os
import platform
import re
import stat
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from blake3 import blake3

from swarm.data.documents import LINES, TEXT, Tally, file_documents
from swarm.data.file_digests import FileDigests
from swarm.data.input_files import TABLE
from swarm.data.tokenizer import Tokenizer, Tokens
from swarm.errors import DataError

SUFFIXES = (*LINES, ".md", TABLE, ".py", ".txt", ".txt.zst")
STANDARD_LIBRARY = "standard library of Python"
"""With the version behind it, the name of the corpus that every machine has."""
MAX_NAME = 64
_OMITTED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
)
_OF_THE_MACHINE = re.compile(r"_sysconfigdata.*|config-.*/.*|(site|user)customize\.py")
"""A file that an installation writes, with its own paths in it."""
_HELD_OUT_ONE_IN = 50


@dataclass(frozen=True)
class Corpus:
    """A sorted list of files.

    Attributes:
        name: for people; nothing depends on it.
        root: the folder that holds the files, absolute.
        files: paths relative to `root`, with forward slashes, sorted.
        unlisted: paths of a kind that is read, but no files, each with the reason.
        column: where .jsonl lines and .parquet rows have their text.
    """

    name: str
    root: Path
    files: tuple[str, ...]
    unlisted: tuple[tuple[str, str], ...] = ()
    column: str = TEXT
    mixture: ClassVar[tuple[tuple[str, float], ...]] = ()

    def documents(self, tally: Tally | None = None) -> Iterator[bytes]:
        """The documents that are not blank, in order; see `swarm.data.documents`.

        Args:
            tally: takes up all that is not read, `unlisted` included.

        Raises:
            DataError: see `file_documents`; or a file could be read at first, and then no more.
        """
        tally = tally or Tally()
        for what, reason in self.unlisted:
            tally.add(what, reason)
        for file in self.files:
            found = file_documents(self.root / file, file, tally, self.column)
            if found is not None:
                yield from found
                tally.files += 1

    def tokens(self, documents: Iterable[bytes], tokenizer: Tokenizer) -> Iterator[Tokens]:
        """Token ids of each document, closed."""
        return tokenizer.encoded(documents)

    def fingerprint(self, digests: FileDigests | None = None) -> str:
        """Digest of the names and contents of the files, wherever they lie.

        Reads them, a second or so a GB, but for those whose digests are known. Equal fingerprints
        mean that a cache of the corpus still holds.

        Raises:
            DataError: a file of the list is gone.
        """
        listed = fingerprint_of(self.root, self.files, digests)
        said = json.dumps([listed, self.unlisted, self.column])
        return blake3(said.encode()).hexdigest()


def fingerprint_of(root: Path, files: Iterable[str], digests: FileDigests | None = None) -> str:
    """Digest of the names and contents of files.

    Raises:
        DataError: one of them is gone.
    """
    names = list(files)
    listed = list(zip(names, (digests or FileDigests()).of(root, names), strict=True))
    return blake3(json.dumps(listed).encode()).hexdigest()


def size_of(root: Path, files: Iterable[str]) -> int:
    """Bytes of files; one that is gone has none."""
    return sum(path.stat().st_size for file in files if (path := root / file).exists())


def open_corpus(folder: str | None, column: str = TEXT) -> Corpus:
    """The corpus in `folder`, or the Python standard library when there is none.

    Raises:
        DataError: the folder is missing or holds no file of a kind we read.
    """
    return standard_library_corpus() if folder is None else folder_corpus(Path(folder), column)


def standard_library_corpus() -> Corpus:
    """The .py sources of this interpreter's standard library, about 11 MB.

    Tests, installed packages and files that describe the machine are left out, so that machines
    with the same Python agree.

    Raises:
        DataError: this Python came without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files, unlisted = _list_files(root, (".py",), _OMITTED_FOLDERS)
    files = tuple(file for file in files if not _OF_THE_MACHINE.fullmatch(file))
    if not files:
        raise DataError(f"{root}: holds no .py files", hint="name a folder of text: --corpus DIR")
    return Corpus(f"{STANDARD_LIBRARY} {platform.python_version()}", root, files, unlisted)


def folder_corpus(folder: Path, column: str = TEXT) -> Corpus:
    """All files of our `SUFFIXES` below `folder`; hidden files and folders are left out.

    Raises:
        DataError: the folder is missing or holds no file of these kinds.
    """
    root = Path(os.path.abspath(folder.expanduser()))
    if not root.is_dir():
        what = "is no folder" if root.exists() else "no such folder"
        raise DataError(
            f"{root}: {what}", hint="--corpus, or corpus.folder, names a folder of text"
        )
    files, unlisted = _list_files(root, SUFFIXES)
    if not files:
        why = "".join(f"; {what}: {reason}" for what, reason in unlisted[:3])
        raise DataError(f"{root}: holds no file with {', '.join(SUFFIXES)}{why}")
    return Corpus(printable_name(root.name) or "text", root, files, unlisted, column)


def is_held_out(content: bytes) -> bool:
    """Whether a document is never trained on: by its content alone, everywhere the same.

    Copies of a text share its fate, and no list of held-out files needs to travel.
    """
    return _digest(content) % _HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class Split:
    """Which documents of a corpus are held out: those of `is_held_out`, or `instead`.

    Attributes:
        instead: digest of the document that is held out where by chance no other is: the smallest.
    """

    instead: int | None = None

    @staticmethod
    def of(documents: Iterable[bytes]) -> Split:
        """The split of a corpus; reads up to the first document that is held out."""
        smallest: int | None = None
        for content in documents:
            if is_held_out(content):
                return Split()
            digest = _digest(content)
            smallest = digest if smallest is None else min(smallest, digest)
        return Split(smallest)

    def holds_out(self, content: bytes) -> bool:
        """Whether a document of the corpus is never trained on."""
        return _digest(content) == self.instead or is_held_out(content)


def _digest(content: bytes) -> int:
    return int.from_bytes(blake3(content).digest(), "big")


def printable_name(name: str) -> str:
    """A folder's name as people may see it."""
    return "".join(c if c.isprintable() else "_" for c in name)[:MAX_NAME].strip()


def _list_files(
    root: Path, suffixes: tuple[str, ...], omitted: frozenset[str] = frozenset()
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Files of these kinds, and other paths of these kinds, both sorted."""
    files: list[str] = []
    unlisted: list[tuple[str, str]] = []

    def cannot_list(error: OSError) -> None:
        unlisted.append(
            (os.path.relpath(error.filename, root), f"cannot be read: {error.strerror}")
        )

    for folder, subfolders, names in os.walk(root, onerror=cannot_list):
        subfolders[:] = [n for n in subfolders if not n.startswith(".") and n not in omitted]
        relative = Path(folder).relative_to(root)
        for name in subfolders:
            if os.path.islink(os.path.join(folder, name)):
                reason = "a link to a folder, which is not followed"
                unlisted.append(((relative / name).as_posix(), reason))
        for name in names:
            if name.startswith(".") or not name.endswith(suffixes):
                continue
            file = (relative / name).as_posix()
            reason = _no_file(os.path.join(folder, name))
            if reason:
                unlisted.append((file, reason))
            else:
                files.append(file)
    return tuple(sorted(files, key=os.fsencode)), tuple(sorted(unlisted))


def _no_file(path: str) -> str:
    """Why a name is not of a regular file; empty if it is."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return "" if stat.S_ISREG(mode) else "a pipe, socket or device"
