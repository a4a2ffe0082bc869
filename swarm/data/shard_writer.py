"""Makes shards of a text, deterministically. After a kill it resumes at the last finished shard.

A finished shard is durable before `progress.json` lists it. A resumed process reads the documents
of finished shards again, because later shards depend on them (copies, the split). It does not
tokenize them again. `header.json` is written last, and marks the folder as finished.
"""

from __future__ import annotations

import bisect
import itertools
import json
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from blake3 import blake3

from swarm import durable
from swarm.data.corpus import Split, size_of
from swarm.data.input_files import FileDigests
from swarm.data.masks import is_repetitive
from swarm.data.tally import Tally
from swarm.data.tokenizer import Tokenizer, Tokens, token_dtype
from swarm.errors import DataError
from swarm.progress import reading

GROUP_TOKENS = 2**22
"""Tokens of a group within which documents are reordered. A group is in memory at once."""


def packed(
    documents: Iterable[Tokens], length: int, end_of_text: int, group_tokens: int = GROUP_TOKENS
) -> Iterator[Tokens]:
    """Packs the tokens of documents into groups of multiples of `length`.

    A document begins with the end-of-text token before it. The rest of a sequence is filled with
    this token: an end-of-text token after an end-of-text token is padding.

    Args:
        documents: each closed by `end_of_text`, with at least one other token.
        length: tokens of a sequence.
        end_of_text: this token's id.
        group_tokens: a group ends with the document that reaches this size.
    """
    group: list[Tokens] = []
    size = 0
    for document in documents:
        group.append(np.roll(document, 1))
        size += len(document)
        if size >= group_tokens:
            yield _in_bins(group, length, end_of_text)
            group, size = [], 0
    if group:
        yield _in_bins(group, length, end_of_text)


