"""Tiny models and weights for the tests of this folder, and a spy on torch's operations."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from swarm.config import RunConfig, validate_config
from swarm.experts import expert_shapes, shared_shapes

# No two sizes are equal, so that a swapped dimension cannot go unseen.
TINY = {
    "vocab_size": 260,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "rope_theta": 5000.0,
}


def tiny_run(**model: Any) -> RunConfig:
    """A run of a tiny model; keywords change the model's settings."""
    return validate_config(
        RunConfig,
        {
            "run": {"name": "tiny", "rounds": 2, "seed": 7},
            "model": TINY | model,
            "data": {"sequence_length": 32, "validation_bytes": 64},
            "train": {"batch_tokens": 128, "micro_batch_sequences": 4},
            "optimizer": {"lr": 1e-3},
            "round": {"local_steps": 2},
        },
        source="test",
    )


def shapes_of(run: RunConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor."""
    shapes = shared_shapes(run.model)
    for expert in range(run.model.num_experts):
        shapes |= expert_shapes(run.model, expert)
    return shapes


def random_weights(run: RunConfig, *, seed: int = 0, std: float = 0.1) -> dict[str, Tensor]:
    """Weights far from their initial values: norms are not 1, matrices five times as large."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in shapes_of(run).items():
        noise = torch.randn(shape, generator=generator) * std
        weights[name] = 1 + noise if len(shape) == 1 else noise
    return weights


def random_tokens(run: RunConfig, *, num_sequences: int = 4, seed: int = 1) -> Tensor:
    """Sequences of sequence_length + 1 random tokens."""
    shape = (num_sequences, run.data.sequence_length + 1)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, run.model.vocab_size, shape, generator=generator)


class OnGpu(Tensor):
    """Claims to be on a GPU, as do results computed from it: `x.as_subclass(OnGpu)`."""

    is_cuda = True


class Spy(TorchDispatchMode):
    """Records the (operation, shape, dtype) of every tensor that torch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, tuple[int, ...], torch.dtype]] = []

    def __torch_dispatch__(
        self, operation: Callable[..., Any], _types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                name = str(operation).split(".")[1]
                self.seen.append((name, tuple(tensor.shape), tensor.dtype))
        return result
