import json
import os
import platform
import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3
from click.testing import CliRunner

from peers.data import main
from swarm.config import RunConfig, parse_config
from swarm.data import documents
from swarm.data.corpus import (
    Mixture,
    Split,
    folder_corpus,
    is_held_out,
    list_files,
    open_corpus,
    open_mixture,
    standard_library_corpus,
)
from swarm.data.tally import Tally
from swarm.data.tokenizer import BYTE, document_tokens
from swarm.errors import ConfigError, DataError, TextMismatch
from swarm.peer.text.run_text import RunText
from tests.scenarios.swarms import EXACT


def test_the_default_corpus_is_the_standard_library_without_tests_and_packages():
    corpus = open_corpus(None)
    folders = {folder for file in corpus.files for folder in file.split("/")[:-1]}
    assert {"argparse.py", "asyncio/locks.py", "json/decoder.py"} <= set(corpus.files)
    assert folders.isdisjoint({"site-packages", "dist-packages", "test", "tests", "__pycache__"})
    assert not any("_sysconfigdata" in file for file in corpus.files)
    # 11.9 MB with Python 3.11. Far less would mean that folders were left out by mistake.
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
    assert list(corpus.documents()) == [b"a.md", b"b.txt", b"sub/c.py", b"one", b"two"]


def test_line_ends_and_control_characters_are_kept(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"a\r\nb\rc\n\x01\x0c")
    assert list(folder_corpus(tmp_path).documents()) == [b"a\r\nb\rc\n\x01\x0c"]


def test_a_lone_surrogate_from_json_becomes_a_question_mark(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}')
    assert list(folder_corpus(tmp_path).documents()) == [b"a?b"]


def test_blank_documents_are_left_out(tmp_path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.txt").write_text(" \n\t")
    (tmp_path / "c.txt").write_text("c")
    assert list(folder_corpus(tmp_path).documents()) == [b"c"]


def test_a_missing_folder_is_an_error_that_names_it(tmp_path):
    with pytest.raises(DataError, match="nowhere: no such folder"):
        open_corpus(str(tmp_path / "nowhere"))


def test_a_folder_without_text_is_an_error_that_names_the_kinds(tmp_path):
    (tmp_path / "a.bin").write_text("a")
    with pytest.raises(DataError, match=r"\.html, \.json, .*\.txt, each .*1 \.bin; a\.bin"):
        open_corpus(str(tmp_path))


def test_the_fingerprint_moves_with_names_and_contents_and_with_nothing_else(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    seen = {folder_corpus(folder).fingerprint()}
    os.utime(folder / "a.txt", ns=(1, 1))
    (folder / "a.txt").chmod(0o600)
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert {folder_corpus(tmp_path / each).fingerprint() for each in ("one", "elsewhere")} == seen
    (folder / "a.txt").write_text("b")
    os.utime(folder / "a.txt", ns=(1, 1))
    seen.add(folder_corpus(folder).fingerprint())
    (folder / "a.txt").rename(folder / "b.txt")
    seen.add(folder_corpus(folder).fingerprint())
    assert len(seen) == 3


def test_a_file_that_vanished_is_skipped_and_the_fingerprint_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    corpus = folder_corpus(tmp_path)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DataError, match=r"a\.txt"):
        corpus.fingerprint()
    skipped = Tally()
    assert list(corpus.documents(skipped)) == [b"b"]
    assert skipped.named == ["a.txt: cannot be read: No such file or directory"]


def test_what_is_no_text_is_skipped_counted_and_named(tmp_path):
    (tmp_path / "binary.txt").write_bytes(b"abc\0def")
    (tmp_path / "latin1.txt").write_bytes(b"caf\xe9!")
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "loop.txt").symlink_to(tmp_path / "loop.txt")
    os.mkfifo(tmp_path / "pipe.txt")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path)
    skipped = Tally(max_named=10)
    assert list(folder_corpus(tmp_path).documents(skipped)) == [b"text"]
    assert skipped.count == 5
    assert sorted(skipped.named) == [
        "binary.txt: binary, because it has NUL bytes",
        "latin1.txt: not UTF-8",
        "link: a link to a folder, which is not followed",
        "loop.txt: cannot be read: Too many levels of symbolic links",
        "pipe.txt: a pipe, socket or device",
    ]


