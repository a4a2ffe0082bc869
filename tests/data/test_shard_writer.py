"""Prepared shards: their bytes depend neither on the machine that writes them nor on kills."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from swarm.data.corpus import Corpus, folder_corpus, is_held_out
from swarm.data.held_out import split_documents
from swarm.data.shard_writer import FORMAT, HEADER, PROGRESS, packed, write_shards
from swarm.data.shards import Torn, open_folder, open_prepared
from swarm.data.tokenizer import BYTE, ByteTokenizer, Tokens, document_tokens
from swarm.errors import DataError

SHARD_TOKENS = 500


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(120):
        # Every third is a copy of an earlier one.
        text = f"document {number - (number % 3 == 2)} " * (1 + number // 3 % 7)
        (folder / f"{number:03}.txt").write_text(text)
    return folder_corpus(folder)


def made(
    corpus: Corpus, folder: Path, *, drop_copies: bool = True, pack: int | None = None
) -> Path:
    folder.mkdir(exist_ok=True)
    options = {"shard_tokens": SHARD_TOKENS, "drop_copies": drop_copies, "pack": pack}
    write_shards(corpus, folder, BYTE, held_out=[b"h1"], **options)
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_copies_are_left_out_and_counted(corpus: Corpus, tmp_path: Path) -> None:
    unique = dict.fromkeys(corpus.documents())
    wanted = [document_tokens(each) for each in unique if not is_held_out(each)]
    shards = open_folder(made(corpus, tmp_path / "out"))
    assert np.array_equal(np.concatenate(shards.arrays), np.concatenate(wanted))
    found = shards.contents
    assert found.copies == 120 - len(unique) == 40
    assert found.documents + found.held_out_documents == len(unique)
    assert found.training_bytes == sum(map(len, wanted)) - len(wanted)
    everything = open_folder(made(corpus, tmp_path / "all", drop_copies=False))
    assert everything.contents.copies == 0 and everything.num_tokens > shards.num_tokens


KILLED = """
import os, signal, sys
from pathlib import Path
from swarm.data.corpus import folder_corpus
from swarm.data.shard_writer import write_shards
from swarm.data.tokenizer import ByteTokenizer

class Fatal(ByteTokenizer):
    def encoded(self, documents):
        for number, tokens in enumerate(super().encoded(documents)):
            if number == int(sys.argv[3]):
                os.kill(os.getpid(), signal.SIGKILL)
            yield tokens

write_shards(folder_corpus(Path(sys.argv[1])), Path(sys.argv[2]), Fatal(), shard_tokens=500,
             drop_copies=True, pack=int(sys.argv[4]) or None, held_out=[b"h1"])
