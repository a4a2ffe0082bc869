"""The documents of a corpus: its files, their order, and the held-out documents.

A mixture reads several folders of text as one stream, each with its share of the bytes.
"""

from __future__ import annotations

import collections
import json
import os
import platform
import re
import stat
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

from blake3 import blake3

from swarm.data.documents import TEXT, file_documents
from swarm.data.input_files import SUFFIXES, FileDigests, kind_of, suffix_of
from swarm.data.tally import HIDDEN, NO_SUFFIX, Tally
from swarm.data.tokenizer import Tokenizer, Tokens
from swarm.errors import DataError

STANDARD_LIBRARY = "standard library of Python"
"""The name of the corpus of every machine, followed by Python's version."""
MAX_NAME = 64
_OMITTED_FOLDERS = frozenset(
    {"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"}
)
_OF_THE_MACHINE = re.compile(r"_sysconfigdata.*|config-.*/.*|(site|user)customize\.py")
"""Names of files that contain an installation's own paths."""
_HELD_OUT_ONE_IN = 50


@dataclass(frozen=True)
class Corpus:
    """A sorted list of files.

    Attributes:
        name: name for people. Nothing depends on it.
        root: the absolute path of the folder with the files.
        files: paths relative to `root`, with forward slashes, sorted.
        unlisted: paths that may be text but are not read, each with the reason.
        column: the key or column of the text in JSON objects and .parquet rows.
        unread: paths that are not read because of their suffix, each with the suffix.
    """

    name: str
    root: Path
    files: tuple[str, ...]
    unlisted: tuple[tuple[str, str], ...] = ()
    column: str = TEXT
    unread: tuple[tuple[str, str], ...] = ()
    mixture: ClassVar[tuple[tuple[str, float], ...]] = ()

    def documents(self, tally: Tally | None = None) -> Iterator[bytes]:
        """The documents in order, except blank documents; see `swarm.data.documents`.

        Args:
            tally: counts all skipped input, including `unlisted` and `unread`.

        Raises:
            DataError: see `file_documents`. Or a file becomes unreadable while it is read.
        """
        tally = tally or Tally()
        for what, reason in self.unlisted:
            tally.add(what, reason)
        for what, suffix in self.unread:
            tally.leave(what, suffix)
        for file in self.files:
            found = file_documents(self.root / file, file, tally, self.column)
            if found is not None:
                yield from found
                tally.finished(size_of(self.root, (file,)))

    def tokens(self, documents: Iterable[bytes], tokenizer: Tokenizer) -> Iterator[Tokens]:
        """Token ids of each document, closed."""
        return tokenizer.encoded(documents)

    def fingerprint(self, digests: FileDigests | None = None) -> str:
        """Digest of the names and contents of the files. It does not depend on their folder.

        Reads the files without known digests, at about a second per GB. A cache of the corpus stays
        valid as long as the fingerprint does not change.

        Raises:
            DataError: a file of the list is missing.
        """
        listed = fingerprint_of(self.root, self.files, digests)
        said = json.dumps([listed, self.unlisted, self.column])
        return blake3(said.encode()).hexdigest()


def fingerprint_of(root: Path, files: Iterable[str], digests: FileDigests | None = None) -> str:
    """Digest of the names and contents of files.

    Raises:
        DataError: a file is missing.
    """
    names = list(files)
    listed = list(zip(names, (digests or FileDigests()).of(root, names), strict=True))
    return blake3(json.dumps(listed).encode()).hexdigest()


def size_of(root: Path, files: Iterable[str]) -> int:
    """Bytes of files. A missing file counts as 0."""
    return sum(path.stat().st_size for file in files if (path := root / file).exists())


def open_corpus(folder: str | None, column: str = TEXT, *, follow_links: bool = False) -> Corpus:
    """The corpus in `folder`, or the Python standard library if `folder` is None.

    Raises:
        DataError: see `folder_corpus`.
    """
    if folder is None:
        return standard_library_corpus()
    return folder_corpus(Path(folder), column, follow_links=follow_links)


def standard_library_corpus() -> Corpus:
    """The .py sources of this interpreter's standard library, about 11 MB.

    Tests, installed packages and files that describe the machine are left out, so that machines
    with the same Python agree.

    Raises:
        DataError: this Python came without its sources.
    """
    root = Path(sysconfig.get_path("stdlib"))
    found = list_files(root, lambda name: name.endswith(".py"), _OMITTED_FOLDERS)
    files = tuple(file for file in found.files if not _OF_THE_MACHINE.fullmatch(file))
    if not files:
        raise DataError(f"{root}: holds no .py files", hint="name a folder of text: --corpus DIR")
    return Corpus(f"{STANDARD_LIBRARY} {platform.python_version()}", root, files, found.unlisted)