def test_links_that_leave_the_folder_are_named_and_followed_only_when_asked_for(tmp_path):
    """Files outside of the folder could be published as held-out text."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key.txt").write_text("secret")
    (tmp_path / "secret" / "back").symlink_to(tmp_path)
    root = tmp_path / "text"
    root.mkdir()
    (root / "a.txt").write_text("a")
    (root / "inside.txt").symlink_to("a.txt")
    (root / "leaves.txt").symlink_to(tmp_path / "secret" / "key.txt")
    (root / "more").symlink_to(tmp_path / "secret")
    tally = Tally()
    assert list(folder_corpus(root).documents(tally)) == [b"a", b"a"]
    assert tally.named == [
        "leaves.txt: a link that leaves the folder, followed with --follow-links",
        "more: a link to a folder, which is not followed",
    ]
    tally = Tally()
    followed = folder_corpus(root, follow_links=True)
    assert followed.files == ("a.txt", "inside.txt", "leaves.txt", "more/key.txt")
    assert list(followed.documents(tally))[2:] == [b"secret"] * 2
    assert tally.named == [
        "more/back/secret: already read by another path",
        "more/back/text: already read by another path",
    ]


def test_names_may_be_any_bytes(tmp_path):
    name = os.fsencode(tmp_path) + b"/caf\xe9"
    for suffix, content in ((b".txt", b"a"), (b".TXT", b"\xff"), (b".jsonl", b'{"text": "b"}')):
        with open(name + suffix, "wb") as file:
            file.write(content)
    tally = Tally()
    corpus = folder_corpus(tmp_path)
    assert list(corpus.documents(tally)) == [b"b", b"a"] and corpus.fingerprint()
    assert tally.named == ["caf\udce9.TXT: not UTF-8"]


def test_what_is_not_read_for_its_name_is_counted_by_suffix_and_named(tmp_path):
    for name in ("a.txt", "b.pdf", "c.PDF", "d.tar.gz", "e", ".f.txt", "g.npy"):
        (tmp_path / name).write_text("text")
    (tmp_path / ".git").mkdir()
    tally = Tally()
    assert list(folder_corpus(tmp_path).documents(tally)) == [b"text"]
    assert tally.count == 0
    assert tally.summary() == (
        "1 file of 4 bytes read; not read by suffix: 2 .pdf, 2 hidden, 1 .npy, 1 .tar.gz, "
        "1 without suffix"
    )
    assert tally.names()[2:4] == ["b.pdf: not read, .pdf", "c.PDF: not read, .pdf"]


def test_a_tally_names_and_counts_within_bounds():
    tally = Tally(max_named=2)
    for number in range(1000):
        tally.leave(f"a.{number}", f".{number}")
        tally.add(f"b{number}", "binary")
    assert len(tally.unread) == 101 and len(tally.names()) == 5
    assert tally.names()[-1] == "... and 1,996 more"
    assert tally.summary().startswith("0 files of 0 bytes read; not read by suffix: 900 others, ")
    assert tally.summary().endswith("; skipped: 1,000 binary")


def test_a_folder_is_listed_alike_whatever_the_disk_says(tmp_path):
    for name in ("b/2.txt", "a/1.txt", "a/0.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    found = list_files(tmp_path, lambda name: name.endswith(".txt"))
    assert found.files == ("a/0.txt", "a/1.txt", "b/2.txt")


def test_a_file_is_skipped_for_what_stands_at_its_very_end(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"words " * 2**19 + b"\xe9")
    (tmp_path / "b.txt").write_text("b")
    assert list(folder_corpus(tmp_path).documents()) == [b"b"]


@pytest.mark.parametrize(
    "line", ["not json", "[" * 10**6, '["text"]', '{"txt": "a"}', '{"text": 3}']
)
def test_a_json_line_without_text_is_skipped_and_named_with_its_number(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n' + line + '\n{"text": "also"}')
    skipped = Tally()
    assert list(folder_corpus(tmp_path).documents(skipped)) == [b"fine", b"also"]
    assert skipped.count == 1 and skipped.named[0].startswith("a.jsonl:2: ")


def test_a_json_line_that_is_too_long_is_skipped_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 32)
    lines = ['{"text": "%s"}' % ("x" * size) for size in (19, 20, 100)]
    assert len(lines[0]) == 31
    (tmp_path / "a.jsonl").write_text("\n".join([*lines, '{"text": "y"}']))
    skipped = Tally()
    assert list(folder_corpus(tmp_path).documents(skipped)) == [b"x" * 19, b"y"]
    assert skipped.count == 2 and skipped.named[1].startswith("a.jsonl:3: longer than")


def test_the_corpus_depends_on_the_order_of_names_and_on_nothing_else_of_them(tmp_path):
    found = []
    for folder, names in (("x/one", ("a.txt", "b.md")), ("y", ("sub/0.py", "sub/1.txt"))):
        for name, text in zip(names, ("first", "second"), strict=True):
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        found.append(list(open_corpus(str(tmp_path / folder)).documents()))
    assert found[0] == found[1] == [b"first", b"second"]


def test_a_relative_folder_is_made_absolute_and_called_by_its_own_name(tmp_path, monkeypatch):
    (tmp_path / "books" / "sub").mkdir(parents=True)
    (tmp_path / "books" / "a.txt").write_text("a")
    monkeypatch.chdir(tmp_path / "books" / "sub")
    corpus = open_corpus("..")
    assert (corpus.root, corpus.name) == (tmp_path / "books", "books")


def test_a_name_has_no_control_characters(tmp_path):
    folder = tmp_path / "a\nb\x1b[31m"
    folder.mkdir()
    (folder / "a.txt").write_text("a")
    assert folder_corpus(folder).name == "a_b_[31m"


def test_what_an_installation_writes_is_no_part_of_the_standard_library():
    """Such files have the installation's paths, so two machines with one Python would not agree."""
    prefix = sysconfig.get_config_var("prefix").encode()
    corpus = standard_library_corpus()
    assert platform.python_version() in corpus.name
    assert not any(file.startswith("config-") for file in corpus.files)
    if len(prefix) > len("/usr/local"):
        assert not any(prefix in document for document in corpus.documents())


