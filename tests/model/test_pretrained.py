"""A run starts from a checkpoint of Transformers, or an error names the reason why not."""

import gc
import json
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from swarm.config import RunConfig
from swarm.errors import ConfigError, CorruptState
from swarm.experts import LAYOUTS, ExpertLayout, all_shapes, expert_tensor
from swarm.model.described import run_of_checkpoint
from swarm.model.huggingface import SINGLE_FILE, config_dict, save_model
from swarm.model.pretrained import TensorFiles, open_checkpoint
from swarm.model.transformer import Transformer
from swarm.peer.text.agreed_model import initial_contents
from swarm.peer.text.run_start import founders_weights, rounding_notice
from swarm.protocol.values.layout import layout_of
from tests.model.checkpoints import make_checkpoint, tokens_of
from tests.model.samples import random_weights, tiny_run

EXACT = {"shared": "fp32", "experts": "fp32", "part_bytes": 4096}


def with_wire(run: RunConfig, **wire: Any) -> RunConfig:
    return run.model_copy(update={"wire": run.wire.model_copy(update=wire)})


def of_checkpoint(folder: Path) -> RunConfig:
    return with_wire(run_of_checkpoint(folder), **EXACT)


def agreed_model(run: RunConfig, folder: Path) -> Transformer:
    """The model of peers that have decoded the founder's values from the wire."""
    layout = layout_of(run)
    flat = {name: torch.empty(shape).flatten() for name, shape in layout.shapes.items()}
    for unit, content in initial_contents(run, layout, founders_weights(run, folder)):
        values = torch.frombuffer(bytearray(b"".join(content)), dtype=torch.float32)
        offset = 0
        for piece in layout.by_unit[unit].slices:
            size = piece.stop - piece.start
            flat[piece.name][piece.start : piece.stop] = values[offset : offset + size]
            offset += size
    model = Transformer(run.model, owned=[0], frozen="fp32")
    model.write({name: value.view(layout.shapes[name]) for name, value in flat.items()})
    return model


@pytest.mark.parametrize("fused", [False, True], ids=["per expert", "fused"])
@pytest.mark.parametrize("max_shard_size", ["50GB", "100KB"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "olmoe", "mixtral"])
def test_a_run_starts_with_the_logits_of_the_checkpoint(
    tmp_path: Path, kind: str, max_shard_size: str, fused: bool
) -> None:
    theirs = make_checkpoint(tmp_path, kind, max_shard_size=max_shard_size, fused=fused)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_shard_size == "100KB")
    assert ("model.layers.1.mlp.experts.gate_up_proj" in TensorFiles(tmp_path)) == fused
    ours, tokens = agreed_model(of_checkpoint(tmp_path), tmp_path), tokens_of()
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert (ours(tokens) - expected).abs().max() < 1e-5
    assert expected.abs().max() > 1


