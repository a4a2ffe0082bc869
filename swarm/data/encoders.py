"""Processes that run one tokenizer's file; see `swarm.data.encoding_worker`."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO

import numpy as np
from numpy.typing import NDArray

from swarm.data import encoding_worker
from swarm.errors import TokenizerError

Ids = NDArray[np.uint32]

MAX_WORKERS = 16
BATCH_BYTES = 2**18
BATCH_DOCUMENTS = 2048
LOAD_S = 60.0
"""Limit for loading. The largest file in use takes some seconds."""
BATCH_S = 120.0
"""Limit for a batch, which usually takes about a tenth of a second."""
MEMORY_BYTES = 4 * 2**30
"""Address space of one process."""
_SINGLE = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
_MAX_SAID = 200


def require_package() -> None:
    """Requires the package that reads tokenizer files.

    Raises:
        TokenizerError: the package is not installed.
    """
    if importlib.util.find_spec("tokenizers") is None:
        raise TokenizerError(
            "this run has a tokenizer of its own, and the package tokenizers is not installed",
            hint="pip install tokenizers, or 'moe-swarm[hf]'",
        )


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def encode(
    content: bytes,
    end_of_text: int,
    documents: Iterable[bytes],
    *,
    workers: int | None = None,
    batch_s: float = BATCH_S,
) -> Iterator[Ids]:
    """Token ids of each document in order, each closed by `end_of_text`.

    Processes start when needed, and end with the iterator. Each process works a few batches ahead.

    Args:
        content: a tokenizer.json.
        end_of_text: id of the token that closes a document.
        documents: UTF-8.
        workers: processes. By default one for each core, at most 16.
        batch_s: time limit of a batch of 256 KiB.

    Raises:
        TokenizerError: the package is missing, the file cannot be loaded, a process ended or took
            too long, or a text contains the id that closes documents.
    """
    require_package()
    count = workers or min(available_cores(), MAX_WORKERS)
    crew = _Crew(content, end_of_text, batch_s)
    pool = ThreadPoolExecutor(max_workers=count, thread_name_prefix="encode")
    pending: deque[Future[list[Ids]]] = deque()
    try:
        for batch in _batches(documents):
            pending.append(pool.submit(crew.encode, batch))
            if len(pending) > 2 * count:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()
        crew.end()
        pool.shutdown(wait=True, cancel_futures=True)
        crew.close()


def decode(content: bytes, end_of_text: int, documents: Sequence[Ids]) -> list[bytes]:
    """The text of each document's token ids, in UTF-8, with U+FFFD for invalid bytes.

    Args:
        content: a tokenizer.json.
        end_of_text: id of the token that closes a document.
        documents: token ids, not closed.

    Raises:
        TokenizerError: the package is missing, the file cannot be loaded, or the process ended or
            took too long.
    """
    require_package()
    crew = _Crew(content, end_of_text, BATCH_S)
    try:
        return crew.decode(documents)
    finally:
        crew.end()
        crew.close()


def _batches(documents: Iterable[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= BATCH_BYTES or len(batch) >= BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Crew:
    """One encoding process for each thread that asks."""

    def __init__(self, content: bytes, end_of_text: int, batch_s: float) -> None:
        self._content, self._end_of_text, self._batch_s = content, end_of_text, batch_s
        self._mine = threading.local()
        self._all: list[_Process] = []
        self._lock = threading.Lock()
        self._ended = False

    def decode(self, documents: Sequence[Ids]) -> list[bytes]:
        return self._process().decode(documents, self._batch_s)

    def encode(self, batch: Sequence[bytes]) -> list[Ids]:
        counts, ids = self._process().encode(batch, self._batch_s)
        if int((ids == self._end_of_text).sum()) != len(batch):
            raise TokenizerError(
                f"the tokenizer encodes ordinary text as its end-of-text id {self._end_of_text}",
                hint="its end-of-text token must be an added token that is special",
            )
        edges = [0, *itertools.accumulate(counts.tolist())]
        return [ids[start:stop] for start, stop in itertools.pairwise(edges)]

    def end(self) -> None:
        with self._lock:
            self._ended = True
            for process in self._all:
                process.kill()

    def close(self) -> None:
        for process in self._all:
            process.close()

    def _process(self) -> _Process:
        """The process of this thread."""
        process = getattr(self._mine, "process", None)
        if process is None:
            process = self._mine.process = self._start()
        return process

    def _start(self) -> _Process:
        with self._lock:
            if self._ended:
                raise TokenizerError("nobody waits for these tokens any more")
            process = _Process()
            self._all.append(process)
        process.load(self._content, self._end_of_text)
        return process


class _Process:
    """One process that encodes. It is killed when an exchange exceeds its deadline."""

    def __init__(self) -> None:
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `kill`
        self._is_late = False
        self._process = subprocess.Popen(
            [sys.executable, "-P", encoding_worker.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env={**os.environ, **_SINGLE},
        )

    def load(self, content: bytes, end_of_text: int) -> None:
        header = encoding_worker.HEADER.pack(len(content), end_of_text, MEMORY_BYTES)
        with self._within(LOAD_S, "to load the tokenizer"):
            self._send(header, content)
            self._receive(1)

    def encode(self, batch: Sequence[bytes], deadline_s: float) -> tuple[Ids, Ids]:
        sizes = np.array([len(batch), *map(len, batch)], dtype="<u4").tobytes()
        with self._within(deadline_s, f"for {sum(map(len, batch)):,} bytes of text"):
            self._send(sizes, *batch)
            counts = np.frombuffer(self._receive(4 * len(batch)), dtype="<u4")
            ids = np.frombuffer(self._receive(4 * int(counts.sum())), dtype="<u4")
        return counts, ids

    def decode(self, documents: Sequence[Ids], deadline_s: float) -> list[bytes]:
        count = encoding_worker.DECODE + len(documents)
        head = np.array([count, *map(len, documents)], dtype="<u4").tobytes()
        with self._within(deadline_s, f"for {sum(map(len, documents)):,} tokens"):
            self._send(head, *(np.asarray(row, dtype="<u4").tobytes() for row in documents))
            sizes = np.frombuffer(self._receive(4 * len(documents)), dtype="<u4").tolist()
            return [self._receive(size) for size in sizes]

    def kill(self) -> None:
        """Ends the process. Waiting callers get an error."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Closes the pipes once no caller waits."""
        for pipe in (self._process.stdin, self._process.stdout, self._said):
            assert pipe is not None
            with contextlib.suppress(OSError):  # input that the process did not read
                pipe.close()

    @contextlib.contextmanager
    def _within(self, deadline_s: float, what: str) -> Iterator[None]:
        def end() -> None:
            self._is_late = True
            self._process.kill()

        timer = threading.Timer(deadline_s, end)
        timer.start()
        try:
            yield
        except OSError as error:
            code = self._process.wait()
            if self._is_late:
                raise TokenizerError(
                    f"the tokenizer took more than {deadline_s:.0f} s {what}"
                ) from error
            raise TokenizerError(f"the tokenizer cannot be run: {self._why(code)}") from error
        finally:
            timer.cancel()

    def _send(self, *parts: bytes) -> None:
        assert self._process.stdin is not None
        for part in parts:
            self._process.stdin.write(part)
        self._process.stdin.flush()

    def _receive(self, size: int) -> bytes:
        assert self._process.stdout is not None
        found = self._process.stdout.read(size)
        if len(found) < size:
            raise ConnectionError("it ended")
        return found

    def _why(self, code: int) -> str:
        if code == encoding_worker.NO_PACKAGE:
            return "the package tokenizers does not load"
        self._said.seek(0)
        lines = self._said.read().decode(errors="replace").split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "it said nothing")
        return f"exit code {code}, {last.strip()[:_MAX_SAID]}"