def test_one_document_in_fifty_is_held_out():
    held_out = sum(is_held_out(json.dumps(number).encode()) for number in range(20_000))
    # Binomial with p = 1/50: 400 expected, standard deviation 19.8; five of them either way.
    assert 300 < held_out < 500


def test_the_document_with_the_smallest_digest_is_held_out_where_by_chance_none_is():
    kept = [text for text in (b"%d" % n for n in range(20)) if not is_held_out(text)]
    held_out = [text for text in kept if Split.of(kept).holds_out(text)]
    assert held_out == [min(kept, key=lambda text: blake3(text).digest())]


def test_the_split_of_a_corpus_with_held_out_documents_is_theirs_alone():
    texts = [b"%d" % n for n in range(500)]
    assert [t for t in texts if Split.of(texts).holds_out(t)] == list(filter(is_held_out, texts))


SHARES = (("web", 0.75), ("code", 0.25))
SETTING = 'data.mixture=[["web", 0.75], ["code", 0.25]]'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, count in (("web", 400), ("code", 400), ("other", 3)):
        (tmp_path / "text" / name).mkdir(parents=True)
        for number in range(count):
            text = f"{name} {number} " * (1 + number * 7 % 11)
            (tmp_path / "text" / name / f"{number:03}.txt").write_text(text)
    return tmp_path / "text"


def run_of(*settings: str) -> RunConfig:
    return parse_config(RunConfig, EXACT, source="test", overrides=settings)


