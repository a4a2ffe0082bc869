"""Token shards of a text, memory-mapped: a cache, or a folder that `swarm-data tokenize` made.

Such a folder has `NNNNN.bin` files (only little-endian token ids), perhaps `held_out.jsonl`, and
`header.json`. The header lists the files with their sizes and digests, names the tokenizer,
describes the contents of the text, and ends with its own digest. `swarm.data.shard_writer` makes
the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from blake3 import blake3

from swarm import durable
from swarm.data import shard_writer
from swarm.data.corpus import Corpus, Mixture, Shares, printable_name
from swarm.data.documents import file_documents
from swarm.data.input_files import FileDigests
from swarm.data.tally import Tally
from swarm.data.tokenizer import Tokenizer, Tokens
from swarm.errors import DataError
from swarm.progress import Reporter

logger = logging.getLogger(__name__)

ORIGIN = "origin"
"""A cache's file with the name of its text, its tokenizer and the size of its shards."""
KEPT_CACHES = 3
"""Most caches of tokens in one folder, including the one in use."""


@dataclass(frozen=True)
class Shards:
    """The training tokens of a corpus: read-only memory-mapped arrays [number of tokens]."""

    arrays: tuple[Tokens, ...]
    contents: shard_writer.Contents = field(default_factory=shard_writer.Contents)

    @property
    def num_tokens(self) -> int:
        """Tokens in all shards."""
        return sum(len(array) for array in self.arrays)

    def windows(self, sequence_length: int) -> list[int]:
        """The number of windows of T + 1 tokens, at a stride of T, in each shard."""
        return [max(0, len(array) - 1) // sequence_length for array in self.arrays]

    def summary(self) -> str:
        """Tokens, files, documents, split and left-out documents, in a line."""
        return f"{self.num_tokens:,} tokens; {self.contents.summary()}"


class Torn(Exception):
    """A folder that contradicts its header."""


def open_shards(
    corpus: Corpus | Mixture,
    cache: Path,
    tokenizer: Tokenizer,
    *,
    shard_tokens: int = shard_writer.SHARD_TOKENS,
) -> Shards:
    """The training documents of a corpus as shards.

    A cache is found by the content of the corpus and the tokenizer's name. A damaged or changed
    cache is built again, which gives the same tokens. Every byte of a cache is checked, at about
    0.4 s per GB. A cache is written next to its place and renamed, so it is there whole or not at
    all. After a kill the next start continues the unfinished cache, unless another corpus is
    opened. The cache of a changed text is removed. The newest caches of other texts and tokenizers
    stay, up to `KEPT_CACHES` in all, because a person may return to an earlier text. A second
    process waits for the first.

    Args:
        corpus: the corpus.
        cache: folder for caches, made if missing.
        tokenizer: tokenizer of the run.
        shard_tokens: a shard is closed by the first document that reaches this size.

    Raises:
        DataError: no document is left for training, or a file cannot be read.
        TokenizerError: the tokenizer cannot be run.
    """
    with _locked(cache):
        digests = FileDigests(cache.with_name(f"{cache.name}.digests"))
        named = json.dumps(
            [shard_writer.FORMAT, tokenizer.name, shard_tokens, corpus.fingerprint(digests)]
        )
        folder = cache / f"corpus-{blake3(named.encode()).hexdigest()[:16]}"
        new, origin = durable.beside(folder), [str(corpus.root), tokenizer.name, shard_tokens]
        for unfinished in cache.glob("corpus-*.*"):
            if unfinished != new:
                shutil.rmtree(unfinished)
        if folder.is_dir():
            try:
                shards = open_folder(folder)
                _tidy(cache, folder, origin)
                return _with_unread(shards, corpus)
            except Torn as torn:
                logger.warning("building %s again: %s", folder.name, torn)
                shutil.rmtree(folder)
        new.mkdir(exist_ok=True)
        try:
            shard_writer.write_shards(
                corpus, new, tokenizer, shard_tokens=shard_tokens, digests=digests
            )
        except DataError:
            shutil.rmtree(new)
            raise
        new.rename(folder)
        _tidy(cache, folder, origin)
        try:
            return open_folder(folder)
        except Torn as torn:
            raise DataError(f"{folder}: just built and already torn: {torn}") from torn


def _tidy(cache: Path, used: Path, origin: list[Any]) -> None:
    """Marks a cache as used, and removes caches that it replaces or that exceed the limit.

    A process that has mapped the files of a removed cache keeps their content.
    """
    try:
        _remove_old(cache, used, origin)
    except OSError as error:
        logger.warning("tokens of other texts stay in %s: %s", cache, error.strerror)


def _remove_old(cache: Path, used: Path, origin: list[Any]) -> None:
    durable.write_file(used / ORIGIN, json.dumps(origin).encode())
    others = [path for path in cache.glob("corpus-*") if path != used and path.is_dir()]
    others.sort(key=_used_s, reverse=True)
    replaced = {path for path in others if _origin_of(path) == origin}
    kept = [path for path in others if path not in replaced][: KEPT_CACHES - 1]
    for path in others:
        if path not in kept:
            why = "its text has changed" if path in replaced else "others were used since"
            size = sum(file.stat().st_size for file in path.iterdir())
            logger.info("removing tokens of %s (%.1f MB): %s", path.name, size / 1e6, why)
            shutil.rmtree(path)


def _origin_of(cache: Path) -> list[Any] | None:
    """Text, tokenizer and shard size of a cache. None if their file is missing or damaged."""
    try:
        found = json.loads((cache / ORIGIN).read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, list) else None


def _used_s(cache: Path) -> float:
    """When a cache was used last."""
    path = cache / ORIGIN
    return (path if path.exists() else cache).stat().st_mtime


def _with_unread(shards: Shards, corpus: Corpus | Mixture) -> Shards:
    """Shards of a cache, with the present files that are not read because of their suffix.

    No token depends on these files, so the cache stays valid when such a file is added or removed.
    """
    tally = Tally()
    for what, suffix in corpus.unread:
        tally.leave(what, suffix)
    names = tuple(tally.left)
    return replace(
        shards, contents=replace(shards.contents, unread=tally.unread, unread_names=names)
    )


@contextlib.contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """Makes the folder, and locks it against other processes."""
    cache.mkdir(parents=True, exist_ok=True)
    with cache.with_name(f"{cache.name}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.warning("waiting: another process tokenizes into %s", cache)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@dataclass(frozen=True)
class Prepared:
    """A folder of prepared shards; see `swarm-data tokenize`.

    Attributes:
        name: name of the text.
        root: the folder.
        tokenizer: name of the tokenizer.
        mixture: folders and weights of a mixed text. Empty if it was not mixed.
        pack: tokens of the sequences that documents were packed into. None if they were not packed.
    """

    name: str
    root: Path
    tokenizer: str
    mixture: Shares = ()
    pack: int | None = None

    def open(self, tokenizer: Tokenizer) -> Shards:
        """The shards of this folder, every byte checked.

        Raises:
            DataError: another tokenizer made the shards, or they are damaged. The error names the
                remedy.
        """
        if self.tokenizer != tokenizer.name:
            raise DataError(
                f"{self.root}: its shards were made with the tokenizer {self.tokenizer}, the run "
                f"has {tokenizer.name}",
                hint="swarm-data tokenize with the run's tokenizer, into another folder",
            )
        return self.opened()

    def opened(self) -> Shards:
        """The shards of this folder, every byte checked, whichever tokenizer made them.

        Raises:
            DataError: they are damaged.
        """
        try:
            return open_folder(self.root)
        except Torn as torn:
            raise self._damaged(torn) from torn

    def documents(self) -> Iterator[bytes]:
        """The held-out documents that are kept as text.

        Raises:
            DataError: they are damaged.
        """
        try:
            _checked(self.root / shard_writer.HELD_OUT, *_header_of(self.root)["held_out"])
        except (Torn, OSError, LookupError, TypeError) as error:
            raise self._damaged(error) from error
        yield from (
            file_documents(self.root / shard_writer.HELD_OUT, shard_writer.HELD_OUT, Tally()) or ()
        )

    def _damaged(self, why: Exception) -> DataError:
        return DataError(
            f"{self.root}: {why}",
            hint="remove the folder and make it again with swarm-data tokenize, or fetch it again",
        )


def is_prepared(folder: Path) -> bool:
    """Whether a folder contains shards, even unfinished, instead of text."""
    return (folder / shard_writer.HEADER).is_file() or (folder / shard_writer.PROGRESS).is_file()


def open_prepared(folder: Path) -> Prepared:
    """A folder of shards. Only reads the header.

    Raises:
        DataError: the folder is damaged, has another version, or is not finished.
    """
    if not (folder / shard_writer.HEADER).is_file():
        raise DataError(
            f"{folder}: its shards are not finished",
            hint="run swarm-data tokenize with the same options again: it resumes",
        )
    try:
        header = _header_of(folder)
        mixture = tuple((str(name), float(weight)) for name, weight in header["mixture"])
        name = printable_name(str(header["name"]))
        pack = int(header["pack"]) if "pack" in header else None
        return Prepared(name, folder, str(header["tokenizer"]), mixture, pack)
    except (Torn, LookupError, TypeError, ValueError) as error:
        raise DataError(
            f"{folder / shard_writer.HEADER}: {error}",
            hint="make the folder again with swarm-data tokenize",
        ) from error


def open_folder(folder: Path) -> Shards:
    """Maps the shards of a folder.

    Raises:
        Torn: a byte contradicts the header.
    """
    header = _header_of(folder)
    try:
        dtype = np.dtype(header["dtype"])
        contents = header["contents"]
        for names in ("skipped_names", "unread_names"):
            contents[names] = tuple(contents[names])
        named = header["shards"]
        checked = Reporter(f"checking {folder.name}", "shard").each(named, len(named))
        arrays = tuple(_map(folder / name, dtype, *of) for name, *of in checked)
        return Shards(arrays, shard_writer.Contents(**contents))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise Torn(f"{type(error).__name__}: {error}") from error


def _header_of(folder: Path) -> dict[str, Any]:
    try:
        header: dict[str, Any] = json.loads(
            (folder / shard_writer.HEADER).read_text(encoding="utf-8")
        )
        stated = header.pop("digest")
        if stated != shard_writer.digest_of_header(header):
            raise Torn("the header was changed")
        if header["format"] != shard_writer.FORMAT:
            raise Torn(f"it has the format {header['format']}, not {shard_writer.FORMAT}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise Torn(f"no header of shards: {type(error).__name__}: {error}") from error
    return header


def _map(path: Path, dtype: np.dtype[Any], num_tokens: int, digest: str) -> Tokens:
    _checked(path, num_tokens * dtype.itemsize, digest)
    return np.memmap(path, dtype=dtype, mode="r")


def _checked(path: Path, num_bytes: int, digest: str) -> None:
    size_bytes = path.stat().st_size
    if size_bytes != num_bytes:
        raise Torn(f"{path.name} has {size_bytes} bytes instead of {num_bytes}, as its header says")
    if blake3().update_mmap(path).hexdigest() != digest:
        raise Torn(f"the content of {path.name} was changed")
