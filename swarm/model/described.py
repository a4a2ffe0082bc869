"""Translates the model of a Transformers config.json into our configuration.

A checkpoint that our decoder cannot compute is refused with the reason. Nothing here reads tensors.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from swarm.config import ModelConfig, RunConfig, validate_config
from swarm.errors import ConfigError

CONFIG_FILE = "config.json"
MAX_SEQUENCE = 2048
"""Longest sequence of a run file that is made for a checkpoint. Longer sequences are a person's
choice."""
MIXTURES = ("qwen3_moe", "olmoe", "dots1", "mixtral")
"""Values of `model_type` that our decoder computes and that exports have."""
DENSE: Mapping[str, str] = {"qwen3": "head", "llama": "none"}
"""The mixture's `model.qk_norm`, by each `model_type` from which a mixture can be made."""
POST_NORM = ("olmo2", "olmo3", "flex_olmo")
_NEUTRAL: Mapping[str, tuple[tuple[object, ...], str]] = {
    "attention_bias": ((None, False), "biases in attention"),
    "qkv_bias": ((None, False), "biases in attention"),
    "mlp_bias": ((None, False), "biases in the MLP"),
    "clip_qkv": ((None,), "clipped queries, keys and values"),
    "use_sliding_window": ((None, False), "sliding windows of attention"),
    "mlp_only_layers": ((None, []), "dense layers between the mixtures"),
    "decoder_sparse_step": ((None, 1), "dense layers between the mixtures"),
    "first_k_dense_replace": ((None, 0), "dense layers between the mixtures"),
    "n_shared_experts": ((None, 0), "shared experts"),
    "num_shared_experts": ((None, 0), "shared experts"),
    "shared_expert_intermediate_size": ((None, 0), "shared experts"),
    "n_group": ((None, 1), "groups of experts"),
    "topk_group": ((None, 1), "groups of experts"),
    "routed_scaling_factor": ((None, 1), "scaled weights of experts"),
    "hidden_act": ((None, "silu"), "another activation than SiLU"),
    "partial_rotary_factor": ((None, 1), "rotary positions in a part of a head"),
    "quantization_config": ((None,), "quantised weights"),
}
"""For each key, the values with which a model equals ours, and the meaning of other values."""
_WINDOW_SWITCHES: Mapping[str, str] = {
    "qwen3": "use_sliding_window",
    "qwen3_moe": "use_sliding_window",
    "dots1": "layer_types",
}
"""For each model_type, the key that decides whether a `sliding_window` is used. Other types always
use it."""
_NOT_COMPARED = ("head_dim", "initializer_range", "noisy_top_k")
"""Settings that follow from others, or concern only training."""


def read_description(folder: Path) -> dict[str, Any]:
    """The contents of a checkpoint's config.json.

    Raises:
        ConfigError: the file is missing, or is no JSON object.
    """
    path = folder / CONFIG_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path}: cannot be read: {error}",
            hint="name a folder with config.json and safetensors files, as an export has",
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: is no JSON object")
    return found


def run_of_checkpoint(folder: Path) -> RunConfig:
    """A run that starts from a checkpoint: the model's section, and moderate choices for the rest.

    Raises:
        ConfigError: there is no config.json, or our decoder cannot compute this model. The error
            names the key of config.json and its meaning.
    """
    found, source = read_description(folder), str(folder / CONFIG_FILE)
    kind = found.get("model_type")
    if kind in DENSE:
        raise ConfigError(
            f"{source}: model_type {kind!r} is dense, and a run trains a mixture of experts",
            hint=f"make one with swarm-upcycle --from {folder} --out DIR",
        )
    _require_kind(found, MIXTURES, source)
    _require_expressible(found, source)
    return run_for(folder, _mixture(found, source), found)


