"""Texts in packed files and tables: as in plain ones, or an error with a remedy."""

import gzip
import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3

from swarm.data import documents
from swarm.data.corpus import folder_corpus
from swarm.data.input_files import SETTLED_S, FileDigests, Kind, kind_of
from swarm.data.tally import Tally
from swarm.errors import DataError

TEXTS = [f"text {number} of a few words " * (number % 9 + 1) for number in range(1500)]
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()


def zstd() -> Any:
    if sys.version_info >= (3, 14):
        from compression import zstd as found  # in the standard library since then
    else:
        found = pytest.importorskip("backports.zstd", reason="the extra data is not installed")
    return found


def write_table(path: Path, **columns: Iterable[object]) -> None:
    pytest.importorskip("pyarrow", reason="the extra data is not installed")
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({name: list(values) for name, values in columns.items()})
    pyarrow.parquet.write_table(table, path, row_group_size=500)


def read(folder: Path, column: str = "text", skipped: Tally | None = None) -> list[str]:
    return [each.decode() for each in folder_corpus(folder, column).documents(skipped)]


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "a.jsonl.gz": gzip.compress,
    "a.jsonl.zst": lambda content: (
        zstd().compress(content[:9000]) + zstd().compress(content[9000:])
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_lines_are_read_as_plain_ones(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(PACKED[name](LINES))
    assert read(tmp_path) == TEXTS


def test_a_packed_text_is_cut_as_a_plain_one(tmp_path: Path) -> None:
    text = "\n\n".join(TEXTS * 3).encode()
    for folder, name, content in (("x", "a.txt", text), ("y", "a.txt.zst", zstd().compress(text))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).write_bytes(content)
    assert read(tmp_path / "x") == read(tmp_path / "y") and len(read(tmp_path / "x")) > 2


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("how", ["cut", "changed", "not packed"])
def test_what_does_not_unpack_is_an_error_with_the_remedy(
    tmp_path: Path, name: str, how: str
) -> None:
    packed = PACKED[name](LINES)
    changed = bytearray(packed)
    changed[len(packed) // 2] ^= 0xFF
    content = {"cut": packed[:-20], "changed": bytes(changed), "not packed": LINES}
    (tmp_path / name).write_bytes(content[how])
    with pytest.raises(DataError, match=rf"{name}: damaged.*fetch or make it again"):
        read(tmp_path)


def test_a_table_gives_its_rows_in_order(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", text=[*TEXTS[:700], None, "", *TEXTS[700:]], id=range(1502))
    skipped = Tally()
    assert read(tmp_path, skipped=skipped) == TEXTS
    assert skipped.named == ["a.parquet: row 701: no text"]


def test_a_long_row_is_cut(tmp_path: Path) -> None:
    text = "words " * 20_000
    write_table(tmp_path / "a.parquet", text=[text])
    found = read(tmp_path)
    assert "".join(found) == text and len(found) == 2


def test_texts_may_lie_under_another_name(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", content=TEXTS[:3], text=["no"] * 3)
    lines = [json.dumps({"content": text, "text": 3}) for text in TEXTS[3:5]]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    assert read(tmp_path, "content") == TEXTS[:5]
    one, other = (folder_corpus(tmp_path, column) for column in ("content", "text"))
    assert one.fingerprint() != other.fingerprint(), "their caches differ"


def test_a_table_without_the_column_says_which_it_has(tmp_path: Path) -> None:
    write_table(tmp_path / "a.parquet", content=TEXTS[:3], id=range(3))
    with pytest.raises(DataError, match=r"no column 'text', but 'content', 'id' .*--column NAME"):
        read(tmp_path)
    with pytest.raises(DataError, match=r"column 'id' has values of type int64, not text"):
        read(tmp_path, "id")


@pytest.mark.parametrize("how", ["cut", "changed", "foreign", "empty"])
def test_a_damaged_table_is_an_error_with_the_remedy(tmp_path: Path, how: str) -> None:
    path = tmp_path / "a.parquet"
    write_table(path, text=TEXTS)
    whole = path.read_bytes()
    page = bytearray(whole)
    page[4:200] = b"\xff" * 196
    damaged = {"cut": whole[:-30], "changed": bytes(page), "foreign": LINES, "empty": b""}
    path.write_bytes(damaged[how])
    with pytest.raises(DataError, match=r"a\.parquet: damaged.*fetch or make it again"):
        read(tmp_path)


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("a.parquet", "pyarrow", "pyarrow"),
        ("a.txt.zst", "backports.zstd", "backports.zstd"),
        ("a.html", "justhtml", "justhtml"),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str, package: str
) -> None:
    (tmp_path / name).write_bytes(b"not looked at")
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, "compression", None)
    monkeypatch.setitem(sys.modules, "backports", None)
    with pytest.raises(DataError, match=rf"package {package} reads it.*'moe-swarm\[data\]'"):
        read(tmp_path)


def test_memory_does_not_grow_with_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read on demand: the first is there before the second group is read."""
    write_table(tmp_path / "a.parquet", text=TEXTS)
    taken: list[str | None] = []

    def noted(path: Path, column: str) -> Iterable[str | None]:
        for text in original(path, column):
            taken.append(text)
            yield text

    original = documents.table_texts
    monkeypatch.setattr(documents, "table_texts", noted)
    assert next(folder_corpus(tmp_path).documents()).decode() == TEXTS[0]
    assert len(taken) == 1


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("a.txt", Kind.TEXT),
        ("A.TXT", Kind.TEXT),
        ("a.md.GZ", Kind.TEXT),
        ("a.Json.zst", Kind.JSON),
        ("a.jsonl", Kind.LINES),
        ("a.HTM", Kind.HTML),
        ("a.b.html.gz", Kind.HTML),
        ("a.parquet.zst", Kind.TABLE),
        ("a.csv", None),
        ("a.gz", None),
        ("txt", None),
    ],
)
def test_a_kind_is_known_by_the_end_of_a_name_in_any_case(name: str, kind: Kind | None) -> None:
    assert kind_of(name) is kind


@pytest.mark.parametrize("packing", [".gz", ".ZST"])
def test_every_kind_may_be_packed(tmp_path: Path, packing: str) -> None:
    pytest.importorskip("justhtml", reason="the extra data is not installed")
    write_table(tmp_path / "table", text=TEXTS[:3])
    contents = {
        "1.txt": b"plain",
        "2.json": b'[{"text": "listed"}]',
        "3.html": b"<p>page</p>",
        "4.parquet": (tmp_path / "table").read_bytes(),
        "5.py": b"code",
    }
    (tmp_path / "table").unlink()
    pack = gzip.compress if packing == ".gz" else zstd().compress
    for name, content in contents.items():
        (tmp_path / f"{name}{packing}").write_bytes(pack(content))
    assert read(tmp_path) == ["plain", "listed", "page", *TEXTS[:3], "code"]


@pytest.mark.parametrize(
    ("content", "texts", "named"),
    [
        ('{"text": "one"}', ["one"], []),
        ('{\n "text": "one"\n}\n', ["one"], []),
        ('[{"text": "one"},\n {"text": 3}, {"text": "two"}]', ["one", "two"], ["a.json: item 2"]),
        ('\n{"text": "one"}\n{"id": 1}\n{"text": "two"}', ["one", "two"], ["a.json:3"]),
        ('{"text": "one"} x', [], ["a.json"]),
        ('"text"', [], ["a.json"]),
        ("[" * 10**5, [], ["a.json"]),
        ("", [], ["a.json"]),
    ],
)
def test_a_json_file_is_an_object_a_list_or_lines(
    tmp_path: Path, content: str, texts: list[str], named: list[str]
) -> None:
    (tmp_path / "a.json").write_text(content)
    skipped = Tally()
    assert read(tmp_path, skipped=skipped) == texts
    assert [each.rpartition(": ")[0] for each in skipped.named] == named


@pytest.mark.parametrize("name", ["a.json", "a.html"])
def test_a_file_that_is_in_memory_as_a_whole_is_named_where_it_is_too_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(documents, "MAX_LINE_BYTES", 2**20)
    (tmp_path / name).write_text("[" + " " * 2**20 + "]")
    skipped = Tally()
    assert read(tmp_path, skipped=skipped) == []
    assert skipped.named[0].startswith(f"{name}: longer than 1 MiB")


def later(path: Path) -> float:
    return path.stat().st_ctime + SETTLED_S + 1


def digest(path: Path, kept: Path | None, now_s: float) -> str:
    (found,) = FileDigests(kept, lambda: now_s).of(path.parent, [path.name])
    return found


def test_an_unchanged_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, kept = tmp_path / "a.txt", tmp_path / "kept"
    path.write_bytes(b"text")
    expected = blake3(b"text").hexdigest()
    assert digest(path, kept, later(path)) == expected
    monkeypatch.setattr("swarm.data.input_files._digest_of", None)
    assert digest(path, kept, later(path)) == expected


def test_an_edit_that_keeps_size_and_time_is_seen(tmp_path: Path) -> None:
    path, kept = tmp_path / "a.txt", tmp_path / "kept"
    path.write_bytes(b"text")
    status = path.stat()
    digest(path, kept, later(path))
    path.write_bytes(b"TEXT")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert path.stat().st_mtime_ns == status.st_mtime_ns
    assert digest(path, kept, later(path)) == blake3(b"TEXT").hexdigest()


def test_a_file_that_changed_just_now_is_not_remembered(tmp_path: Path) -> None:
    path, kept = tmp_path / "a.txt", tmp_path / "kept"
    path.write_bytes(b"text")
    digest(path, kept, path.stat().st_ctime + SETTLED_S / 2)
    assert not kept.exists() or kept.read_bytes() == b"{}"


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b'{"a": 1}'])
def test_what_is_remembered_may_be_damaged_and_never_grows(tmp_path: Path, content: bytes) -> None:
    path, kept = tmp_path / "a.txt", tmp_path / "kept"
    path.write_bytes(b"text")
    kept.write_bytes(content)
    for _ in range(3):
        assert digest(path, kept, later(path)) == blake3(b"text").hexdigest()
        path.write_bytes(b"text")
    assert kept.read_bytes().count(b":") == 1


def test_a_missing_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.txt: No such file"):
        FileDigests().of(tmp_path, ["a.txt"])
