"""Names of tensors and units, which are built and parsed only here. No tensors here.

A tensor's Hugging Face name is its name in memory, on the wire and in state directories. Files of
Transformers may name and group tensors differently, as `LAYOUTS` lists.
"Expert e" means index e in every layer. A *unit* is what a manifest lists: one expert
(`expert.3`) or one part of the shared tensors (`shared.0`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from swarm.config import Codec, Coding, ModelConfig, Optimizer

_EXPERT = re.compile(r"^model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight$")
_STACK = re.compile(r"^model\.layers\.(\d+)\.mlp\.experts\.owned\.(gate|up|down)_proj$")
_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_SELECTION_BIAS = "mlp.gate.e_score_correction_bias"
_ROUTER_NOISE = "mlp.gate.noise_weight"
EMBEDDING = "model.embed_tokens.weight"
ADAMW_MOMENTS = ("exp_avg", "exp_avg_sq")
MUON_MOMENTS = ("momentum",)
PROJECTIONS = ("down", "gate", "up")
"""The three matrices of an expert, in the order of their names."""

Shape = tuple[int, ...]
ELEMENT_BYTES: Mapping[Codec, int] = {"fp32": 4, "bf16": 2}
"""Bytes of one element. Shared tensors are cut into units in this order of codecs."""


@dataclass(frozen=True)
class Slice:
    """Consecutive elements of a flattened (row-major) tensor: [start, stop)."""

    name: str
    start: int
    stop: int


@dataclass(frozen=True)
class UnitLayout:
    """The layout of a unit's blob: the slices one after the other, without header.

    Attributes:
        num_bytes: size of the blob.
        coding: coding of the delta that changes the unit's value in a round. "none": a round sends
            the new value itself.
    """

    unit: str
    codec: Codec
    slices: tuple[Slice, ...]
    num_elements: int
    num_bytes: int
    coding: Coding = "none"


@dataclass(frozen=True)
class Stored:
    """The place of a tensor of the model in the files of a checkpoint.

    Attributes:
        name: name of the tensor in the files.
        shape: shape of the tensor in the files.
        part: the index of the model's tensor in the tensor of the files. Empty for the whole
            tensor.
    """

    name: str
    shape: Shape
    part: tuple[int | slice, ...] = ()


@dataclass(frozen=True)
class ExpertLayout:
    """How the files of a checkpoint name and group routers and experts.

    Attributes:
        block: the name of the block of a layer that contains its router and experts.
        matrices: name of each projection in the block. A name without {expert} is that of one
            tensor [E, rows, columns] for all E experts. Projections that share such a name follow
            each other in the rows of this tensor, in this order.
    """

    block: str
    matrices: Mapping[str, str]

    def name(self, name: str) -> str:
        """The name in the files of the tensor that is, or contains, a tensor of the model."""
        place = place_of(name)
        if place is None:
            return name.replace(".mlp.", f".{self.block}.")
        layer, expert, projection = place
        matrix = self.matrices[projection].format(expert=expert)
        return f"model.layers.{layer}.{self.block}.{matrix}"

    def stored(self, name: str, shape: Shape, num_experts: int) -> Stored:
        """The place in the files of the model's tensor with this name and shape."""
        place = place_of(name)
        if place is None or "{expert}" in (matrix := self.matrices[place[2]]):
            return Stored(self.name(name), shape)
        _, expert, projection = place
        together = [each for each, other in self.matrices.items() if other == matrix]
        rows, columns = shape
        first = rows * together.index(projection)
        whole = (num_experts, rows * len(together), columns)
        return Stored(self.name(name), whole, (expert, slice(first, first + rows)))


