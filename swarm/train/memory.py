"""The need of an engine, in bytes, before it is made. Pure arithmetic on the sizes of a run.

Letters as in the code: N tokens of a micro-batch, D hidden size, V vocabulary, L layers, E experts,
K experts of a token, I inner size of an expert, H query heads, G key heads, C size of a head.
"""

from __future__ import annotations

import math
from dataclasses import replace

from swarm.config import ModelConfig, RunConfig
from swarm.model.moe import matrix_shapes
from swarm.model.stage import Stage
from swarm.model.transformer import DTYPES
from swarm.train.activations import MicroBatchBytes
from swarm.train.adam_moments import MOMENT_BYTES
from swarm.train.options import ActivationCheckpoints, EngineKind, EngineOptions
from swarm.train.resident_memory import (
    Held,
    Loads,
    held_by_stages,
    need_with_crowding,
    resident_need,
)
from swarm.train.sizes import (
    BUCKET,
    GRADIENT,
    MASTER,
    Need,
    Sizes,
    frozen_layer_bytes,
    pipeline_cut,
    sizes_of,
)


def need_of(run: RunConfig, num_owned: int, options: EngineOptions, workers: int = 0) -> Need:
    """The peak of one step, or of a held-out loss, for a peer that owns so many experts.

    Args:
        run: the model and its micro-batches.
        num_owned: experts that the peer trains.
        options: of the engine, or of each worker.
        workers: that share the micro-batches; 0 for as many as experts and layers are cut over.

    Allocator rounding, the libraries, a running round and the peer itself come on top. Measured:
    within 5 % of the peak of allocations, see `scripts/bench_memory.py`. Of a pipeline it is the
    stage that needs most. Workers that stream have one host copy, and each of them needs its part.
    """
    if options.pp > 1:
        return max(stage_needs(run, num_owned, options, workers), key=lambda need: need.crowded)
    if options.kind is EngineKind.RESIDENT:
        return need_with_crowding(run, num_owned, options, Held.of(run, options, workers))
    return _streaming(run, num_owned, options, max(workers, 1))


