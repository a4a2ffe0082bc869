"""Tables are read in bounded memory, for rows of any size."""

from pathlib import Path
from typing import Any

import pytest

from swarm.data import tables
from swarm.data.corpus import folder_corpus
from swarm.data.tables import table_texts
from swarm.errors import DataError

pa = pytest.importorskip("pyarrow", reason="the extra data is not installed")
parquet = pytest.importorskip("pyarrow.parquet")


def most_bytes(path: Path, rows: list[str | None]) -> int:
    """The peak of pyarrow's memory while these texts are read."""
    pool = pa.default_memory_pool()
    before, most = pool.bytes_allocated(), 0
    for number, text in enumerate(table_texts(path, "text")):
        assert text == rows[number]
        most = max(most, pool.bytes_allocated() - before)
    assert number == len(rows) - 1
    return most


def write(path: Path, texts: Any, **options: Any) -> None:
    parquet.write_table(pa.table({"id": [0] * len(texts), "text": texts}), path, **options)


def test_a_small_file_of_one_large_text_many_times_takes_little_memory(tmp_path: Path) -> None:
    text = "words of it " * 140_000
    repeated = pa.DictionaryArray.from_arrays(pa.array([0] * 200, pa.int32()), [text])
    write(tmp_path / "a.parquet", repeated, store_schema=False, compression="zstd")
    assert (tmp_path / "a.parquet").stat().st_size < 27_000
    assert most_bytes(tmp_path / "a.parquet", [text] * 200) < 2**26, "all rows have 336 MB"


def test_rows_are_read_by_bytes(tmp_path: Path) -> None:
    """Small rows come first, so that the mean row is no hint at the later large ones."""
    rows = [f"{n} " for n in range(5000)] + [f"{n} {'large row ' * 200_000}" for n in range(60)]
    write(tmp_path / "a.parquet", rows, use_dictionary=False, write_batch_size=1)
    assert most_bytes(tmp_path / "a.parquet", list(rows)) < 2**26, "the large rows have 120 MB"


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "snappy"])
def test_pages_of_all_kinds_are_read_in_order(
    tmp_path: Path, version: str, compression: str
) -> None:
    large = "words of it " * 300
    rows = [f"{large}{n % 50}" for n in range(300)] + [f"{n} {large}" for n in range(300)]
    rows += ["", None]
    for kind in (pa.string(), pa.large_string(), pa.string_view()):
        write(
            tmp_path / "a.parquet",
            pa.array(rows, kind),
            compression=compression,
            data_page_version=version,
            dictionary_pagesize_limit=100_000,
            row_group_size=400,
        )
        assert list(table_texts(tmp_path / "a.parquet", "text")) == rows


def test_a_page_that_is_too_large_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables, "MAX_PAGE_BYTES", 2**20)
    rows = [f"{n} {'row ' * 2**14}" for n in range(40)]
    write(tmp_path / "a.parquet", rows, use_dictionary=False)
    with pytest.raises(DataError, match=r"one page of it has 3 MiB.*write_batch_size=1"):
        list(folder_corpus(tmp_path).documents())
    write(tmp_path / "a.parquet", rows, use_dictionary=False, write_batch_size=1, data_page_size=1)
    assert len(list(folder_corpus(tmp_path).documents())) == 80, "each is cut in two"


def test_a_page_header_that_is_none_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write(path, ["text"] * 5, use_dictionary=False)
    column = parquet.read_metadata(path).row_group(0).column(1)
    content = bytearray(path.read_bytes())
    for header in (b"\xff" * 12, b"\x1c" * 12, b"\x15\x03\x15\x03\x15\x03\x00", b"\x00" * 12):
        content[column.data_page_offset : column.data_page_offset + len(header)] = header
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"a\.parquet: damaged"):
            list(folder_corpus(tmp_path).documents())
