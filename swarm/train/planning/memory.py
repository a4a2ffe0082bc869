"""The memory of an engine and of a peer's process, phase by phase, in bytes. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from swarm.config import ModelConfig, RunConfig
from swarm.model.cost import expert_wire_bytes, shared_wire_bytes
from swarm.model.moe import matrix_shapes
from swarm.model.stage import Stage
from swarm.model.transformer import DTYPES
from swarm.train.engine.engine_options import ActivationCheckpoints, EngineKind, EngineOptions
from swarm.train.engine.sizes import (
    BUCKET,
    DIRECTION_BYTES,
    GRADIENT_BYTES,
    MASTER_BYTES,
    Need,
    Sizes,
    frozen_layer_bytes,
    matrix_update_bytes,
    moments_bytes,
    muon_matrices,
    pipeline_cut,
    sizes_of,
)
from swarm.train.planning import resident_memory
from swarm.train.planning.activations import MicroBatchBytes


def need_of(run: RunConfig, num_owned: int, options: EngineOptions, workers: int = 0) -> Need:
    """The peak of one step, or of a held-out loss, for a peer that owns `num_owned` experts.

    Args:
        run: the model and its micro-batches.
        num_owned: experts that the peer trains.
        options: options of the engine, or of each worker.
        workers: number of workers that share the micro-batches. 0 for the product of `ep` and `pp`.

    Allocator rounding, libraries, a running round and the peer itself are not included. The result
    is within 5 % of the measured peak of allocations (`scripts/benchmarks/bench_memory.py`). For a
    pipeline, the result is the need of the largest stage. Workers that stream share one host copy,
    of which each counts its part.
    """
    if options.pp > 1:
        return max(stage_needs(run, num_owned, options, workers), key=lambda need: need.crowded)
    if options.kind is EngineKind.RESIDENT:
        return resident_memory.need_with_crowding(
            run, num_owned, options, resident_memory.Held.of(run, options, workers)
        )
    return _streaming(run, num_owned, options, max(workers, 1))


def rank_need(
    run: RunConfig,
    num_owned: int,
    options: EngineOptions,
    loads: resident_memory.Loads,
    *,
    workers: int,
    rank: int,
) -> Need:
    """The peak of one rank's step, computed from the rows that its experts get in that step.

    Args:
        run: the model and its micro-batches.
        num_owned: experts that the peer trains.
        options: options of the workers.
        loads: the rows of this rank.
        workers: number of ranks.
        rank: number of the rank.
    """
    held = resident_memory.Held.of(run, options, workers)
    if options.pp > 1:
        stages = resident_memory.held_by_stages(run, options, workers)
        held = stages[rank % (options.ep * options.pp) // options.ep]
    return resident_memory.resident_need(run, num_owned, options, held, loads)


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
    """Bytes on top of `Need.device_state` while a resident engine exchanges its experts.

    The old masters exist until the last layer has its new masters, so that an engine without enough
    memory can step down. The frozen experts of one layer exist twice. A step needs as much for its
    gradients.
    """
    owned = sizes_of(run.model, -(-num_owned // options.ep), options.tp).layer_owned
    frozen = frozen_layer_bytes(run, num_owned, options)
    layers = -(-run.model.num_hidden_layers // options.pp)
    return layers * MASTER_BYTES * owned + frozen


def evaluation_bytes(
    run: RunConfig, num_owned: int, options: EngineOptions, workers: int = 1
) -> float:
    """Bytes on top of `Need.device_state` during a held-out evaluation, in fp32 without a graph.

    These are the activations of one layer, a slice of logits, and one expert's converted matrices.
    A streaming engine frees its device state for the evaluation. Then it holds the fp32 masters of
    two layers and the head, and takes all micro-batches of a pass through a layer together. This
    may be less than the freed state.
    """
    micro = MicroBatchBytes(run, replace(options, compute="fp32"))
    if options.kind is EngineKind.RESIDENT:
        matrices = sum(math.prod(shape) for shape in matrix_shapes(run.model).values())
        return micro.kept() + 3 * micro.checkpoint() + micro.logits() + 4 * matrices
    sizes, layers = sizes_of(run.model, num_owned), run.model.num_hidden_layers
    frozen = frozen_layer_bytes(run, num_owned, options)
    masters = min(2, layers) * (MASTER_BYTES * sizes.layer + frozen) + MASTER_BYTES * sizes.table
    waiting = options.evaluated_together(run, workers) * micro.checkpoint()
    computing = micro.evaluated(sizes.table, options.frozen)
    state = _streaming_state(run, num_owned, options)
    return max(0.0, masters + waiting + computing - state)


def stage_needs(
    run: RunConfig, num_owned: int, options: EngineOptions, workers: int = 0
) -> tuple[Need, ...]:
    """The peak of one step on a worker of each stage, in order; see `need_of`."""
    stages = resident_memory.held_by_stages(run, options, workers)
    return tuple(
        resident_memory.need_with_crowding(run, num_owned, options, held) for held in stages
    )


def trained_by_stage(
    run: RunConfig, num_owned: int, options: EngineOptions
) -> list[tuple[int, int]]:
    """Trained parameters of a worker, stage by stage.

    Returns:
        For each stage: parameters that all its workers have, and parameters of this worker's
        experts and sharded heads.
    """
    sizes = sizes_of(run.model, -(-num_owned // options.ep), options.tp)
    stages = [Stage.whole(run.model)]
    if options.pp > 1:
        stages = list(pipeline_cut(run, options).stages)
    owned = [len(stage.layers) * (sizes.layer_owned + sizes.layer_heads) for stage in stages]
    trained = [resident_memory.Held(stage).trained(run.model, sizes) for stage in stages]
    return [(each - own, own) for each, own in zip(trained, owned, strict=True)]


def _streaming_state(run: RunConfig, num_owned: int, options: EngineOptions) -> float:
    """Weights and gradients of a streaming engine on the device."""
    sizes, layers = sizes_of(run.model, num_owned), run.model.num_hidden_layers
    own = layers if options.resident_layers is None else min(options.resident_layers, layers)
    places = own + min(2, layers - own)
    layer = _wire(sizes, options) + frozen_layer_bytes(run, num_owned, options)
    # Norm and head, or the tied embedding, and the gradient of one of them at a time.
    ends = (4 + GRADIENT_BYTES) * sizes.table
    return places * layer + 2 * GRADIENT_BYTES * sizes.layer + ends


def _wire(sizes: Sizes, options: EngineOptions) -> int:
    """Bytes of a layer's trained tensors in the form that is sent to the device."""
    cast = sizes.layer_cast + sizes.layer_owned
    return 4 * (sizes.layer_shared - sizes.layer_cast) + DTYPES[options.compute].itemsize * cast


