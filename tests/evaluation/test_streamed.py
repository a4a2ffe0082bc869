"""An exported model that is read layer by layer computes the same as the whole model."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from swarm.data.held_out import measured_on
from swarm.data.tokenizer import BYTE
from swarm.errors import ConfigError, CorruptState
from swarm.evaluation import measure
from swarm.evaluation.measure import StreamedModel
from swarm.experts import all_shapes
from swarm.model.huggingface import SINGLE_FILE, save_model
from swarm.model.masking import Masked
from swarm.model.transformer import Transformer
from tests.evaluation.exports import DOCUMENTS, make_export
from tests.model.samples import random_weights, tiny_run

VARIANTS = [
    {},
    {"tie_word_embeddings": True},
    {"qk_norm": "projection", "norm_topk_prob": False},
    {"qk_norm": "none", "norm_topk_prob": True},
    {"scoring_func": "sigmoid"},
    {"noisy_top_k": True},
]


@pytest.mark.parametrize("model", VARIANTS, ids=str)
def test_its_loss_is_that_of_the_whole_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: dict[str, object]
) -> None:
    run = tiny_run(**model)
    save_model(tmp_path, run, random_weights(run).items(), max_shard_bytes=100_000)
    held_out = measured_on(BYTE, [document.encode() for document in DOCUMENTS], 32)
    whole = Transformer(run.model, frozen="fp32")
    whole.write(random_weights(run))
    with torch.no_grad():
        wanted = held_out.mean(
            lambda tokens, scored: float(
                whole.losses(tokens, run.loss, masked=Masked(scored_BT=scored)).cross_entropy
            )
        )
    # Small, so that windows and logits are split into several parts.
    monkeypatch.setattr(measure, "BATCH_TOKENS", 96)
    monkeypatch.setattr(measure, "LOGITS_BYTES", 4 * 260 * 7)
    found = StreamedModel(tmp_path, run)
    assert found.nats_per_token(held_out) == pytest.approx(wanted, rel=1e-5)
    with torch.no_grad():
        tokens = [256, 65, 66]
        for _ in range(4):
            tokens.append(int(whole(torch.tensor([tokens]))[0, -1].argmax()))
    assert found.continued([256, 65, 66], count=4, end_of_text=-1) == tokens[3:]
    until = tokens[3 : tokens.index(tokens[-1], 3)]
    assert found.continued([256, 65, 66], count=4, end_of_text=tokens[-1]) == until


def test_one_layer_is_in_memory_at_a_time(tmp_path: Path) -> None:
    run = make_export(tmp_path, BYTE)
    found = StreamedModel(tmp_path, run)
    held = sum(t.numel() for t in found._one.read(all_shapes(found._one.config)).values())
    whole = sum(tensor.numel() for tensor in random_weights(run).values())
    ends = 2 * run.model.vocab_size * run.model.hidden_size + run.model.hidden_size
    assert held == ends + (whole - ends) // run.model.num_hidden_layers


def test_an_export_that_is_removed_while_it_is_measured_is_read_to_its_end(tmp_path: Path) -> None:
    """While a run is followed, the oldest exports are removed, and `latest` changes."""
    run = make_export(tmp_path / "out", BYTE)
    found = StreamedModel(tmp_path / "out", run)
    wanted = found.continued([1, 2], count=2, end_of_text=-1)
    shutil.rmtree(tmp_path / "out")
    make_export(tmp_path / "out", BYTE, std=0.5)
    assert found.continued([1, 2], count=2, end_of_text=-1) == wanted


def test_what_is_no_export_of_the_run_is_refused(tmp_path: Path) -> None:
    run = make_export(tmp_path / "good", BYTE)
    with pytest.raises(ConfigError, match=r"model\.vocab_size is 300, there 320"):
        StreamedModel(tmp_path / "good", tiny_run(vocab_size=300))
    shutil.copytree(tmp_path / "good", tmp_path / "lacking")
    lost = "model.layers.1.mlp.gate.weight"
    stored = load_file(tmp_path / "good" / SINGLE_FILE)
    del stored[lost]
    save_file(stored, tmp_path / "lacking" / SINGLE_FILE)
    with pytest.raises(ConfigError, match=rf"{lost} is missing; expected \(8, 64\)"):
        StreamedModel(tmp_path / "lacking", run)
    shutil.copytree(tmp_path / "good", tmp_path / "torn")
    (tmp_path / "torn" / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(CorruptState, match="torn"):
        StreamedModel(tmp_path / "torn", run)
