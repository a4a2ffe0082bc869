"""swarm-data: from a folder of text to shards for a run."""

import gzip
import json
import logging
import os
import sysconfig
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from peers.data import main
from swarm.config import RunConfig, parse_config
from swarm.data.corpus import Corpus, Mixture
from swarm.data.shards import Prepared, Shards
from swarm.data.tokenizer import BYTE
from swarm.data.tokenizer_file import open_tokenizer
from swarm.errors import DataError
from swarm.peer.text.run_text import RunText, corpus_of
from swarm.protocol.records.printable import printable
from tests.scenarios.swarms import EXACT


def invoke(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "text"
    folder.mkdir()
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:12]
    for path in library:
        (folder / path.name).write_bytes(path.read_bytes())
    lines = [json.dumps({"text": path.read_text(encoding="utf-8")}) for path in library[:2]]
    (folder / "copies.jsonl.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return folder


@pytest.fixture(scope="module")
def tokenizer(text: Path) -> Path:
    out = text.parent / "tokenizer"
    code, said = invoke("train-tokenizer", "--corpus", text, "--vocab-size", 500, "--out", out)
    assert code == 0, said
    assert "500 ids" in said
    return out


def test_a_tokenizer_of_the_same_text_is_the_same(
    text: Path, tokenizer: Path, tmp_path: Path
) -> None:
    invoke("train-tokenizer", "--corpus", text, "--vocab-size", 500, "--out", tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (tokenizer / name).read_bytes()
    code, said = invoke("info", tokenizer)
    assert code == 0 and open_tokenizer(tokenizer).name in said and "<|endoftext|>" in said


def test_a_text_with_few_pairs_says_that_the_vocabulary_is_smaller(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("ab")
    (tmp_path / "text" / "b.txt").write_text("cd")
    out = tmp_path / "out"
    code, said = invoke(
        "train-tokenizer", "--corpus", tmp_path / "text", "--vocab-size", 9999, "--out", out
    )
    assert code == 0 and "since the text has no more" in said
    code, said = invoke("train-tokenizer", "--vocab-size", 100, "--out", out)
    assert code == 2 and "at least 257" in said


def test_shards_are_made_looked_at_verified_and_taken_by_a_run(
    text: Path, tokenizer: Path, tmp_path: Path
) -> None:
    out, used = tmp_path / "shards", open_tokenizer(tokenizer)
    making = ("tokenize", "--corpus", text, "--tokenizer", tokenizer, "--out", out)
    code, said = invoke(*making, "--shard-tokens", 20_000)
    assert code == 0, said
    code, said = invoke("info", out, "--json")
    found = json.loads(said)
    assert found["tokenizer"] == used.name and found["shards"] > 2
    assert found["copies"] >= 2 and found["bytes_per_token"] > 1.5
    code, said = invoke("verify", out, "--tokenizer", tokenizer)
    assert code == 0 and "whole" in said and "not checked" not in said
    code, said = invoke("verify", out)
    assert code == 0 and f"its ids were not checked against {used.name}" in said
    code, said = invoke(*making)
    assert code == DataError.exit_code and "holds finished shards" in said

    overrides = ["model.vocab_size=512", "data.tokenizer=file"]
    run = parse_config(RunConfig, EXACT, source="test", overrides=overrides)
    given = RunText(str(out), tmp_path / "cache", print).found(run, used)
    assert given.common is not None and given.common.tokens == found["tokens"]
    assert given.common.tokenizer == used.name and given.common.digest == found["digest"]
    tokens = np.frombuffer(given.held_out, "<u4")
    assert tokens[-1] == used.end_of_text and 0 < given.held_out_bytes <= run.data.validation_bytes
    joiner = RunText(str(out), tmp_path / "cache", print)
    joiner.require(run, used, given.common, None)
    assert joiner.shards.num_tokens == found["tokens"]
    byte_run = parse_config(RunConfig, EXACT, source="test")
    with pytest.raises(DataError, match="made with the tokenizer"):
        RunText(str(out), tmp_path / "cache", print).found(byte_run, BYTE)
    (out / "00001.bin").write_bytes(b"torn")
    for named in (("--tokenizer", tokenizer), ()):
        code, said = invoke("verify", out, *named)
        assert code == DataError.exit_code and "00001.bin has 4 bytes" in said
        assert "make it again" in said


def test_shards_of_another_tokenizer_than_the_one_named_are_wrong(
    text: Path, tokenizer: Path, tmp_path: Path
) -> None:
    out = tmp_path / "shards"
    assert invoke("tokenize", "--corpus", text, "--out", out)[0] == 0
    code, said = invoke("verify", out)
    assert code == 0 and "not checked" not in said, "bytes have no other tokenizer"
    code, said = invoke("verify", out, "--tokenizer", tokenizer)
    assert code == DataError.exit_code and "made with the tokenizer byte-" in said


def test_a_shard_that_ends_otherwise_than_the_first_is_wrong_whichever_tokenizer_made_it(
    text: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "shards"
    making = ("tokenize", "--corpus", text, "--tokenizer", tokenizer, "--out", out)
    assert invoke(*making, "--shard-tokens", 20_000)[0] == 0
    real = Prepared.opened

    def with_another_end(prepared: Prepared) -> Shards:
        shards = real(prepared)
        *others, array = shards.arrays
        return replace(shards, arrays=(*others, array[:-1]))

    monkeypatch.setattr(Prepared, "opened", with_another_end)
    code, said = invoke("verify", out)
    assert code == DataError.exit_code and "ends in a document" in said


def test_packed_shards_are_for_runs_of_their_length_that_keep_documents_apart(
    text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "shards"
    code, said = invoke("tokenize", "--corpus", text, "--out", out, "--pack", 64)
    assert code == 0 and "packed into  64" in said, said
    assert invoke("verify", out)[0] == 0

    def taken(*settings: str) -> Corpus | Mixture | Prepared:
        return corpus_of(parse_config(RunConfig, EXACT, source="t", overrides=settings), str(out))

    with pytest.raises(DataError, match="packed into sequences of 64 tokens"):
        taken("data.attention=document")
    with pytest.raises(DataError, match=r'data\.attention = "window"'):
        taken("data.sequence_length=64")
    found = taken("data.sequence_length=64", "data.attention=document")
    assert isinstance(found, Prepared) and found.pack == 64


def test_the_number_of_processes_changes_no_byte(
    text: Path, tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for cores in (1, 3):
        monkeypatch.setattr("swarm.data.encoders.available_cores", lambda n=cores: n)
        out = tmp_path / str(cores)
        invoke("tokenize", "--corpus", text, "--tokenizer", tokenizer, "--out", out)
        found.append({path.name: path.read_bytes() for path in out.iterdir()})
    assert found[0] == found[1]


def test_ready_tokens_keep_their_held_out_text(text: Path, tokenizer: Path, tmp_path: Path) -> None:
    used = open_tokenizer(tokenizer)
    documents = [f"text {number} of a few words".encode() for number in range(200)]
    (tmp_path / "in").mkdir()
    stream = np.concatenate(list(used.encoded(documents)))
    (tmp_path / "in" / "train.bin").write_bytes(stream.astype("<u2").tobytes())
    out = tmp_path / "out"
    code, said = invoke(
        "tokenize", "--corpus", tmp_path / "in", "--tokenizer", tokenizer, "--out", out
    )
    assert code == 0, said
    lines = (out / "held_out.jsonl").read_text().splitlines()
    assert lines and {json.loads(line)["text"].encode() for line in lines} <= set(documents)
    code, said = invoke("tokenize", "--corpus", tmp_path / "in", "--out", tmp_path / "bytes")
    assert code == DataError.exit_code and "name the tokenizer" in said


def tokenised_bytes(folder: Path, documents: list[str]) -> Path:
    """Shards of a .bin file of these documents, with bytes as ids."""
    (folder / "in").mkdir()
    stream = np.concatenate(list(BYTE.encoded([text.encode() for text in documents])))
    (folder / "in" / "train.bin").write_bytes(stream.astype("<u2").tobytes())
    code, said = invoke("tokenize", "--corpus", folder / "in", "--out", folder / "out")
    assert code == 0, said
    return folder / "out"


def test_a_founder_has_all_the_held_out_text_of_ready_tokens_it_asks_for(tmp_path: Path) -> None:
    out = tokenised_bytes(tmp_path, [f"text {number} " * 100 for number in range(4000)])
    run = parse_config(RunConfig, EXACT, source="test", overrides=["data.validation_bytes=65536"])
    assert RunText(str(out), tmp_path / "cache", print).found(run, BYTE).held_out_bytes == 65536


def test_of_ready_tokens_whole_documents_are_kept_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peers.data.MAX_HELD_OUT_TEXT", 1000)
    documents = [f"{number} é" * 29 for number in range(4000)]
    lines = (tokenised_bytes(tmp_path, documents) / "held_out.jsonl").read_text().splitlines()
    kept = [json.loads(line)["text"] for line in lines]
    assert set(kept) <= set(documents) and 700 < sum(len(text.encode()) for text in kept) <= 1000


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """A folder with all kinds of real files, and some that break readers."""
    pytest.importorskip("justhtml", reason="the extra data is not installed")
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra data is not installed")
    zstd = pytest.importorskip("backports.zstd", reason="the extra data is not installed")
    import pyarrow

    folder = tmp_path / "mixed"
    folder.mkdir()
    words = "words to make up more than one batch of tokens " * 40
    for name in ("a.txt", "b.TXT", "c.md"):
        (folder / name).write_text(f"{name} {words}")
    (folder / "copy.txt").write_text(f"a.txt {words}")
    (folder / "d.html").write_text(f"<p>d.html {words}")
    (folder / "e.txt.gz").write_bytes(gzip.compress(f"e.txt {words}".encode()))
    (folder / "f.json").write_text(json.dumps([{"text": f"f.json {words}"}, {"txt": ""}]))
    line = json.dumps({"text": f"g.jsonl {words}"}).encode()
    (folder / "g.jsonl.zst").write_bytes(zstd.compress(line + b"\nbroken"))
    parquet.write_table(pyarrow.table({"text": [f"h {words}", None]}), folder / "h.parquet")
    os.mkfifo(folder / "pipe.txt")
    (tmp_path / "secret.txt").write_text("secret")
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    (folder / "broken.txt").write_bytes(b"caf\xe9")
    (folder / "paper.pdf").write_bytes(b"%PDF")
    (folder / os.fsdecode(b"caf\xe9.doc")).write_bytes(b"")
    return folder


NOT_READ = (
    "link.txt: a link that leaves the folder, followed with --follow-links",
    "pipe.txt: a pipe, socket or device",
    "broken.txt: not UTF-8",
    'f.json: item 2: no object with a string under "text"',
    "g.jsonl.zst:2: not valid JSON",
    "h.parquet: row 2: no text",
    r"caf\udce9.doc: not read, .doc",
    "paper.pdf: not read, .pdf",
)


@pytest.mark.parametrize("program", ["train-tokenizer", "tokenize", "info", "swarm-peer"])
def test_a_folder_of_mixed_kinds_is_read_or_named_file_by_file(
    mixed: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, program: str
) -> None:
    if program == "swarm-peer":
        run = parse_config(RunConfig, EXACT, source="test")
        text = RunText(str(mixed), tmp_path / "cache", print, list_skipped=True)
        with caplog.at_level(logging.INFO):
            text.found(run, BYTE)
        lines = [printable(record.getMessage()) for record in caplog.records]
    else:
        more = {
            "train-tokenizer": ("--corpus", mixed, "--vocab-size", 300, "--out", tmp_path / "out"),
            "tokenize": ("--corpus", mixed, "--out", tmp_path / "out"),
            "info": (mixed,),
        }[program]
        code, said = invoke(program, *more, "--list-skipped")
        assert code == 0, said
        lines = said.splitlines()
    (summary,) = [line for line in lines if "read by suffix" in line]
    read = sum(path.stat().st_size for path in mixed.iterdir() if path.name[0] in "abcdefgh")
    unread = sum((mixed / name).stat().st_size for name in ("broken.txt",))
    assert f"9 files of {read - unread:,} bytes read; " in summary, summary
    assert "not read by suffix: 1 .doc, 1 .pdf; skipped: 1 a link that leaves the" in summary
    assert "1 not UTF-8" in summary and summary.endswith("; 1 copies left out"), summary
    assert set(NOT_READ) <= set(lines), "and no read file is named"
    assert not any("secret" in line for line in lines)


def test_an_unreadable_folder_ends_a_program_and_info_describes_it(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(20):
        (tmp_path / "in" / f"{number:02}.pdf").write_text("%PDF")
    out = ("--vocab-size", 300, "--out", tmp_path / "out")
    code, said = invoke("train-tokenizer", "--corpus", tmp_path / "in", *out)
    assert code == DataError.exit_code
    for part in ("20 .pdf", "00.pdf: not read, .pdf", "info FOLDER --list-skipped names all"):
        assert part in said
    (tmp_path / "in" / "a.txt").write_bytes(b"\xff")
    code, said = invoke("train-tokenizer", "--corpus", tmp_path / "in", *out)
    assert code == DataError.exit_code and "1 not UTF-8" in said
    assert not (tmp_path / "out").exists()
    code, said = invoke("info", tmp_path / "in", "--list-skipped")
    assert code == 0 and said.count("not read, .pdf") == 20 and "a.txt: not UTF-8" in said
    code, said = invoke("info", tmp_path / "in", "--json")
    assert json.loads(said)["unread"] == {".pdf": 20}
    code, said = invoke("info", tmp_path / "nowhere")
    assert code == DataError.exit_code and "nowhere: no such folder" in said


def test_ready_tokens_are_not_taken_through_a_link_that_leaves_their_folder(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for path, documents in (("in/a.bin", 200), ("b.bin", 100)):
        stream = np.concatenate(list(BYTE.encoded([f"{n}".encode() for n in range(documents)])))
        (tmp_path / path).write_bytes(stream.astype("<u2").tobytes())
    (tmp_path / "in" / "b.bin").symlink_to(tmp_path / "b.bin")
    (tmp_path / "in" / "meta.json").write_text("{}")
    code, said = invoke("tokenize", "--corpus", tmp_path / "in", "--out", tmp_path / "out")
    assert code == 0 and "1 file of" in said and "1 a link that leaves the folder" in said, said
    more = ("--follow-links", "--out", tmp_path / "both")
    code, said = invoke("tokenize", "--corpus", tmp_path / "in", *more)
    assert code == 0 and "2 files of" in said, said
