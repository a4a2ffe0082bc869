"""The held-out text of a run: its documents, and the windows for measuring it.

The text is chosen by bytes, so that runs with different tokenizers are measured on the same text.
It is measured like `loglikelihood_rolling` of lm-evaluation-harness: document by document, in
windows that predict each token once, with the end-of-text token before a document.

Legend: B sequences, T predicted tokens of a sequence.
"""

from __future__ import annotations

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from blake3 import blake3
from numpy.typing import NDArray

from swarm.data.corpus import is_held_out
from swarm.data.tokenizer import Tokenizer
from swarm.errors import DataError

MAX_HELD_OUT_TEXT = 1_000_000
"""Bytes of the largest `data.validation_bytes`."""


class Windows(NamedTuple):
    """Windows of one width.

    Attributes:
        tokens_BT1: int64. Each sequence predicts T tokens.
        scored_BT: bool, the predictions that count. The other predictions are context, or come
            after the text.
    """

    tokens_BT1: torch.Tensor
    scored_BT: torch.Tensor


@dataclass(frozen=True)
class HeldOut:
    """The held-out text as models are measured on it.

    Attributes:
        windows: grouped by width, the widest first. A short document has a narrow window, to save
            padding.
        num_tokens: predicted tokens, each once.
        num_bytes: bytes of the text in UTF-8.
    """

    windows: tuple[Windows, ...]
    num_tokens: int
    num_bytes: int

    def mean(self, loss_of: Callable[[torch.Tensor, torch.Tensor], float]) -> float:
        """The mean over all predicted tokens.

        Args:
            loss_of: gives the mean over the scored predictions of windows; see `Windows`.
        """
        total = 0.0
        for tokens_BT1, scored_BT in self.windows:
            total += loss_of(tokens_BT1, scored_BT) * int(scored_BT.sum())
        return total / self.num_tokens

    def bits_per_byte(self, nats_per_token: float) -> float:
        """The loss in a unit that does not depend on the tokenizer."""
        return nats_per_token * self.num_tokens / (self.num_bytes * math.log(2))


def held_out_documents(
    documents: Iterable[bytes], limit: int, *, are_held_out: bool = False
) -> list[bytes]:
    """Held-out documents of at most `limit` bytes together, those with the smallest digests first.

    The order does not depend on paths or names of files, and draws from the whole corpus. The last
    document is cut at a character. If no document happens to be held out, the document with the
    smallest digest is held out (`swarm.data.corpus.Split`). Equal documents count once. The
    function reads every document, but keeps only the returned documents in memory.

    Args:
        documents: texts in UTF-8.
        limit: most bytes of all documents together.
        are_held_out: whether all documents are held out, like the documents kept with shards. For
            ready tokens, the digest of the ids has decided the split, which differs from the text's
            digest.

    Raises:
        DataError: there is no document.
    """
    contents = whole_held_out(documents, limit, are_held_out=are_held_out)
    excess = sum(map(len, contents)) - limit
    if excess > 0:
        contents[-1] = _cut(contents[-1], len(contents[-1]) - excess)
    return [content for content in contents if content]


def whole_held_out(
    documents: Iterable[bytes], limit: int, *, are_held_out: bool = False
) -> list[bytes]:
    """Like `held_out_documents`, but without cutting the last document, which may be no text."""
    # A heap with the largest digest on top. heapq keeps the smallest on top, hence the sign.
    kept: list[tuple[int, bytes]] = []
    chosen = set[int]()
    num_bytes = 0
    instead: tuple[int, bytes] | None = None
    for content in documents:
        digest = int.from_bytes(blake3(content).digest(), "big")
        if not (are_held_out or is_held_out(content)):
            if not kept and (instead is None or digest < instead[0]):
                instead = (digest, content)
            continue
        if digest in chosen:  # a copy
            continue
        chosen.add(digest)
        heapq.heappush(kept, (-digest, content))
        num_bytes += len(content)
        while num_bytes - len(kept[0][1]) >= limit:
            negative, dropped = heapq.heappop(kept)
            chosen.remove(-negative)
            num_bytes -= len(dropped)
    contents = [content for _, content in sorted(kept, reverse=True)]
    if not contents:
        if instead is None:
            raise DataError("the corpus holds no text", hint="add documents")
        contents = [instead[1]]
    return contents


