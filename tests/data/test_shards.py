import itertools
import json
import logging
import os
import shutil
import threading

import numpy as np
import pytest
from blake3 import blake3

from swarm.data import shard_writer
from swarm.data.corpus import folder_corpus, is_held_out
from swarm.data.held_out import held_out_documents
from swarm.data.shards import KEPT_CACHES, open_shards
from swarm.data.tokenizer import BYTE, ByteTokenizer, document_tokens, token_dtype
from swarm.errors import DataError


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(120):
        (folder / f"{number:03}.txt").write_text(f"document {number} " * (1 + number % 7))
    return folder_corpus(folder)


def expected_tokens(corpus):
    contents = list(corpus.documents())
    kept = [content for content in contents if not is_held_out(content)]
    assert len(kept) < len(contents), "the test needs a held-out document"
    return np.concatenate([document_tokens(content) for content in kept])


def all_tokens(shards):
    return np.concatenate(shards.arrays)


def only_folder(cache):
    (folder,) = cache.iterdir()
    return folder


def test_shards_hold_the_training_documents_in_order(corpus, tmp_path):
    shards = open_shards(corpus, tmp_path / "cache", BYTE)
    assert np.array_equal(all_tokens(shards), expected_tokens(corpus))
    assert shards.num_tokens == len(expected_tokens(corpus))


def test_a_shard_is_closed_by_a_whole_document(corpus, tmp_path):
    shards = open_shards(corpus, tmp_path / "cache", BYTE, shard_tokens=500)
    assert len(shards.arrays) > 5
    assert all(len(array) >= 500 for array in shards.arrays[:-1])
    assert all(array[-1] == 256 for array in shards.arrays)
    assert np.array_equal(all_tokens(shards), expected_tokens(corpus))


def test_the_second_opening_reads_the_cache(corpus, tmp_path):
    open_shards(corpus, tmp_path / "cache", BYTE)
    written_ns = (only_folder(tmp_path / "cache") / "00000.bin").stat().st_mtime_ns
    open_shards(corpus, tmp_path / "cache", BYTE)
    assert (only_folder(tmp_path / "cache") / "00000.bin").stat().st_mtime_ns == written_ns


def test_a_changed_corpus_gets_a_cache_in_place_of_the_one_before(corpus, tmp_path, caplog):
    open_shards(corpus, tmp_path / "cache", BYTE)
    (corpus.root / "000.txt").write_text("something else, longer than before")
    with caplog.at_level(logging.INFO):
        shards = open_shards(corpus, tmp_path / "cache", BYTE)
    assert np.array_equal(all_tokens(shards), expected_tokens(corpus))
    assert "removing tokens of corpus-" in caplog.text and "its text has changed" in caplog.text
    only_folder(tmp_path / "cache")


def test_a_text_with_another_mode_owner_or_place_is_not_tokenised_again(
    corpus, tmp_path, monkeypatch
):
    """A container and a copy change the stat of each file, and of the folder."""
    open_shards(corpus, tmp_path / "cache", BYTE)
    for path in corpus.root.iterdir():
        path.chmod(0o600)
    moved = tmp_path / "moved"
    shutil.copytree(corpus.root, moved)
    monkeypatch.setattr(shard_writer, "_write_shard", None)
    for text in (corpus, folder_corpus(moved)):
        shards = open_shards(text, tmp_path / "cache", BYTE)
        assert np.array_equal(all_tokens(shards), expected_tokens(corpus))


def test_caches_of_other_texts_are_few_and_those_used_last(corpus, tmp_path):
    cache, texts = tmp_path / "cache", [corpus]
    for number in range(KEPT_CACHES + 1):
        folder = tmp_path / f"text{number}"
        shutil.copytree(corpus.root, folder)
        (folder / "000.txt").write_text(f"another text, number {number}")
        texts.append(folder_corpus(folder))
    for number, text in enumerate(texts):
        open_shards(text, cache, BYTE)
        for path in cache.glob("corpus-*/origin"):
            if json.loads(path.read_bytes())[0] == str(text.root):
                os.utime(path, (number, number))
    kept = {json.loads(path.read_bytes())[0] for path in cache.glob("corpus-*/origin")}
    assert kept == {str(text.root) for text in texts[-KEPT_CACHES:]}


def test_the_digest_is_of_all_training_tokens_however_they_are_cut(corpus, tmp_path):
    expected = blake3(expected_tokens(corpus).astype("<u2").tobytes()).hexdigest()
    whole = open_shards(corpus, tmp_path / "one", BYTE)
    cut = open_shards(corpus, tmp_path / "two", BYTE, shard_tokens=500)
    again = open_shards(corpus, tmp_path / "two", BYTE, shard_tokens=500)
    assert len(cut.arrays) > len(whole.arrays)
    assert {each.contents.digest for each in (whole, cut, again)} == {expected}


