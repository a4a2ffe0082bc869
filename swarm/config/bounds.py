"""How large a run may be: checked before anything is computed from its configuration.

A configuration comes from strangers, and what it makes a peer do (list all tensors and parts) takes
time and memory in proportion to products of its numbers. The bounds leave room for a mixture
of experts of 10 trillion parameters.
"""

from __future__ import annotations

MAX_TENSORS = 2**19
"""Of 128 layers with 1,024 experts: 393,216 matrices."""
MAX_ELEMENTS = 2**44
"""35 TB in bf16."""
MAX_UNITS = 2**14
"""A manifest has an entry of some 250 bytes for each and at most 8 MiB."""
MAX_ROUND_TOKENS = 2**40
"""Of one peer in one round; offers with more are refused."""
_NORMS_AND_MATRICES = 11
"""Shared tensors of a layer, at most."""
_FP32_BYTES = 4


def size_problem(
    *,
    layers: int,
    experts: int,
    vocabulary: int,
    hidden: int,
    inner: int,
    heads: int,
    part_bytes: int,
    shared_every: int,
) -> str | None:
    """Why a model is too large to be listed, or None; the sizes are a little overestimated.

    Args:
        layers: number of layers.
        experts: of each layer.
        vocabulary: tokens in it.
        hidden: elements of a token's state.
        inner: elements of an expert's state.
        heads: elements of all heads' queries, keys and values together, with the output.
        part_bytes: largest size of a part of the shared tensors.
        shared_every: their number is a multiple of this.

    Returns:
        A text that begins with the key to change.
    """
    tensors = 3 * layers * experts + _NORMS_AND_MATRICES * layers + 3
    if tensors > MAX_TENSORS:
        return (
            f"model.num_hidden_layers: {layers} layers of {experts} experts have {tensors} "
            f"tensors (limit {MAX_TENSORS}); fewer layers or fewer model.num_experts"
        )
    per_layer = hidden * (heads + 2 * experts + 2) + 2 * heads + experts
    shared = (2 * vocabulary + 1) * hidden + layers * per_layer
    elements = shared + 3 * layers * experts * hidden * inner
    if elements > MAX_ELEMENTS:
        return (
            f"model.hidden_size: the model has {elements} parameters (limit {MAX_ELEMENTS}); "
            "make it smaller"
        )
    units = shared * _FP32_BYTES // part_bytes + 2 * shared_every + experts
    if units > MAX_UNITS:
        return (
            f"wire.part_bytes: in parts of {part_bytes} bytes the shared tensors and the experts "
            f"are {units} units (limit {MAX_UNITS}); make it larger"
        )
    return None