def _streaming(run: RunConfig, num_owned: int, options: EngineOptions, workers: int) -> Need:
    """The need of each worker, with its part of the one host copy."""
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
    # The recomputed layer includes its output.
    layer = micro.kept_again() + micro.checkpoint()
    layer += compute * (sizes.layer_cast + sizes.layer_owned)
    layer += micro.backward(sizes.layer_owned, frozen)
    # After the backward pass of a layer.
    on_gpu, updating = options.device != "cpu", matrix_update_bytes(run, options)
    # A bucket of gradients, the other workers' parts of it, and its sums.
    bucket = min(BUCKET, max(sizes.table, sizes.layer))
    adding = GRADIENT_BYTES * bucket * (2 + 1 / workers) if workers > 1 else 0.0
    activations = kept + max(micro.head(sizes.table), layer, adding, updating if on_gpu else 0)
    activations = max(activations, evaluation_bytes(run, num_owned, options, workers))
    matrices = muon_matrices(run, num_owned)
    host: float = MASTER_BYTES * sizes.trained
    host += moments_bytes(run, options.moments, sizes.trained, matrices)
    host += DIRECTION_BYTES * matrices if on_gpu else options.host_threads * updating
    host += layers * _wire(sizes, options) if compute < 4 else 0
    shared = options.gradient_buffers
    host += GRADIENT_BYTES * (2 * sizes.table + sizes.layer * (shared or layers))
    on_disk = options.frozen_folder is not None
    host += frozen if on_disk else frozen * layers
    host /= workers
    if not on_device:
        half = options.activation_checkpoints is ActivationCheckpoints.HOST_BF16
        host += checkpoints / 2 if half else checkpoints
    copied = on_disk and not options.frozen_lent
    return Need(device, activations, host, frozen * layers if copied else 0.0)