def test_the_digest_depends_on_the_text_and_not_on_where_it_lies(corpus, tmp_path):
    elsewhere = tmp_path / "else" / "where"
    shutil.copytree(corpus.root, elsewhere)
    first = open_shards(corpus, tmp_path / "cache", BYTE).contents
    assert open_shards(folder_corpus(elsewhere), tmp_path / "cache", BYTE).contents == first
    (elsewhere / "000.txt").rename(elsewhere / "zzz.txt")
    moved = open_shards(folder_corpus(elsewhere), tmp_path / "cache", BYTE).contents
    assert moved.digest != first.digest, "another order of documents is another text"


def test_a_line_says_what_was_read_and_what_was_not(corpus, tmp_path):
    (corpus.root / "bad.txt").write_bytes(b"\0")
    (corpus.root / "bad.jsonl").write_text("1\n2\n3\n")
    (corpus.root / "paper.pdf").write_text("%PDF")
    corpus = folder_corpus(corpus.root)
    for _ in range(2):  # built, and from the cache
        shards = open_shards(corpus, tmp_path / "cache", BYTE)
        held_out = [len(each) for each in corpus.documents() if is_held_out(each)]
        assert shards.summary() == (
            f"{shards.num_tokens:,} tokens; 121 files of {shards.contents.file_bytes:,} bytes "
            'read; not read by suffix: 1 .pdf; skipped: 3 no object with a string under "text", '
            "1 binary, because it has NUL bytes (--list-skipped names them); "
            f"documents to train on: {120 - len(held_out)}, "
            f"held out: {len(held_out)} of {sum(held_out)} bytes"
        )
        assert shards.contents.tally.names() == [
            *(f'bad.jsonl:{n}: no object with a string under "text"' for n in (1, 2, 3)),
            "bad.txt: binary, because it has NUL bytes",
            "paper.pdf: not read, .pdf",
        ]


def test_a_cache_is_kept_when_files_come_that_are_no_text_and_they_are_named(corpus, tmp_path):
    open_shards(corpus, tmp_path / "cache", BYTE)
    (made,) = (tmp_path / "cache").iterdir()
    before = made.stat().st_ino
    (corpus.root / "paper.PDF").write_text("%PDF")
    shards = open_shards(folder_corpus(corpus.root), tmp_path / "cache", BYTE)
    assert [path.stat().st_ino for path in (tmp_path / "cache").iterdir()] == [before]
    assert shards.contents.unread == {".pdf": 1}
    assert shards.contents.tally.names() == ["paper.PDF: not read, .pdf"]


def test_one_large_text_is_split_into_training_and_held_out_documents(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "book.txt").write_text("".join(f"line {n}\n" for n in range(30_000)))
    corpus = folder_corpus(tmp_path / "text")
    assert 3 < len(list(corpus.documents())) < 10
    assert not any(map(is_held_out, corpus.documents())), "by chance no document is held out"
    shards = open_shards(corpus, tmp_path / "cache", BYTE)
    (held_out,) = held_out_documents(corpus.documents(), 10**6)
    assert shards.contents.held_out_documents == 1
    assert shards.contents.held_out_bytes == len(held_out)
    assert held_out not in bytes(all_tokens(shards).astype(np.uint8))


def test_a_text_of_one_document_says_that_nothing_is_left(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "note.txt").write_text("one small document")
    with pytest.raises(DataError, match=r"all of its documents are held out.*add documents"):
        open_shards(folder_corpus(tmp_path / "text"), tmp_path / "cache", BYTE)


def test_a_text_without_any_document_names_what_was_skipped(tmp_path):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_bytes(b"\0")
    with pytest.raises(DataError, match=r"holds no text; 0 files .*; a\.txt: binary"):
        open_shards(folder_corpus(tmp_path / "text"), tmp_path / "cache", BYTE)