def folder_corpus(folder: Path, column: str = TEXT, *, follow_links: bool = False) -> Corpus:
    """Like `listed_corpus`, but requires at least one file.

    Raises:
        DataError: the folder is missing or has no file of these kinds. The error names some of its
            files.
    """
    corpus = listed_corpus(folder, column, follow_links=follow_links)
    if not corpus.files:
        tally = Tally()
        collections.deque(corpus.documents(tally), maxlen=0)
        raise DataError(f"{corpus.root}: holds no file with {SUFFIXES}; {tally.examples()}")
    return corpus


def listed_corpus(folder: Path, column: str = TEXT, *, follow_links: bool = False) -> Corpus:
    """All files below `folder` that `kind_of` knows, except hidden files and folders.

    A link to a file inside the folder is read. A link out of the folder, or to a folder, is
    followed only with `follow_links`, because its target could be published as held-out text.

    Raises:
        DataError: the folder is missing.
    """
    root = Path(os.path.abspath(folder.expanduser()))
    if not root.is_dir():
        what = "is no folder" if root.exists() else "no such folder"
        raise DataError(
            f"{root}: {what}", hint="--corpus, or corpus.folder, names a folder of text"
        )
    found = list_files(root, lambda name: kind_of(name) is not None, follow_links=follow_links)
    name = printable_name(root.name) or "text"
    return Corpus(name, root, found.files, found.unlisted, column, found.unread)


def is_held_out(content: bytes) -> bool:
    """Whether a document is held out from training, which only its content decides.

    So all machines agree without a list of held-out files, and copies of a text are treated alike.
    """
    return _digest(content) % _HELD_OUT_ONE_IN == 0


@dataclass(frozen=True)
class Split:
    """The held-out documents of a corpus: those of `is_held_out`, or `instead`.

    Attributes:
        instead: the smallest digest of all documents. The document with this digest is held out if
            by chance no other document is.
    """

    instead: int | None = None

    @staticmethod
    def of(documents: Iterable[bytes]) -> Split:
        """The split of a corpus. Reads up to the first held-out document."""
        smallest: int | None = None
        for content in documents:
            if is_held_out(content):
                return Split()
            digest = _digest(content)
            smallest = digest if smallest is None else min(smallest, digest)
        return Split(smallest)

    def holds_out(self, content: bytes) -> bool:
        """Whether a document of the corpus is held out from training."""
        return _digest(content) == self.instead or is_held_out(content)


def _digest(content: bytes) -> int:
    return int.from_bytes(blake3(content).digest(), "big")


def printable_name(name: str) -> str:
    """A folder's name in printable characters."""
    return "".join(c if c.isprintable() else "_" for c in name)[:MAX_NAME].strip()


class Listing(NamedTuple):
    """The files below a folder. Paths are relative to it, and sorted.

    Attributes:
        files: the wanted files.
        unlisted: files that may be wanted but cannot be used, each with the reason.
        unread: files with unwanted names, each with the suffix.
    """

    files: tuple[str, ...]
    unlisted: tuple[tuple[str, str], ...]
    unread: tuple[tuple[str, str], ...]


def list_files(
    root: Path,
    is_wanted: Callable[[str], bool],
    omitted: frozenset[str] = frozenset(),
    *,
    follow_links: bool = False,
) -> Listing:
    """Lists the files below a folder.

    Args:
        root: the folder, absolute.
        is_wanted: whether to read a file, by its name.
        omitted: names of folders to skip without a record.
        follow_links: whether to follow links to folders, and links out of `root`.
    """
    real_root = os.path.realpath(root)
    entered = {real_root}
    files: list[str] = []
    unlisted: list[tuple[str, str]] = []
    unread: list[tuple[str, str]] = []

    def cannot_list(error: OSError) -> None:
        unlisted.append(
            (os.path.relpath(error.filename, root), f"cannot be read: {error.strerror}")
        )

    def may_enter(path: str, shown: str) -> bool:
        name, real = os.path.basename(path), os.path.realpath(path)
        if name.startswith("."):
            unread.append((shown, HIDDEN))
        elif os.path.islink(path) and not follow_links:
            unlisted.append((shown, "a link to a folder, which is not followed"))
        elif real in entered:
            unlisted.append((shown, "already read by another path"))
        else:
            entered.add(real)
            return True
        return False

    for folder, subfolders, names in os.walk(root, onerror=cannot_list, followlinks=follow_links):
        within = os.path.relpath(folder, root)
        shown = {name: os.path.normpath(os.path.join(within, name)) for name in subfolders + names}
        subfolders[:] = sorted(
            name
            for name in subfolders
            if name not in omitted and may_enter(os.path.join(folder, name), shown[name])
        )
        for name in names:
            path = os.path.join(folder, name)
            if name.startswith(".") or not is_wanted(name):
                kind = HIDDEN if name.startswith(".") else suffix_of(name) or NO_SUFFIX
                unread.append((shown[name], kind))
            elif reason := _no_file(path, None if follow_links else real_root):
                unlisted.append((shown[name], reason))
            else:
                files.append(shown[name])
    by_bytes = sorted(files, key=os.fsencode)
    return Listing(tuple(by_bytes), tuple(sorted(unlisted)), tuple(sorted(unread)))


