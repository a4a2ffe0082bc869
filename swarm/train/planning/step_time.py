"""Predicts the seconds of a step from a machine's assumed speeds. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from swarm.config import RunConfig
from swarm.model.cost import step_flops_with
from swarm.model.transformer import DTYPES
from swarm.train.engine.engine_options import EngineKind, EngineOptions
from swarm.train.engine.hardware import Machine
from swarm.train.engine.mesh import Mesh, flows_of
from swarm.train.engine.sizes import (
    frozen_layer_bytes,
    muon_bus_bytes,
    orthogonalising_flops,
    pipeline_cut,
    sizes_of,
)
from swarm.train.parallel.dispatch import crossing_bytes
from swarm.train.parallel.tensor_parallel import sums_bytes
from swarm.train.planning.memory import trained_by_stage

GPU_UPDATES_G_S = 50.0
"""10^9 parameters that a GPU updates in a second; each moves 30 bytes of the GPU's memory."""
SUM_BYTES = 8
"""Bytes that leave a rank for each element when gradients are added up: fp32 to the rank that adds
the element up, and its sum back to all."""


@dataclass(frozen=True)
class StepTime:
    """Predicted seconds of a step, one part after the other.

    Attributes:
        products: matrix products, as if all ranks computed all the time.
        waiting: the slowest rank's wait for others: stages that fill and drain, an uneven number
            of micro-batches, stages of unequal size.
        tokens: transfer of tokens to experts and back.
        outputs: sums of outputs where heads are cut, and of their gradients.
        stream: transfer of the residual stream between stages.
        sums: addition of gradients.
        updates: updates of masters; in the streaming engine, the part of copies and updates that
            exceeds the products that they overlap.
    """

    products: float
    waiting: float = 0.0
    tokens: float = 0.0
    outputs: float = 0.0
    stream: float = 0.0
    sums: float = 0.0
    updates: float = 0.0

    @property
    def total(self) -> float:
        """The sum of all parts."""
        computing = self.products + self.waiting + self.updates
        return computing + self.tokens + self.outputs + self.stream + self.sums

    def longest_part(self, than: StepTime) -> str:
        """The part that most exceeds the same part of the other step, in words."""
        words = {
            "products": "layers are computed again",
            "waiting": "workers wait for each other",
            "tokens": "tokens travel to experts and back",
            "outputs": "outputs of heads and experts are added up",
            "stream": "the residual stream travels between stages",
            "sums": "gradients are added up",
            "updates": "masters are updated",
        }
        part = max(words, key=lambda name: vars(self)[name] - vars(than)[name])
        return f"{words[part]} for {vars(self)[part]:.3g} s"


