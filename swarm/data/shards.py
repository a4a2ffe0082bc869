"""Memory-mapped token shards of a corpus, built once and cached on disk.

A cache is one folder, `corpus-KEY`, of `NNNNN.bin` files (little-endian token ids and nothing else)
and `header.json`, which lists them with their sizes and digests, says what the corpus was found to
hold, and ends with a digest of itself. It is written beside its place and renamed, so it is there
whole or not at all.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from swarm.data.corpus import Corpus, Split
from swarm.data.documents import Skipped
from swarm.data.tokenise import NUM_IDS, document_tokens
from swarm.errors import DataError

_FORMAT = "byte-2"
_HEADER = "header.json"
_SHARD_TOKENS = 2**27
"""A shard is closed by the first document that reaches this size."""
PROGRESS_S = 15.0
"""How often a build says how far it is."""

logger = logging.getLogger(__name__)

Tokens = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Contents:
    """The contents of a corpus.

    Attributes:
        digest: BLAKE3 of all training tokens in order, little-endian, however they are cut into
            shards; hexadecimal.
        files: those that are text.
        documents: those that are trained on.
        held_out_documents: the others.
        held_out_tokens: their tokens.
        skipped: files, folders and lines that are not read.
        skipped_first: the first of them, with the reason.
    """

    digest: str = ""
    files: int = 0
    documents: int = 0
    held_out_documents: int = 0
    held_out_tokens: int = 0
    skipped: int = 0
    skipped_first: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shards:
    """The training tokens of a corpus: memory-mapped arrays [number of tokens], read-only."""

    arrays: tuple[Tokens, ...]
    contents: Contents = Contents()

    @property
    def num_tokens(self) -> int:
        """Tokens in all shards."""
        return sum(len(array) for array in self.arrays)

    def windows(self, sequence_length: int) -> list[int]:
        """How many windows of T + 1 tokens, at a stride of T, each shard holds."""
        return [max(0, len(array) - 1) // sequence_length for array in self.arrays]

    def summary(self) -> str:
        """Files, documents, tokens, split and all that was skipped, in a line."""
        found = self.contents
        skipped = f"; {found.skipped} skipped" if found.skipped else ""
        if found.skipped_first:
            rest = ", ..." if found.skipped > len(found.skipped_first) else ""
            skipped += f" ({', '.join(found.skipped_first)}{rest})"
        return (
            f"{found.files:,} files, {found.documents + found.held_out_documents:,} documents, "
            f"{self.num_tokens + found.held_out_tokens:,} tokens: {self.num_tokens:,} in "
            f"{found.documents:,} documents to train on, {found.held_out_tokens:,} in "
            f"{found.held_out_documents:,} held out{skipped}"
        )


class _Torn(Exception):
    """A cache that contradicts its header."""


def open_shards(corpus: Corpus, cache: Path, *, shard_tokens: int = _SHARD_TOKENS) -> Shards:
    """The training documents of a corpus (held-out ones are left out) as shards.

    A cache is found by the corpus's fingerprint; one that is torn or was changed is built anew,
    which gives the same tokens. Every byte of it is checked: about 0.4 s per GB.

    Args:
        corpus: its documents.
        cache: folder for caches; made when missing.
        shard_tokens: a shard is closed by the first document that reaches this size.

    Raises:
        DataError: no document is left for training, or a file cannot be read.
    """
    named = json.dumps([_FORMAT, shard_tokens, corpus.fingerprint()])
    folder = cache / f"corpus-{blake3(named.encode()).hexdigest()[:16]}"
    if folder.is_dir():
        try:
            return _open(folder)
        except _Torn as torn:
            logger.warning("building %s anew: %s", folder.name, torn)
            _remove(folder)
    _build(corpus, folder, shard_tokens)
    try:
        return _open(folder)
    except _Torn as torn:
        raise DataError(f"{folder}: just built and already torn: {torn}") from torn


def token_dtype(num_ids: int) -> np.dtype[Any]:
    """The smallest of our two dtypes on disk that holds `num_ids` token ids."""
    return np.dtype("<u2") if num_ids <= 2**16 else np.dtype("<u4")


def _open(folder: Path) -> Shards:
    """Maps a cache; raises `_Torn` unless every byte is as its header says."""
    try:
        header = json.loads((folder / _HEADER).read_text(encoding="utf-8"))
        stated = header.pop("digest")
        if stated != _digest_of(header):
            raise _Torn("the header was changed")
        dtype = np.dtype(header["dtype"])
        contents = header["contents"]
        contents["skipped_first"] = tuple(contents["skipped_first"])
        arrays = tuple(_map(folder / name, dtype, *of) for name, *of in header["shards"])
        return Shards(arrays, Contents(**contents))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _Torn(f"{type(error).__name__}: {error}") from error


def _map(path: Path, dtype: np.dtype[Any], num_tokens: int, digest: str) -> Tokens:
    size_bytes = path.stat().st_size
    expected_bytes = num_tokens * dtype.itemsize
    if size_bytes != expected_bytes:
        raise _Torn(
            f"{path.name} has {size_bytes} bytes instead of {expected_bytes}, which are "
            f"{num_tokens} tokens of {dtype.itemsize} bytes"
        )
    if blake3().update_mmap(path).hexdigest() != digest:
        raise _Torn(f"the content of {path.name} was changed")
    return np.memmap(path, dtype=dtype, mode="r")


def _build(corpus: Corpus, folder: Path, shard_tokens: int) -> None:
    """Writes a cache beside `folder` and renames it; a process that was faster wins."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        reading = _Reading(corpus)
        training = reading.training_documents()
        shards: list[tuple[str, int, str]] = []
        while (
            written := _write_shard(beside, len(shards), training, shard_tokens, reading.digest)
        ) is not None:
            shards.append(written)
        if not shards:
            raise _no_text(corpus, reading)
        header: dict[str, Any] = {
            "dtype": token_dtype(NUM_IDS).str,
            "shards": shards,
            "contents": asdict(reading.contents()),
        }
        header["digest"] = _digest_of(header)
        with (beside / _HEADER).open("wb") as file:
            _write(file, json.dumps(header).encode())
        _rename(beside, folder)
    finally:
        _remove(beside)


