"""The need of an engine, in bytes, before it is made. Pure arithmetic on the sizes of a run.

Letters as in the code: N tokens of a micro-batch, D hidden size, V vocabulary, L layers, E experts,
K experts of a token, I inner size of an expert, H query heads, G key heads, C size of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from swarm.config import ModelConfig, RunConfig
from swarm.experts import Shape, shared_shapes
from swarm.model.attention import BLOCK_TOKENS, SHORT_TOKENS
from swarm.model.cost import owned_per_peer, parameters
from swarm.model.frozen import frozen_bytes
from swarm.model.losses import slice_tokens
from swarm.model.masking import WASTE
from swarm.model.moe import matrix_shapes
from swarm.model.rows import GROUPED_ROWS
from swarm.model.stage import Stage
from swarm.model.swiglu import PAD_ROWS_BF16
from swarm.model.transformer import DTYPES
from swarm.train.adam_moments import MOMENT_BYTES
from swarm.train.options import ActivationCheckpoints, EngineKind, EngineOptions
from swarm.train.parallel.stages import Cut, cut_of
from swarm.train.streaming.units import is_cast

BUCKET = 2**22
"""Elements of gradients that workers add up together: 16 MiB, and as much of the other workers'."""
MASTER = GRADIENT = 4
"""Bytes of an fp32 master or gradient, per trained parameter."""


@dataclass(frozen=True)
class Need:
    """Bytes that an engine needs at its peak.

    Attributes:
        device_state: weights, gradients and, in the resident engine, moments and buffers between
            stages, on the device.
        activations: the most that exists beside them on the device.
        host: masters, moments, gradients and activation checkpoints in host memory.
        disk: frozen experts in mapped files of the engine's own.
    """

    device_state: float
    activations: float
    host: float
    disk: float

    @property
    def device(self) -> float:
        """Peak on the device."""
        return self.device_state + self.activations


@dataclass(frozen=True)
class Sizes:
    """Numbers of parameters, split as engines hold them.

    Attributes:
        layer_shared: of a layer, trained by everybody.
        layer_cast: those of them that travel in the compute type.
        layer_owned: of a layer's experts, the owned ones.
        table: embedding or head.
        trained: all that is trained.
    """

    layer_shared: int
    layer_cast: int
    layer_owned: int
    table: int
    trained: int

    @property
    def layer(self) -> int:
        """Trained parameters of a layer."""
        return self.layer_shared + self.layer_owned


def sizes_of(model: ModelConfig, num_owned: int) -> Sizes:
    """Counts the parameters of a peer that owns so many experts."""
    first = {n: s for n, s in shared_shapes(model).items() if n.startswith("model.layers.0.")}
    counted = parameters(model)
    per_layer = counted.per_expert // model.num_hidden_layers
    return Sizes(
        layer_shared=_count(first),
        layer_cast=_count({name: shape for name, shape in first.items() if is_cast(name)}),
        layer_owned=num_owned * per_layer,
        table=model.vocab_size * model.hidden_size,
        trained=counted.shared + num_owned * counted.per_expert,
    )


def need_of(run: RunConfig, num_owned: int, options: EngineOptions) -> Need:
    """The peak of one step for a peer that owns so many experts.

    Allocator rounding, the libraries, a running round and the peer itself come on top. Measured:
    within 15 % of the peak of allocations, see `scripts/bench_memory.py`. Of a pipeline it is the
    stage that needs most.
    """
    if options.pp > 1:
        return max(stage_needs(run, num_owned, options), key=lambda need: need.device)
    if options.kind is EngineKind.RESIDENT:
        return _resident(run, num_owned, options)
    return _streaming(run, num_owned, options)


def largest_tensor_bytes(model: ModelConfig) -> int:
    """The largest tensor of the model in fp32."""
    return max(4 * sizes_of(model, 0).table, expert_matrix_bytes(model))


def expert_matrix_bytes(model: ModelConfig) -> int:
    """One matrix of one expert in one layer, in fp32."""
    return 4 * max(math.prod(shape) for shape in matrix_shapes(model).values())


