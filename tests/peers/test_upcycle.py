"""swarm-upcycle: from a dense checkpoint to a run file for a founder."""

from pathlib import Path

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from peers.upcycle import main
from swarm.config import RunConfig, parse_config
from swarm.data.tokenizer import BYTE
from swarm.errors import ConfigError, TokenizerError
from swarm.model.described import run_of_checkpoint
from swarm.peer.text.run_start import founders_tokenizer, founders_weights
from tests.model.checkpoints import make_checkpoint


def invoke(*args: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(arg) for arg in args])
    return result.exit_code, result.output


def test_a_dense_checkpoint_becomes_a_run_file_and_its_weights(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "dense", "llama")
    out, file = tmp_path / "my mixture", tmp_path / "run.toml"
    code, said = invoke("--from", tmp_path / "dense", "--num-experts", 4, "--out", out)
    assert code == 0, said
    assert "4 experts in 2 layers, 2 of them for a token" in said
    code, said = invoke("config", out, "--out", file)
    assert (code, "--initialise-from" in said) == (0, True)
    run = parse_config(RunConfig, file.read_text(), source="test")
    assert (run.run.name, run.run.initial) == ("my-mixture", "given")
    assert (run.model.num_experts, run.model.qk_norm) == (4, "none")
    assert (run.data.sequence_length, run.data.tokenizer) == (64, "byte")
    weights = founders_weights(run, out)
    assert weights is not None and len(weights) == 2 * (8 + 3 * 4 - 1) + 3
    assert invoke("config", out) == (0, file.read_text())


def test_a_folder_with_a_tokenizer_makes_a_run_with_one(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "olmoe", fused=True)
    BYTE.save(tmp_path, model_max_length=64)
    code, said = invoke("config", tmp_path)
    assert code == 0, said
    run = parse_config(RunConfig, said, source="test")
    assert run.data.tokenizer == "file"
    code, said = invoke("config", tmp_path, "--out", tmp_path / "run.toml")
    assert f"--initialise-from {tmp_path} --tokenizer {tmp_path}\n" in said
    assert founders_weights(run, tmp_path) is not None
    founders_tokenizer(run, tmp_path)


def test_a_run_file_is_only_written_for_what_can_be_founded(tmp_path: Path) -> None:
    """A founder would refuse it with the same words, but only after its user has written a run."""
    make_checkpoint(tmp_path, "qwen3_moe", fused=True)
    BYTE.save(tmp_path, model_max_length=64)
    run = run_of_checkpoint(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError) as unfit:
        founders_tokenizer(run, tmp_path)
    code, said = invoke("config", tmp_path, "--out", tmp_path / "run.toml")
    assert (code, str(unfit.value) in said) == (4, True), said
    stored = load_file(tmp_path / "model.safetensors")
    lost = "model.layers.0.mlp.experts.down_proj"
    del stored[lost]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError) as misfit:
        founders_weights(run, tmp_path)
    code, said = invoke("config", tmp_path, "--out", tmp_path / "run.toml")
    assert f"{lost} is missing; expected (8, 32, 24)" in said
    assert (code, str(misfit.value) in said) == (2, True), said
    assert not (tmp_path / "run.toml").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "--from and --out are both needed"),
        (("--from", "nowhere", "--out", "x"), "nowhere/config.json: cannot be read"),
        (("config", "nowhere"), "nowhere/config.json: cannot be read"),
        (("--from", "nowhere", "--out", "x", "--noise", "-1"), "--noise"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(arguments: tuple[str, ...], message: str) -> None:
    code, said = invoke(*arguments)
    assert (code, message in said) == (2, True), said
