"""swarm-generate: an export continues a text."""

import json
import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from peers.generate import main
from swarm.errors import ConfigError, CorruptState
from swarm.export.manager import write_export
from swarm.network.blobs.blob_store import BlobStore
from tests.export.models import facts_of, found, toy_run

pytest.importorskip("transformers", reason="of the extra hf")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run, store = toy_run(), BlobStore()
    out = tmp_path_factory.mktemp("export")
    write_export(out, facts_of(run, found(store, run), store))
    return out


def invoke(*args: object, stdin: str | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(arg) for arg in args], input=stdin)
    return result.exit_code, result.output


def test_equal_seeds_go_on_equally_from_an_option_or_from_stdin(folder: Path) -> None:
    options = ("--max-new-tokens", 12, "--log-level", "error")
    code, first = invoke(folder, "--prompt", "def f(", "--seed", 3, *options)
    assert code == 0, first
    assert first.startswith("def f(") and len(first) > len("def f(\n")
    assert invoke(folder, "--seed", 3, *options, stdin="def f(") == (0, first)
    assert invoke(folder, "--prompt", "def f(", "--seed", 4, *options)[1] != first
    greedy = invoke(folder, "--prompt", "def f(", "--temperature", 0, *options)
    assert greedy == invoke(folder, "--prompt", "def f(", "--temperature", 0, *options)


def test_an_empty_prompt_begins_a_document(folder: Path) -> None:
    code, said = invoke(folder, "--prompt", "", "--max-new-tokens", 3, "--seed", 0)
    assert code == 0 and said.endswith("\n")


def test_text_does_not_act_on_a_terminal(folder: Path) -> None:
    code, said = invoke(folder, "--prompt", "\x1b[2J\ta\n", "--max-new-tokens", 1)
    assert code == 0 and said.startswith("\\x1b[2J\ta\n") and "\x1b" not in said


def test_a_prompt_has_to_fit_the_models_context(folder: Path) -> None:
    code, said = invoke(folder, "--prompt", "a" * 40)
    assert code == ConfigError.exit_code
    assert "the prompt has 41 tokens, the model reads 32 at once (shorten the prompt)" in said
    code, said = invoke(folder, "--prompt", "a" * 30, "--max-new-tokens", 99)
    assert code == 0 and "the model's context ends after 1 new tokens" in said


def test_what_is_no_export_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    code, said = invoke(tmp_path / "no", "--prompt", "a")
    assert code == ConfigError.exit_code and "no such folder (swarm-export" in said
    code, said = invoke(tmp_path, "--prompt", "a")
    assert code == ConfigError.exit_code
    assert "config.json, tokenizer.json, model.safetensors is not there" in said
    (tmp_path / "latest").symlink_to(folder)
    code, said = invoke(tmp_path, "--prompt", "a")
    assert code == ConfigError.exit_code and f"name {tmp_path / 'latest'}" in said
    assert invoke(tmp_path / "latest", "--prompt", "a", "--max-new-tokens", 1)[0] == 0


def test_a_torn_file_is_an_error_that_says_what_to_do(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-10])
    code, said = invoke(tmp_path, "--prompt", "a")
    assert code == CorruptState.exit_code and "(export it again)" in said


def test_a_prompt_may_be_any_bytes(folder: Path) -> None:
    code, said = invoke(folder, "--prompt", os.fsdecode(b"caf\xe9"), "--max-new-tokens", 1)
    assert code == 0 and said.startswith("caf\ufffd"), said


def test_a_models_code_is_not_run_and_nobody_is_asked(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    classes = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    config |= {"model_type": "mine", "auto_map": classes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    code, said = invoke(tmp_path, "--prompt", "a", stdin="y\n" * 9)
    assert not (tmp_path / "ran").exists()
    assert code == ConfigError.exit_code and "which is not run" in said, said