def invoke(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    return result.exit_code, result.output


def from_web(documents: list[bytes]) -> float:
    return sum(len(d) for d in documents if d.startswith(b"web")) / sum(map(len, documents))


def test_every_stretch_has_the_shares_and_nothing_comes_twice(folder: Path) -> None:
    tally = Tally()
    found = list(open_mixture(str(folder), SHARES).documents(tally))
    assert len(set(found)) == len(found) and not any(d.startswith(b"other") for d in found)
    for start in range(0, len(found) - 100, 100):
        assert from_web(found[start : start + 100]) == pytest.approx(0.75, abs=0.04)
    assert sum(d.startswith(b"web") for d in found) == 400, "it ends when the first folder ends"
    assert tally.named == ["code: not read to its end, because web ended first"]
    assert tally.files < 600
    for name in (b"web", b"code"):
        of_it = [d for d in found if d.startswith(name)]
        assert of_it == sorted(of_it, key=lambda d: int(d.split()[1])), "in the order of files"


def test_its_order_is_a_function_of_folders_and_weights(folder: Path) -> None:
    def order(*shares: tuple[str, float]) -> list[bytes]:
        return list(open_mixture(str(folder), shares).documents())

    assert order(*SHARES) == order(("web", 3.0), ("code", 1.0))
    assert order(*SHARES) != order(("web", 0.25), ("code", 0.75))
    prints = {open_mixture(str(folder), s).fingerprint() for s in (SHARES, SHARES[::-1])}
    assert len(prints) == 2
    (folder / "web" / "000.txt").write_text("changed")
    assert open_mixture(str(folder), SHARES).fingerprint() not in prints


def test_a_run_mixes_its_text_and_joiners_need_the_same(folder: Path, tmp_path: Path) -> None:
    run, plain = run_of(SETTING), run_of()
    given = RunText(str(folder), tmp_path / "cache", print).found(run, BYTE)
    mixed = open_mixture(str(folder), SHARES)
    tokens = [document_tokens(each) for each in mixed.documents() if not is_held_out(each)]
    joiner = RunText(str(folder), tmp_path / "other", print)
    joiner.require(run, BYTE, given.common, None)
    assert np.array_equal(np.concatenate(joiner.shards.arrays), np.concatenate(tokens))
    (folder / "code" / "000.txt").write_text("another text")
    with pytest.raises(TextMismatch):
        RunText(str(folder), tmp_path / "other", print).require(run, BYTE, given.common, None)
    assert given.common is not None
    assert RunText(str(folder), tmp_path / "cache", print).found(plain, BYTE).common != given.common


def test_shards_are_mixed_as_the_run_file_says_or_refused(folder: Path, tmp_path: Path) -> None:
    run_file, out = tmp_path / "run.toml", tmp_path / "shards"
    share = 'mixture = [["web", 0.75], ["code", 0.25]]\nsequence_length'
    run_file.write_text(EXACT.replace("sequence_length", share, 1))
    code, said = invoke("tokenize", "--run", run_file, "--corpus", folder, "--out", out)
    assert code == 0, said
    code, said = invoke("info", out, "--json")
    assert json.loads(said)["mixture"] == [["web", 0.75], ["code", 0.25]]
    mixed = RunText(str(out), tmp_path / "cache", print).found(run_of(SETTING), BYTE)
    same = RunText(str(folder), tmp_path / "cache", print).found(run_of(SETTING), BYTE)
    assert mixed.common is not None and same.common is not None
    assert mixed.common.digest == same.common.digest and mixed.held_out == same.held_out
    with pytest.raises(DataError, match=r"'web', 0.75.*the run has \[\].*tokenize --run FILE"):
        RunText(str(out), tmp_path / "cache", print).found(run_of(), BYTE)


def test_what_cannot_be_mixed_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"web, code, and no folder with these .*--corpus DIR"):
        RunText(None, tmp_path / "cache", print).found(run_of(SETTING), BYTE)
    with pytest.raises(DataError, match=r"nowhere: no such folder"):
        open_mixture(str(folder), [("nowhere", 1.0)])
    with pytest.raises(ConfigError, match="names a folder twice"):
        run_of('data.mixture=[["web", 0.5], ["web", 0.5]]')
    for wrong in ('["web", 0.0]', '["../web", 1.0]', '["/etc", 1.0]', '["web"]', '[".", 1.0]'):
        with pytest.raises(ConfigError, match=r"data\.mixture"):
            run_of(f"data.mixture=[{wrong}]")
    assert isinstance(open_mixture(str(folder), [("web", 1.0)]), Mixture)