def test_a_long_build_says_how_far_it_is(corpus, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("swarm.progress.EVERY_S", 0.0)
    with caplog.at_level("INFO"):
        open_shards(corpus, tmp_path / "cache", BYTE)
    assert "reading text: MB 1 of 1" in caplog.text


def cut_tokens(folder):
    content = (folder / "00000.bin").read_bytes()
    (folder / "00000.bin").write_bytes(content[:-2])


def flip_token(folder):
    content = bytearray((folder / "00000.bin").read_bytes())
    content[100] ^= 1
    (folder / "00000.bin").write_bytes(content)


def remove_tokens(folder):
    (folder / "00000.bin").unlink()


def cut_header(folder):
    content = (folder / "header.json").read_bytes()
    (folder / "header.json").write_bytes(content[:-10])


def change_header(folder):
    header = json.loads((folder / "header.json").read_text())
    header["dtype"] = "<u4"
    (folder / "header.json").write_text(json.dumps(header))


def strip_header(folder):
    (folder / "header.json").write_text("[]")


@pytest.mark.parametrize(
    "damage", [cut_tokens, flip_token, remove_tokens, cut_header, change_header, strip_header]
)
def test_a_damaged_cache_is_seen_said_and_built_anew(corpus, tmp_path, damage, caplog):
    open_shards(corpus, tmp_path / "cache", BYTE)
    damage(only_folder(tmp_path / "cache"))
    shards = open_shards(corpus, tmp_path / "cache", BYTE)
    assert np.array_equal(all_tokens(shards), expected_tokens(corpus))
    assert "again" in caplog.text
    caplog.clear()
    open_shards(corpus, tmp_path / "cache", BYTE)
    assert not caplog.text


def test_nothing_is_left_beside_the_cache(corpus, tmp_path):
    open_shards(corpus, tmp_path / "cache", BYTE)
    folder = only_folder(tmp_path / "cache")
    assert sorted(path.name for path in folder.iterdir()) == ["00000.bin", "header.json", "origin"]


def test_processes_that_build_at_the_same_time_end_with_one_cache(corpus, tmp_path):
    found = []
    start = threading.Barrier(3)

    def build():
        start.wait(timeout=10)
        found.append(all_tokens(open_shards(corpus, tmp_path / "cache", BYTE)))

    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert len(found) == 3
    assert all(np.array_equal(tokens, expected_tokens(corpus)) for tokens in found)
    only_folder(tmp_path / "cache")


class Killed(BaseException):
    """No code of ours cleans up after it."""


class Fatal(ByteTokenizer):
    """Ends the process in the middle of a corpus."""

    def encoded(self, documents):
        yield from itertools.islice(super().encoded(documents), 60)
        raise Killed


def killed(corpus, cache):
    """Leaves a half-built cache and returns its first shard."""
    with pytest.raises(Killed):
        open_shards(corpus, cache, Fatal(), shard_tokens=500)
    (shard,) = cache.glob("*.new/00000.bin")
    return shard


def test_a_cache_whose_building_was_killed_is_gone_on_with(corpus, tmp_path):
    cache = tmp_path / "cache"
    written_ns = killed(corpus, cache).stat().st_mtime_ns
    shards = open_shards(corpus, cache, BYTE, shard_tokens=500)
    assert np.array_equal(all_tokens(shards), expected_tokens(corpus))
    assert (only_folder(cache) / "00000.bin").stat().st_mtime_ns == written_ns
    assert not (only_folder(cache) / "progress.json").exists()


def test_what_was_half_built_of_another_corpus_is_removed(corpus, tmp_path):
    cache = tmp_path / "cache"
    killed(corpus, cache)
    (corpus.root / "000.txt").write_text("something else, longer than before")
    open_shards(corpus, cache, BYTE, shard_tokens=500)
    assert "." not in only_folder(cache).name


def test_a_half_built_cache_that_was_changed_is_an_error_once(corpus, tmp_path):
    cache = tmp_path / "cache"
    killed(corpus, cache).write_bytes(b"torn")
    with pytest.raises(DataError, match=r"00000\.bin: was changed"):
        open_shards(corpus, cache, BYTE, shard_tokens=500)
    shards = open_shards(corpus, cache, BYTE, shard_tokens=500)
    assert np.array_equal(all_tokens(shards), expected_tokens(corpus))


def test_a_corpus_that_is_all_held_out_is_an_error_and_leaves_no_cache(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    held_out = next(text for text in map(str, range(10_000)) if is_held_out(text.encode()))
    (folder / "a.txt").write_text(held_out)
    with pytest.raises(DataError, match="no text is left for training"):
        open_shards(folder_corpus(folder), tmp_path / "cache", BYTE)
    assert list((tmp_path / "cache").iterdir()) == []


def test_tokens_take_two_bytes_while_they_fit():
    assert (token_dtype(258).str, token_dtype(65_536).str) == ("<u2", "<u2")
    assert token_dtype(151_665).str == "<u4"


def test_what_a_torn_shard_is_said_to_lack_is_in_one_unit(corpus, tmp_path, caplog):
    tokens = open_shards(corpus, tmp_path / "cache", BYTE).num_tokens
    shard = only_folder(tmp_path / "cache") / "00000.bin"
    shard.write_bytes(shard.read_bytes()[:-2])
    open_shards(corpus, tmp_path / "cache", BYTE)
    assert f"has {2 * tokens - 2} bytes instead of {2 * tokens}, " in caplog.text
