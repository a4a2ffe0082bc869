"""A data set in the Hugging Face format gives the documents of its rows."""

import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from peers.data import main
from swarm.data.corpus import folder_corpus
from swarm.data.dataset_rows import DatasetText
from swarm.data.tally import Tally
from swarm.errors import DataError

TEXTS = [f"row {number} " * (1 + number % 5) for number in range(300)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    pytest.importorskip("datasets", reason="the extra hf-data is not installed")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    (tmp_path / "rows").mkdir()
    lines = [json.dumps({"text": text, "id": number}) for number, text in enumerate(TEXTS)]
    (tmp_path / "rows" / "train.jsonl").write_text("\n".join(lines))
    return tmp_path / "rows"


def test_a_local_data_set_gives_the_documents_of_its_files(folder: Path) -> None:
    tally = Tally()
    source = DatasetText(str(folder))
    assert list(source.documents(tally)) == list(folder_corpus(folder).documents())
    assert (tally.files, tally.count, source.name) == (1, 0, "rows")


def test_the_fingerprint_moves_with_its_files_and_with_what_is_read(folder: Path) -> None:
    seen = {DatasetText(str(folder)).fingerprint()}
    assert DatasetText(str(folder)).fingerprint() in seen
    seen.add(DatasetText(str(folder), column="id").fingerprint())
    os.utime(folder / "train.jsonl", ns=(1, 1))
    seen.add(DatasetText(str(folder)).fingerprint())
    assert len(seen) == 3


def test_what_cannot_be_read_says_what_to_name(folder: Path, tmp_path: Path) -> None:
    for source, words in (
        (DatasetText(str(tmp_path / "nowhere")), "nowhere: cannot be read.*--dataset is a name"),
        (DatasetText(str(folder), split="test"), "cannot be read.*test.*--split"),
        (DatasetText(str(folder), column="body"), "no column 'body', but 'text', 'id'.*--column"),
        (DatasetText(str(folder), column="id"), "no text 'id'.*--column"),
    ):
        with pytest.raises(DataError, match=words):
            list(source.documents())


def test_a_missing_package_is_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"package datasets reads it.*'moe-swarm\[hf-data\]'"):
        DatasetText("anything").fingerprint()


def test_shards_of_it_are_those_of_its_files(folder: Path, tmp_path: Path) -> None:
    tokens = []
    for name, given in (("one", "--dataset"), ("two", "--corpus")):
        args = ["tokenize", given, str(folder), "--out", str(tmp_path / name)]
        result = CliRunner().invoke(main, args)
        assert result.exit_code == 0, result.output
        tokens.append((tmp_path / name / "00000.bin").read_bytes())
    assert tokens[0] == tokens[1]
    args = ["tokenize", "--dataset", "x", "--corpus", "y", "--out", str(tmp_path / "three")]
    assert CliRunner().invoke(main, args).exit_code == 2
