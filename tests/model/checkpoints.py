"""Tiny checkpoints as Transformers writes them, made on the spot."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES: dict[str, Any] = {
    "vocab_size": 260,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "intermediate_size": 48,
        "head_dim": 12,
        "norm_topk_prob": True,
    },
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24},
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 24},
    "qwen3": {"intermediate_size": 48, "head_dim": 12, "tie_word_embeddings": True},
    "llama": {"intermediate_size": 48},
}


def make_checkpoint(
    folder: Path,
    kind: str,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "50GB",
    fused: bool = False,
    **settings: Any,
) -> PreTrainedModel:
    """Writes a model with weights far from their initial values, and returns it.

    With `fused`, all experts of a layer are in two tensors, as in Transformers 5 in memory.
    """
    values = SIZES | KINDS[kind] | settings
    with torch.random.fork_rng():
        torch.manual_seed(3)
        config = AutoConfig.for_model(kind, **values)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
    model = model.eval().to(dtype)
    model.save_pretrained(folder, max_shard_size=max_shard_size, save_original_format=not fused)
    return model


def tokens_of(vocab_size: int = 260) -> Tensor:
    """Four sequences of 32 token ids."""
    generator = torch.Generator().manual_seed(5)
    return torch.randint(0, vocab_size, (4, 32), generator=generator)