def rank_need(
    run: RunConfig, num_owned: int, options: EngineOptions, loads: Loads, *, workers: int, rank: int
) -> Need:
    """The peak of a step of one rank, from the rows that its experts get in that step.

    Args:
        run: the model and its micro-batches.
        num_owned: experts that the peer trains.
        options: of the workers.
        loads: the rows of this rank.
        workers: in all.
        rank: of these.
    """
    held = Held.of(run, options, workers)
    if options.pp > 1:
        stages = held_by_stages(run, options, workers)
        held = stages[rank % (options.ep * options.pp) // options.ep]
    return resident_need(run, num_owned, options, held, loads)


def largest_tensor_bytes(model: ModelConfig) -> int:
    """The largest tensor of the model in fp32."""
    return max(4 * sizes_of(model, 0).table, expert_matrix_bytes(model))


def expert_matrix_bytes(model: ModelConfig) -> int:
    """One matrix of one expert in one layer, in fp32."""
    return 4 * max(math.prod(shape) for shape in matrix_shapes(model).values())


def owned_layer_bytes(model: ModelConfig, num_owned: int) -> int:
    """The owned experts of one layer, in fp32."""
    return 4 * sizes_of(model, num_owned).layer_owned


def moving_bytes(run: RunConfig, num_owned: int, options: EngineOptions) -> int:
    """Bytes beside `Need.device_state` while a resident engine exchanges its experts.

    The masters of before live until the last layer has its new ones, so that an engine that lacks
    memory for these can step down; the frozen experts of one layer exist twice. A step needs as
    much for its gradients.
    """
    owned = sizes_of(run.model, -(-num_owned // options.ep), options.tp).layer_owned
    frozen = frozen_layer_bytes(run, num_owned, options)
    layers = -(-run.model.num_hidden_layers // options.pp)
    return layers * MASTER * owned + frozen


def evaluation_bytes(
    run: RunConfig, num_owned: int, options: EngineOptions, workers: int = 1
) -> float:
    """Bytes beside `Need.device_state` while a held-out loss is computed, in fp32, without a graph.

    Activations of one layer, a slice of logits, and one expert's matrices as they are converted. A
    streaming engine gives that state up meanwhile, for the fp32 masters of two layers and the head,
    and takes all micro-batches of a pass through a layer together; it may need less than the state.
    """
    micro = MicroBatchBytes(run, replace(options, compute="fp32"))
    if options.kind is EngineKind.RESIDENT:
        matrices = sum(math.prod(shape) for shape in matrix_shapes(run.model).values())
        return micro.kept() + 3 * micro.checkpoint() + micro.logits() + 4 * matrices
    sizes, layers = sizes_of(run.model, num_owned), run.model.num_hidden_layers
    frozen = frozen_layer_bytes(run, num_owned, options)
    masters = min(2, layers) * (MASTER * sizes.layer + frozen) + MASTER * sizes.table
    waiting = options.evaluated_together(run, workers) * micro.checkpoint()
    computing = micro.evaluated(sizes.table, options.frozen)
    state = _streaming_state(run, num_owned, options)
    return max(0.0, masters + waiting + computing - state)


def stage_needs(
    run: RunConfig, num_owned: int, options: EngineOptions, workers: int = 0
) -> tuple[Need, ...]:
    """The peak of one step on a worker of each stage, in their order; as `need_of`."""
    stages = held_by_stages(run, options, workers)
    return tuple(need_with_crowding(run, num_owned, options, held) for held in stages)


def trained_by_stage(
    run: RunConfig, num_owned: int, options: EngineOptions
) -> list[tuple[int, int]]:
    """Of a worker of each stage the trained parameters: those that every one of the stage has.

    And those of its experts, and of its heads where these are cut.
    """
    sizes = sizes_of(run.model, -(-num_owned // options.ep), options.tp)
    stages = [Stage.whole(run.model)]
    if options.pp > 1:
        stages = list(pipeline_cut(run, options).stages)
    owned = [len(stage.layers) * (sizes.layer_owned + sizes.layer_heads) for stage in stages]
    trained = [Held(stage).trained(run.model, sizes) for stage in stages]
    return [(each - own, own) for each, own in zip(trained, owned, strict=True)]


def _streaming_state(run: RunConfig, num_owned: int, options: EngineOptions) -> float:
    """Weights and gradients of a streaming engine on the device."""
    sizes, layers = sizes_of(run.model, num_owned), run.model.num_hidden_layers
    own = layers if options.resident_layers is None else min(options.resident_layers, layers)
    places = own + min(2, layers - own)
    layer = _wire(sizes, options) + frozen_layer_bytes(run, num_owned, options)
    # Norm and head, or the tied embedding, and the gradient of one of them at a time.
    ends = (4 + GRADIENT) * sizes.table
    return places * layer + 2 * GRADIENT * sizes.layer + ends


def _wire(sizes: Sizes, options: EngineOptions) -> int:
    """The trained tensors of a layer as they travel to the device."""
    cast = sizes.layer_cast + sizes.layer_owned
    return 4 * (sizes.layer_shared - sizes.layer_cast) + DTYPES[options.compute].itemsize * cast


def _streaming(run: RunConfig, num_owned: int, options: EngineOptions, workers: int) -> Need:
    """Of each worker; of the one host copy its part, so that all together need all of it."""
    model, sizes = run.model, sizes_of(run.model, num_owned)
    layers, compute = model.num_hidden_layers, DTYPES[options.compute].itemsize
    frozen = frozen_layer_bytes(run, num_owned, options)
    device = _streaming_state(run, num_owned, options)
    micro = MicroBatchBytes(run, options)
    batches = options.together(run, workers)
    checkpoints = layers * batches * micro.checkpoint()
    on_device = options.activation_checkpoints is ActivationCheckpoints.DEVICE
    kept = batches * (layers * micro.routing(gradients=True) + micro.checkpoint())
    kept += checkpoints if on_device else 2 * micro.checkpoint()
    # With its output, as it is computed again to the end.
    layer = micro.kept_again() + micro.checkpoint()
    layer += compute * (sizes.layer_cast + sizes.layer_owned)
    layer += micro.backward(sizes.layer_owned, frozen)
    # A bucket of gradients, what other workers send of it, and its sums.
    bucket = min(BUCKET, max(sizes.table, sizes.layer))
    adding = GRADIENT * bucket * (2 + 1 / workers) if workers > 1 else 0.0
    activations = kept + max(micro.head(sizes.table), layer, adding)
    activations = max(activations, evaluation_bytes(run, num_owned, options, workers))
    host = (MASTER + MOMENT_BYTES[options.moments]) * sizes.trained
    host += layers * _wire(sizes, options) if compute < 4 else 0
    shared = options.gradient_buffers
    host += GRADIENT * (2 * sizes.table + sizes.layer * (shared or layers))
    on_disk = options.frozen_folder is not None
    host += frozen if on_disk else frozen * layers
    host /= workers
    if not on_device:
        half = options.activation_checkpoints is ActivationCheckpoints.HOST_BF16
        host += checkpoints / 2 if half else checkpoints
    copied = on_disk and not options.frozen_lent
    return Need(device, activations, host, frozen * layers if copied else 0.0)