_OWN_NAMES = {each: f"experts.{{expert}}.{each}_proj.weight" for each in ("gate", "up", "down")}
_MIXTRAL_NAMES = {
    "gate": "experts.{expert}.w1.weight",
    "up": "experts.{expert}.w3.weight",
    "down": "experts.{expert}.w2.weight",
}
_FUSED_NAMES = {
    "gate": "experts.gate_up_proj",
    "up": "experts.gate_up_proj",
    "down": "experts.down_proj",
}
PER_EXPERT = ExpertLayout("mlp", _OWN_NAMES)
MIXTRAL = ExpertLayout("block_sparse_moe", _MIXTRAL_NAMES)
LAYOUTS = (
    PER_EXPERT,
    MIXTRAL,
    ExpertLayout("mlp", _FUSED_NAMES),
    ExpertLayout("block_sparse_moe", _FUSED_NAMES),
)
"""Every layout that can be read. Exports have one of the first two layouts.

Source: Transformers 5.23 `conversion_mapping.py`, "qwen2_moe" and "mixtral".
"""


def travels_exactly(name: str) -> bool:
    """Whether a shared tensor is a norm or a router: small and sensitive, so fp32 and uncoded."""
    return name.endswith("norm.weight") or ".mlp.gate." in name


def expert_tensor(layer: int, expert: int, projection: str) -> str:
    """Name of one matrix of one expert; `projection` is "gate", "up" or "down"."""
    return f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"


def owned_stack(layer: int, projection: str) -> str:
    """Name of the parameter in which a peer stacks one matrix of the experts that it owns."""
    return f"model.layers.{layer}.mlp.experts.owned.{projection}_proj"


def stacked_tensors(name: str, owned: Sequence[int]) -> tuple[str, ...]:
    """The tensors that a parameter stacks if it is an owned stack, else nothing."""
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


def is_matrix(name: str) -> bool:
    """Whether a tensor's only use is a matrix product: attention or experts, also as a stack.

    Norms, routers and the head compute in fp32. The head's gradient is added up over slices.
    """
    is_expert = _STACK.match(name) or _EXPERT.match(name)
    return bool(is_expert) or (".self_attn." in name and name.endswith("_proj.weight"))


def moments_of(name: str, optimizer: Optimizer) -> tuple[str, ...]:
    """The moments that an optimizer keeps for a tensor, named as in private states."""
    return MUON_MOMENTS if optimizer == "muon" and is_matrix(name) else ADAMW_MOMENTS


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
    """Whether a tensor belongs to an exported model. Only the router's noise does not."""
    return not name.endswith(_ROUTER_NOISE)


def stored_name(name: str, model: ModelConfig) -> str:
    """The name that a tensor has in the files of an export; Mixtral's names differ."""
    return (MIXTRAL if model.qk_norm == "none" else PER_EXPERT).name(name)


def expert_unit(expert: int) -> str:
    """The unit that holds an expert, in all layers."""
    return f"expert.{expert}"


def shared_unit(part: int) -> str:
    """The unit that holds a part of the shared tensors."""
    return f"shared.{part}"


def expert_of_unit(unit: str) -> int | None:
    """The expert in a unit's name, or None for a part of the shared tensors."""
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


def unknown(name: str) -> str:
    """A sentence that says that the model does not have a tensor."""
    return f"{name} is not in our model"


def misfit(name: str, found: Shape | None, expected: Shape | None) -> str | None:
    """A sentence that says why a tensor does not fit the model. None if it fits.

    Args:
        name: name of the tensor.
        found: the tensor's shape. None if the tensor is missing.
        expected: the shape in the model. None if the model does not have this tensor.
    """
    if expected is None:
        return unknown(name)
    if found is None:
        return f"{name} is missing; expected {expected}"
    return None if found == expected else f"{name} is {found}; expected {expected}"


def lacking(model: ModelConfig, names: Collection[str]) -> str | None:
    """A sentence that names the first missing tensor of the model. None if none is missing."""
    missing = {name: shape for name, shape in all_shapes(model).items() if name not in names}
    if not missing:
        return None
    first = next(iter(missing))
    more = f"; {len(missing) - 1} more are missing" if len(missing) > 1 else ""
    return f"{misfit(first, None, missing[first])}{more}"


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
