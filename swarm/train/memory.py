"""The need of an engine, in bytes, before it is made. Pure arithmetic on the sizes of a run.

Letters as in the code: N tokens of a micro-batch, D hidden size, V vocabulary, L layers, E experts,
K experts of a token, I inner size of an expert, H query heads, G key heads, C size of a head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from swarm.config import ModelConfig, RunConfig
from swarm.experts import Shape, shared_shapes
from swarm.model.cost import owned_per_peer, parameters
from swarm.model.frozen import frozen_bytes
from swarm.model.moe import matrix_shapes
from swarm.model.stage import Stage
from swarm.model.transformer import DTYPES
from swarm.train.activations import MicroBatchBytes
from swarm.train.adam_moments import MOMENT_BYTES, MomentsFormat
from swarm.train.optimizer import PIECE, PIECE_GPU
from swarm.train.options import ActivationCheckpoints, EngineKind, EngineOptions
from swarm.train.parallel.stages import Cut, cut_of
from swarm.train.streaming.units import is_cast

BUCKET = 2**22
"""Elements of gradients that workers add up together: 16 MiB, and as much of the other workers'."""
UPDATE_BYTES: dict[MomentsFormat, int] = {"fp32": 0, "bf16": 25, "int8": 18}
"""Beside gradients, of each element of a piece while it is updated: moments in fp32, and what
rounding them takes."""
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
        layer_elsewhere: of a layer's shared ones, the heads of other ranks; counted nowhere else.
    """

    layer_shared: int
    layer_cast: int
    layer_owned: int
    table: int
    trained: int
    layer_elsewhere: int = 0

    @property
    def layer(self) -> int:
        """Trained parameters of a layer."""
        return self.layer_shared + self.layer_owned


def sizes_of(model: ModelConfig, num_owned: int, tp: int = 1) -> Sizes:
    """Counts the parameters of a peer that owns so many experts, on one of `tp` ranks for heads."""
    first = {n: s for n, s in shared_shapes(model).items() if n.startswith("model.layers.0.")}
    counted = parameters(model)
    layers = model.num_hidden_layers
    per_layer = counted.per_expert // layers
    # Attention's matrices are cut over heads, and are all that is cast.
    cast = _count({name: shape for name, shape in first.items() if is_cast(name)})
    cut = cast
    if model.qk_norm == "projection":
        cut += (model.num_attention_heads + model.num_key_value_heads) * model.dim_per_head
    elsewhere = cut - cut // tp
    return Sizes(
        layer_shared=_count(first) - elsewhere,
        layer_cast=cast // tp,
        layer_owned=num_owned * per_layer,
        table=model.vocab_size * model.hidden_size,
        trained=counted.shared + num_owned * counted.per_expert - layers * elsewhere,
        layer_elsewhere=elsewhere,
    )


def need_of(run: RunConfig, num_owned: int, options: EngineOptions, workers: int = 0) -> Need:
    """The peak of one step for a peer that owns so many experts.

    Args:
        run: the model and its micro-batches.
        num_owned: experts that the peer trains.
        options: of the engine, or of each worker.
        workers: that share the micro-batches; 0 for as many as experts and layers are cut over.

    Allocator rounding, the libraries, a running round and the peer itself come on top. Measured:
    within 5 % of the peak of allocations, see `scripts/bench_memory.py`. Of a pipeline it is the
    stage that needs most.
    """
    if options.pp > 1:
        return max(stage_needs(run, num_owned, options, workers), key=lambda need: need.device)
    if options.kind is EngineKind.RESIDENT:
        return _resident(run, num_owned, options, _Held.of(run, options, workers))
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
    micro = MicroBatchBytes(run, replace(options, compute="fp32"))
    matrices = sum(math.prod(shape) for shape in matrix_shapes(run.model).values())
    return micro.kept() + 3 * micro.checkpoint() + micro.logits() + 4 * matrices


def frozen_layer_bytes(run: RunConfig, num_owned: int, options: EngineOptions) -> int:
    """Frozen experts of one layer, on the worker that has most where they are dealt out."""
    frozen = -(-(run.model.num_experts - num_owned) // options.ep)
    shapes = matrix_shapes(run.model).values()
    return sum(frozen_bytes(options.frozen, (frozen, *shape)) for shape in shapes)


def stage_needs(
    run: RunConfig, num_owned: int, options: EngineOptions, workers: int = 0
) -> tuple[Need, ...]:
    """The peak of one step on a worker of each stage, in their order; as `need_of`."""
    stages = pipeline_cut(run, options).stages
    whole = _Held.of(run, options, workers)
    needs = []
    for index, stage in enumerate(stages):
        kept = whole.micro_batches
        if options.schedule == "1f1b":
            kept = min(kept, len(stages) - index)
        held = replace(whole, stage=stage, kept=kept, received=whole.micro_batches)
        needs.append(_resident(run, num_owned, options, held))
    return tuple(needs)


def trained_by_stage(
    run: RunConfig, num_owned: int, options: EngineOptions
) -> list[tuple[int, int]]:
    """Of a worker of each stage the trained parameters: shared ones, and those of its experts."""
    sizes = sizes_of(run.model, -(-num_owned // options.ep), options.tp)
    stages = [Stage.whole(run.model)]
    if options.pp > 1:
        stages = list(pipeline_cut(run, options).stages)
    owned = [len(stage.layers) * sizes.layer_owned for stage in stages]
    trained = [_Held(stage).trained(run.model, sizes) for stage in stages]
    return [(each - own, own) for each, own in zip(trained, owned, strict=True)]


def pipeline_cut(run: RunConfig, options: EngineOptions) -> Cut:
    """The stages of a pipeline: by what a peer owns in the beginning, so that layers never move."""
    return cut_of(run, owned_per_peer(run, run.run.peers), options.pp)


class Ends(NamedTuple):
    """Of what comes before the first layer of a stage, and after the last."""

    first: int
    last: int


@dataclass(frozen=True)
class _Held:
    """What a worker holds of a model, and for how many micro-batches.

    Attributes:
        stage: its layers and ends.
        micro_batches: of the worker in a step; of the one that has most.
        kept: micro-batches whose backward is yet to come, at most.
        received: micro-batches for which there are buffers between stages.
        sharers: workers that hold the same shared tensors, and add up their gradients; they have
            different micro-batches.
    """

    stage: Stage
    micro_batches: int = 1
    kept: int = 1
    received: int = 0
    sharers: int = 1

    @classmethod
    def of(cls, run: RunConfig, options: EngineOptions, workers: int) -> _Held:
        """All layers, and the micro-batches of a worker if there are so many."""
        sharers = max(workers // options.pp, options.ep) // options.tp
        tokens = run.train.micro_batch_sequences * run.data.sequence_length
        micro_batches = -(-(run.train.batch_tokens // tokens) // sharers)
        return cls(Stage.whole(run.model), micro_batches, sharers=sharers)

    def trained(self, model: ModelConfig, sizes: Sizes) -> int:
        """Trained parameters."""
        tied = model.tie_word_embeddings
        shapes = shared_shapes(model).items()
        shared = _count({name: s for name, s in shapes if self.stage.holds(name, tied=tied)})
        return shared + len(self.stage.layers) * (sizes.layer_owned - sizes.layer_elsewhere)

    def tables(self, model: ModelConfig, sizes: Sizes) -> Ends:
        """Bytes of the gradients at its ends: those of the head, and of an embedding beside it."""
        own = GRADIENT * sizes.table
        is_one = model.tie_word_embeddings and self.stage.is_last
        return Ends(
            first=own if self.stage.is_first and not is_one else 0,
            last=own if self.stage.is_last else 0,
        )

    def waiting(self, micro: MicroBatchBytes, sizes: Sizes) -> float:
        """Bytes beside the graphs of a pipeline's stage.

        Of the last one the head's gradient and that of its input, which are formed with the loss,
        of micro-batches that wait for backward; and the rows of those that are done, since the
        schedule keeps their losses. Of the others what goes back to the stage before.
        """
        going_back = 0.0 if self.stage.is_first else micro.checkpoint()
        if not self.stage.is_last:
            return going_back
        formed = GRADIENT * sizes.table + micro.checkpoint() * (1 + micro.compute / 4)
        done = len(self.stage.layers) * micro.sorted_rows() if self.received else 0.0
        return going_back + (self.kept - 1) * formed + (self.received - self.kept) * done

    def buffers(self, micro: MicroBatchBytes) -> float:
        """Bytes of what comes from the stages beside it; a schedule keeps them between steps."""
        sides = (not self.stage.is_first) + (not self.stage.is_last)
        return self.received * sides * micro.checkpoint()


def _resident(run: RunConfig, num_owned: int, options: EngineOptions, held: _Held) -> Need:
    # Dealt out evenly; of what is left over one worker has one more.
    sizes = sizes_of(run.model, -(-num_owned // options.ep), options.tp)
    layers, trained = len(held.stage.layers), held.trained(run.model, sizes)
    frozen = layers * frozen_layer_bytes(run, num_owned, options)
    state = _trained_state(sizes, layers, trained, options) + frozen
    micro = MicroBatchBytes(run, options)
    cast = micro.cast_matrices(sizes.layer_cast)
    if options.recompute == "none":
        one, again = layers * (micro.kept() + cast), 0.0
    else:
        one = layers * (micro.checkpoint() + micro.routing())
        again = micro.kept_again() + cast
    # What goes out is kept too, what came in is a buffer.
    one += micro.checkpoint() * (held.stage.is_first - held.stage.is_last)
    kept = held.kept * one
    gradients: float = GRADIENT * trained
    backward = again + micro.backward(sizes.layer_owned, frozen / layers)
    head, layer = gradients, backward + gradients
    if held.micro_batches == 1 or 1 < held.kept == held.received:
        # Gradients come into being while backward goes down and frees the first micro-batch;
        # they are all there from the second one on.
        tables = held.tables(run.model, sizes)
        bottom = gradients - tables.first - GRADIENT * sizes.layer_owned
        bottom -= one * (layers - 1) / layers
        second = layer - one if held.micro_batches > 1 else 0.0
        end = gradients - one + micro.checkpoint()
        head, layer = 0.0, max(backward + max(tables.last, bottom), second, end)
    beside = held.waiting(micro, sizes)
    if held.stage.is_last:
        head += micro.head(sizes.table)
    # A bucket of gradients, what other workers send of it, and its sums.
    dealt = layers * sizes.layer_owned if options.ep > 1 else 0
    alike = held.sharers * options.tp // options.ep  # workers with the same experts
    adding = max(
        GRADIENT * min(BUCKET, number) * (2 + 1 / workers) if workers > 1 else 0.0
        for number, workers in (
            (trained - dealt, held.sharers),
            (dealt, alike),
            (sizes.table if held.stage.is_last else 0, held.sharers * options.tp),
        )
    )
    piece = min(PIECE_GPU if options.device == "cuda" else PIECE, sizes.table)
    after = gradients + max(adding, UPDATE_BYTES[options.moments] * piece)
    return Need(state + held.buffers(micro), max(kept + beside + max(head, layer), after), 0.0, 0.0)


def _trained_state(sizes: Sizes, layers: int, trained: int, options: EngineOptions) -> float:
    """Bytes of masters and moments on a rank, and of copies in the compute type."""
    moments, ways = MOMENT_BYTES[options.moments], options.alike
    experts = layers * sizes.layer_owned
    state = 0.0
    for count, over, cast in (
        (trained - experts, ways[0], layers * sizes.layer_cast + head_of(sizes, layers, trained)),
        (experts, ways[1], experts),
    ):
        copies = cast if over > 1 and DTYPES[options.compute].itemsize < 4 else 0
        state += MASTER * (count - copies) + moments * count / over
        state += copies * (DTYPES[options.compute].itemsize + MASTER / over)
    return state


def head_of(sizes: Sizes, layers: int, trained: int) -> int:
    """Parameters of the head; none where it is the embedding."""
    return sizes.table if trained - layers * sizes.layer > 2 * sizes.table else 0


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
    micro = MicroBatchBytes(run, options)
    batches = max(1, run.train.batch_tokens // micro.tokens)
    batches = min(batches, options.pass_micro_batches or batches)
    checkpoints = layers * batches * micro.checkpoint()
    on_device = options.activation_checkpoints is ActivationCheckpoints.DEVICE
    kept = batches * (layers * micro.routing(gradients=True) + micro.checkpoint())
    kept += checkpoints if on_device else 2 * micro.checkpoint()
    # With its output, as it is computed again to the end.
    layer = micro.kept_again() + micro.checkpoint() + compute * cast
    layer += micro.backward(sizes.layer_owned, frozen)
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


def _count(shapes: dict[str, Shape]) -> int:
    return sum(math.prod(shape) for shape in shapes.values())
