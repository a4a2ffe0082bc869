"""The text of a run: fixed by its founder, checked by every peer, refused if it differs."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from swarm.config import RunConfig, parse_config
from swarm.data.corpus import open_corpus
from swarm.data.held_out import held_out_documents
from swarm.data.shard_writer import write_shards
from swarm.data.tokenizer import BYTE
from swarm.errors import BadManifest, DataError, TextMismatch
from swarm.peer.machine.state_directory import RunDirectory
from swarm.peer.text.run_request import joiners_need
from swarm.peer.text.run_text import RunText
from swarm.protocol.values.texts import Text
from tests.scenarios.swarms import EXACT

RUN = parse_config(RunConfig, EXACT, source="test")
OWN = parse_config(RunConfig, EXACT, source="test", overrides=["data.mode=own"])


@pytest.fixture
def books(tmp_path: Path) -> Path:
    folder = tmp_path / "books"
    folder.mkdir()
    for number in range(8):
        text = "".join(f"book {number} line {line}\n" for line in range(500))
        (folder / f"{number}.txt").write_text(text)
    return folder


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "data"


def founded(folder: Path | None, cache: Path) -> Text:
    text = RunText(str(folder) if folder else None, cache, print).found(RUN, BYTE).common
    assert text is not None
    return text


def test_a_founder_binds_its_text(books: Path, cache: Path) -> None:
    mine = RunText(str(books), cache, print)
    found = mine.found(RUN, BYTE)
    text, held_out = found.common, np.frombuffer(found.held_out, dtype="<u4")
    shards = mine.shards
    assert text == Text(
        name="books",
        tokenizer=BYTE.name,
        digest=shards.contents.digest,
        documents=7,
        tokens=shards.num_tokens,
        windows=(shards.num_tokens - 1) // 32,
    )
    assert found.held_out_bytes == RUN.data.validation_bytes == int((held_out < 256).sum())
    assert held_out[-1] == BYTE.end_of_text


def test_the_same_text_elsewhere_and_under_another_name_is_the_runs(
    books: Path, cache: Path, tmp_path: Path
) -> None:
    needed = founded(books, cache)
    shutil.copytree(books, tmp_path / "x" / "copy")
    joiner = RunText(str(tmp_path / "x" / "copy"), cache, print)
    joiner.require(RUN, BYTE, needed, None)
    assert joiner.shards.contents.digest == needed.digest


def test_another_text_is_refused_with_both_digests_and_the_remedy(books: Path, cache: Path) -> None:
    needed = founded(books, cache)
    (books / "0.txt").write_text("something else " * 1000)
    joiner = RunText(str(books), cache, print)
    with pytest.raises(TextMismatch) as refused:
        joiner.require(RUN, BYTE, needed, None)
    have = founded(books, cache)
    assert have.digest != needed.digest
    for part in (needed.digest, have.digest, "'books'", str(books), "--corpus", "7 documents"):
        assert part in str(refused.value)
    assert refused.value.exit_code == 4
    with pytest.raises(AssertionError):
        joiner.shards  # noqa: B018 - nothing of another text is handed out


def shards_of(books: Path, out: Path, *, drop_copies: bool = True) -> Path:
    corpus = open_corpus(str(books))
    out.mkdir()
    held_out = held_out_documents(corpus.documents(), RUN.data.validation_bytes)
    write_shards(corpus, out, BYTE, drop_copies=drop_copies, held_out=held_out)
    return out


def test_a_folder_and_the_shards_made_of_it_are_one_text_also_with_equal_documents(
    books: Path, cache: Path, tmp_path: Path
) -> None:
    for path in list(books.iterdir()):  # also those that are held out
        shutil.copy(path, books / f"again-{path.name}")
    shards = shards_of(books, tmp_path / "shards")
    RunText(str(books), cache, print).require(RUN, BYTE, founded(shards, cache), None)
    one, other = (RunText(str(path), cache, print).found(RUN, BYTE) for path in (books, shards))
    assert one == other, "the held-out text too"


def test_shards_that_keep_copies_are_another_text_and_the_remedy_names_them(
    books: Path, cache: Path, tmp_path: Path
) -> None:
    shutil.copy(books / "0.txt", books / "again.txt")
    needed = founded(shards_of(books, tmp_path / "shards", drop_copies=False), cache)
    assert needed.name == "books"
    with pytest.raises(TextMismatch, match=r"unchanged: --corpus FOLDER, or the founder's shards"):
        RunText(str(books), cache, print).require(RUN, BYTE, needed, None)
    (tmp_path / "others").mkdir()
    shutil.copy(books / "0.txt", tmp_path / "others")
    with pytest.raises(TextMismatch) as refused:
        RunText(str(tmp_path / "others"), cache, print).require(RUN, BYTE, needed, None)
    assert "shards" not in str(refused.value.hint), "it has other files"


def test_a_joiner_without_corpus_has_the_standard_library_which_is_refused(
    books: Path, cache: Path
) -> None:
    needed, library = founded(books, cache), founded(None, cache)
    with pytest.raises(TextMismatch) as refused:
        RunText(None, cache, print).require(RUN, BYTE, needed, None)
    for part in (needed.digest, library.digest, "standard library of Python", "--corpus FOLDER"):
        assert part in str(refused.value)
    with pytest.raises(TextMismatch, match=r"leave --corpus out and use Python 3\.\d+\.\d+"):
        RunText(str(books), cache, print).require(RUN, BYTE, library, None)


def test_the_remembered_folder_is_used_and_a_named_one_wins(
    books: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = founded(books, cache)
    again = RunText(None, cache, print)
    again.require(RUN, BYTE, needed, str(books))
    assert again.folder == str(books)
    shutil.copytree(books, tmp_path / "copy")
    monkeypatch.chdir(tmp_path)
    named = RunText("copy", cache, print)
    named.require(RUN, BYTE, needed, str(books))
    assert named.folder == str(tmp_path / "copy"), "absolute, whatever was given"


def test_a_folder_that_is_gone_is_an_error_that_names_the_text(books: Path, cache: Path) -> None:
    needed = founded(books, cache)
    shutil.rmtree(books)
    with pytest.raises(TextMismatch) as refused:
        RunText(None, cache, print).require(RUN, BYTE, needed, str(books))
    for part in (needed.digest, f"{books}: no such folder", "--corpus FOLDER"):
        assert part in str(refused.value)


def test_a_run_that_is_wrong_about_its_own_text_is_refused(books: Path, cache: Path) -> None:
    needed = founded(books, cache)
    with pytest.raises(BadManifest, match="is wrong about the text 'books'"):
        RunText(str(books), cache, print).require(
            RUN, BYTE, replace(needed, windows=needed.windows + 1), None
        )
    with pytest.raises(TextMismatch, match="tokenizer is byte-0, this machine's is byte-"):
        RunText(str(books), cache, print).require(
            RUN, BYTE, replace(needed, tokenizer="byte-0"), None
        )


@pytest.mark.parametrize(("run", "has_text"), [(RUN, False), (OWN, True)])
def test_whether_there_is_a_common_text_follows_from_the_mode(
    books: Path, cache: Path, run: RunConfig, has_text: bool
) -> None:
    needed = founded(books, cache) if has_text else None
    with pytest.raises(BadManifest, match=r"contradicts data\.mode"):
        RunText(str(books), cache, print).require(run, BYTE, needed, None)


def test_with_texts_of_their_own_peers_must_name_theirs_and_nobody_compares(
    books: Path, cache: Path
) -> None:
    found = RunText(str(books), cache, print).found(OWN, BYTE)
    assert found.common is None and found.held_out
    with pytest.raises(DataError, match=r"own text.*--corpus"):
        RunText(None, cache, print).require(OWN, BYTE, None, None)
    (books / "0.txt").write_text("another text " * 1000)
    for given, remembered in ((str(books), None), (None, str(books))):
        RunText(given, cache, print).require(OWN, BYTE, None, remembered)


def test_a_text_too_small_for_a_batch_is_refused_before_a_run_is_founded(
    cache: Path, tmp_path: Path
) -> None:
    few = tmp_path / "few"
    few.mkdir()
    for number in range(3):
        (few / f"{number}.txt").write_text(f"{number} short")
    with pytest.raises(DataError, match="less than one batch"):
        RunText(str(few), cache, print).found(RUN, BYTE)
    (few / "long.txt").write_text("a longer text\n" * 200)
    assert RunText(str(few), cache, print).found(RUN, BYTE).held_out, "one short document is enough"


def test_the_line_about_the_text_is_said_once(
    books: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    joiner, needed = RunText(str(books), cache, print), founded(books, cache)
    capsys.readouterr()
    joiner.require(RUN, BYTE, needed, None)
    joiner.require(RUN, BYTE, needed, None)
    assert capsys.readouterr().out == joiners_need(needed) + "\n"
    assert joiners_need(needed) == (
        f"This run trains on the text 'books' (digest {needed.digest}, {needed.tokens:,} tokens in "
        "7 documents): joiners need the same, by --corpus FOLDER"
    )


def test_a_run_directory_remembers_the_folder(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    for folder in (None, "/with\nline and \udcff", None):
        directory.write_text_folder(folder)
        assert RunDirectory(tmp_path).read_text_folder() == folder