PROCESS_BYTES = 0.39e9
"""Interpreter, libraries and network of a peer; the libp2p daemon is a process of its own."""
CUDA_BYTES = 2.5e9
"""Additional host memory of CUDA's libraries and context; not measured by this project."""
SLACK_BYTES = 0.08e9
"""Bytes of freed chunks that allocators keep."""
KEPT_MATRICES = 10
"""How many fp32 expert matrices a process on a CPU keeps after its computations, with any number of
experts. Measured by `scripts/benchmarks/bench_real_size.py` with matrices of 0.4 and of 47 MB."""
# Buffers of codecs, merge, network, private state and export; tests compare these with the
# constants there.
CHUNK_ELEMENTS = 2**20
MERGE_COLUMNS = 2**16
PIECE_BYTES = 4 * 2**20
FLOWS_PER_PEER = 2
FLOWS = 64
SAVED_CHUNK_BYTES = 16 * 2**20
SAVED_CHUNKS = 8
"""Chunks that are being copied or hashed, or wait to be written."""
SHARD_BYTES = 0.8e9
"""Size of an export's file; it is in memory twice."""


@dataclass(frozen=True)
class HostPeaks:
    """Peaks of the process in host memory, in bytes.

    Attributes:
        training: local steps.
        offering: own values and the private state are written to disk.
        averaging: means of other peers' values, and arriving blobs.
        merging: the merge of similar experts, while nothing is trained.
        adopting: agreed values enter the engine, with moments of newly owned experts; the worst
            case exchanges all experts.
        validating: the held-out loss of the agreed values.
        leaving: moments are written to disk for their next owners.
        exporting: swarm-export, without an engine.
    """

    training: float
    offering: float
    averaging: float
    merging: float
    adopting: float
    validating: float
    leaving: float
    exporting: float

    @property
    def running_a_round(self) -> float:
        """The largest peak of the phases between two trainings, without a merge."""
        return max(self.offering, self.averaging, self.adopting, self.validating, self.leaving)

    @property
    def highest(self) -> float:
        """The largest peak of all phases of a peer."""
        return max(self.training, self.running_a_round, self.merging)


def host_peaks(
    run: RunConfig,
    num_owned: int,
    options: EngineOptions,
    *,
    num_peers: int,
    need: Need | None = None,
) -> HostPeaks:
    """The peaks of a peer that owns `num_owned` experts, in a swarm of `num_peers` peers.

    With several workers, these are the peaks of one worker. `need` is the engine's, if known.
    """
    need = need or need_of(run, num_owned, options)
    on_host = options.device == "cpu"
    experts, chunk, matrix = run.model.num_experts, CHUNK_ELEMENTS, expert_matrix_bytes(run.model)
    rest = PROCESS_BYTES + SLACK_BYTES + need.host
    rest += need.device_state + KEPT_MATRICES * matrix if on_host else CUDA_BYTES
    rest += min(FLOWS_PER_PEER * max(1, num_peers - 1), FLOWS) * PIECE_BYTES
    donors = experts * MERGE_COLUMNS * (16 + 4) + 64 * experts**2
    # A mean needs one chunk of each value, their weighted sum in fp32 twice, and the result.
    mean = chunk * (4 * num_peers + 4 + 4 + 4)
    # The resident engine puts the owned masters of a layer aside while the agreed values replace
    # them.
    is_resident = options.kind is EngineKind.RESIDENT
    aside = owned_layer_bytes(run.model, num_owned) if is_resident else 0
    moving = moving_bytes(run, num_owned, options) if is_resident and on_host else 0
    evaluating = (evaluation_bytes(run, num_owned, options) + aside if on_host else 0) + matrix
    largest = largest_tensor_bytes(run.model)
    shard = min(SHARD_BYTES, shared_wire_bytes(run) + expert_wire_bytes(run))
    offer = 12 * chunk + SAVED_CHUNKS * SAVED_CHUNK_BYTES
    step = need.activations + need.crowding if on_host else 0
    return HostPeaks(
        training=rest + step + (offer + mean if run.round.overlap == "round" else 0),
        offering=rest + offer,
        averaging=rest + mean,
        merging=rest + max(donors, (16 + 2 * 4) * chunk),
        adopting=rest + max(moving, max(matrix, 24 * chunk) + 6 * matrix),
        validating=rest + evaluating,
        leaving=rest + 3 * matrix,
        exporting=PROCESS_BYTES + SLACK_BYTES + largest + 2 * max(shard, largest),
    )