class _Reading:
    """One pass through a corpus: hands the training documents out and counts everything."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self.digest = blake3()
        """Of the tokens that were written."""
        self.skipped = Skipped()
        self._files = self._documents = 0
        self.held_out_documents = self._held_out_tokens = 0

    def training_documents(self) -> Iterator[bytes]:
        """The documents that are not held out; says every 15 s how far it is."""
        split = Split.of(self._corpus.documents())
        said_s, num_bytes = time.monotonic(), 0
        for documents in self._corpus.documents_by_file(self.skipped):
            self._files += 1
            for content in documents:
                num_bytes += len(content)
                if time.monotonic() - said_s >= PROGRESS_S:
                    said_s = time.monotonic()
                    self._say_progress(num_bytes)
                if split.holds_out(content):
                    self.held_out_documents += 1
                    self._held_out_tokens += len(content) + 1
                else:
                    self._documents += 1
                    yield content

    def _say_progress(self, num_bytes: int) -> None:
        logger.info(
            "tokenising %s: %.0f MB so far, file %d of %d",
            self._corpus.name, num_bytes / 1e6, self._files, len(self._corpus.files),
        )  # fmt: skip

    def contents(self) -> Contents:
        """The contents, once the pass is through."""
        return Contents(
            self.digest.hexdigest(),
            self._files,
            self._documents,
            self.held_out_documents,
            self._held_out_tokens,
            self.skipped.count,
            tuple(self.skipped.named),
        )


def _no_text(corpus: Corpus, reading: _Reading) -> DataError:
    if reading.held_out_documents:
        found = f"its {reading.held_out_documents} documents are all held out"
    else:
        found = "; ".join(("it holds no text", *reading.skipped.named))
    return DataError(
        f"{corpus.root}: no text is left for training: {found}",
        hint="add documents; texts of more than 64 KiB are cut into several",
    )


def _rename(beside: Path, folder: Path) -> None:
    try:
        beside.rename(folder)
    except OSError:
        # Another process was faster. It read the same files, so its cache is as good as ours.
        if not folder.is_dir():
            raise


def _write_shard(
    folder: Path, index: int, contents: Iterator[bytes], shard_tokens: int, all_tokens: blake3
) -> tuple[str, int, str] | None:
    """Writes the next shard: (file name, tokens, digest), or None when nothing is left.

    Its tokens also go into the digest of all tokens.
    """
    first = next(contents, None)
    if first is None:
        return None
    dtype, digest, num_tokens = token_dtype(NUM_IDS), blake3(), 0
    name = f"{index:05}.bin"
    with (folder / name).open("wb") as file:
        for content in itertools.chain((first,), contents):
            data = document_tokens(content).astype(dtype).tobytes()
            digest.update(data)
            all_tokens.update(data)
            file.write(data)
            num_tokens += len(content) + 1
            if num_tokens >= shard_tokens:
                break
        _write(file, b"")
    return name, num_tokens, digest.hexdigest()


def _write(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.flush()
    os.fsync(file.fileno())


def _digest_of(header: dict[str, Any]) -> str:
    return blake3(json.dumps(header, sort_keys=True).encode()).hexdigest()


def _remove(folder: Path) -> None:
    """Removes a folder that may be gone, or be removed by another process at the same time."""
    shutil.rmtree(folder, ignore_errors=True)