def run_of_dense(
    folder: Path, *, num_experts: int, top_k: int, norm_topk_prob: bool, untie: bool
) -> RunConfig:
    """A run of the mixture made from a dense checkpoint, with the checkpoint's sequences.

    Args:
        folder: folder of a dense Qwen3 or Llama.
        num_experts: copies of each MLP.
        top_k: experts of a token.
        norm_topk_prob: whether the weights of these experts are divided by their sum.
        untie: gives a model with a tied head a separate head.

    Raises:
        ConfigError: as `run_of_checkpoint`, or the checkpoint already is a mixture.
    """
    found, source = read_description(folder), str(folder / CONFIG_FILE)
    if (kind := found.get("model_type")) in MIXTURES:
        raise ConfigError(
            f"{source}: model_type {kind!r} is a mixture already",
            hint=f"start from it with --initialise-from {folder}",
        )
    _require_kind(found, DENSE, source)
    _require_expressible(found, source)
    shared = _shared_settings(found, source)
    mixture = {
        "num_experts": num_experts,
        "num_experts_per_tok": top_k,
        "moe_intermediate_size": _value_of(found, source, "intermediate_size"),
        "norm_topk_prob": norm_topk_prob,
        "qk_norm": DENSE[found["model_type"]],
        "tie_word_embeddings": shared["tie_word_embeddings"] and not untie,
    }
    run = run_for(folder, shared | mixture, found)
    longest = found.get("max_position_embeddings")
    if not isinstance(longest, int):
        return run
    data = run.data.model_copy(update={"sequence_length": longest})
    return run.model_copy(update={"data": data})


def end_of_text_of(folder: Path) -> int | None:
    """The id that ends a text, or the first of several. None if there is no id."""
    found = read_description(folder).get("eos_token_id")
    first = found[0] if isinstance(found, list) and found else found
    return first if isinstance(first, int) else None


def run_for(folder: Path, model: Mapping[str, Any], found: Mapping[str, Any]) -> RunConfig:
    """A run of a model, named after the folder, with sequences that the checkpoint allows.

    If the folder has a tokenizer.json, the run uses it. `found` is the config.json.

    Raises:
        ConfigError: the model's sizes contradict each other, or exceed a bound.
    """
    longest = found.get("max_position_embeddings")
    length = min(longest, MAX_SEQUENCE) if isinstance(longest, int) else MAX_SEQUENCE
    has_file = (folder / "tokenizer.json").exists()
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", folder.resolve().name).strip("-_.")[:64] or "model"
    vocabulary = model.get("vocab_size")
    is_small = isinstance(vocabulary, int) and vocabulary < 258
    values = {
        "run": {"name": name, "rounds": 1000, "peers": 4, "initial": "given"},
        "model": dict(model),
        "data": {
            "sequence_length": length,
            "tokenizer": "file" if has_file or is_small else "byte",
        },
        "train": {"batch_tokens": 16 * length, "micro_batch_sequences": 1},
        "optimizer": {"lr": 1e-4, "warmup_steps": 100},
        "round": {"local_steps": 50},
    }
    return validate_config(RunConfig, values, source=str(folder / CONFIG_FILE))


def require_same_model(run: RunConfig, folder: Path) -> None:
    """Refuses a checkpoint of another model than the run's.

    Raises:
        ConfigError: names each setting that differs, with both values. Or as `run_of_checkpoint`.
    """
    theirs = run_of_checkpoint(folder).model
    differences = list(_differences(run.model, theirs))
    if differences:
        raise ConfigError(
            f"{folder} is not of {run.run.name}'s model: {'; '.join(differences)}",
            hint=f"swarm-upcycle config {folder} writes a run file for it",
        )


def _differences(ours: ModelConfig, theirs: ModelConfig) -> Iterator[str]:
    for key in ModelConfig.model_fields:
        mine, its = getattr(ours, key), getattr(theirs, key)
        if key not in _NOT_COMPARED and mine != its:
            yield f"model.{key} is {mine!r}, there {its!r}"
    if ours.dim_per_head != theirs.dim_per_head:
        yield f"model.head_dim is {ours.dim_per_head}, there {theirs.dim_per_head}"


# ------------------------------------------------ limits of our decoder


