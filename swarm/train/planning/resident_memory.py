"""The memory that a resident engine needs, alone or as one of several ranks. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from swarm.config import ModelConfig, RunConfig
from swarm.model.stage import Stage
from swarm.model.transformer import DTYPES
from swarm.train.engine.engine_options import EngineOptions
from swarm.train.engine.mesh import flows_of
from swarm.train.engine.sizes import (
    BUCKET,
    GRADIENT_BYTES,
    MASTER_BYTES,
    Need,
    Sizes,
    frozen_layer_bytes,
    moments_bytes,
    pipeline_cut,
    sizes_of,
    update_bytes,
)
from swarm.train.planning.activations import MicroBatchBytes, Rows

CROWDING = 0.25
"""A plan leaves room for this share of rows above even routing on a rank's experts. The reason: at
a capacity factor of 1.25 a Switch Transformer with a balancing loss drops few tokens of an expert
(arXiv 2101.03961, section 2.2), and a rank's experts together are nearer to the mean."""
Loads = Sequence[Sequence[Rows]]
"""The rows of each layer, for each micro-batch of a rank in order."""


class Ends(NamedTuple):
    """Bytes before the first layer of a stage, and after its last layer."""

    first: int
    last: int


@dataclass(frozen=True)
class Held:
    """The part of a model that a worker holds, and its numbers of micro-batches.

    Attributes:
        stage: the worker's layers and ends.
        micro_batches: the most that any worker has in a step.
        kept: the most micro-batches that wait for backward. With several chunks a stage, a
            micro-batch may count in part.
        received: micro-batches for which there are buffers between stages.
        sharers: number of workers with the same shared tensors, which add up their gradients. These
            workers have different micro-batches, or different tokens of the same micro-batches.
    """

    stage: Stage
    micro_batches: int = 1
    kept: float = 1
    received: int = 0
    sharers: int = 1

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.stage.layers)

    @classmethod
    def of(cls, run: RunConfig, options: EngineOptions, workers: int) -> Held:
        """All layers, and the most micro-batches of any of the `workers`."""
        sharers = max(workers // options.pp, options.ep)
        tokens = run.train.micro_batch_sequences * run.data.sequence_length
        micro_batches = -(-(run.train.batch_tokens // tokens) * options.tp // sharers)
        return cls(Stage.whole(run.model), micro_batches, sharers=sharers)

    def trained(self, model: ModelConfig, sizes: Sizes) -> int:
        """Trained parameters."""
        stage, tied = self.stage, model.tie_word_embeddings
        embedding = sizes.table if stage.is_first or (tied and stage.is_last) else 0
        norm = model.hidden_size if stage.is_last else 0
        return self.layers * sizes.layer + embedding + norm + self.head(model, sizes)

    def head(self, model: ModelConfig, sizes: Sizes) -> int:
        """Parameters of the head; 0 where it is tied to the embedding."""
        return sizes.table if self.stage.is_last and not model.tie_word_embeddings else 0

    def tables(self, model: ModelConfig, sizes: Sizes) -> Ends:
        """Bytes of gradients at both ends: of a separate embedding, and of the head."""
        own = GRADIENT_BYTES * sizes.table
        is_one = model.tie_word_embeddings and self.stage.is_last
        return Ends(
            first=own if self.stage.is_first and not is_one else 0,
            last=own if self.stage.is_last else 0,
        )

    def waiting(self, micro: MicroBatchBytes, sizes: Sizes) -> float:
        """Bytes of a pipeline's stage besides its graphs.

        The last stage forms the gradients of the head and of its input with the loss, and keeps
        them for micro-batches that wait for backward. It also keeps the rows of completed
        micro-batches, since the schedule keeps their losses. Every other stage has a gradient for
        the stage before it. With several chunks, the schedule keeps everything it has sent until
        the step ends.
        """
        going_back = 0.0 if self.stage.is_first else micro.checkpoint()
        chunks = self.stage.chunks
        if len(chunks) > 1:
            going_back = (self.received - self.kept) * self.sides * micro.checkpoint()
        if not self.stage.is_last:
            return going_back
        formed = GRADIENT_BYTES * sizes.table + micro.checkpoint() * (1 + micro.compute / 4)
        done = len(chunks[-1].layers) * micro.sorted_rows() if self.received else 0.0
        kept = self.kept if len(chunks) == 1 else 1  # the last chunk begins backward at once
        return going_back + (kept - 1) * formed + (self.received - kept) * done

    @property
    def sides(self) -> int:
        """How many ends of the stage's chunks have a neighbour."""
        return 2 * len(self.stage.chunks) - self.stage.is_first - self.stage.is_last

    def buffers(self, micro: MicroBatchBytes) -> float:
        """Bytes received from neighbouring stages; a schedule keeps these buffers between steps."""
        return self.received * self.sides * micro.checkpoint()


def held_by_stages(run: RunConfig, options: EngineOptions, workers: int) -> list[Held]:
    """The `Held` of a worker of each stage, in order."""
    whole, stages = Held.of(run, options, workers), pipeline_cut(run, options).stages
    found = []
    for index, stage in enumerate(stages):
        kept: float = whole.micro_batches
        if options.schedule == "1f1b":
            kept = min(kept, len(stages) - index)
        if options.schedule == "interleaved":
            kept = kept_by_chunks(whole.micro_batches, len(stages), index, options.chunks)
        found.append(replace(whole, stage=stage, kept=kept, received=whole.micro_batches))
    return found


def kept_by_chunks(micro_batches: int, stages: int, stage: int, chunks: int) -> float:
    """The most micro-batches that wait for backward if each stage has several chunks.

    Torch's schedule first takes a round of micro-batches forward through all chunks but the last,
    and two further micro-batches for each stage behind this stage. Then forward and backward
    alternate. A micro-batch that has passed some of the chunks counts as that fraction. The flows
    of `flows_of` run one after another.
    """
    number = max(flows_of(micro_batches, stages))
    of_a_round = number // max(1, number // stages)
    forwards = (chunks - 1) * of_a_round + 2 * (stages - 1 - stage) + 1
    return min(forwards, chunks * number) / chunks


def need_with_crowding(run: RunConfig, num_owned: int, options: EngineOptions, held: Held) -> Need:
    """The need with even routing, and separately the extra need of `CROWDING` more rows."""
    even, graphs = Rows.even(run, options), math.ceil(held.kept)
    need = resident_need(run, num_owned, options, held, [[even] * held.layers] * graphs)
    if options.ep == 1:
        return need
    more = [[even.crowded(CROWDING)] * held.layers] * graphs
    crowded = resident_need(run, num_owned, options, held, more)
    return replace(need, crowding=crowded.device - need.device)


@dataclass(frozen=True)
class _Graph:
    """Bytes of a micro-batch while it passes the layers of a rank.

    Attributes:
        layers: bytes that each layer's graph keeps until its backward.
        backward: additional bytes of each layer's backward, without graphs and gradients.
        ends: bytes of kept inputs and outputs of the rank.
    """

    layers: tuple[float, ...]
    backward: tuple[float, ...]
    ends: float

    @classmethod
    def of(
        cls, micros: Sequence[MicroBatchBytes], sizes: Sizes, frozen_layer: float, ends: float
    ) -> _Graph:
        """The graph of a micro-batch whose layers have the rows of `micros`."""
        layers, backward = [], []
        for micro in micros:
            cast = micro.cast_matrices(sizes.layer_cast)
            if micro.options.recompute == "none":
                one, again = micro.kept() + cast, 0.0
            else:
                one, again = micro.checkpoint() + micro.routing(), micro.kept_again() + cast
            layers.append(one)
            backward.append(again + micro.backward(sizes.layer_owned, frozen_layer))
        return cls(tuple(layers), tuple(backward), ends)

    @property
    def kept(self) -> float:
        """Bytes of all layers and ends."""
        return sum(self.layers) + self.ends

    def going_back(self, gradients: Sequence[float]) -> float:
        """Peak bytes of the backward pass on top of `kept`; layers above are freed one by one.

        Args:
            gradients: bytes of gradients that exist while each layer goes backward.
        """
        above = [sum(self.layers[at + 1 :]) for at in range(len(self.layers))]
        each = zip(self.backward, gradients, above, strict=True)
        return max(backward + there - gone for backward, there, gone in each)


def resident_need(
    run: RunConfig, num_owned: int, options: EngineOptions, held: Held, loads: Loads
) -> Need:
    """The peak of one step.

    Args:
        run: the model and its micro-batches.
        num_owned: experts that the peer trains.
        options: options of the engine, or of each worker.
        held: the part of the model that the rank holds.
        loads: the rows of the rank's layers, for at least as many micro-batches as the rank keeps.
    """
    # The worker with the most experts: experts are dealt out evenly, rounded up.
    sizes = sizes_of(run.model, -(-num_owned // options.ep), options.tp)
    trained = held.trained(run.model, sizes)
    frozen_layer = frozen_layer_bytes(run, num_owned, options)
    state = _trained_state(run, sizes, held, options) + held.layers * frozen_layer
    micro = MicroBatchBytes(run, options)
    # A kept graph includes its output; its input is one of the buffers.
    ends = micro.checkpoint() * (held.stage.is_first - held.stage.is_last)
    graphs = [
        _Graph.of([MicroBatchBytes(run, options, r) for r in rows], sizes, frozen_layer, ends)
        for rows in loads
    ]
    kept = math.ceil(held.kept)
    starts = range(len(graphs) - kept + 1)
    peak = max(_peak(micro, graphs[at : at + kept], sizes, held) for at in starts)
    peak += held.waiting(micro, sizes)
    # A bucket of gradients, the other workers' parts of it, and its sums.
    own = held.layers * (sizes.layer_owned + sizes.layer_heads) if options.ep > 1 else 0
    alike = held.sharers // options.ep  # workers with the same experts
    adding = max(
        GRADIENT_BYTES * min(BUCKET, number) * (2 + 1 / workers) if workers > 1 else 0.0
        for number, workers in ((trained - own, held.sharers), (own, alike))
    )
    after = GRADIENT_BYTES * trained + max(adding, update_bytes(run, options))
    return Need(state + held.buffers(micro), max(peak, after), 0.0, 0.0)


def _peak(micro: MicroBatchBytes, graphs: Sequence[_Graph], sizes: Sizes, held: Held) -> float:
    """Peak bytes of graphs and gradients while the first kept micro-batch goes backward."""
    gradients: float = GRADIENT_BYTES * held.trained(micro.model, sizes)
    # The last micro-batch may have passed only some of the chunks.
    part = 1 + held.kept - len(graphs)
    kept = sum(graph.kept for graph in graphs[:-1]) + part * graphs[-1].kept
    head = micro.head(sizes.table) if held.stage.is_last else 0.0
    all_there = [gradients] * held.layers
    all_kept = 1 < held.kept == held.received and len(held.stage.chunks) == 1
    if held.micro_batches > 1 and not all_kept:
        return kept + max(gradients + head, graphs[0].going_back(all_there))
    # In the first micro-batch, backward allocates each layer's gradients as it frees the layer's
    # activations. From the second micro-batch on all gradients exist.
    tables = held.tables(micro.model, sizes)
    forming: list[float] = [
        tables.last + GRADIENT_BYTES * sizes.layer * at for at in reversed(range(held.layers))
    ]
    forming[0] = max(forming[0], gradients - tables.first - GRADIENT_BYTES * sizes.layer_owned)
    peaks = [kept + head, kept + graphs[0].going_back(forming)]
    for done, graph in enumerate(graphs[1:], start=1):
        rest = sum(each.kept for each in graphs[done:])
        peaks.append(rest + max(gradients + micro.checkpoint(), graph.going_back(all_there)))
    peaks.append(gradients + micro.checkpoint())
    return max(peaks)


def _trained_state(run: RunConfig, sizes: Sizes, held: Held, options: EngineOptions) -> float:
    """Bytes of masters and moments on a rank, and of copies in the compute type."""
    ways = options.alike
    trained, experts = held.trained(run.model, sizes), held.layers * sizes.layer_owned
    shared_cast = held.layers * sizes.layer_cast + held.head(run.model, sizes)
    state = 0.0
    attention = held.layers * sizes.layer_cast
    for count, over, cast, matrices in (
        (trained - experts, ways[0], shared_cast, attention),
        (experts, ways[1], experts, experts),
    ):
        copies = cast if over > 1 and DTYPES[options.compute].itemsize < 4 else 0
        moments = moments_bytes(run, options.moments, count, matrices)
        state += MASTER_BYTES * (count - copies) + moments / over
        state += copies * (DTYPES[options.compute].itemsize + MASTER_BYTES / over)
    return state