def _no_file(path: str, real_root: str | None) -> str:
    """Why a name is no regular file (inside `real_root`, if given). Empty if it is one."""
    try:
        mode = os.stat(path).st_mode
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    if not stat.S_ISREG(mode):
        return "a pipe, socket or device"
    if real_root is None or not os.path.islink(path):
        return ""
    is_within = os.path.commonpath([real_root, os.path.realpath(path)]) == real_root
    return "" if is_within else "a link that leaves the folder, followed with --follow-links"


Shares = tuple[tuple[str, float], ...]
"""Folders and their weights, see `data.mixture`."""


@dataclass(frozen=True)
class Mixture:
    """Documents of several folders, in turn; see `swarm.data.shard_writer.Source`.

    The next document comes from the folder with the fewest bytes so far, divided by its weight.
    Ties go to the first folder. The mixture ends when the chosen folder has no more documents. The
    rest of the other folders is not read. So no document occurs twice, and the shares are exact up
    to a document.

    Attributes:
        name: name for people.
        root: the folder that contains the mixed folders.
        mixture: names and weights of the mixed folders.
        parts: documents of each mixed folder.
    """

    name: str
    root: Path
    mixture: Shares
    parts: tuple[Corpus, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """Paths below `root`."""
        pairs = zip(self.mixture, self.parts, strict=True)
        return tuple(f"{folder}/{file}" for (folder, _), part in pairs for file in part.files)

    @property
    def unread(self) -> tuple[tuple[str, str], ...]:
        """Paths below `root` that are not read because of their suffix, each with the suffix."""
        pairs = zip(self.mixture, self.parts, strict=True)
        return tuple((f"{f}/{path}", kind) for (f, _), part in pairs for path, kind in part.unread)

    def fingerprint(self, digests: FileDigests | None = None) -> str:
        """See `Source`."""
        digests = digests or FileDigests()
        said = [self.mixture, [part.fingerprint(digests) for part in self.parts]]
        return blake3(json.dumps(said).encode()).hexdigest()

    def documents(self, tally: Tally | None = None) -> Iterator[bytes]:
        """See `Source`. The tally names folders that were not read to their end.

        Raises:
            DataError: see `Corpus.documents`.
        """
        tally = tally or Tally()
        streams = [part.documents(tally) for part in self.parts]
        weights = [weight for _, weight in self.mixture]
        taken = [0] * len(streams)
        while True:
            turn = min(range(len(streams)), key=lambda part: (taken[part] / weights[part], part))
            content = next(streams[turn], None)
            if content is None:
                break
            taken[turn] += len(content)
            yield content
        ended = self.mixture[turn][0]
        for (folder, _), stream in zip(self.mixture, streams, strict=True):
            if next(stream, None) is not None:
                tally.add(folder, f"not read to its end, because {ended} ended first")

    def tokens(self, documents: Iterable[bytes], tokenizer: Tokenizer) -> Iterator[Tokens]:
        """See `Source`."""
        return tokenizer.encoded(documents)


def open_mixture(
    folder: str | None,
    shares: Sequence[tuple[str, float]],
    column: str = TEXT,
    *,
    follow_links: bool = False,
) -> Mixture:
    """A mixture of the folders in one folder.

    Raises:
        DataError: a folder is missing or has no text.
    """
    if folder is None:
        names = ", ".join(name for name, _ in shares)
        raise DataError(
            f"the run mixes the folders {names}, and no folder with these was named",
            hint="--corpus DIR",
        )
    root = Path(folder).expanduser().absolute()
    parts = tuple(
        folder_corpus(root / name, column, follow_links=follow_links) for name, _ in shares
    )
    return Mixture(
        printable_name(root.name) or TEXT,
        root,
        tuple((name, weight) for name, weight in shares),
        parts,
    )
