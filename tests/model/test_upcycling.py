"""A dense checkpoint becomes a mixture that computes the same, and learns to use its experts."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from swarm.config import RunConfig
from swarm.errors import ConfigError
from swarm.experts import all_shapes, expert_tensor
from swarm.model.described import run_of_checkpoint
from swarm.model.huggingface import SINGLE_FILE, save_model
from swarm.model.pretrained import TensorFiles, open_checkpoint
from swarm.model.transformer import Transformer
from swarm.model.upcycling import ROUTER_STD, Recipe, Upcycling
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.resident import ResidentEngine
from tests.model.checkpoints import make_checkpoint, tokens_of
from tests.model.test_pretrained import Live

PLAIN = Recipe(noise=0.0)
KINDS = ["qwen3", "llama"]
STEPS = 50


def ours(folder: Path) -> Transformer:
    run = run_of_checkpoint(folder)
    model = Transformer(run.model, owned=[0], frozen="fp32")
    model.write(open_checkpoint(folder, run))
    return model


def logits_of(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        found = model(tokens_of())
    return found if isinstance(found, Tensor) else found.logits


@pytest.mark.parametrize("router", ["normal", "zeros"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_noise_the_mixture_computes_what_the_dense_model_does(
    tmp_path: Path, kind: str, router: str
) -> None:
    dense = make_checkpoint(tmp_path / "dense", kind, eos_token_id=[256, 257])
    (tmp_path / "dense" / "tokenizer.json").write_text("{}")
    recipe, out = replace(PLAIN, router=router), tmp_path / "out"
    written = Upcycling(tmp_path / "dense", recipe).save(out, max_shard_bytes=300_000)
    assert len(list(out.glob("*.safetensors"))) > 1
    assert {path.name for path in out.iterdir()} == {path.name for path in written}
    assert (out / "tokenizer.json").read_text() == "{}"
    expected = logits_of(dense)
    theirs, notes = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(notes.values()), notes
    assert (logits_of(theirs) - expected).abs().max() < 1e-5
    assert (logits_of(ours(out)) - expected).abs().max() < 1e-5
    assert expected.abs().max() > 1
    kept = (theirs.config.max_position_embeddings, theirs.config.eos_token_id)
    assert kept == (dense.config.max_position_embeddings, 256)
    assert theirs.config.tie_word_embeddings == dense.config.tie_word_embeddings


def test_unnormalised_weights_are_made_up_for_unless_spes_is_wanted(tmp_path: Path) -> None:
    dense = make_checkpoint(tmp_path / "dense", "qwen3", vocab_size=260)
    recipe = replace(PLAIN, norm_topk_prob=False, router="zeros")
    Upcycling(tmp_path / "dense", recipe).save(tmp_path / "scaled")
    expected = logits_of(dense)
    assert (logits_of(ours(tmp_path / "scaled")) - expected).abs().max() < 1e-5
    Upcycling(tmp_path / "dense", replace(recipe, exact_spes=True)).save(tmp_path / "spes")
    assert (logits_of(ours(tmp_path / "spes")) - expected).abs().max() > 0.01
    stored, tied = TensorFiles(tmp_path / "spes"), "model.embed_tokens.weight"
    assert torch.equal(stored["lm_head.weight"], stored[tied]), "SPES unties the head"
    assert "lm_head.weight" not in TensorFiles(tmp_path / "scaled").shapes


def test_noise_is_that_of_spes_and_the_seed_decides_it(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "qwen3", hidden_size=128, intermediate_size=256)
    made = dict(Upcycling(tmp_path, Recipe()).tensors())
    again = dict(Upcycling(tmp_path, Recipe()).tensors())
    assert all(torch.equal(made[name], again[name]) for name in made)
    other = dict(Upcycling(tmp_path, Recipe(seed=1)).tensors())
    dense = load_file(tmp_path / SINGLE_FILE)["model.layers.1.mlp.up_proj.weight"]
    names = [expert_tensor(1, expert, "up") for expert in range(8)]
    for name in names:
        noise = made[name] - dense
        is_moved = noise != 0
        assert is_moved.float().mean() == pytest.approx(0.5, abs=0.02)
        assert noise[is_moved].std().item() == pytest.approx(0.02, rel=0.03)
        assert not torch.equal(made[name], other[name])
    assert len({made[name].sum().item() for name in names}) == 8
    router = "model.layers.0.mlp.gate.weight"
    assert made[router].std().item() == pytest.approx(ROUTER_STD, rel=0.1)
    zeros = dict(Upcycling(tmp_path, Recipe(router="zeros")).tensors())
    assert not zeros[router].any() and torch.equal(zeros[names[0]], made[names[0]])
    others = [n for n in made if ".mlp." not in n]
    stored = load_file(tmp_path / SINGLE_FILE)
    assert others and all(torch.equal(made[name], stored[name]) for name in others)


def text(step: int, run: RunConfig) -> Tensor:
    """Sequences in which the next token follows from the last one, most of the time."""
    generator = torch.Generator().manual_seed(step)
    rows, length = 8, run.data.sequence_length
    tokens = torch.randint(0, 250, (rows, length + 1), generator=generator)
    is_kept = torch.rand((rows, length), generator=generator) < 0.8
    for t in range(length):
        follows = (tokens[:, t] * 7 + 3) % 250
        tokens[:, t + 1] = torch.where(is_kept[:, t], follows, tokens[:, t + 1])
    return tokens


@pytest.mark.parametrize("kind", KINDS)
def test_with_noise_it_trains_and_every_expert_has_tokens(tmp_path: Path, kind: str) -> None:
    make_checkpoint(tmp_path / "dense", kind, max_position_embeddings=32)
    Upcycling(tmp_path / "dense", Recipe()).save(tmp_path / "mixture")
    run = run_of_checkpoint(tmp_path / "mixture")
    train = {"compute": "fp32", "frozen": "fp32", "micro_batch_sequences": 8, "batch_tokens": 256}
    run = run.model_copy(update={"train": run.train.model_copy(update=train)})
    engine = ResidentEngine(run, EngineOptions.of(run))
    engine.write(open_checkpoint(tmp_path / "mixture", run))
    engine.own(range(8))
    steps = [engine.step(text(step, run), lr=3e-3) for step in range(STEPS)]
    assert steps[-1].cross_entropy < steps[0].cross_entropy - 1
    for layer in steps[0].expert_tokens, steps[-1].expert_tokens:
        assert all(min(counts) > 0 for counts in layer)
    trained = engine.read(all_shapes(run.model))
    save_model(tmp_path / "export", run, trained.items())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert (logits_of(ours(tmp_path / "export")) - logits_of(theirs)).abs().max() < 1e-5


def test_dense_matrices_are_read_in_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "llama", num_hidden_layers=8)
    live, read = Live(), TensorFiles.read
    monkeypatch.setattr(TensorFiles, "read", lambda self, stored: live.read(read(self, stored)))
    work, made = Upcycling(tmp_path, Recipe()), 0
    assert live.total == 0
    for number, (_, tensor) in enumerate(work.tensors(), 1):
        made += tensor.nbytes
        assert number <= work.num_tensors
    stored = load_file(tmp_path / SINGLE_FILE)
    assert live.total == sum(each.nbytes for each in stored.values()) < made, "each is read once"
    # The tensor in use, and the next one before the first is freed.
    assert live.peak <= 2 * max(each.nbytes for each in stored.values())


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("llama", {"mlp_bias": True}, "mlp_bias = true means biases in the MLP"),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "rope_scaling = .llama3. means"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window = true means sliding"),
        ("qwen3", {"model_type": "olmo2"}, "'olmo2' is post-norm: its norms stand behind"),
        ("qwen3", {"model_type": "gemma"}, "'gemma' cannot be trained here; qwen3, llama can"),
        ("qwen3", {"model_type": "olmoe"}, "'olmoe' is a mixture already.*--initialise-from"),
    ],
)
def test_a_dense_model_that_cannot_be_expressed_is_refused(
    tmp_path: Path, kind: str, values: dict[str, object], message: str
) -> None:
    make_checkpoint(tmp_path, kind, num_hidden_layers=1)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    with pytest.raises(ConfigError, match=message):
        Upcycling(tmp_path, Recipe())


def test_what_does_not_fit_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError, match="num_experts_per_tok: 9 exceeds num_experts 8"):
        Upcycling(tmp_path, Recipe(top_k=9))
    with pytest.raises(ConfigError, match="exports as Mixtral, which always renormalises"):
        Upcycling(tmp_path, Recipe(norm_topk_prob=False))
    with pytest.raises(ConfigError, match="own folder"):
        Upcycling(tmp_path, Recipe()).save(tmp_path)
    stored = load_file(tmp_path / SINGLE_FILE)
    stored["model.layers.0.mlp.up_proj.bias"] = torch.zeros(48)
    save_file(stored, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"up_proj\.bias is not in our model"):
        Upcycling(tmp_path, Recipe())
