"""Sizes for predictions of memory: an engine's needs, and the parameters that it holds. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from swarm.config import ModelConfig, RunConfig
from swarm.experts import Shape, is_matrix, shared_shapes
from swarm.model.cost import owned_per_peer, parameters
from swarm.model.frozen import frozen_bytes
from swarm.model.moe import matrix_shapes
from swarm.train.engine import muon
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.mesh import Cut, cut_of
from swarm.train.engine.optimizer import PIECE, PIECE_GPU
from swarm.train.engine.optimizer_moments import MOMENT_BYTES, MomentsFormat

BUCKET = 2**22
"""Gradient elements that workers add up at a time: 16 MiB, and as much for the others' values."""
UPDATE_BYTES: dict[MomentsFormat, int] = {"fp32": 0, "bf16": 25, "int8": 18}
"""Bytes per element of a piece during its update, without gradients: moments in fp32, and the
memory for rounding them."""
DIRECTION_BYTES = 2
"""Bytes per element of Muon's direction, which the device computes and sends to the host."""
MASTER_BYTES = GRADIENT_BYTES = 4
"""Bytes of an fp32 master or gradient, per trained parameter."""


@dataclass(frozen=True)
class Need:
    """Bytes that an engine needs at its peak.

    Attributes:
        device_state: weights, gradients and, in the resident engine, moments and buffers between
            stages, on the device.
        activations: the device's peak on top of `device_state`, in a step. A streaming engine may
            reach its peak while it computes a held-out loss.
        host: masters, moments, gradients and activation checkpoints in host memory.
        disk: frozen experts in the engine's own mapped files, and the history for new workers.
        crowding: additional device memory of a rank whose experts get tokens of other ranks:
            for `CROWDING` more rows than an even share.
    """

    device_state: float
    activations: float
    host: float
    disk: float
    crowding: float = 0.0

    @property
    def device(self) -> float:
        """Peak on the device."""
        return self.device_state + self.activations

    @property
    def crowded(self) -> float:
        """Peak on the device with crowded tokens, by which plans are chosen."""
        return self.device + self.crowding


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters, divided as in engines.

    Attributes:
        layer_shared: shared parameters of a layer.
        layer_cast: shared parameters of a layer that are copied in the compute type.
        layer_owned: parameters of a layer's owned experts.
        table: embedding or head.
        trained: all trained parameters.
        layer_heads: shared parameters of a layer that belong to this rank's attention heads; 0 if
            heads are not divided over ranks.
        layer_elsewhere: parameters of a layer that belong to other ranks' heads. No other count
            includes them.
    """

    layer_shared: int
    layer_cast: int
    layer_owned: int
    table: int
    trained: int
    layer_heads: int = 0
    layer_elsewhere: int = 0

    @property
    def layer(self) -> int:
        """Trained parameters of a layer."""
        return self.layer_shared + self.layer_owned


@lru_cache(maxsize=256)
def sizes_of(model: ModelConfig, num_owned: int, tp: int = 1) -> Sizes:
    """Counts the parameters of a peer with `num_owned` experts, on one of `tp` ranks."""
    first = {n: s for n, s in shared_shapes(model).items() if n.startswith("model.layers.0.")}
    counted = parameters(model)
    layers = model.num_hidden_layers
    per_layer = counted.per_expert // layers
    # Only the matrices of attention are cast, and these are cut over heads.
    cast = sum(rows * columns for rows, columns in attention_matrices(model))
    cut = cast
    if model.qk_norm == "projection":
        cut += (model.num_attention_heads + model.num_key_value_heads) * model.dim_per_head
    elsewhere = cut - cut // tp
    return Sizes(
        layer_shared=num_elements(first) - elsewhere,
        layer_cast=cast // tp,
        layer_owned=num_owned * per_layer,
        table=model.vocab_size * model.hidden_size,
        trained=counted.shared + num_owned * counted.per_expert - layers * elsewhere,
        layer_heads=cut // tp if tp > 1 else 0,
        layer_elsewhere=elsewhere,
    )


def moments_bytes(run: RunConfig, form: MomentsFormat, trained: int, matrices: int) -> float:
    """Bytes of the moments of `trained` parameters, including `matrices` elements of matrices."""
    ones = matrices if run.optimizer.kind == "muon" else 0
    return MOMENT_BYTES[form] * (2 * trained - ones)


def attention_matrices(model: ModelConfig) -> list[tuple[int, int]]:
    """Shapes of the matrices of attention in a layer."""
    first = {n: s for n, s in shared_shapes(model).items() if n.startswith("model.layers.0.")}
    return [(shape[0], shape[1]) for name, shape in first.items() if is_matrix(name)]


def update_bytes(run: RunConfig, options: EngineOptions) -> int:
    """Bytes that the update of one piece needs on the device, gradients not included."""
    table = run.model.vocab_size * run.model.hidden_size
    piece = min(PIECE_GPU if options.device == "cuda" else PIECE, table)
    found = UPDATE_BYTES[options.moments] * piece
    return max(found, matrix_update_bytes(run, options))


def matrix_update_bytes(run: RunConfig, options: EngineOptions) -> int:
    """Bytes of Muon's update of the largest matrix: bf16 products on a GPU, fp32 on a CPU."""
    if run.optimizer.kind != "muon":
        return 0
    shapes = [*attention_matrices(run.model), *matrix_shapes(run.model).values()]
    rounding, itemsize = UPDATE_BYTES[options.moments] // 2, 4 if options.device == "cpu" else 2
    return max(
        muon.update_bytes(rows, columns, itemsize) + rounding * rows * columns
        for rows, columns in shapes
    )