def _require_kind(found: Mapping[str, Any], known: Collection[str], source: str) -> None:
    kind = found.get("model_type")
    if kind in POST_NORM:
        raise ConfigError(
            f"{source}: model_type {kind!r} is post-norm: its norms stand behind attention and MLP "
            "instead of before them, so neither Qwen3-MoE nor Mixtral computes the same"
        )
    if kind not in known:
        raise ConfigError(
            f"{source}: model_type {kind!r} cannot be trained here; {', '.join(known)} can"
        )


def _require_expressible(found: Mapping[str, Any], source: str) -> None:
    """Refuses a dense model or a mixture that our decoder cannot compute.

    Raises:
        ConfigError: names the key, its value and its meaning.
    """
    for key, (neutral, what) in _NEUTRAL.items():
        if found.get(key) not in neutral:
            raise _refused(source, key, found[key], what)
    for key in ("rope_scaling", "rope_parameters"):
        rope = found.get(key) or {}
        form = _form_of(rope)
        if form != "default":
            raise _refused(source, key, form, "rotary positions that are scaled")
        if rope.get("partial_rotary_factor") not in (None, 1):
            raise _refused(source, key, rope, "rotary positions in a part of a head")
    kinds = found.get("layer_types") or []
    switch = _WINDOW_SWITCHES.get(found["model_type"])
    if found.get("sliding_window") is not None and switch not in found:
        raise _refused(source, "sliding_window", found["sliding_window"], "sliding windows")
    others = [kind for kind in kinds if kind != "full_attention"]
    if others:
        raise _refused(source, "layer_types", others[0], "sliding windows or other attention")


def _form_of(rope: object) -> object:
    if not isinstance(rope, dict):
        return rope
    return rope.get("rope_type", rope.get("type", "default"))


def _refused(source: str, key: str, value: object, what: str) -> ConfigError:
    shown = json.dumps(value)[:80]
    return ConfigError(
        f"{source}: {key} = {shown} means {what}, which our decoder does not support"
    )


def _value_of(found: Mapping[str, Any], source: str, *keys: str) -> Any:
    """The value of the first of these keys that exists.

    Raises:
        ConfigError: no key exists.
    """
    for key in keys:
        if found.get(key) is not None:
            return found[key]
    raise ConfigError(f"{source}: lacks {keys[0]}")


def _shared_settings(found: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The settings that dense models and mixtures share. Raises like `_value_of`."""
    rope = found.get("rope_parameters") or {}
    head = found.get("head_dim")
    if found.get("model_type") == "qwen3" and head is None:
        head = 128  # Transformers' default, whatever the hidden size
    return {
        **{
            key: _value_of(found, source, key)
            for key in (
                *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
                "rms_norm_eps",
            )
        },
        "num_key_value_heads": _value_of(
            found, source, "num_key_value_heads", "num_attention_heads"
        ),
        "head_dim": head,
        "rope_theta": _real(_value_of({**found, **rope}, source, "rope_theta")),
        "tie_word_embeddings": found.get("tie_word_embeddings", False),
        "initializer_range": found.get("initializer_range", 0.02),
    }


def _real(value: object) -> object:
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _mixture(found: Mapping[str, Any], source: str) -> dict[str, Any]:
    kind = found["model_type"]
    inner = "moe_intermediate_size" if kind in ("qwen3_moe", "dots1") else "intermediate_size"
    own: dict[str, dict[str, Any]] = {
        "qwen3_moe": {"qk_norm": "head"},
        "olmoe": {"qk_norm": "projection"},
        "dots1": {"qk_norm": "head", "scoring_func": "sigmoid"},
        "mixtral": {"qk_norm": "none", "norm_topk_prob": True},
    }
    return {
        **_shared_settings(found, source),
        "num_experts": _value_of(
            found, source, "num_experts", "num_local_experts", "n_routed_experts"
        ),
        "num_experts_per_tok": _value_of(found, source, "num_experts_per_tok"),
        "moe_intermediate_size": _value_of(found, source, inner),
        "norm_topk_prob": found.get("norm_topk_prob", False),
        **own[kind],
    }