"""


@pytest.mark.parametrize(
    ("kills", "pack"), [([1], None), ([30], None), ([60], None), ([20, 30, 40], None), ([30], 64)]
)
def test_killed_and_run_again_it_makes_the_same_bytes(
    corpus: Corpus, tmp_path: Path, kills: list[int], pack: int | None
) -> None:
    whole, out = made(corpus, tmp_path / "whole", pack=pack), tmp_path / "out"
    out.mkdir()
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    for after in kills:
        given = [str(corpus.root), str(out), str(after), str(pack or 0)]
        command = [sys.executable, "-c", KILLED, *given]
        ended = subprocess.run(command, env=environment, timeout=60, check=False)
        assert ended.returncode == -signal.SIGKILL
        assert not (out / HEADER).exists()
    assert (out / PROGRESS).exists() == (max(kills) > 1), "the first shard has more documents"
    assert files_of(made(corpus, out, pack=pack)) == files_of(whole)


def test_packed_documents_begin_where_sequences_do_or_behind_another(
    corpus: Corpus, tmp_path: Path
) -> None:
    length = 64
    outs = tmp_path / "plain", tmp_path / "packed"
    for out, pack in zip(outs, (None, length), strict=True):
        out.mkdir()
        write_shards(corpus, out, BYTE, shard_tokens=SHARD_TOKENS, pack=pack, held_out=[])
    plain, found = map(open_folder, outs)
    assert open_prepared(outs[1]).pack == length and open_prepared(outs[0]).pack is None
    assert len(found.arrays) > 2
    documents: list[bytes] = []
    for array in found.arrays:
        assert (len(array), int(array[-1])) == (len(array) // length * length + 1, BYTE.end_of_text)
        documents += [each.tobytes() for each in split_documents(array, BYTE.end_of_text)]
        # A short document lies in one sequence.
        rows = array[:-1].reshape(-1, length)
        kept = [each for row in rows for each in split_documents(row, BYTE.end_of_text)]
        short = [each for each in split_documents(array, BYTE.end_of_text) if len(each) < length]
        assert {each.tobytes() for each in short} <= {each.tobytes() for each in kept}
    every = np.concatenate(plain.arrays)
    wanted = [each.tobytes() for each in split_documents(every, BYTE.end_of_text)]
    assert sorted(documents) == sorted(wanted)
    assert found.contents.documents == plain.contents.documents


def test_packing_wastes_little() -> None:
    sizes = np.random.default_rng(1).integers(2, 300, 800)
    texts = [np.append(np.full(size, 65), 256) for size in sizes]
    groups = list(packed(texts, 256, 256, 50_000))
    assert len(groups) == 3 and all(len(group) % 256 == 0 for group in groups)
    assert sum(map(len, groups)) < 1.05 * sum(map(len, texts))


def repeating(folder: Path) -> Corpus:
    folder.mkdir()
    for number in range(90):
        text = f"document {number} " + ("ab" * 40 if number % 3 == 1 else "") + "and so on"
        (folder / f"{number:03}.txt").write_text(text)
    return folder_corpus(folder)


def test_repetitive_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    corpus, out = repeating(tmp_path / "text"), tmp_path / "out"
    training = [each for each in corpus.documents() if not is_held_out(each)]
    wanted = [document_tokens(each) for each in training if b"abab" not in each]
    out.mkdir()
    write_shards(corpus, out, BYTE, shard_tokens=SHARD_TOKENS, drop_repetition=True)
    shards = open_folder(out)
    assert np.array_equal(np.concatenate(shards.arrays), np.concatenate(wanted))
    found = shards.contents
    assert (found.documents, found.repetitive) == (len(wanted), len(training) - len(wanted))
    assert found.training_bytes == sum(map(len, wanted)) - len(wanted)
    assert f"{found.repetitive} repetitive left out" in shards.summary()


class Ended(Exception):
    """Stands for a kill."""


def test_ended_and_run_again_it_leaves_the_same_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, whole, out = repeating(tmp_path / "text"), tmp_path / "whole", tmp_path / "out"
    whole.mkdir()
    out.mkdir()

    def write(folder: Path) -> None:
        write_shards(corpus, folder, BYTE, shard_tokens=SHARD_TOKENS, drop_repetition=True)

    write(whole)
    encoded = ByteTokenizer.encoded
    for after in (40, 30, 40):

        def ending(self: ByteTokenizer, documents: Iterable[bytes]) -> Iterator[Tokens]:
            for number, tokens in enumerate(encoded(self, documents)):
                if number == after:  # noqa: B023 - called before the next turn
                    raise Ended
                yield tokens

        with monkeypatch.context() as patched, pytest.raises(Ended):
            patched.setattr(ByteTokenizer, "encoded", ending)
            write(out)
        assert (out / PROGRESS).exists()
    write(out)
    assert files_of(out) == files_of(whole)


def key_of(corpus: Corpus) -> str:
    """The source that a half-made folder names."""
    named = [FORMAT, BYTE.name, SHARD_TOKENS, True, False, corpus.fingerprint()]
    return blake3(json.dumps(named).encode()).hexdigest()


def test_what_is_finished_is_not_tokenised_again(
    corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[bytes] = []

    def noted(_: object, documents: Iterable[bytes]) -> Iterator[Tokens]:
        for document in documents:
            encoded.append(document)
            yield document_tokens(document)

    monkeypatch.setattr(ByteTokenizer, "encoded", noted)
    out = made(corpus, tmp_path / "out")
    whole, all_encoded = files_of(out), len(encoded)
    first = [*json.loads((out / HEADER).read_text())["shards"][0]]
    documents = int((np.fromfile(out / first[0], "<u2") == BYTE.end_of_text).sum())
    (out / HEADER).unlink()
    progress = {"key": key_of(corpus), "shards": [[*first, documents, 0, 0]]}
    (out / PROGRESS).write_text(json.dumps(progress))
    encoded.clear()
    assert files_of(made(corpus, out)) == whole
    assert len(encoded) == all_encoded - documents


def test_another_text_or_other_options_do_not_go_on_with_it(corpus: Corpus, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / PROGRESS).write_text(json.dumps({"key": "0" * 64, "shards": []}))
    with pytest.raises(DataError, match=r"another text, tokenizer or other options.*remove"):
        made(corpus, out)
    with pytest.raises(DataError, match=r"not finished.*it resumes"):
        open_prepared(out)
    (out / PROGRESS).write_text("{")
    with pytest.raises(DataError, match="damaged"):
        made(corpus, out)


def test_a_finished_shard_that_was_changed_is_seen_before_it_goes_on(
    corpus: Corpus, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "00000.bin").write_bytes(b"ab")
    shards = [["00000.bin", 1, "0" * 64, 1, 0, 0]]
    (out / PROGRESS).write_text(json.dumps({"key": key_of(corpus), "shards": shards}))
    with pytest.raises(DataError, match=r"00000\.bin: was changed.*remove"):
        made(corpus, out)
    (out / "00000.bin").unlink()
    with pytest.raises(DataError, match=r"00000\.bin.*remove"):
        made(corpus, out)


def test_shards_of_another_tokenizer_are_refused_and_named(corpus: Corpus, tmp_path: Path) -> None:
    out = made(corpus, tmp_path / "out")

    class Other:
        name, num_ids, end_of_text = "file-0", 258, 256

    with pytest.raises(DataError, match=f"made with the tokenizer {BYTE.name}, the run has file-0"):
        open_prepared(out).open(Other())  # type: ignore[arg-type]
    assert open_prepared(out).open(BYTE).num_tokens > 0
    assert list(open_prepared(out).documents()) == [b"h1"]


@pytest.mark.parametrize("file", ["00000.bin", "held_out.jsonl", HEADER])
@pytest.mark.parametrize("how", ["cut", "changed", "gone"])
def test_a_damaged_folder_is_an_error_that_says_what_to_do(
    corpus: Corpus, tmp_path: Path, file: str, how: str
) -> None:
    out = made(corpus, tmp_path / "out")
    content = (out / file).read_bytes()
    damaged = {"cut": content[:-3], "changed": content.replace(b"1", b"2", 1), "gone": None}[how]
    assert damaged != content
    if damaged is None:
        (out / file).unlink()
    else:
        (out / file).write_bytes(damaged)
    with pytest.raises(DataError, match="swarm-data tokenize"):
        prepared = open_prepared(out)
        list(prepared.documents())
        prepared.open(BYTE)


def test_a_folder_of_another_version_is_torn(tmp_path: Path) -> None:
    (tmp_path / HEADER).write_text("{}")
    with pytest.raises(Torn):
        open_folder(tmp_path)
