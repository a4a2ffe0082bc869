"""Exports load in Transformers unmodified and compute the same."""

import itertools
import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel

from swarm import durable
from swarm.config import RunConfig
from swarm.errors import CorruptState, StateError
from swarm.experts import expert_of
from swarm.model.huggingface import INDEX_FILE, SINGLE_FILE, save_model
from swarm.model.pretrained import TensorFiles
from swarm.model.transformer import Transformer
from swarm.peer.machine.local_faults import named_fault
from tests.model.samples import random_tokens, random_weights, shapes_of, tiny_run

VARIANTS: dict[str, dict[str, Any]] = {
    "qwen3": {"qk_norm": "head", "head_dim": 24, "norm_topk_prob": True},
    "qwen3 tied": {"qk_norm": "head", "tie_word_embeddings": True},
    "olmoe": {"qk_norm": "projection", "rms_norm_eps": 1e-4},
    "olmoe tied": {"qk_norm": "projection", "tie_word_embeddings": True},
    "qwen3 top 1": {"num_experts_per_tok": 1},
    "mixtral": {"qk_norm": "none", "norm_topk_prob": True, "head_dim": 24},
    "mixtral tied": {"qk_norm": "none", "norm_topk_prob": True, "tie_word_embeddings": True},
    "dots1": {"scoring_func": "sigmoid", "head_dim": 24, "num_experts_per_tok": 3},
    "dots1 tied": {"scoring_func": "sigmoid", "norm_topk_prob": True, "tie_word_embeddings": True},
    "qwen3 trained with noise": {"noisy_top_k": True, "norm_topk_prob": True},
}


def exported(folder: Path, run: RunConfig, **settings: Any) -> list[Path]:
    return save_model(folder, run, iter(random_weights(run).items()), **settings)


def loaded(folder: Path) -> PreTrainedModel:
    model, notes = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(notes.values()), notes
    return model


# torch's warning about the empty shared expert of dots1.
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("max_shard_bytes", [5 * 10**9, 200_000])
@pytest.mark.parametrize("variant", VARIANTS)
def test_an_export_loads_unmodified_with_equal_logits(
    tmp_path: Path, variant: str, max_shard_bytes: int
) -> None:
    run = tiny_run(**VARIANTS[variant])
    written = exported(tmp_path, run, max_shard_bytes=max_shard_bytes)
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in written}
    model = loaded(tmp_path)
    assert (len(written) > 2) == (max_shard_bytes < 10**6)
    ours = Transformer(run.model, owned=[0], frozen="fp32")
    ours.write(random_weights(run))
    tokens = random_tokens(run)
    with torch.no_grad():
        difference = (model(tokens).logits - ours(tokens)).abs().max()
    # See test_transformers_parity.
    assert difference < 1e-5
    assert model.config.max_position_embeddings == run.data.sequence_length


def test_the_selection_bias_is_exported_and_the_noise_is_not(tmp_path: Path) -> None:
    run = tiny_run(scoring_func="sigmoid", noisy_top_k=True)
    exported(tmp_path, run)
    read, weights = dict(TensorFiles(tmp_path).items()), random_weights(run)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert torch.equal(read[name], weights[name])
    left_out = weights.keys() - read.keys()
    assert left_out == {f"model.layers.{layer}.mlp.gate.noise_weight" for layer in (0, 1)}
    added = read.keys() - weights.keys()
    assert len(added) == 6 and all(read[name].numel() == 0 for name in added)


def test_experts_exported_in_bf16_load_as_the_same_values(tmp_path: Path) -> None:
    run = tiny_run()
    named = {
        name: tensor.bfloat16() if expert_of(name) is not None else tensor
        for name, tensor in random_weights(run).items()
    }
    save_model(tmp_path, run, named.items())
    model = loaded(tmp_path)
    assert model.dtype == torch.float32
    ours = Transformer(run.model, owned=[0], frozen="bf16")
    ours.write(named)
    tokens = random_tokens(run)
    with torch.no_grad():
        assert (model(tokens).logits - ours(tokens)).abs().max() < 1e-5


def test_views_of_a_stack_are_written_alone(tmp_path: Path) -> None:
    run = tiny_run()
    model = Transformer(run.model, owned=[1, 2], frozen="fp32")
    model.write(random_weights(run))
    save_model(tmp_path, run, model.read(shapes_of(run)).items())
    elements = sum(tensor.numel() for _, tensor in TensorFiles(tmp_path).items())
    size = (tmp_path / SINGLE_FILE).stat().st_size
    # The header names each tensor.
    assert 4 * elements < size < 4 * elements + 20_000


