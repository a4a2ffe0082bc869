import json
import os

import pytest

from swarm.data.corpus import (
    document_bytes,
    folder_corpus,
    is_held_out,
    open_corpus,
    standard_library_corpus,
)
from swarm.errors import DataError


def test_the_default_corpus_is_the_standard_library_without_tests_and_packages():
    corpus = open_corpus(None)
    folders = {folder for file in corpus.files for folder in file.split("/")[:-1]}
    assert {"argparse.py", "asyncio/locks.py", "json/decoder.py"} <= set(corpus.files)
    assert folders.isdisjoint({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
    assert not any("_sysconfigdata" in file for file in corpus.files)
    # 11.9 MB with Python 3.11; far less would mean that folders were left out by mistake.
    assert sum((corpus.root / file).stat().st_size for file in corpus.files) > 8_000_000


def test_files_are_sorted_whatever_the_disk_says():
    assert list(standard_library_corpus().files) == sorted(standard_library_corpus().files)


def test_a_folder_gives_its_four_kinds_of_files_and_nothing_hidden(tmp_path):
    for name in ("b.txt", "a.md", "sub/c.py", "d.bin", ".hidden.txt", ".git/e.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "z.jsonl").write_text('{"text": "one"}\n\n{"text": "two", "id": 7}\n')
    corpus = open_corpus(str(tmp_path))
    assert corpus.files == ("a.md", "b.txt", "sub/c.py", "z.jsonl")
    assert list(corpus.documents()) == ["a.md", "b.txt", "sub/c.py", "one", "two"]


def test_line_ends_and_control_characters_are_kept(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\r\nb\rc\n\x00\x0c")
    assert list(folder_corpus(tmp_path).documents()) == ["a\r\nb\rc\n\x00\x0c"]


def test_bytes_that_are_not_utf8_become_replacement_characters(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9!")
    assert list(folder_corpus(tmp_path).documents()) == ["caf\ufffd!"]


def test_a_lone_surrogate_from_json_becomes_a_question_mark(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}')
    (text,) = folder_corpus(tmp_path).documents()
    assert document_bytes(text) == b"a?b"


def test_blank_documents_are_left_out(tmp_path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text(" \n\t")
    (tmp_path / "c.txt").write_text("c")
    assert list(folder_corpus(tmp_path).documents()) == ["c"]


@pytest.mark.parametrize("line", ["not json", '["text"]', '{"txt": "a"}', '{"text": 3}'])
def test_a_wrong_json_line_is_named_with_file_and_number(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(DataError, match=r"a\.jsonl:2: "):
        list(folder_corpus(tmp_path).documents())


def test_a_missing_folder_is_an_error_that_names_it(tmp_path):
    with pytest.raises(DataError, match="nowhere: no such folder"):
        open_corpus(str(tmp_path / "nowhere"))


def test_a_folder_without_text_is_an_error_that_names_the_kinds(tmp_path):
    (tmp_path / "a.bin").write_text("a")
    with pytest.raises(DataError, match=r"\.jsonl, \.md, \.py, \.txt"):
        open_corpus(str(tmp_path))


def test_the_fingerprint_moves_with_names_sizes_and_times(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    seen = {folder_corpus(tmp_path).fingerprint()}
    assert folder_corpus(tmp_path).fingerprint() in seen
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    seen.add(folder_corpus(tmp_path).fingerprint())
    (tmp_path / "a.txt").write_text("ab")
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    seen.add(folder_corpus(tmp_path).fingerprint())
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    seen.add(folder_corpus(tmp_path).fingerprint())
    assert len(seen) == 4


def test_a_file_that_vanished_is_a_data_error(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    corpus = folder_corpus(tmp_path)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"a\.txt"):
        corpus.fingerprint()
    with pytest.raises(DataError, match=r"a\.txt"):
        list(corpus.documents())


def test_one_document_in_fifty_is_held_out():
    held_out = sum(is_held_out(json.dumps(number).encode()) for number in range(20_000))
    # Binomial with p = 1/50: 400 expected, standard deviation 19.8; five of them either way.
    assert 300 < held_out < 500