def test_fused_experts_under_mixtrals_own_name_are_read(tmp_path: Path) -> None:
    """Transformers renames the block whatever its content."""
    make_checkpoint(tmp_path, "mixtral", fused=True)
    run = of_checkpoint(tmp_path)
    expected = dict(open_checkpoint(tmp_path, run))
    stored = load_file(tmp_path / SINGLE_FILE)
    renamed = {name.replace(".mlp.", ".block_sparse_moe."): stored[name] for name in stored}
    save_file(renamed, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    found = open_checkpoint(tmp_path, run)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("layout", LAYOUTS, ids=["per expert", "mixtral", "fused", "fused mixtral"])
def test_every_layout_gives_back_what_it_holds(tmp_path: Path, layout: ExpertLayout) -> None:
    """Each tensor of the model has its own place, and together they fill the files."""
    run = tiny_run(scoring_func="sigmoid")
    weights, files = random_weights(run), dict[str, Tensor]()
    for name, tensor in weights.items():
        place = layout.stored(name, tuple(tensor.shape), run.model.num_experts)
        whole = files.setdefault(place.name, torch.full(place.shape, torch.nan))
        assert whole[place.part].isnan().all(), "there are no other tensors"
        whole[place.part] = tensor
    assert not any(tensor.isnan().any() for tensor in files.values())
    (tmp_path / "config.json").write_text(json.dumps(config_dict(run)))
    save_file(files, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    found = open_checkpoint(tmp_path, run)
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("kind", ["qwen3_moe", "olmoe"])
def test_tied_embeddings_and_bf16_are_read_as_they_are(tmp_path: Path, kind: str) -> None:
    make_checkpoint(tmp_path, kind, dtype=torch.bfloat16, tie_word_embeddings=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    run = of_checkpoint(tmp_path)
    assert run.model.tie_word_embeddings
    ours, tokens = agreed_model(run, tmp_path), tokens_of()
    with torch.no_grad():
        assert (ours(tokens) - theirs(tokens).logits).abs().max() < 1e-5
    # A head stored in addition to the tie is not read. Transformers does not read it either.
    stored = load_file(tmp_path / SINGLE_FILE)
    extra = {"lm_head.weight": stored["model.embed_tokens.weight"] + 1}
    save_file(stored | extra, tmp_path / SINGLE_FILE, metadata={"format": "pt"})
    assert open_checkpoint(tmp_path, run).keys() == all_shapes(run.model).keys()


@pytest.mark.parametrize(
    "variant",
    [
        {"qk_norm": "head", "head_dim": 24, "norm_topk_prob": True, "noisy_top_k": True},
        {"qk_norm": "projection", "tie_word_embeddings": True},
        {"scoring_func": "sigmoid", "num_experts_per_tok": 3},
        {"qk_norm": "none", "norm_topk_prob": True},
    ],
    ids=["qwen3_moe", "olmoe", "dots1", "mixtral"],
)
def test_an_export_of_ours_is_a_checkpoint_too(tmp_path: Path, variant: dict[str, Any]) -> None:
    run, weights = tiny_run(**variant), random_weights(tiny_run(**variant))
    save_model(tmp_path, run, weights.items(), max_shard_bytes=200_000)
    described = run_of_checkpoint(tmp_path).model
    unsaid = {"noisy_top_k": False, "head_dim": run.model.dim_per_head}
    assert described.model_copy(update=unsaid) == run.model.model_copy(update=unsaid)
    read = open_checkpoint(tmp_path, run)
    assert read.keys() == weights.keys()
    noise = [name for name in read if name.endswith("noise_weight")]
    assert bool(noise) == run.model.noisy_top_k and not any(read[name].any() for name in noise)
    assert all(torch.equal(read[name], weights[name]) for name in read if name not in noise)


class Live:
    """Counts the bytes of the tensors that were read and are still there."""

    def __init__(self) -> None:
        self.now = self.peak = self.total = 0

    def read(self, tensor: Tensor) -> Tensor:
        mine, size = tensor.clone(), tensor.nbytes
        self.now, self.total = self.now + size, self.total + size
        self.peak = max(self.peak, self.now)
        weakref.finalize(mine.untyped_storage(), self._gone, size)
        return mine

    def _gone(self, size: int) -> None:
        self.now -= size


@pytest.mark.parametrize("fused", [False, True], ids=["per expert", "fused"])
def test_at_most_one_tensor_is_in_memory_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    make_checkpoint(tmp_path, "qwen3_moe", max_shard_size="100KB", num_experts=32, fused=fused)
    run, live = of_checkpoint(tmp_path), Live()
    read = TensorFiles.read
    monkeypatch.setattr(TensorFiles, "read", lambda self, stored: live.read(read(self, stored)))
    weights = founders_weights(run, tmp_path)
    assert weights is not None and live.total == 0, "opening reads no tensor"
    largest = max(weights[name].nbytes for name in weights)
    whole, live.total, live.peak = live.total, 0, 0
    for _, content in initial_contents(run, layout_of(run), weights):
        for chunk in content:
            assert chunk
    gc.collect()
    assert live.total == whole, "each tensor is read once though parts of the shared ones cut it"
    assert live.peak == largest < whole / 20


# ------------------------------------------------ what is refused


def changed(folder: Path, **values: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return folder


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "rope scaling": ({"rope_scaling": {"type": "yarn", "factor": 4}}, "rope_scaling = .yarn"),
    "rope parameters": (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}},
        "rope_parameters = .llama3. means rotary positions that are scaled",
    ),
    "part of a head": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 means"),
    "attention bias": ({"attention_bias": True}, "attention_bias = true means biases in"),
    "mlp bias": ({"mlp_bias": True}, "mlp_bias = true means biases in the MLP"),
    "shared experts": ({"n_shared_experts": 1}, "n_shared_experts = 1 means shared experts"),
    "qwen2's shared expert": (
        {"shared_expert_intermediate_size": 64},
        "shared_expert_intermediate_size = 64 means shared experts",
    ),
    "dense layers": ({"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\] means dense layers"),
    "every other layer": ({"decoder_sparse_step": 2}, "decoder_sparse_step = 2 means dense"),
    "clipping": ({"clip_qkv": 8.0}, "clip_qkv = 8.0 means clipped queries"),
    "sliding windows": ({"use_sliding_window": True}, "use_sliding_window = true means sliding"),
    "some sliding layers": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types = .sliding_attention. means sliding",
    ),
    "activation": ({"hidden_act": "gelu"}, "hidden_act = .gelu. means another activation"),
    "quantised": ({"quantization_config": {"bits": 4}}, "quantization_config = .* quantised"),
    "another model": ({"model_type": "gpt2"}, "model_type 'gpt2' cannot be trained here"),
    "post-norm": ({"model_type": "olmo2"}, "model_type 'olmo2' is post-norm"),
    "dense": ({"model_type": "llama"}, "'llama' is dense.*swarm-upcycle --from"),
    "nothing of a size": ({"hidden_size": None}, "lacks hidden_size"),
    "a wrong type": ({"hidden_size": "32"}, "hidden_size"),
    "an odd head": ({"head_dim": 7}, "head_dim: 7 is odd"),
}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    make_checkpoint(folder, "qwen3_moe")
    return folder


@pytest.fixture
def copied(qwen: Path, tmp_path: Path) -> Path:
    for path in qwen.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize("case", REFUSED)
def test_what_our_decoder_has_not_is_refused_by_name(copied: Path, case: str) -> None:
    run, (values, message) = of_checkpoint(copied), REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(changed(copied, **values), run)


def test_a_window_in_a_config_that_switches_it_off_is_none(copied: Path) -> None:
    run = of_checkpoint(copied)
    open_checkpoint(changed(copied, sliding_window=4096, use_sliding_window=False), run)
    make_checkpoint(copied / "o", "olmoe")
    with pytest.raises(ConfigError, match="sliding_window = 4096 means"):
        run_of_checkpoint(changed(copied / "o", sliding_window=4096))


@pytest.mark.parametrize(
    "switch", [{"use_sliding_window": False}, {"layer_types": ["full_attention"] * 2}], ids=str
)
def test_mixtral_has_its_window_in_any_case(tmp_path: Path, switch: dict[str, object]) -> None:
    """Its code in Transformers reads no other key."""
    make_checkpoint(tmp_path, "mixtral")
    with pytest.raises(ConfigError, match="sliding_window = 8 means sliding windows"):
        run_of_checkpoint(changed(tmp_path, sliding_window=8, **switch))


def test_names_of_releases_before_5_are_read(copied: Path) -> None:
    path = copied / "config.json"
    found, run = json.loads(path.read_text()), of_checkpoint(copied)
    found["num_experts"] = found.pop("num_local_experts", None) or found["num_experts"]
    found["rope_theta"] = int(found.pop("rope_parameters")["rope_theta"])
    path.write_text(json.dumps(found | {"rope_scaling": None}))
    assert run_of_checkpoint(copied).model == run.model


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"rope_theta": 5.0}, r"model\.rope_theta is 5\.0, there 10000\.0"),
        ({"rms_norm_eps": 1e-3}, r"model\.rms_norm_eps is 0\.001, there 1e-06"),
        ({"norm_topk_prob": False}, r"model\.norm_topk_prob is False, there True"),
        ({"num_experts": 4}, r"model\.num_experts is 4, there 8"),
        ({"vocab_size": 300}, r"model\.vocab_size is 300, there 260"),
        ({"head_dim": 8}, r"model\.head_dim is 8, there 12"),
        ({"tie_word_embeddings": True}, r"model\.tie_word_embeddings is True, there False"),
    ],
)
def test_a_model_section_that_does_not_match_is_named(
    qwen: Path, setting: dict[str, Any], message: str
) -> None:
    run = of_checkpoint(qwen)
    other = run.model_copy(update={"model": run.model.model_copy(update=setting)})
    with pytest.raises(ConfigError, match=f"{message}.*swarm-upcycle config"):
        open_checkpoint(qwen, other)


