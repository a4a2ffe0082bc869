"""Measures the speed of making shards, against `encode_batch_fast` of the package tokenizers.

Both tokenize the same documents of one folder, in turns: ours, theirs, theirs, ours, and so on.
"Ours" is all of `swarm-data tokenize`: it reads the files (twice for the held-out text), cuts them,
finds copies, and durably writes shards with digests. "Theirs" is only `encode_batch_fast` on
documents in memory, with all cores. On a machine with other users, the ratio of CPU times is more
reliable than the ratio of rates.

Usage: scripts/benchmarks/bench_tokenise.py --megabytes 50 --pairs 3 [--tokenizer DIR]
"""

import argparse
import resource
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import tokenizers

from swarm.data.corpus import Corpus, folder_corpus, standard_library_corpus
from swarm.data.held_out import MAX_HELD_OUT_TEXT, held_out_documents
from swarm.data.shard_writer import write_shards
from swarm.data.tokenizer_file import FileTokenizer, open_tokenizer, train_tokenizer

BATCH = 1000
"""Documents per call of `encode_batch_fast`."""
VOCABULARY = 32_000


class Taken(NamedTuple):
    """Seconds of a turn, or the ratios of two turns."""

    wall_s: float
    cpu_s: float


def main() -> int:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=50)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--tokenizer", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-tokenise-") as folder:
        corpus = text_of(Path(folder) / "text", asked.megabytes * 10**6)
        used = open_tokenizer(asked.tokenizer) if asked.tokenizer else None
        used = used or train_tokenizer(standard_library_corpus().documents(), VOCABULARY)
        documents = [document.decode() for document in corpus.documents()]
        size = sum(len(document.encode()) for document in documents)
        print(
            f"{size / 1e6:.1f} MB, {len(documents):,} documents, {used.num_ids:,} ids", flush=True
        )
        out = Path(folder) / "out"
        ratios: list[Taken] = []
        turns: dict[str, Callable[[], None]] = {
            "ours": partial(ours, corpus, used, out),
            "theirs": partial(theirs, documents, used),
        }
        for pair in range(asked.pairs):
            order = sorted(turns, reverse=pair % 2 == 1)
            taken = {name: timed(turns[name]) for name in order}
            mine, other = taken["ours"], taken["theirs"]
            ratios.append(Taken(other.wall_s / mine.wall_s, other.cpu_s / mine.cpu_s))
            print(
                f"ours {size / 1e6 / mine.wall_s:.2f} MB/s ({mine.cpu_s:.1f} s of cores), "
                f"encode_batch_fast {size / 1e6 / other.wall_s:.2f} MB/s ({other.cpu_s:.1f} s)",
                flush=True,
            )
    for what, values in zip(("rate", "work of cores"), zip(*ratios, strict=True), strict=True):
        spread = f"{min(values):.3f} to {max(values):.3f}, n = {len(values)} pairs"
        print(f"ratio by {what}: median {statistics.median(values):.3f} ({spread})")
    return 0


def timed(work: Callable[[], None]) -> Taken:
    """Wall time of a call, and CPU time including child processes."""
    began_s, before_s = time.perf_counter(), cpu_s()
    work()
    return Taken(time.perf_counter() - began_s, cpu_s() - before_s)


def cpu_s() -> float:
    """CPU seconds of this process and of its ended children."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in usage)


def text_of(folder: Path, size: int) -> Corpus:
    """The standard library several times, each time with other digits."""
    folder.mkdir(parents=True)
    written = 0
    for number, document in enumerate(_endless(), start=1):
        content = document.replace(b"0", str(number).encode())
        (folder / f"{number:06}.py").write_bytes(content)
        written += len(content)
        if written >= size:
            return folder_corpus(folder)
    raise AssertionError("endless")


def _endless() -> Iterator[bytes]:
    while True:
        yield from standard_library_corpus().documents()


def ours(corpus: Corpus, tokenizer: FileTokenizer, out: Path) -> None:
    """All of `swarm-data tokenize`."""
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    held_out = held_out_documents(corpus.documents(), MAX_HELD_OUT_TEXT)
    write_shards(corpus, out, tokenizer, drop_copies=True, held_out=held_out)


def theirs(documents: list[str], tokenizer: FileTokenizer) -> None:
    """`encode_batch_fast` alone."""
    loaded = tokenizers.Tokenizer.from_str(tokenizer.content.decode())
    loaded.encode_special_tokens = True
    for start in range(0, len(documents), BATCH):
        loaded.encode_batch_fast(documents[start : start + BATCH], add_special_tokens=False)


if __name__ == "__main__":
    sys.exit(main())