@pytest.mark.parametrize("max_shard_bytes", [5 * 10**9, 200_000])
def test_what_is_saved_is_loaded(tmp_path: Path, max_shard_bytes: int) -> None:
    run = tiny_run()
    exported(tmp_path, run, max_shard_bytes=max_shard_bytes)
    read = dict(TensorFiles(tmp_path).items())
    weights = random_weights(run)
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in weights)


def test_shards_keep_to_their_size_and_the_index_names_every_tensor(tmp_path: Path) -> None:
    run = tiny_run()
    exported(tmp_path, run, max_shard_bytes=200_000)
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert index["weight_map"].keys() == shapes_of(run).keys()
    for file in set(index["weight_map"].values()):
        assert (tmp_path / file).stat().st_size < 200_000 + 20_000
    weights = random_weights(run)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in weights.values())


def test_an_export_over_an_older_one_leaves_nothing_of_it(tmp_path: Path) -> None:
    run = tiny_run()
    exported(tmp_path, run, max_shard_bytes=200_000)
    (tmp_path / "tokenizer.json").write_text("{}")
    exported(tmp_path, run)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"config.json", SINGLE_FILE, "tokenizer.json"}


@pytest.mark.parametrize("before_bytes", [5 * 10**9, 200_000])
@pytest.mark.parametrize("shard", [0, 1, 3])
def test_an_export_over_an_older_one_that_ends_halfway_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, before_bytes: int, shard: int
) -> None:
    run, moves = tiny_run(), itertools.count()
    exported(tmp_path, run, max_shard_bytes=before_bytes)
    put_in_place = durable.put_in_place

    def put_or_fail(path: Path) -> None:
        if next(moves) == shard:
            raise OSError("no space left on device")
        put_in_place(path)

    monkeypatch.setattr(durable, "put_in_place", put_or_fail)
    with pytest.raises(OSError, match="no space"):
        exported(tmp_path, run, max_shard_bytes=200_000)
    with pytest.raises(CorruptState):
        TensorFiles(tmp_path)
    with pytest.raises((OSError, ValueError)):
        AutoModelForCausalLM.from_pretrained(tmp_path)


def test_all_files_have_the_permissions_that_new_files_have(tmp_path: Path) -> None:
    """A server of another user can read the weights as well as the configuration."""
    before = os.umask(0o027)
    try:
        written = exported(tmp_path, tiny_run(), max_shard_bytes=200_000)
    finally:
        os.umask(before)
    assert len(written) > 3 and {path.stat().st_mode & 0o777 for path in written} == {0o640}


def test_a_full_disk_is_a_disk_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left (os error 28)")

    monkeypatch.setattr("swarm.model.huggingface.save_file", full)
    with pytest.raises(OSError, match="No space left") as refused:
        exported(tmp_path, tiny_run())
    fault = named_fault(refused.value)
    assert (
        isinstance(fault, StateError) and fault.exit_code == 6 and "free some space" in str(fault)
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fault", ["missing", "foreign", "repeated"])
def test_an_incomplete_model_is_not_exported(tmp_path: Path, fault: str) -> None:
    run = tiny_run()
    named = list(random_weights(run).items())
    named = {
        "missing": named[1:],
        "foreign": [*named, ("model.layers.2.mlp.gate.weight", torch.zeros(8, 64))],
        "repeated": [*named, named[0]],
    }[fault]
    with pytest.raises(CorruptState, match="cannot export"):
        save_model(tmp_path, run, named, max_shard_bytes=200_000)
    assert list(tmp_path.iterdir()) == []


def test_a_torn_file_is_detected(tmp_path: Path) -> None:
    exported(tmp_path, tiny_run())
    path = tmp_path / SINGLE_FILE
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CorruptState, match=SINGLE_FILE):
        TensorFiles(tmp_path)
    path.unlink()
    with pytest.raises(CorruptState, match=SINGLE_FILE):
        TensorFiles(tmp_path)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": {"a": "../../secret"}}'])
def test_a_hostile_index_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX_FILE).write_text(content)
    with pytest.raises(CorruptState, match="index"):
        TensorFiles(tmp_path)


def test_loading_an_export_warns_of_nothing(tmp_path: Path) -> None:
    exported(tmp_path, tiny_run(), eos_token_id=256)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = loaded(tmp_path)
    assert model.config.eos_token_id == 256
