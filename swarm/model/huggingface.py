"""Writes a model as the files that Transformers loads: config.json and safetensors.

Tensors keep their names, except for Mixtral (`experts.stored_name`).
"""

from __future__ import annotations

import itertools
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from swarm import durable
from swarm.config import RunConfig
from swarm.errors import CorruptState
from swarm.experts import Shape, expert_shapes, exported, shared_shapes, stored_name

MAX_SHARD_BYTES = 8 * 10**8
"""While a shard is written, memory holds it twice: as tensors and as bytes."""
SINGLE_FILE = "model.safetensors"
Dtype = Literal["agreed", "float32", "bfloat16"]
"""Types of weights in files. "agreed": as peers exchange them, experts perhaps in bf16, norms in
fp32."""
INDEX_FILE = "model.safetensors.index.json"


def config_dict(
    run: RunConfig, *, eos_token_id: int | None = None, dtype: Dtype = "agreed"
) -> dict[str, Any]:
    """The contents of config.json.

    The decoder is Qwen3-MoE for QK-norm per head, OLMoE for QK-norm of the projection, Mixtral for
    none, and dots.llm1 for a sigmoid router. Of the decoders with a selection bias, dots.llm1
    equals ours in all else, once its shared expert has the width 0. Noise, capacity and own-expert
    bias concern only training, so config.json need not have them.

    Source: Transformers 5.23 `Qwen3MoeConfig`, `OlmoeConfig`, `Dots1Config`. `rope_theta` is
    written twice, because releases before 5 look for it outside of `rope_parameters`.
    """
    model = run.model
    common = {
        "attention_bias": False,
        "bos_token_id": None,
        "dtype": "bfloat16" if dtype == "bfloat16" else "float32",
        "eos_token_id": eos_token_id,
        "hidden_act": "silu",
        "hidden_size": model.hidden_size,
        "initializer_range": model.initializer_range,
        "max_position_embeddings": run.data.sequence_length,
        "norm_topk_prob": model.norm_topk_prob,
        "num_attention_heads": model.num_attention_heads,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.num_experts_per_tok,
        "num_hidden_layers": model.num_hidden_layers,
        "num_key_value_heads": model.num_key_value_heads,
        "pad_token_id": None,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_parameters": {"rope_theta": model.rope_theta, "rope_type": "default"},
        "rope_theta": model.rope_theta,
        "router_aux_loss_coef": run.loss.balance_weight,
        "tie_word_embeddings": model.tie_word_embeddings,
        "vocab_size": model.vocab_size,
    }
    if model.scoring_func == "sigmoid":
        return common | _dots1(run)
    of_norm = {"head": _qwen3, "projection": _olmoe, "none": _mixtral}
    return common | of_norm[model.qk_norm](run)


def _qwen3(run: RunConfig) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "decoder_sparse_step": 1,
        "head_dim": run.model.dim_per_head,
        # The size of dense layers. There are none, but some tools require the key.
        "intermediate_size": run.model.moe_intermediate_size,
        "mlp_only_layers": [],
        "moe_intermediate_size": run.model.moe_intermediate_size,
        "sliding_window": None,
        "use_sliding_window": False,
    }


def _olmoe(run: RunConfig) -> dict[str, Any]:
    return {
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "clip_qkv": None,
        "intermediate_size": run.model.moe_intermediate_size,
    }


def _mixtral(run: RunConfig) -> dict[str, Any]:
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "head_dim": run.model.dim_per_head,
        "intermediate_size": run.model.moe_intermediate_size,
        "num_local_experts": run.model.num_experts,
        "router_jitter_noise": 0.0,
        "sliding_window": None,
    }


def _dots1(run: RunConfig) -> dict[str, Any]:
    return {
        "architectures": ["Dots1ForCausalLM"],
        "model_type": "dots1",
        "first_k_dense_replace": 0,
        "head_dim": run.model.dim_per_head,
        "intermediate_size": run.model.moe_intermediate_size,
        "moe_intermediate_size": run.model.moe_intermediate_size,
        "n_group": 1,
        "n_routed_experts": run.model.num_experts,
        "n_shared_experts": 0,
        "routed_scaling_factor": 1.0,
        "sliding_window": None,
        "topk_group": 1,
    }


def unused_shapes(run: RunConfig) -> dict[str, Shape]:
    """Names and shapes of dots.llm1's empty shared experts, without which loading warns."""
    if run.model.scoring_func != "sigmoid":
        return {}
    hidden = run.model.hidden_size
    return {
        f"model.layers.{layer}.mlp.shared_experts.{projection}_proj.weight": shape
        for layer in range(run.model.num_hidden_layers)
        for projection, shape in (
            ("gate", (0, hidden)),
            ("up", (0, hidden)),
            ("down", (hidden, 0)),
        )
    }


