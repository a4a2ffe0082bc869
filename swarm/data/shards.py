"""Memory-mapped token shards of a corpus, built once and cached on disk.

A cache is one folder, `corpus-KEY`, of `NNNNN.bin` files (little-endian token ids and nothing else)
and `header.json`, which lists them with their sizes and digests and ends with a digest of itself.
It is written beside its place and renamed, so it is there whole or not at all.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from swarm.data.corpus import Corpus, document_bytes, is_held_out
from swarm.data.tokenise import NUM_IDS, document_tokens
from swarm.errors import DataError

_FORMAT = "byte-1"
_HEADER = "header.json"
_SHARD_TOKENS = 2**27
"""A shard is closed by the first document that reaches this size."""

logger = logging.getLogger(__name__)

Tokens = NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Shards:
    """The training tokens of a corpus: memory-mapped arrays [number of tokens], read-only."""

    arrays: tuple[Tokens, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens in all shards."""
        return sum(len(array) for array in self.arrays)


class _Torn(Exception):
    """A cache that is not what its header says."""


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
        return Shards(tuple(_map(folder / name, dtype, *of) for name, *of in header["shards"]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise _Torn(f"{type(error).__name__}: {error}") from error


def _map(path: Path, dtype: np.dtype[Any], num_tokens: int, digest: str) -> Tokens:
    size_bytes = path.stat().st_size
    if size_bytes != num_tokens * dtype.itemsize:
        raise _Torn(f"{path.name} has {size_bytes} bytes instead of {num_tokens} tokens")
    if blake3().update_mmap(path).hexdigest() != digest:
        raise _Torn(f"the content of {path.name} was changed")
    return np.memmap(path, dtype=dtype, mode="r")


def _build(corpus: Corpus, folder: Path, shard_tokens: int) -> None:
    """Writes a cache beside `folder` and renames it; a process that was faster wins."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    beside = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        contents = (document_bytes(text) for text in corpus.documents())
        training = (content for content in contents if not is_held_out(content))
        shards: list[tuple[str, int, str]] = []
        while (written := _write_shard(beside, len(shards), training, shard_tokens)) is not None:
            shards.append(written)
        if not shards:
            raise DataError(f"{corpus.name}: no text is left for training", hint="add documents")
        header: dict[str, Any] = {"dtype": token_dtype(NUM_IDS).str, "shards": shards}
        header["digest"] = _digest_of(header)
        with (beside / _HEADER).open("wb") as file:
            _write(file, json.dumps(header).encode())
        _rename(beside, folder)
    finally:
        _remove(beside)


def _rename(beside: Path, folder: Path) -> None:
    try:
        beside.rename(folder)
    except OSError:
        # Another process was faster. It read the same files, so its cache is as good as ours.
        if not folder.is_dir():
            raise


def _write_shard(
    folder: Path, index: int, contents: Iterator[bytes], shard_tokens: int
) -> tuple[str, int, str] | None:
    """Writes the next shard: (file name, tokens, digest), or None when nothing is left."""
    first = next(contents, None)
    if first is None:
        return None
    dtype, digest, num_tokens = token_dtype(NUM_IDS), blake3(), 0
    name = f"{index:05}.bin"
    with (folder / name).open("wb") as file:
        for content in itertools.chain((first,), contents):
            data = document_tokens(content).astype(dtype).tobytes()
            digest.update(data)
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
