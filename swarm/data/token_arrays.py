"""Tokens from other tools: .npy arrays and nanoGPT's .bin files, as documents of ids.

Here a document is the bytes of its ids, little-endian uint32, without the closing id. So it has a
digest like a text, and the same rules find held-out documents and copies.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from blake3 import blake3

from swarm.data.corpus import fingerprint_of, list_files, printable_name, size_of
from swarm.data.input_files import FileDigests, Kind, kind_of
from swarm.data.tally import HIDDEN, Tally
from swarm.data.tokenizer import Tokenizer, Tokens, token_dtype
from swarm.errors import DataError

SUFFIXES = (".npy", ".bin")
MAX_DOCUMENT_TOKENS = 2**14
"""Most ids of a document. Longer documents are cut, like texts."""
_MAGIC = 20240520
"""First of the 256 int32 at the head of .bin files of llm.c and modded-nanogpt. [1] is the version,
[2] the number of tokens. The tokens follow as uint16. Files of nanoGPT begin with their tokens."""
_HEADER_INTS = 256
_READ_TOKENS = 2**22
_SURE = 64
"""Number of ids. If every second id is 0, the file has 4 bytes per id but was read with 2."""


@dataclass(frozen=True)
class ReadyTokens:
    """A folder of ready tokens; see `swarm.data.shard_writer.Source`.

    Attributes:
        name: the name for people.
        root: the folder.
        files: paths relative to the folder, sorted.
        num_ids: upper bound of ids.
        end_of_text: id that closes a document in these files.
        unlisted: paths of .npy and .bin files that are not read, each with the reason.
        unread: paths that are not read because of their suffix, each with the suffix.
    """

    name: str
    root: Path
    files: tuple[str, ...]
    num_ids: int
    end_of_text: int
    unlisted: tuple[tuple[str, str], ...] = ()
    unread: tuple[tuple[str, str], ...] = ()
    mixture: ClassVar[tuple[tuple[str, float], ...]] = ()

    def fingerprint(self, digests: FileDigests | None = None) -> str:
        """See `Source`."""
        said = [fingerprint_of(self.root, self.files, digests), self.end_of_text]
        return blake3(json.dumps(said).encode()).hexdigest()

    def documents(self, tally: Tally | None = None) -> Iterator[bytes]:
        """See `Source`. No file is skipped, because all were made as tokens.

        Raises:
            DataError: a file has no tokens of this tokenizer.
        """
        tally = tally or Tally()
        for what, reason in self.unlisted:
            tally.add(what, reason)
        for what, suffix in self.unread:
            tally.leave(what, suffix)
        for file in self.files:
            yield from self._documents_of(file)
            tally.finished(size_of(self.root, (file,)))

    def tokens(self, documents: Iterable[bytes], tokenizer: Tokenizer) -> Iterator[Tokens]:
        """See `Source`."""
        for document in documents:
            ids = np.frombuffer(document, dtype="<u4")
            yield np.append(ids, np.uint32(tokenizer.end_of_text))

    def _documents_of(self, file: str) -> Iterator[bytes]:
        tokens = read_tokens(self.root / file, self.num_ids)
        begun = np.empty(0, dtype="<u4")
        for start in range(0, len(tokens), _READ_TOKENS):
            some = np.asarray(tokens[start : start + _READ_TOKENS])
            if len(some) and not 0 <= int(some.min()) <= int(some.max()) < self.num_ids:
                raise DataError(
                    f"{self.root / file}: has ids from {some.min()} to {some.max()}, and the "
                    f"tokenizer has ids from 0 to {self.num_ids - 1}",
                    hint="name the tokenizer that made these tokens",
                )
            begun = np.concatenate([begun, some.astype("<u4")])
            ends = np.flatnonzero(begun == self.end_of_text)
            for piece in np.split(begun, ends + 1)[:-1]:
                yield from _cut(piece[:-1])
            begun = begun[ends[-1] + 1 :] if len(ends) else begun
            whole = len(begun) // MAX_DOCUMENT_TOKENS * MAX_DOCUMENT_TOKENS
            yield from _cut(begun[:whole])
            begun = begun[whole:]
        yield from _cut(begun)


def ready_tokens(
    folder: Path, tokenizer: Tokenizer, end_of_text: int | None, *, follow_links: bool = False
) -> ReadyTokens | None:
    """The .npy and .bin files below a folder, except hidden files. None if there are none.

    `end_of_text` is the id that closes documents in these files, by default the tokenizer's. Links
    are followed as for texts.

    Raises:
        DataError: the folder has texts too. A .json file is allowed, because it may describe the
            tokens.
    """
    root = Path(os.path.abspath(folder.expanduser()))
    files, unlisted, unread = list_files(
        root, lambda name: name.lower().endswith(SUFFIXES), follow_links=follow_links
    )
    if not files:
        return None
    for name, suffix in unread:
        if suffix != HIDDEN and kind_of(name) not in (None, Kind.JSON):
            raise DataError(
                f"{root}: has tokens ({files[0]}) and texts ({name})",
                hint="keep them in folders of their own, and make shards of each",
            )
    end = tokenizer.end_of_text if end_of_text is None else end_of_text
    name = printable_name(root.name)
    return ReadyTokens(name, root, files, tokenizer.num_ids, end, unlisted, unread)


def read_tokens(path: Path, num_ids: int) -> Tokens:
    """The memory-mapped tokens of a file. `num_ids` is the tokenizer's.

    A .npy file names the size of its integers. In a .bin file ids have 2 bytes, or 4 if the
    tokenizer has more than 65,536 ids. In llm.c's files with a header ids have 2 bytes.

    Raises:
        DataError: the file is no one-dimensional array of integers of this size, or is torn.
    """
    try:
        if path.suffix.lower() == ".npy":
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise DataError(
                    f"{path}: an array of {array.dtype} with shape {array.shape}",
                    hint="tokens are one row of integers",
                )
            tokens: Tokens = array
            return tokens
        size = path.stat().st_size
        head = np.fromfile(path, dtype="<i4", count=_HEADER_INTS)
        if len(head) == _HEADER_INTS and head[0] == _MAGIC:
            if head[1] != 1 or size != 4 * _HEADER_INTS + 2 * int(head[2]):
                raise DataError(
                    f"{path}: its header says version {head[1]} and {head[2]} tokens, and it has "
                    f"{size} bytes",
                    hint="it is torn, or made by another version: fetch or make it again",
                )
            return np.memmap(path, dtype="<u2", mode="r", offset=4 * _HEADER_INTS)
        dtype = token_dtype(num_ids)
        if size % dtype.itemsize or not size:
            raise DataError(
                f"{path}: {size} bytes are no tokens of {dtype.itemsize} bytes each",
                hint="it is torn, or of another tokenizer: fetch or make it again",
            )
        found = np.memmap(path, dtype=dtype, mode="r")
        _require_size(path, found)
        return found
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error


def _require_size(path: Path, tokens: Tokens) -> None:
    """Refuses a file with ids of 4 bytes that is read with 2."""
    first = np.asarray(tokens[: 2 * _SURE])
    if first.itemsize == 2 and len(first) == 2 * _SURE and not first[1::2].any() and first.any():
        raise DataError(
            f"{path}: its tokens seem to have 4 bytes each, and this tokenizer's have 2",
            hint="save them as uint16, or as .npy, which names their size",
        )


def _cut(tokens: Tokens) -> Iterator[bytes]:
    for start in range(0, len(tokens), MAX_DOCUMENT_TOKENS):
        yield tokens[start : start + MAX_DOCUMENT_TOKENS].tobytes()