def save_model(
    folder: Path,
    run: RunConfig,
    named: Iterable[tuple[str, Tensor]],
    *,
    eos_token_id: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: Dtype = "agreed",
) -> list[Path]:
    """Writes config.json and the tensors, in shards with an index if they exceed one shard.

    Every file is written under a temporary name, flushed to disk and renamed. A file that names the
    other files comes last. Files of an earlier export in the same folder are removed, its index
    first. After a kill at any moment, the folder holds one of the two exports or none.

    Args:
        folder: folder of the export, made if missing.
        run: the configuration that the tensors belong to.
        named: every tensor of the model once, in any order. Memory holds one shard of them at a
            time. Tensors that only training uses are left out.
        eos_token_id: the tokenizer's end-of-text id.
        max_shard_bytes: size of a shard. A larger tensor gets its own shard.
        dtype: type of the weights in the files.

    Returns:
        The files written.

    Raises:
        CorruptState: the tensors are not those of the run's model. OSError: the disk refused.
    """
    folder.mkdir(parents=True, exist_ok=True)
    parts, contents = [], []
    wanted = (
        (stored_name(name, run.model), _cast(name, tensor, dtype))
        for name, tensor in named
        if exported(name)
    )
    unused = ((name, torch.empty(shape)) for name, shape in unused_shapes(run).items())
    named = itertools.chain(wanted, unused)
    for number, shard in enumerate(_shards(named, max_shard_bytes)):
        parts.append(folder / f"{number:05d}.partial")
        _save_shard(shard, parts[-1])
        contents.append({name: tensor.nbytes for name, tensor in shard.items()})
    _check_names([name for content in contents for name in content], run, parts)
    files = _name_files(len(parts))
    for part in parts:
        durable.sync_file(part)
    for name in ("config.json", INDEX_FILE, SINGLE_FILE):
        (folder / name).unlink(missing_ok=True)
    durable.sync_folder(folder)
    for part, file in zip(parts, files, strict=True):
        part.replace(durable.beside(folder / file))
        durable.put_in_place(folder / file)
    written = [folder / file for file in files]
    if len(files) > 1:
        written.append(_write_json(folder / INDEX_FILE, _index(files, contents)))
    config = config_dict(run, eos_token_id=eos_token_id, dtype=dtype)
    written.append(_write_json(folder / "config.json", config))
    _remove_others(folder, written)
    return written


def _save_shard(shard: dict[str, Tensor], path: Path) -> None:
    """Writes a file of tensors with the usual permissions of a new file. Raises OSError.

    The safetensors package makes a file that only its owner may read, and raises its own error for
    disks.
    """
    path.touch()
    mode = stat.S_IMODE(path.stat().st_mode)
    try:
        save_file(shard, path, metadata={"format": "pt"})
    except SafetensorError as error:
        path.unlink(missing_ok=True)
        code = re.search(r"\(os error (\d+)\)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error
    path.chmod(mode)


def _cast(name: str, tensor: Tensor, dtype: Dtype) -> Tensor:
    """A tensor in its type in the files. Transformers always keeps selection biases in fp32."""
    if dtype == "agreed":
        return tensor
    is_exact = dtype == "float32" or name.endswith("e_score_correction_bias")
    return tensor.to(torch.float32 if is_exact else torch.bfloat16)


def _name_files(count: int) -> list[str]:
    if count == 1:
        return [SINGLE_FILE]
    return [f"model-{k:05d}-of-{count:05d}.safetensors" for k in range(1, count + 1)]


def _index(files: list[str], contents: list[dict[str, int]]) -> dict[str, Any]:
    pairs = list(zip(files, contents, strict=True))
    weight_map = {name: file for file, content in pairs for name in content}
    total = sum(size for content in contents for size in content.values())
    return {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}


def _remove_others(folder: Path, written: list[Path]) -> None:
    ours = [*folder.glob("model*.safetensors"), *folder.glob("*.partial"), folder / INDEX_FILE]
    for path in ours:
        if path not in written:
            path.unlink(missing_ok=True)


def _shards(
    named: Iterable[tuple[str, Tensor]], max_shard_bytes: int
) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    num_bytes = 0
    for name, tensor in named:
        if shard and num_bytes + tensor.nbytes > max_shard_bytes:
            yield shard
            shard, num_bytes = {}, 0
        shard[name] = tensor.detach().contiguous()
        num_bytes += tensor.nbytes
    yield shard


def _check_names(names: list[str], run: RunConfig, parts: list[Path]) -> None:
    expected = {name for name in shared_shapes(run.model) if exported(name)}
    expected |= unused_shapes(run).keys()
    for expert in range(run.model.num_experts):
        expected |= set(expert_shapes(run.model, expert))
    expected = {stored_name(name, run.model) for name in expected}
    wrong = sorted(expected.symmetric_difference(names))
    if wrong or len(names) != len(expected):
        for part in parts:
            part.unlink()
        raise CorruptState(f"cannot export: missing, foreign or repeated tensors: {wrong[:3]}")


def _write_json(path: Path, values: dict[str, Any]) -> Path:
    durable.write_file(path, (json.dumps(values, indent=2) + "\n").encode())
    return path


def tensor_files(folder: Path) -> list[str]:
    """Names of the safetensors files in an export: the files in its index, or the only file.

    Raises:
        CorruptState: the index is damaged, or names files in other folders.
    """
    index = folder / INDEX_FILE
    if not index.exists():
        return [SINGLE_FILE]
    try:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CorruptState(f"{index}: not an index of safetensors files: {error!r}") from error
    for file in files:
        if Path(file).name != file:
            raise CorruptState(f"{index}: {file!r} is not a plain file name")
    return files
