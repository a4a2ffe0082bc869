"""Tokens of other tools are used without change, or refused with a remedy."""

from pathlib import Path

import numpy as np
import pytest

from swarm.data.corpus import is_held_out
from swarm.data.shard_writer import write_shards
from swarm.data.shards import open_folder
from swarm.data.token_arrays import MAX_DOCUMENT_TOKENS, ReadyTokens, read_tokens, ready_tokens
from swarm.data.tokenizer import BYTE
from swarm.errors import DataError

DOCUMENTS = [list(range(number % 200, number % 200 + 30)) for number in range(80)]
STREAM = [token for document in DOCUMENTS for token in (*document, 256)]


def source(folder: Path) -> ReadyTokens:
    found = ready_tokens(folder, BYTE, None)
    assert found is not None
    return found


def ids_of(folder: Path) -> list[list[int]]:
    return [np.frombuffer(each, "<u4").tolist() for each in source(folder).documents()]


def llm_c(tokens: list[int], *, version: int = 1, count: int | None = None) -> bytes:
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, version, len(tokens) if count is None else count
    return header.tobytes() + np.array(tokens, dtype="<u2").tobytes()


def test_all_forms_give_the_same_documents(tmp_path: Path) -> None:
    for name in ("npy", "nanogpt", "llmc"):
        (tmp_path / name).mkdir()
    np.save(tmp_path / "npy" / "a.npy", np.array(STREAM, dtype=np.int64))
    (tmp_path / "nanogpt" / "train.bin").write_bytes(np.array(STREAM, dtype="<u2").tobytes())
    (tmp_path / "llmc" / "train_000.bin").write_bytes(llm_c(STREAM))
    for name in ("npy", "nanogpt", "llmc"):
        assert ids_of(tmp_path / name) == DOCUMENTS, name
    (tmp_path / "text").mkdir()
    assert ready_tokens(tmp_path / "text", BYTE, None) is None


def test_they_become_shards_of_the_same_tokens(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    np.save(tmp_path / "in" / "a.npy", np.array(STREAM, dtype=np.uint16))
    write_shards(source(tmp_path / "in"), tmp_path / "out", BYTE)
    shards = open_folder(tmp_path / "out")
    assert shards.contents.documents + shards.contents.held_out_documents == len(DOCUMENTS)
    trained = [each for each in DOCUMENTS if not is_held_out(np.array(each, "<u4").tobytes())]
    assert 0 < shards.contents.held_out_documents == len(DOCUMENTS) - len(trained)
    tokens = [token for document in trained for token in (*document, 256)]
    assert np.concatenate(shards.arrays).tolist() == tokens


def test_documents_may_be_closed_by_another_id_and_long_ones_are_cut(tmp_path: Path) -> None:
    tokens = np.full(2 * MAX_DOCUMENT_TOKENS + 10, 7, dtype=np.uint16)
    tokens[5] = 99
    np.save(tmp_path / "a.npy", tokens)
    found = ready_tokens(tmp_path, BYTE, 99)
    assert found is not None
    sizes = [len(each) // 4 for each in found.documents()]
    assert sizes == [5, MAX_DOCUMENT_TOKENS, MAX_DOCUMENT_TOKENS, 4]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.bin", llm_c(STREAM, count=5), "header says version 1 and 5 tokens.*torn"),
        ("a.bin", llm_c(STREAM, version=2), "version 2"),
        ("a.bin", llm_c(STREAM)[:-2], "torn"),
        ("a.bin", b"abc", "no tokens of 2 bytes"),
        ("a.bin", b"", "no tokens of 2 bytes"),
        ("a.bin", np.array([1, 999], "<u2").tobytes(), "ids from 1 to 999.*name the tokenizer"),
        ("a.npy", b"not numpy", "cannot be read"),
        ("a.npy", b"\x93NUMPY", "cannot be read"),
    ],
)
def test_what_is_torn_or_foreign_is_refused(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=words):
        list(source(tmp_path).documents())


@pytest.mark.parametrize("array", [np.zeros((2, 2), np.uint16), np.zeros(4), np.array([-1, 2])])
def test_arrays_that_are_no_tokens_are_refused(tmp_path: Path, array: np.ndarray) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(DataError, match=r"one row of integers|ids from -1"):
        list(source(tmp_path).documents())


def test_the_size_of_an_id_is_the_tokenizers_or_refused(tmp_path: Path) -> None:
    wide = np.array(STREAM * 2, dtype="<u4")
    (tmp_path / "a.bin").write_bytes(wide.tobytes())
    with pytest.raises(DataError, match=r"4 bytes each, and this tokenizer's have 2.*\.npy"):
        list(source(tmp_path).documents())
    assert np.array_equal(read_tokens(tmp_path / "a.bin", 100_000), wide)
    (tmp_path / "a.bin").write_bytes(wide.astype("<u2").tobytes())
    found = ReadyTokens("wide", tmp_path, ("a.bin",), 100_000, 256)
    with pytest.raises(DataError, match=r"ids from .*name the tokenizer that made these"):
        list(found.documents())
    (tmp_path / "a.bin").write_bytes(wide.tobytes()[:-2])
    with pytest.raises(DataError, match=r"no tokens of 4 bytes each"):
        list(found.documents())


def test_tokens_beside_texts_are_refused_and_hidden_files_left_out(tmp_path: Path) -> None:
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.bin").write_bytes(b"abcd")
    assert ready_tokens(tmp_path, BYTE, None) is None
    np.save(tmp_path / "a.npy", np.array(STREAM, dtype=np.uint16))
    (tmp_path / "note.txt").write_text("a text")
    with pytest.raises(DataError, match=r"tokens \(a\.npy\) and texts \(note\.txt\).*folders"):
        ready_tokens(tmp_path, BYTE, None)


def test_an_array_of_objects_is_not_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(DataError, match="cannot be read"):
        list(source(tmp_path).documents())