def held_out_windows(
    tokens: NDArray[np.integer[Any]], end_of_text: int, sequence_length: int, num_bytes: int
) -> HeldOut:
    """The windows of held-out documents.

    A document of n tokens has windows at 0, T, 2T, and so on. The first window begins with the
    end-of-text token, each further window with the token before its first prediction. The last
    window predicts the rest. In a document longer than T, it ends with the document and begins T
    tokens before, so that the rest has a full window of context.

    Source: lm-evaluation-harness 0.4, `get_rolling_token_windows` and `make_disjoint_window`.

    Args:
        tokens: tokens of all documents, each closed by `end_of_text`.
        end_of_text: id of the end-of-text token.
        sequence_length: T of the run.
        num_bytes: bytes of the text in UTF-8.

    Raises:
        DataError: there is no token to predict.
    """
    rows: dict[int, list[tuple[NDArray[np.int64], int, int]]] = defaultdict(list)
    num_tokens = 0
    for document in split_documents(tokens, end_of_text):
        num_tokens += len(document)
        for row, first, after in _rows(document, end_of_text, sequence_length):
            rows[_width(len(row) - 1, sequence_length)].append((row, first, after))
    if not num_tokens:
        raise DataError("the held-out text has no token", hint="add documents")
    groups = tuple(_group(rows[width], width, end_of_text) for width in sorted(rows, reverse=True))
    return HeldOut(groups, num_tokens, num_bytes)


def split_documents(
    tokens: NDArray[np.integer[Any]], end_of_text: int
) -> Iterator[NDArray[np.int64]]:
    """The documents with at least one token, each without its closing `end_of_text`."""
    found = np.asarray(tokens).astype(np.int64)
    ends = [*np.flatnonzero(found == end_of_text).tolist(), len(found)]
    start = 0
    for end in ends:
        if end > start:
            yield found[start:end]
        start = end + 1


def measured_on(tokenizer: Tokenizer, documents: Sequence[bytes], sequence_length: int) -> HeldOut:
    """The windows of held-out documents that are given as text.

    Raises:
        DataError: there is no token to predict.
    """
    tokens = np.concatenate([np.empty(0, dtype=np.uint32), *tokenizer.encoded(documents)])
    num_bytes = sum(map(len, documents))
    return held_out_windows(tokens, tokenizer.end_of_text, sequence_length, num_bytes)


def _rows(
    document: NDArray[np.int64], end_of_text: int, length: int
) -> Iterator[tuple[NDArray[np.int64], int, int]]:
    """Tokens of each window, and the predictions that count: `first` to before `after`."""
    with_context = np.concatenate([[end_of_text], document])
    for start in range(0, len(document), length):
        stop = min(start + length, len(document))
        begin = start if stop - start == length or start == 0 else stop - length
        yield with_context[begin : stop + 1], start - begin, stop - begin


def _width(predicted: int, sequence_length: int) -> int:
    """The smallest used width that holds a window. Used widths are powers of two, and T."""
    return min(1 << (predicted - 1).bit_length(), sequence_length)


def _group(rows: list[tuple[NDArray[np.int64], int, int]], width: int, end_of_text: int) -> Windows:
    tokens = np.full((len(rows), width + 1), end_of_text, dtype=np.int64)
    scored = np.zeros((len(rows), width), dtype=np.bool_)
    for index, (row, first, after) in enumerate(rows):
        tokens[index, : len(row)] = row
        scored[index, first:after] = True
    return Windows(torch.from_numpy(tokens), torch.from_numpy(scored))


def _cut(content: bytes, size: int) -> bytes:
    """The beginning of a UTF-8 text, cut at a character."""
    return content[:size].decode("utf-8", errors="ignore").encode()
