"""What things are called: the only place that builds or parses tensor names. No tensors here.

A tensor's Hugging Face name is its name in memory, on the wire, in checkpoints and in exports; a
model without QK-norm alone is exported under Mixtral's names.
"Expert e" means index e in every layer. A *unit* is what a manifest lists: one expert
(`expert.3`) or one part of the shared tensors (`shared.0`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from swarm.config import Codec, Coding, ModelConfig

_EXPERT = re.compile(r"^model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight$")
_STACK = re.compile(r"^model\.layers\.(\d+)\.mlp\.experts\.owned\.(gate|up|down)_proj$")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_SELECTION_BIAS = "mlp.gate.e_score_correction_bias"
_ROUTER_NOISE = "mlp.gate.noise_weight"
_MIXTRAL = {"gate": "w1", "down": "w2", "up": "w3"}
EMBEDDING = "model.embed_tokens.weight"
PROJECTIONS = ("down", "gate", "up")
"""The three matrices of an expert, in the order of their names."""

Shape = tuple[int, ...]
ELEMENT_BYTES: Mapping[Codec, int] = {"fp32": 4, "bf16": 2}
"""Bytes of one element; the shared tensors' codecs come in the order of these."""


@dataclass(frozen=True)
class Slice:
    """A run of elements of a flattened (row-major) tensor: [start, stop)."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class UnitLayout:
    """What the bytes of a unit's blob are: these slices one after the other, no header.

    Attributes:
        num_bytes: of the blob.
        coding: how the unit's value is moved in a round; "none": it is replaced.
    """

    unit: str
    codec: Codec
    slices: tuple[Slice, ...]
    num_elements: int
    num_bytes: int
    coding: Coding = "none"


def travels_exactly(name: str) -> bool:
    """Whether a shared tensor is a norm or a router: small and sensitive, so in fp32, uncoded."""
    return name.endswith("norm.weight") or ".mlp.gate." in name


def expert_tensor(layer: int, expert: int, projection: str) -> str:
    """Name of one matrix of one expert; `projection` is "gate", "up" or "down"."""
    return f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"


def owned_stack(layer: int, projection: str) -> str:
    """Name of the parameter in which a peer stacks one matrix of the experts that it owns."""
    return f"model.layers.{layer}.mlp.experts.owned.{projection}_proj"


def stacked_tensors(name: str, owned: Sequence[int]) -> tuple[str, ...]:
    """The tensors behind the rows of a parameter if it is an owned stack, else nothing."""
    match = _STACK.match(name)
    if match is None:
        return ()
    return tuple(expert_tensor(int(match[1]), expert, match[2]) for expert in owned)


def expert_of(name: str) -> int | None:
    """The expert index in a tensor's name, or None for a shared tensor."""
    match = _EXPERT.match(name)
    return int(match[2]) if match else None


def layer_of(name: str) -> int | None:
    """The layer in the name of a tensor or stack, or None for embedding, last norm and head."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def place_of(name: str) -> tuple[int, int, str] | None:
    """Layer, expert and projection of an expert's matrix, or None for a shared tensor."""
    match = _EXPERT.match(name)
    return (int(match[1]), int(match[2]), match[3]) if match else None


def moved_by_rule(name: str) -> bool:
    """Whether a shared tensor has no gradient and no moments: the router's selection bias."""
    return name.endswith(_SELECTION_BIAS)


def selection_biases(model: ModelConfig) -> tuple[str, ...]:
    """The shared tensors that are `moved_by_rule`, in the order of the layers."""
    if model.scoring_func != "sigmoid":
        return ()
    layers = range(model.num_hidden_layers)
    return tuple(f"model.layers.{layer}.{_SELECTION_BIAS}" for layer in layers)


def exported(name: str) -> bool:
    """Whether a tensor belongs to the model outside of training: all but the router's noise."""
    return not name.endswith(_ROUTER_NOISE)


def stored_name(name: str, model: ModelConfig) -> str:
    """The name that a tensor has in the files of an export."""
    if model.qk_norm != "none":
        return name
    place = place_of(name)
    if place is None:
        return name.replace(".mlp.gate.", ".block_sparse_moe.gate.")
    layer, expert, projection = place
    own = _MIXTRAL[projection]
    return f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{own}.weight"


def expert_unit(expert: int) -> str:
    """The unit that holds an expert, in all layers."""
    return f"expert.{expert}"


def shared_unit(part: int) -> str:
    """The unit that holds a part of the shared tensors."""
    return f"shared.{part}"


def expert_of_unit(unit: str) -> int | None:
    """The expert of a unit's name, or None for a part of the shared tensors."""
    kind, _, index = unit.partition(".")
    return int(index) if kind == "expert" else None


def shared_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Name -> shape of every shared tensor, sorted by name."""
    return dict(sorted(_shared(model)))


def expert_shapes(model: ModelConfig, expert: int) -> dict[str, Shape]:
    """Name -> shape of one expert's matrices in all layers, sorted by name."""
    inner, hidden = model.moe_intermediate_size, model.hidden_size
    shapes = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
    names = {
        expert_tensor(layer, expert, projection): shapes[projection]
        for layer in range(model.num_hidden_layers)
        for projection in PROJECTIONS
    }
    return dict(sorted(names.items()))


def all_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Name -> shape of every tensor of the model, shared ones first."""
    shapes = shared_shapes(model)
    for expert in range(model.num_experts):
        shapes |= expert_shapes(model, expert)
    return shapes


def lacking(model: ModelConfig, names: Collection[str]) -> str | None:
    """Says which tensors of the model are missing, a few by name; None if none is."""
    missing = [name for name in all_shapes(model) if name not in names]
    if not missing:
        return None
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return f"tensors of the model are missing: {', '.join(missing[:3])}{more}"


def _shared(model: ModelConfig) -> Iterator[tuple[str, Shape]]:
    hidden, head = model.hidden_size, model.dim_per_head
    queries, keys = model.num_attention_heads * head, model.num_key_value_heads * head
    yield EMBEDDING, (model.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    if not model.tie_word_embeddings:
        yield "lm_head.weight", (model.vocab_size, hidden)
    for layer in range(model.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.self_attn.q_proj.weight", (queries, hidden)
        yield f"{prefix}.self_attn.k_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.v_proj.weight", (keys, hidden)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, queries)
        if model.qk_norm != "none":
            whole = model.qk_norm == "projection"
            yield f"{prefix}.self_attn.q_norm.weight", (queries if whole else head,)
            yield f"{prefix}.self_attn.k_norm.weight", (keys if whole else head,)
        yield f"{prefix}.mlp.gate.weight", (model.num_experts, hidden)
        if model.noisy_top_k:
            yield f"{prefix}.{_ROUTER_NOISE}", (model.num_experts, hidden)
        if model.scoring_func == "sigmoid":
            yield f"{prefix}.{_SELECTION_BIAS}", (model.num_experts,)
