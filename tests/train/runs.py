"""A tiny run with steps of milliseconds, and its engines, tokens and names."""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from swarm.config import RunConfig
from swarm.data.held_out import HeldOut, Windows
from swarm.data.shards import Shards
from swarm.experts import expert_shapes, shared_shapes
from swarm.model.initial_weights import initial_tensors
from swarm.train.engine.engine_options import EngineKind, EngineOptions
from swarm.train.engine.resident import ResidentEngine
from swarm.train.streaming.streaming_engine import StreamingEngine

LENGTH = 16
NUM_EXPERTS = 4

TINY: dict[str, dict[str, Any]] = {
    "run": {"name": "tiny", "rounds": 4, "seed": 1},
    "model": {
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
    "data": {"sequence_length": LENGTH, "validation_bytes": 64},
    "train": {
        "batch_tokens": 4 * LENGTH,
        "micro_batch_sequences": 2,
        "compute": "fp32",
        "frozen": "fp32",
    },
    "optimizer": {"lr": 1e-2, "warmup_steps": 2},
    "round": {"local_steps": 3},
    "wire": {"experts": "fp32"},
}


def tiny_run(**sections: dict[str, Any]) -> RunConfig:
    """The tiny run with some settings changed: `tiny_run(train={"compute": "bf16"})`."""
    values = {name: {**TINY.get(name, {}), **sections.get(name, {})} for name in TINY | sections}
    return RunConfig.model_validate_json(json.dumps(values))


def all_names(run: RunConfig) -> list[str]:
    """The Hugging Face names of all tensors, shared ones first."""
    experts = range(run.model.num_experts)
    return [*shared_shapes(run.model), *(n for e in experts for n in expert_shapes(run.model, e))]


def new_engine(run: RunConfig, owned: Sequence[int] = (), **options: Any) -> ResidentEngine:
    """A resident engine with the run's initial weights and some owned experts."""
    engine = ResidentEngine(run, replace(EngineOptions.of(run), **options))
    engine.write(initial_tensors(run, all_names(run)))
    engine.own(owned)
    return engine


def new_streaming(run: RunConfig, owned: Sequence[int] = (), **options: Any) -> StreamingEngine:
    """A streaming engine likewise. Close it."""
    given = {"kind": EngineKind.STREAMING, "host_threads": 2, **options}
    engine = StreamingEngine(run, replace(EngineOptions.of(run), **given))
    engine.write(initial_tensors(run, all_names(run)))
    engine.own(owned)
    return engine


def batch(run: RunConfig, step: int) -> Tensor:
    """Random tokens [B, T + 1] of one step, the same on every call."""
    generator = torch.Generator().manual_seed(step)
    rows = run.train.batch_tokens // LENGTH
    return torch.randint(0, 256, (rows, LENGTH + 1), generator=generator)


def held_out(run: RunConfig) -> HeldOut:
    """Random held-out tokens of a number of bytes."""
    tokens_BT1 = batch(run, 0)
    scored_BT = torch.ones_like(tokens_BT1[:, 1:], dtype=torch.bool)
    return HeldOut((Windows(tokens_BT1, scored_BT),), scored_BT.numel(), scored_BT.numel())


def patterned_shards(num_tokens: int = 6000) -> Shards:
    """Tokens with a learnable pattern: a text of few letters, repeated with a drift."""
    generator = torch.Generator().manual_seed(0)
    jumps = torch.randint(0, 3, (num_tokens,), generator=generator)
    return Shards(((jumps.cumsum(0) % 17 + 65).numpy(),))


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    """Whether two sets of named tensors are equal bit for bit."""
    return left.keys() == right.keys() and all(
        left[name].dtype == right[name].dtype and torch.equal(bits(left[name]), bits(right[name]))
        for name in left
    )


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, so that -0.0 differs from 0.0 and NaN equals itself."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