def muon_matrices(run: RunConfig, num_owned: int) -> int:
    """Parameters of a peer that Muon updates."""
    sizes = sizes_of(run.model, num_owned)
    number = run.model.num_hidden_layers * (sizes.layer_cast + sizes.layer_owned)
    return number if run.optimizer.kind == "muon" else 0


def muon_bus_bytes(run: RunConfig, num_owned: int, options: EngineOptions) -> float:
    """The most bytes that Muon adds on the bus, each way, in a step of a streaming engine."""
    return max(MOMENT_BYTES[options.moments], DIRECTION_BYTES) * muon_matrices(run, num_owned)


def orthogonalising_flops(run: RunConfig, num_owned: int, options: EngineOptions) -> float:
    """Floating-point operations of Muon's updates in a step, on one of the ranks of a whole model.

    Ranks that stream count as one rank.
    """
    if run.optimizer.kind != "muon":
        return 0.0
    flops = muon.newton_schulz_flops
    attention = sum(flops(*shape) for shape in attention_matrices(run.model))
    expert = sum(flops(*shape) for shape in matrix_shapes(run.model).values())
    shared_over, experts_over = options.alike
    owned = -(-num_owned // options.ep)
    layer = attention / shared_over + owned * expert / experts_over
    return run.model.num_hidden_layers / options.pp * layer


def frozen_layer_bytes(run: RunConfig, num_owned: int, options: EngineOptions) -> int:
    """Bytes of one layer's frozen experts, on the worker that has the most of them."""
    frozen = -(-(run.model.num_experts - num_owned) // options.ep)
    shapes = matrix_shapes(run.model).values()
    return sum(frozen_bytes(options.frozen, (frozen, *shape)) for shape in shapes)


def pipeline_cut(run: RunConfig, options: EngineOptions) -> Cut:
    """The stages of a pipeline, cut for the initial number of experts, since layers never move."""
    return cut_of(run, owned_per_peer(run, run.run.peers), options.pp, options.chunks)


def num_elements(shapes: dict[str, Shape]) -> int:
    """Elements of tensors of these shapes."""
    return sum(math.prod(shape) for shape in shapes.values())