def _in_bins(group: list[Tokens], length: int, end_of_text: int) -> Tokens:
    bins: list[list[Tokens]] = []
    room: list[tuple[int, int]] = []
    """Number of free places and index of each bin with room, ascending."""
    for document in sorted(group, key=len, reverse=True):
        place = bisect.bisect_left(room, (len(document), 0))
        if place < len(room):
            free, index = room.pop(place)
        else:
            free, index = -(-len(document) // length) * length, len(bins)
            bins.append([])
        bins[index].append(document)
        if free > len(document):
            bisect.insort(room, (free - len(document), index))
    for free, index in room:
        bins[index].append(np.full(free, end_of_text, group[0].dtype))
    return np.concatenate([part for parts in bins for part in parts])


FORMAT = "swarm-shards-2"
HEADER = "header.json"
PROGRESS = "progress.json"
HELD_OUT = "held_out.jsonl"
SHARD_TOKENS = 2**27
_COPY_BYTES = 16
"""Bytes of a digest that identifies copies."""


class Source(Protocol):
    """A source of documents: folders of text, or a folder of ready tokens."""

    @property
    def name(self) -> str:
        """The name for people."""

    @property
    def root(self) -> Path:
        """The folder."""

    @property
    def files(self) -> tuple[str, ...]:
        """Paths below the folder."""

    @property
    def mixture(self) -> tuple[tuple[str, float], ...]:
        """Folders and their weights. Empty if the text is not mixed."""

    def fingerprint(self, digests: FileDigests | None = None, /) -> str:
        """Equal as long as no file's content changes. `digests` are the known digests."""

    def documents(self, tally: Tally | None = None) -> Iterator[bytes]:
        """All documents in order. The tally counts files and skipped input."""

    def tokens(self, documents: Iterable[bytes], tokenizer: Tokenizer) -> Iterator[Tokens]:
        """Token ids of documents, each closed."""


@dataclass(frozen=True)
class Contents:
    """The contents of a corpus.

    Attributes:
        digest: BLAKE3 of all training tokens in order, little-endian, in hex. It does not depend on
            the cuts into shards.
        files: number of text files.
        documents: training documents.
        training_bytes: size of the training documents.
        held_out_documents: held-out documents.
        held_out_bytes: size of the held-out documents.
        copies: documents that were left out as copies of earlier documents.
        repetitive: documents that were left out because they repeat a few tokens many times.
        file_bytes: size of the text files on disk.
        skipped: number of skipped files, folders, lines and rows by reason.
        unread: number of files that are not read because of their suffix, by suffix.
        skipped_names: the first 10,000 skipped names, with the reason.
        unread_names: the first 10,000 files that are not read because of their suffix.
    """

    digest: str = ""
    files: int = 0
    documents: int = 0
    training_bytes: int = 0
    held_out_documents: int = 0
    held_out_bytes: int = 0
    copies: int = 0
    repetitive: int = 0
    file_bytes: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    unread: dict[str, int] = field(default_factory=dict)
    skipped_names: tuple[str, ...] = ()
    unread_names: tuple[str, ...] = ()

    @property
    def tally(self) -> Tally:
        """The tally of read and skipped input."""
        return Tally(
            self.files,
            self.file_bytes,
            self.skipped,
            self.unread,
            list(self.skipped_names),
            list(self.unread_names),
        )

    def summary(self) -> str:
        """Files, documents, tokens, split and left-out documents, in a line."""
        left_out = f"; {self.copies:,} copies left out" if self.copies else ""
        left_out += f"; {self.repetitive:,} repetitive left out" if self.repetitive else ""
        hint = " (--list-skipped names them)" if self.skipped or self.unread else ""
        return (
            f"{self.tally.summary()}{hint}; documents to train on: {self.documents:,}, "
            f"held out: {self.held_out_documents:,} of {self.held_out_bytes:,} bytes{left_out}"
        )


_Shard = tuple[str, int, str, int, int, int]
"""File name, tokens, digest. Then totals up to the shard's end: tokenized documents, left-out
repetitive documents, and their bytes."""


@dataclass
class _Finished:
    """The finished shards of a folder."""

    folder: Path
    key: str
    shards: list[_Shard]

    @staticmethod
    def read(folder: Path, key: str) -> _Finished:
        """The finished shards of a folder. Empty for a new folder.

        Raises:
            DataError: the folder belongs to another text or options, or a finished shard was
                changed.
        """
        path = folder / PROGRESS
        if not path.exists():
            return _Finished(folder, key, [])
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            shards = [
                (str(n), int(t), str(d), int(c), int(r), int(b))
                for n, t, d, c, r, b in values["shards"]
            ]
            is_same = values["key"] == key
        except (ValueError, LookupError, TypeError) as error:
            raise DataError(f"{path}: damaged: {error}", hint=f"remove {folder}") from error
        if not is_same:
            raise DataError(
                f"{folder}: shards of another text, tokenizer or other options were begun here",
                hint="name another folder, or remove this one",
            )
        return _Finished(folder, key, shards)

    def add(self, shard: _Shard) -> None:
        self.shards.append(shard)
        content = json.dumps({"key": self.key, "shards": self.shards}).encode()
        durable.write_file(self.folder / PROGRESS, content)

    def digest(self) -> blake3:
        """A digest of all tokens in finished shards, to be continued.

        Raises:
            DataError: a shard has changed.
        """
        everything = blake3()
        for name, _, digest, *_ in self.shards:
            path = self.folder / name
            try:
                if blake3().update_mmap(path).hexdigest() != digest:
                    raise DataError(f"{path}: was changed", hint=f"remove {self.folder}")
                everything.update_mmap(path)
            except OSError as error:
                raise DataError(f"{path}: {error}", hint=f"remove {self.folder}") from error
        return everything


def write_shards(
    source: Source,
    folder: Path,
    tokenizer: Tokenizer,
    *,
    shard_tokens: int = SHARD_TOKENS,
    drop_copies: bool = True,
    drop_repetition: bool = False,
    pack: int | None = None,
    held_out: Iterable[bytes] | None = None,
    digests: FileDigests | None = None,
) -> None:
    """Makes the shards of a text, or resumes this work. Reports progress.

    Args:
        source: the documents.
        folder: existing folder for the shards.
        tokenizer: encodes the documents.
        shard_tokens: a shard is closed by the first document that reaches this size.
        drop_copies: whether only the first of equal documents is kept.
        drop_repetition: whether documents are left out that `is_repetitive` finds.
        pack: tokens of the sequences that whole documents are packed into; see `packed`. None
            leaves documents in their order.
        held_out: held-out documents to keep as text. None if the text stays available.
        digests: known digests of the source's files.

    Raises:
        DataError: no document is left for training, a file cannot be read, or the folder belongs to
            another text or options.
        TokenizerError: the tokenizer cannot be run.
    """
    options = [shard_tokens, drop_copies, drop_repetition, *([pack] if pack else [])]
    named = [FORMAT, tokenizer.name, *options, source.fingerprint(digests)]
    finished = _Finished.read(folder, blake3(json.dumps(named).encode()).hexdigest())
    one_pass = Pass(source, finished.digest())
    dtype = token_dtype(tokenizer.num_ids)
    kept = _Kept(*finished.shards[-1][3:]) if finished.shards else _Kept()
    documents = itertools.islice(one_pass.training_documents(drop_copies), kept.seen, None)
    tokenised = source.tokens(kept.noted(documents), tokenizer)
    training = kept.of(tokenised, drop_repetition)
    last = np.empty(0, dtype)
    if pack:
        last = np.full(1, tokenizer.end_of_text, dtype)
        training = packed(training, pack, tokenizer.end_of_text, min(shard_tokens, GROUP_TOKENS))
    while (first := next(training, None)) is not None:
        several = itertools.chain((first,), training)
        path = folder / f"{len(finished.shards):05}.bin"
        written = _write_shard(path, several, shard_tokens, last, one_pass.digest)
        finished.add((*written, kept.seen, kept.left_out, kept.left_out_bytes))
    if not finished.shards:
        raise one_pass.no_text()
    header = _header_of(source, tokenizer, dtype, pack)
    header["shards"] = [shard[:3] for shard in finished.shards]
    header["contents"] = asdict(one_pass.contents(kept.left_out, kept.left_out_bytes))
    _finish(folder, header, held_out)


def _header_of(
    source: Source, tokenizer: Tokenizer, dtype: np.dtype[Any], pack: int | None
) -> dict[str, Any]:
    """The fields of the header that are known before the text is read."""
    return {
        "format": FORMAT,
        "name": source.name,
        "mixture": source.mixture,
        "tokenizer": tokenizer.name,
        "dtype": dtype.str,
        **({"pack": pack} if pack else {}),
    }


def _finish(folder: Path, header: dict[str, Any], held_out: Iterable[bytes] | None) -> None:
    """Writes the other files of the folder, the header last."""
    if held_out is not None:
        header["held_out"] = _write_held_out(folder / HELD_OUT, held_out)
    header["digest"] = digest_of_header(header)
    durable.write_file(folder / HEADER, json.dumps(header).encode())
    (folder / PROGRESS).unlink()


def digest_of_header(header: dict[str, Any]) -> str:
    """The digest at the end of a header."""
    return blake3(json.dumps(header, sort_keys=True).encode()).hexdigest()


@dataclass
class _Kept:
    """Filters the tokenized documents.

    Attributes:
        seen: tokenized documents, including those of finished shards.
        left_out: documents among these that were left out as repetitive.
        left_out_bytes: size of the left-out documents.
    """

    seen: int = 0
    left_out: int = 0
    left_out_bytes: int = 0
    _sizes: deque[int] = field(default_factory=deque)

    def noted(self, documents: Iterable[bytes]) -> Iterator[bytes]:
        """Yields the documents, and records their sizes for `of`, which may be behind."""
        for content in documents:
            self._sizes.append(len(content))
            yield content

    def of(self, tokenised: Iterable[Tokens], drop_repetition: bool) -> Iterator[Tokens]:
        """The tokens of the kept documents."""
        for tokens in tokenised:
            size = self._sizes.popleft()
            self.seen += 1
            if drop_repetition and is_repetitive(tokens):
                self.left_out += 1
                self.left_out_bytes += size
            else:
                yield tokens


class Pass:
    """One pass through a corpus. Yields the training documents and counts everything."""

    def __init__(self, source: Source, digest: blake3 | None = None) -> None:
        self._source = source
        self.digest = digest or blake3()
        """Digest of the written tokens."""
        self.tally = Tally()
        self._counted: Counter[str] = Counter()

    def training_documents(self, drop_copies: bool = True) -> Iterator[bytes]:
        """The documents that are not held out. Reports the progress of reading."""
        source, count = self._source, self._counted
        split, seen = Split.of(source.documents()), set[bytes]()
        documents = source.documents(self.tally)
        for content in reading(source.name, size_of(source.root, source.files), documents):
            digest = blake3(content).digest(length=_COPY_BYTES) if drop_copies else b""
            if digest in seen:
                count["copies"] += 1
                continue
            if drop_copies:
                seen.add(digest)
            kind = "held_out" if split.holds_out(content) else "training"
            count[f"{kind}_documents"] += 1
            count[f"{kind}_bytes"] += len(content)
            if kind == "training":
                yield content

    def contents(self, left_out: int = 0, left_out_bytes: int = 0) -> Contents:
        """The contents, after the end of the pass.

        Args:
            left_out: training documents that were left out as repetitive.
            left_out_bytes: size of these documents.
        """
        count = self._counted
        return Contents(
            digest=self.digest.hexdigest(),
            files=self.tally.files,
            documents=count["training_documents"] - left_out,
            training_bytes=count["training_bytes"] - left_out_bytes,
            held_out_documents=count["held_out_documents"],
            held_out_bytes=count["held_out_bytes"],
            copies=count["copies"],
            repetitive=left_out,
            file_bytes=self.tally.num_bytes,
            skipped=self.tally.skipped,
            unread=self.tally.unread,
            skipped_names=tuple(self.tally.named),
            unread_names=tuple(self.tally.left),
        )

    def no_text(self) -> DataError:
        """The error of a corpus without training text, after the end of the pass."""
        held_out = self._counted["held_out_documents"]
        found = "all of its documents are held out" if held_out else "it holds no text"
        return DataError(
            f"{self._source.root}: no text is left for training: {found}; {self.tally.examples()}",
            hint="add documents; texts of more than 64 KiB are cut into several",
        )


def _write_shard(
    path: Path, documents: Iterable[Tokens], shard_tokens: int, last: Tokens, all_tokens: blake3
) -> tuple[str, int, str]:
    """Durably writes a shard that ends with `last`. Returns file name, tokens and digest.

    Its tokens also go into the digest of all tokens.
    """
    digest, num_tokens = blake3(), 0
    with path.open("wb") as file:
        for tokens in itertools.chain(_until(documents, shard_tokens), [last]):
            data = tokens.astype(last.dtype).tobytes()
            digest.update(data)
            all_tokens.update(data)
            file.write(data)
            num_tokens += len(tokens)
        file.flush()
        os.fsync(file.fileno())
    return path.name, num_tokens, digest.hexdigest()


def _until(documents: Iterable[Tokens], num_tokens: int) -> Iterator[Tokens]:
    """The first documents, up to the document that reaches a number of tokens. Reads no further."""
    size = 0
    for tokens in documents:
        yield tokens
        size += len(tokens)
        if size >= num_tokens:
            return


def _write_held_out(path: Path, documents: Iterable[bytes]) -> tuple[int, str]:
    """Writes held-out documents as text. Returns size and digest of the file."""
    lines = [json.dumps({"text": each.decode()}, ensure_ascii=False) + "\n" for each in documents]
    content = "".join(lines).encode()
    durable.write_file(path, content)
    return len(content), blake3(content).hexdigest()