def owned_layer_bytes(model: ModelConfig, num_owned: int) -> int:
    """The owned experts of one layer, in fp32."""
    return 4 * sizes_of(model, num_owned).layer_owned


def evaluation_bytes(run: RunConfig, options: EngineOptions) -> float:
    """Bytes beside the weights while a micro-batch is evaluated, in fp32, without a graph.

    Activations of one layer, a slice of logits, and one expert's matrices as they are converted.
    """
    micro = _Micro(run, replace(options, compute="fp32"))
    matrices = sum(math.prod(shape) for shape in matrix_shapes(run.model).values())
    return micro.kept() + 3 * micro.checkpoint() + micro.logits() + 4 * matrices


def frozen_layer_bytes(run: RunConfig, num_owned: int, options: EngineOptions) -> int:
    """Frozen experts of one layer, on the worker that has most where they are dealt out."""
    frozen = -(-(run.model.num_experts - num_owned) // options.ep)
    shapes = matrix_shapes(run.model).values()
    return sum(frozen_bytes(options.frozen, (frozen, *shape)) for shape in shapes)


def stage_needs(run: RunConfig, num_owned: int, options: EngineOptions) -> tuple[Need, ...]:
    """The peak of one step on each worker of a pipeline, in the order of the stages.

    As if one pipeline, or the `ep` that share experts, had all micro-batches: where there are
    several, each has fewer.
    """
    stages = pipeline_cut(run, options).stages
    # Pipelines that share experts have equally many, some perhaps without tokens.
    micro_batches = -(-run.train.batch_tokens // (_Micro(run, options).tokens * options.ep))
    needs = []
    for index, stage in enumerate(stages):
        kept = micro_batches
        if options.schedule == "1f1b":
            kept = min(kept, len(stages) - index)
        needs.append(_resident(run, num_owned, options, _Held(stage, kept, micro_batches)))
    return tuple(needs)


def pipeline_cut(run: RunConfig, options: EngineOptions) -> Cut:
    """The stages of a pipeline: by what a peer owns in the beginning, so that layers never move."""
    return cut_of(run, owned_per_peer(run, run.run.peers), options.pp)


@dataclass(frozen=True)
class _Held:
    """What a worker holds of a model, and for how many micro-batches.

    Attributes:
        stage: its layers and ends.
        kept: micro-batches whose backward is yet to come, at most.
        received: micro-batches for which there are buffers between stages.
    """

    stage: Stage
    kept: int = 1
    received: int = 0

    def trained(self, model: ModelConfig, sizes: Sizes) -> int:
        """Trained parameters."""
        tied = model.tie_word_embeddings
        shapes = shared_shapes(model).items()
        shared = _count({name: s for name, s in shapes if self.stage.holds(name, tied=tied)})
        return shared + len(self.stage.layers) * sizes.layer_owned

    def buffers(self, micro: _Micro) -> float:
        """Bytes of what comes from the stages beside it; a schedule keeps them between steps."""
        sides = (not self.stage.is_first) + (not self.stage.is_last)
        return self.received * sides * micro.checkpoint()


def _resident(
    run: RunConfig, num_owned: int, options: EngineOptions, held: _Held | None = None
) -> Need:
    held = held or _Held(Stage.whole(run.model))
    # Dealt out evenly; of what is left over one worker has one more.
    sizes = sizes_of(run.model, -(-num_owned // options.ep))
    layers, trained = len(held.stage.layers), held.trained(run.model, sizes)
    frozen = layers * frozen_layer_bytes(run, num_owned, options)
    state = (MASTER + MOMENT_BYTES[options.moments]) * trained + frozen
    micro = _Micro(run, options)
    one_layer = micro.kept() + micro.cast_matrices(sizes)
    if options.recompute == "none":
        kept, again = held.kept * layers * one_layer, 0.0
    else:
        kept, again = held.kept * layers * (micro.checkpoint() + micro.routing()), one_layer
    gradients = GRADIENT * trained
    # The gradients of the first micro-batch come into being while backward goes down; from the
    # second on all are there already, but where all go forward first.
    several = run.train.batch_tokens > options.ep * micro.tokens
    all_first = 1 < held.kept == held.received
    head = gradients if several and not all_first else 0.0
    layer = again + micro.backward(sizes, frozen / layers) + gradients
    if all_first:
        layer -= min(gradients, kept / held.kept)  # gone when the gradients are all there
    if held.stage.is_last:
        # The head's is formed with the loss, so that others wait for their backward.
        waiting = (held.kept - 1) * GRADIENT * sizes.table
        head, layer = head + micro.head(sizes.table) + waiting, layer + waiting
    # A bucket of gradients, what other workers send of it, and its sums.
    bucket = min(BUCKET, trained - layers * sizes.layer_owned)
    adding = gradients + GRADIENT * bucket * (2 + 1 / options.ep) if options.ep > 1 else 0
    return Need(state + held.buffers(micro), max(kept + max(head, layer), adding), 0.0, 0.0)


def _streaming(run: RunConfig, num_owned: int, options: EngineOptions) -> Need:
    model, sizes = run.model, sizes_of(run.model, num_owned)
    layers, compute = model.num_hidden_layers, DTYPES[options.compute].itemsize
    frozen = frozen_layer_bytes(run, num_owned, options)
    cast = sizes.layer_cast + sizes.layer_owned
    wire = 4 * (sizes.layer_shared - sizes.layer_cast) + compute * cast
    own = layers if options.resident_layers is None else min(options.resident_layers, layers)
    places = own + min(2, layers - own)
    # Norm and head, or the tied embedding, and the gradient of one of them at a time.
    ends = (4 + GRADIENT) * sizes.table
    device = places * (wire + frozen) + 2 * GRADIENT * sizes.layer + ends
    micro = _Micro(run, options)
    batches = max(1, run.train.batch_tokens // micro.tokens)
    batches = min(batches, options.pass_micro_batches or batches)
    checkpoints = layers * batches * micro.checkpoint()
    on_device = options.activation_checkpoints is ActivationCheckpoints.DEVICE
    kept = batches * (layers * micro.routing() + micro.checkpoint())
    kept += checkpoints if on_device else 2 * micro.checkpoint()
    layer = micro.kept() + micro.backward(sizes, frozen) + compute * cast
    activations = kept + max(micro.head(sizes.table), layer)
    host = (MASTER + MOMENT_BYTES[options.moments]) * sizes.trained
    host += layers * wire if compute < 4 else 0
    shared = options.gradient_buffers
    host += GRADIENT * (2 * sizes.table + sizes.layer * (shared or layers))
    if not on_device:
        half = options.activation_checkpoints is ActivationCheckpoints.HOST_BF16
        host += checkpoints / 2 if half else checkpoints
    on_disk = options.frozen_folder is not None
    host += frozen if on_disk else frozen * layers
    copied = on_disk and not options.frozen_lent
    return Need(device, activations, host, frozen * layers if copied else 0.0)


class _Micro:
    """Activations of one micro-batch, as the autograd functions of the model keep them."""

    def __init__(self, run: RunConfig, options: EngineOptions) -> None:
        self.run, self.model, self.options = run, run.model, options
        self.tokens = run.train.micro_batch_sequences * run.data.sequence_length
        self.compute = DTYPES[options.compute].itemsize
        self.grouped = options.device == "cuda"
        self.experts = run.model.num_experts / options.ep

    def checkpoint(self) -> float:
        """The residual stream, fp32."""
        return 4.0 * self.tokens * self.model.hidden_size

    def routing(self) -> float:
        """Logits and probabilities with their gradients, weights, and rows of one layer."""
        model = self.model
        sorted_rows = 4 if self.options.ep == 1 else 7  # also where they are computed
        each = model.num_experts_per_tok * (4 + sorted_rows * 8)
        return self.tokens * (4 * 4 * model.num_experts + each)

    def kept(self) -> float:
        """Bytes that the graph of one layer keeps for its backward."""
        model, c = self.model, self.compute
        hidden, head = model.hidden_size, model.dim_per_head
        queries, keys = model.num_attention_heads * head, model.num_key_value_heads * head
        # Inputs of both norms and of the router in fp32, of attention and of experts.
        per_token: float = 4 * 3 * hidden + c * hidden
        # Projections before their norms; rotated ones; values; the output, also transposed.
        per_token += c * (queries + keys) if model.qk_norm != "none" else 0
        per_token += c * (queries + 2 * keys) * self.places() + c * 2 * queries
        # The output of each document by itself, and which token is where.
        per_token += self.places() * (c * queries + 8) if self.places() > 1 else 0
        experts = c * self.rows() * 2 * model.moe_intermediate_size
        experts += c * hidden * self.inputs()
        return self.tokens * per_token + experts + self.routing() + self.scores()

    def places(self) -> float:
        """Places in attention for each token, at most."""
        return WASTE if self.run.data.attention == "document" else 1

    def rows(self) -> float:
        """Rows that experts compute; half a group's padding for each in bf16 on a CPU."""
        rows = self.tokens * self.model.num_experts_per_tok
        padded = self.compute == 2 and not self.grouped
        return rows + (PAD_ROWS_BF16 / 2 * self.experts if padded else 0)

    def inputs(self) -> float:
        """Inputs of experts that are kept: of a token, or one for each row that has travelled."""
        each = self.model.num_experts_per_tok if self.options.ep > 1 else 1
        return self.tokens * each

    def scores(self) -> float:
        """Softmax of short sequences, which bf16 attention on a CPU keeps, without the future."""
        length = self.run.data.sequence_length
        if self.compute != 2 or self.grouped or length > SHORT_TOKENS:
            return 0.0
        keys = (length + min(length, BLOCK_TOKENS)) / 2
        return self.compute * self.tokens * self.places() * keys * self.model.num_attention_heads

    def cast_matrices(self, sizes: Sizes) -> float:
        """Attention matrices in the compute type, which the graph keeps beside their masters."""
        return self.compute * sizes.layer_cast if self.compute < 4 else 0.0

    def backward(self, sizes: Sizes, frozen_layer: float) -> float:
        """Bytes beside all that while one layer goes backward."""
        model, c = self.model, self.compute
        rows = self.rows()
        # On a CPU one expert at a time; a grouped product takes a stack, in pieces if it is long.
        one_expert = rows / self.experts
        together = min(rows, max(GROUPED_ROWS, one_expert)) if self.grouped else one_expert
        products = c * together * (2 * model.hidden_size + 5 * model.moe_intermediate_size)
        gathered = c * rows * model.hidden_size + 3 * self.checkpoint()
        if self.options.ep > 1:
            gathered += c * self.inputs() * model.hidden_size
        dense = (sizes.layer_owned * c if c < 4 else 0) + frozen_layer
        matrices = dense if self.grouped else dense / self.experts
        return products + gathered + matrices + 4 * sizes.layer_owned

    def head(self, table: int) -> float:
        """Bytes while the loss and its gradient are formed."""
        c, hidden = self.compute, self.model.hidden_size
        # Beside the logits a CPU has a product before it is added to the gradient.
        product = (c + 4) * table if c < 4 and not self.grouped else 0
        cast = c * table if c < 4 else 0
        # The gradient, the head as it is multiplied; then the gradient times the loss's scale.
        matrices = max(4 * table + cast + self.logits() + product, 2 * 4 * table)
        return matrices + self.tokens * hidden * (4 + 3 * c)

    def logits(self) -> float:
        """A slice of logits, and their exponentials in fp32, which replace fp32 ones on a CPU."""
        c = self.compute
        step = slice_tokens(self.tokens, self.model.vocab_size, self.options.device)
        return (4 if c == 4 and not self.grouped else c + 4) * step * self.model.vocab_size


def _count(shapes: dict[str, Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
