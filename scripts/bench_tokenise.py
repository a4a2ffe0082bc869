"""Measures how fast text becomes shards, against the package tokenizers' own `encode_batch_fast`.

Both tokenise the same documents of one folder, by turns: ours, theirs, theirs, ours, and so on.
Ours is all of `swarm-data tokenize`: it reads the files (twice for the held-out text), cuts them,
looks for copies, and writes shards with digests, durably. Theirs is `encode_batch_fast` alone, on
documents that are in memory already, with all cores. Prints rates and the ratio of each pair.

Usage: scripts/bench_tokenise.py --megabytes 50 --pairs 3 [--tokenizer DIR]
"""

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import tokenizers

from swarm.data.corpus import Corpus, folder_corpus, standard_library_corpus
from swarm.data.held_out import MAX_HELD_OUT_TEXT, held_out_documents
from swarm.data.shard_writer import write_shards
from swarm.data.tokenizer_file import FileTokenizer, open_tokenizer
from swarm.data.training import train_tokenizer

BATCH = 1000
"""Documents that `encode_batch_fast` gets at once."""
VOCABULARY = 32_000


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
        out, ratios = Path(folder) / "out", []
        for pair in range(asked.pairs):
            first, last = (True, False) if pair % 2 == 0 else (False, True)
            taken = {
                is_ours: seconds_of(ours, corpus, used, out)
                if is_ours
                else seconds_of(theirs, documents, used)
                for is_ours in (first, last)
            }
            ratios.append(taken[False] / taken[True])
            print(
                f"ours {size / 1e6 / taken[True]:.2f} MB/s, encode_batch_fast "
                f"{size / 1e6 / taken[False]:.2f} MB/s, ratio {ratios[-1]:.3f}",
                flush=True,
            )
    spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
    print(f"median ratio {statistics.median(ratios):.3f} ({spread}, n = {len(ratios)} pairs)")
    return 0


def seconds_of(work: Callable[..., None], *arguments: object) -> float:
    """How long a call takes."""
    began_s = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - began_s


def text_of(folder: Path, size: int) -> Corpus:
    """The standard library again and again, each time with other digits."""
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