def step_time(run: RunConfig, num_owned: int, options: EngineOptions, machine: Machine) -> StepTime:
    """The seconds of a step of a peer that owns `num_owned` experts.

    The resident engine is assumed to overlap nothing. In the streaming engine copies and updates
    overlap products.
    """
    if options.kind is EngineKind.STREAMING:
        return _streaming(run, num_owned, options, machine)
    fabric = machine.fabric
    mesh = Mesh(fabric.size, options.ep, options.pp, options.tp)
    again = options.recompute != "none"
    tokens = run.train.micro_batch_sequences * run.data.sequence_length
    flops = tokens * step_flops_with(run, num_owned) * (4 / 3 if again else 1)
    micro_s = flops / mesh.tp / (machine.tflops * 1e12)
    micro_batches = run.train.batch_tokens // tokens
    # Each stream of micro-batches passes all stages. The slowest rank determines the slots, one for
    # each of its chunks of layers.
    flowing = -(-micro_batches * options.pp * mesh.tp // mesh.size)
    goes = len(flows_of(flowing, options.pp)) if options.chunks > 1 else 1
    slots = options.chunks * flowing + goes * (options.pp - 1)
    stages = pipeline_cut(run, options) if options.pp > 1 else None
    share = stages.slot if stages else 1.0
    layers = run.model.num_hidden_layers
    if stages:
        layers = max(len(chunk.layers) for stage in stages.stages for chunk in stage.chunks)
    travelling_s = slots * layers * _tokens_s(run, options, machine, mesh)
    products_s = micro_batches * micro_s * mesh.tp / mesh.size
    trained = max(sum(each) for each in trained_by_stage(run, num_owned, options))
    on_gpu = machine.device == "cuda"
    return StepTime(
        products=products_s,
        waiting=max(slots * share * micro_s - products_s, 0.0),
        tokens=travelling_s if mesh.tp == 1 else 0.0,
        outputs=travelling_s if mesh.tp > 1 else 0.0,
        stream=slots * _stream_s(run, options, machine, mesh),
        sums=_sums_s(run, num_owned, options, machine),
        updates=trained / ((GPU_UPDATES_G_S if on_gpu else machine.updates_g_s) * 1e9)
        + orthogonalising_flops(run, num_owned, options) / (machine.tflops * 1e12),
    )


def _tokens_s(run: RunConfig, options: EngineOptions, machine: Machine, mesh: Mesh) -> float:
    """Seconds of `tokens`, or with `tp` > 1 of `outputs`, for one layer and micro-batch of a rank.

    Routing is assumed to be even.
    """
    tokens = run.train.micro_batch_sequences * run.data.sequence_length
    itemsize, again = DTYPES[options.compute].itemsize, options.recompute != "none"
    if options.tp > 1:
        leaving = sums_bytes(tokens, run.model, itemsize, options.tp, again=again)
    else:
        rows = tokens * run.model.num_experts_per_tok * (1 - 1 / options.ep)
        leaving = crossing_bytes(rows, run.model, itemsize, again=again)
    return machine.fabric.exchange_s(mesh.sharers, leaving)


def _stream_s(run: RunConfig, options: EngineOptions, machine: Machine, mesh: Mesh) -> float:
    """Seconds of one micro-batch's residual stream, and of its gradient on the way back.

    With several chunks, the last stage also sends to the first one.
    """
    tokens = run.train.micro_batch_sequences * run.data.sequence_length / mesh.tp
    pairs = []
    for ranks in mesh.pipelines:
        ahead = list(pairwise((*ranks, ranks[0]) if options.chunks > 1 else ranks))
        pairs += ahead + [(receiver, sender) for sender, receiver in ahead]
    return machine.fabric.stream_s(pairs, 4 * tokens * run.model.hidden_size)


def _sums_s(run: RunConfig, num_owned: int, options: EngineOptions, machine: Machine) -> float:
    """Seconds to add up gradients.

    Shared tensors are added up over all ranks of a stage. Experts and heads are added up over the
    ranks of a seat.
    """
    fabric = machine.fabric
    mesh = Mesh(fabric.size, options.ep, options.pp, options.tp)
    seconds = 0.0
    for shared, own in trained_by_stage(run, num_owned, options):
        of_stage = 0.0
        for number, parts in ((shared, mesh.stages), (own, mesh.replicas)):
            others = len(parts[0]) - 1
            of_stage += fabric.exchange_s(parts, SUM_BYTES * number * others / (others + 1))
        seconds = max(seconds, of_stage)
    if mesh.pp > 1 and run.model.tie_word_embeddings:
        seconds += fabric.exchange_s(mesh.ends, SUM_BYTES / 2 * sizes_of(run.model, 0).table)
    return seconds


def _streaming(
    run: RunConfig, num_owned: int, options: EngineOptions, machine: Machine
) -> StepTime:
    sizes = sizes_of(run.model, num_owned)
    flops = run.train.batch_tokens * step_flops_with(run, num_owned)
    ranks = range(machine.fabric.size)
    products_s = flops * 4 / 3 / (machine.tflops * 1e12) / len(ranks)
    micro_tokens = run.train.micro_batch_sequences * run.data.sequence_length
    micro_batches = run.train.batch_tokens // micro_tokens
    layers = run.model.num_hidden_layers
    stay = layers if options.resident_layers is None else options.resident_layers
    frozen = frozen_layer_bytes(run, num_owned, options)
    weights = 2 * (layers - stay) * (2 * sizes.layer + frozen) + stay * 2 * sizes.layer
    most = -(-micro_batches // len(ranks))  # of any rank
    passes = -(-most // (options.pass_micro_batches or most))
    # Sums of gradients go to the host after each pass, and come back for the next pass. Several
    # ranks first add up their gradients; then each sends and updates its share.
    share = sizes.trained / len(ranks)
    inward = passes * weights + (passes - 1) * 4 * share
    bus_s = max(inward, passes * 4 * share) / (machine.bus_gb_s * 1e9)
    updates_s = share / (machine.updates_g_s * 1e9)
    # Ranks share Muon's matrices. Momentum comes to a GPU, and directions in bf16 leave it. On a
    # CPU both stay on the host.
    orthogonal_s = orthogonalising_flops(run, num_owned, options) / (machine.tflops * 1e12)
    products_s += orthogonal_s / len(ranks)
    crossing = muon_bus_bytes(run, num_owned, options) if machine.device == "cuda" else 0.0
    bus_s += crossing / len(ranks) / (machine.bus_gb_s * 1e9)
    busy_s = products_s * most * len(ranks) / micro_batches
    leaving = passes * 4 * (sizes.trained - share)
    return StepTime(
        products_s,
        waiting=busy_s - products_s,
        sums=machine.fabric.exchange_s([ranks], leaving),
        updates=max(0.0, bus_s - busy_s, updates_s - busy_s),
    )