def rewritten(folder: Path, change: Any) -> None:
    stored = load_file(folder / SINGLE_FILE)
    change(stored)
    save_file(stored, folder / SINGLE_FILE, metadata={"format": "pt"})


ROUTER = "model.layers.0.mlp.gate.weight"
TENSORS: dict[str, tuple[Any, str]] = {
    "missing": (lambda s: s.pop(ROUTER), rf"{ROUTER} is missing; expected \(8, 32\)"),
    "missing expert": (
        lambda s: s.pop(expert_tensor(1, 7, "up")),
        rf"{expert_tensor(1, 7, 'up')} is missing; expected \(24, 32\)",
    ),
    "extra": (
        lambda s: s.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}),
        r"q_proj\.bias is not in our model",
    ),
    "shape": (
        lambda s: s.update({ROUTER: torch.zeros(32, 8)}),
        rf"{ROUTER} is \(32, 8\); expected \(8, 32\)",
    ),
    "type": (lambda s: s.update({ROUTER: torch.zeros(8, 32).int()}), "is of type i32"),
}


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_named_before_any_is_read(copied: Path, case: str) -> None:
    run, (change, message) = of_checkpoint(copied), TENSORS[case]
    rewritten(copied, change)
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(copied, run)


EXPERTS = "model.layers.1.mlp.experts"
FUSED: dict[str, tuple[Any, str]] = {
    "missing": (
        lambda s: s.pop(f"{EXPERTS}.gate_up_proj"),
        rf"{EXPERTS}\.gate_up_proj is missing; expected \(8, 48, 32\)",
    ),
    "transposed": (
        lambda s: s.update({k: s[k].mT.contiguous() for k in s if ".experts." in k}),
        r"0\.mlp\.experts\.down_proj is \(8, 24, 32\); expected \(8, 32, 24\)",
    ),
    "both layouts": (
        lambda s: s.update({expert_tensor(1, 0, "up"): torch.zeros(24, 32)}),
        rf"{EXPERTS}\.0\.up_proj\.weight is not in our model",
    ),
}


