"""Stored trainings: the match with an earlier one, and the report about it."""

import importlib
import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "scripts" / "benchmarks"
KEEPING = ("cells", "reproduce_spes", "bench_routing", "bench_tokenizers", "bench_adoption")


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    monkeypatch.syspath_prepend(BENCHMARKS)
    for name in KEEPING:
        sys.modules.pop(name, None)
    found = {name: importlib.import_module(name) for name in KEEPING}
    monkeypatch.setattr(found["cells"], "commit", lambda: "7fc209b")
    return found


def text(folder: Path, word: str) -> Path:
    folder.mkdir()
    for number in range(60):
        (folder / f"{number}.txt").write_text(f"Line {number} of a small {word}.\n" * 40)
    return folder


@pytest.fixture
def texts(tmp_path: Path) -> list[Path]:
    return [text(tmp_path / word, word) for word in ("text", "book")]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_another_text_is_another_training(
    scripts: dict[str, ModuleType],
    texts: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    losses = iter([5.0, 4.0, 3.0])
    monkeypatch.setattr(scripts["cells"], "train", lambda *_, **__: {"losses": {16: next(losses)}})
    out = tmp_path / "cells.jsonl"
    words = ["--quick", "--out", str(out), "--cache", str(tmp_path / "tokens")]
    words += ["--cells", "main/centralised/1"]
    for folder, said in (
        (texts[0], "0 of 1 trainings are of earlier calls"),
        (texts[1], "0 of 1 trainings are of earlier calls"),
        (texts[0], "1 of 1 trainings are of earlier calls: 1 of 7fc209b"),
    ):
        scripts["reproduce_spes"].main([*words, "--corpus", str(folder)])
        assert said in capsys.readouterr().out.splitlines()
    first, second = lines_of(out)
    assert {**first, "corpus": 0, "losses": 0} == {**second, "corpus": 0, "losses": 0}
    assert first["corpus"] != second["corpus"]
    assert (first["commit"], first["losses"]) == ("7fc209b", {"16": 5.0})


def test_a_line_without_its_text_is_taken_for_none(
    scripts: dict[str, ModuleType], tmp_path: Path
) -> None:
    path = tmp_path / "cells.jsonl"
    path.write_text('{"cell": "main/a/1", "run": "ab"}\n{"key": "[[], 1, 0, 80]", "result": {}}\n')
    results = scripts["cells"].Results(path, "of today")
    assert results.get("main/a/1", "ab") is None
    assert results.add("main/a/1", "ab", {"loss": 2.0}) == results.get("main/a/1", "ab")
    assert len(path.read_text().splitlines()) == 3
    again = scripts["cells"].Results(path, "of today")
    assert again.get("main/a/1", "ab")["loss"] == 2.0
    assert scripts["cells"].Results(path, "of tomorrow").get("main/a/1", "ab") is None


def test_the_commit_is_known_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)
    sys.modules.pop("cells", None)
    cells = importlib.import_module("cells")
    is_a_clone = (BENCHMARKS.parents[1] / ".git").exists() and shutil.which("git")
    assert re.fullmatch(r"[0-9a-f]{7,}\+?" if is_a_clone else "", cells.commit())
    cells.commit.cache_clear()
    monkeypatch.setenv("PATH", "")
    assert cells.commit() == ""


def test_routing_is_trained_again_where_the_demo_or_the_text_changed(
    scripts: dict[str, ModuleType],
    texts: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script, trained = scripts["bench_routing"], []

    def train(setting: Any, seed: int, *_: object) -> Any:
        trained.append((setting.name, seed))
        return script.Result(2.5, 1.5, 1.6, 0.0)

    def call() -> int:
        trained.clear()
        words = ["peers", "--seeds", "1", "--results", str(tmp_path / "routing.jsonl")]
        monkeypatch.setattr(sys, "argv", ["bench_routing", *words])
        script.main()
        return len(trained)

    from swarm.data.corpus import open_corpus

    monkeypatch.setattr(script, "train", train)
    monkeypatch.setattr(script, "open_corpus", lambda _: open_corpus(str(texts[0])))
    settings = len(script.peer_settings())
    assert [call(), call()] == [settings, 0]
    monkeypatch.setattr(script, "open_corpus", lambda _: open_corpus(str(texts[1])))
    assert [call(), call()] == [settings, 0]
    changed = tmp_path / "demo.toml"
    changed.write_text(script.DEMO.read_text().replace("hidden_size = 128", "hidden_size = 64"))
    assert changed.read_text() != script.DEMO.read_text()
    monkeypatch.setattr(script, "DEMO", changed)
    assert [call(), call()] == [settings, 0]
    monkeypatch.setattr(script, "SMALL", (*script.SMALL, "data.sequence_length=32"))
    assert [call(), call()] == [settings, 0]


def test_tokenizers_are_compared_again_where_settings_or_the_text_changed(
    scripts: dict[str, ModuleType],
    texts: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script, trained = scripts["bench_tokenizers"], []
    from swarm.data.corpus import folder_corpus

    def train(_: object, vocabulary: str, run: Any) -> Any:
        trained.append(run.run.seed)
        return script.Result(vocabulary, run.run.seed, 6, 2.9, 10**6, 256, 6e5, 20.0)

    def call() -> int:
        trained.clear()
        words = ["--vocabularies", "bytes", "--seeds", "2", "--results", str(tmp_path / "t.jsonl")]
        monkeypatch.setattr(sys, "argv", ["bench_tokenizers", *words])
        assert script.main() == 0
        return len(trained)

    monkeypatch.setattr(script, "train", train)
    monkeypatch.setattr(script, "standard_library_corpus", lambda: folder_corpus(texts[0]))
    assert [call(), call()] == [2, 0]
    monkeypatch.setattr(script, "standard_library_corpus", lambda: folder_corpus(texts[1]))
    assert [call(), call()] == [2, 0]
    monkeypatch.setattr(script, "SEQUENCES", 4)
    assert [call(), call()] == [2, 0]


def test_adoption_is_measured_again_where_settings_or_the_text_changed(
    scripts: dict[str, ModuleType],
    texts: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script, measured = scripts["bench_adoption"], []
    from swarm.data.corpus import open_corpus

    class Pair:
        def __init__(self, *_: object) -> None: ...

        def train(self, _: int) -> None: ...

        def losses(self, variant: str, _: object) -> list[float]:
            measured.append(variant)
            return [2.0] * len(script.MEASURED)

    def call() -> int:
        measured.clear()
        words = ["--seeds", "1", "2", "--out", str(tmp_path / "adoption.jsonl")]
        monkeypatch.setattr(sys, "argv", ["bench_adoption", *words])
        script.main()
        return len(measured)

    monkeypatch.chdir(tmp_path)  # its cache of tokens
    monkeypatch.setattr(script, "Pair", Pair)
    monkeypatch.setattr(script, "open_corpus", lambda _: open_corpus(str(texts[0])))
    all_of_it = 2 * len([*script.AGES, "zero"])
    assert [call(), call()] == [all_of_it, 0]
    monkeypatch.setattr(script, "open_corpus", lambda _: open_corpus(str(texts[1])))
    assert [call(), call()] == [all_of_it, 0]
    monkeypatch.setattr(script, "SETTINGS", (*script.SETTINGS, "optimizer.weight_decay=0.2"))
    assert [call(), call()] == [all_of_it, 0]
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--table"])
    script.main()
    *table, said = capsys.readouterr().out.splitlines()
    assert "moments (n = 2)" in table[0]
    assert said == "8 of 8 trainings are of earlier calls: 8 of 7fc209b"