@pytest.mark.parametrize("case", FUSED)
def test_fused_tensors_that_do_not_fit_are_named(tmp_path: Path, case: str) -> None:
    make_checkpoint(tmp_path, "qwen3_moe", fused=True)
    run, (change, message) = of_checkpoint(tmp_path), FUSED[case]
    rewritten(tmp_path, change)
    with pytest.raises(ConfigError, match=message):
        open_checkpoint(tmp_path, run)


def test_a_tensor_that_was_read_is_a_copy(qwen: Path) -> None:
    """Files stay mapped, so a script's change of a tensor must not affect the next reading."""
    weights, name = open_checkpoint(qwen, of_checkpoint(qwen)), "model.embed_tokens.weight"
    first = weights[name].clone()
    weights[name].zero_()
    assert torch.equal(weights[name], first) and first.any()


def test_rotary_buffers_of_older_checkpoints_are_left_out(copied: Path) -> None:
    run, name = of_checkpoint(copied), "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewritten(copied, lambda s: s.update({name: torch.zeros(6)}))
    assert name not in open_checkpoint(copied, run)


def test_damage_is_said(copied: Path) -> None:
    run, name = of_checkpoint(copied), "model.norm.weight"
    rewritten(copied, lambda s: s[name].fill_(float("nan")))
    weights = open_checkpoint(copied, run)
    with pytest.raises(CorruptState, match=r"model\.norm\.weight has values that are not finite"):
        weights[name]
    (copied / SINGLE_FILE).write_bytes((copied / SINGLE_FILE).read_bytes()[:-8])
    with pytest.raises(CorruptState, match=SINGLE_FILE):
        open_checkpoint(copied, run)
    (copied / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="no JSON object"):
        open_checkpoint(copied, run)
    with pytest.raises(ConfigError, match="cannot be read"):
        open_checkpoint(copied / "nowhere", run)


# ------------------------------------------------ who gives weights, and what the wire does


def test_a_run_says_whether_its_weights_are_given(qwen: Path) -> None:
    given = of_checkpoint(qwen)
    assert given.run.initial == "given"
    with pytest.raises(ConfigError, match=r"no checkpoint was named.*--initialise-from DIR"):
        founders_weights(given, None)
    seeded = given.model_copy(update={"run": given.run.model_copy(update={"initial": "seed"})})
    assert founders_weights(seeded, None) is None
    with pytest.raises(ConfigError, match=r"--set run\.initial=given"):
        founders_weights(seeded, qwen)
    with pytest.raises(ConfigError, match=r"--set run\.initial=given"):
        founders_weights(seeded, None, {"model.norm.weight": torch.ones(32)})


def test_given_weights_are_those_of_the_whole_model(qwen: Path) -> None:
    """A script may pass any weights.

    An empty mapping once founded a run with the initial weights of its seed.
    """
    run = of_checkpoint(qwen)
    weights = dict(founders_weights(run, qwen) or {})
    assert founders_weights(run, None, weights) is weights
    name, layout = "model.norm.weight", layout_of(run)
    for given in ({}, {n: tensor for n, tensor in weights.items() if n != name}):
        with pytest.raises(ConfigError, match=r" is missing; expected .*swarm\.load_export"):
            founders_weights(run, None, given)
    cut = {**weights, name: weights[name][:-1]}
    with pytest.raises(ConfigError, match=rf"another model: {name} is \(31,\); expected \(32,\)"):
        for _, content in initial_contents(run, layout, cut):
            content.whole()


def test_rounding_by_the_wire_is_said_where_there_is_any(qwen: Path, tmp_path: Path) -> None:
    run = of_checkpoint(qwen)
    rounded = with_wire(run, experts="bf16")
    assert rounding_notice(run, founders_weights(run, qwen)) is None
    said = rounding_notice(rounded, founders_weights(rounded, qwen))
    assert said is not None and "rounded to bf16 once, since wire.experts is bf16" in said
    assert rounding_notice(rounded, None) is None
    make_checkpoint(tmp_path, "qwen3_moe", dtype=torch.bfloat16)
    assert rounding_notice(rounded, founders_weights(rounded, tmp_path)) is None
