"""Pipeline parallel: one stage of the model, and micro-batches that flow through the stages."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
)

from swarm.config import LossConfig, ModelConfig, RunConfig
from swarm.errors import lacks_memory
from swarm.experts import EMBEDDING
from swarm.model.losses import LayerTerms, Losses
from swarm.model.masking import Masked
from swarm.model.routing import RoutingControls
from swarm.model.similarity import MAX_PAIRS
from swarm.model.stage import Stage
from swarm.model.transformer import Transformer
from swarm.train.engine.engine import Part
from swarm.train.engine.engine_options import EngineOptions, ScheduleName
from swarm.train.engine.mesh import Mesh, flows_of
from swarm.train.engine.micro_batches import MicroBatch
from swarm.train.engine.ranks import PIPELINE, STAGE, Disconnected, Ranks, Watch
from swarm.train.engine.sizes import pipeline_cut
from swarm.train.parallel.data_parallel import RankEngine
from swarm.train.parallel.sharded_state import ShardedEngine
from swarm.train.parallel.tensor_parallel import HeadsEngine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TermsForm:
    """The layout of a layer's terms as one row of a table, fp32.

    fp32 holds the counts exactly below 2^24 tokens of a micro-batch.

    Attributes:
        num_experts: experts of a layer.
        top_k: experts of a token.
        num_tokens: tokens of a micro-batch.
        pairs: the most compared pairs of experts; 0 where none are measured.
    """

    num_experts: int
    top_k: int
    num_tokens: int
    pairs: int

    @property
    def _sizes(self) -> list[int]:
        """Sizes: means, z, counts, dropped, number of pairs, similarities, both experts."""
        return [self.num_experts, 1, self.num_experts, 1, 1, *(3 * [self.pairs])]

    @property
    def width(self) -> int:
        """How many numbers a row has."""
        return sum(self._sizes)

    def row(self, terms: LayerTerms) -> Tensor:
        """A row [W], differentiable as the terms are."""
        alike, pair_P2 = terms.similarity, terms.pair_P2
        if alike is None or pair_P2 is None:
            alike, pair_P2 = terms.z.new_empty(0), torch.empty(0, 2)
        number = terms.z.new_tensor([len(alike)])
        filling = terms.z.new_zeros(self.pairs - len(alike))
        parts = [terms.mean_E, terms.z[None], terms.tokens_E, terms.dropped[None], number]
        parts += [alike, filling]
        for each_P in pair_P2.to(terms.z.device).unbind(1):
            parts += [each_P, filling]
        return torch.cat([part.float() for part in parts])

    def terms(self, row: Tensor) -> LayerTerms:
        """The terms of such a row."""
        mean_E, z, tokens_E, dropped, number, alike, *pair = row.split(self._sizes)
        terms = LayerTerms(
            mean_E,
            z[0],
            tokens_E.detach().long(),
            dropped[0].detach().long(),
            self.num_tokens,
            self.top_k,
        )
        if not self.pairs:
            return terms  # without a wait for the device
        size = int(number)
        pair_P2 = torch.stack([each[:size].detach().long().cpu() for each in pair], 1)
        return terms._replace(similarity=alike[:size], pair_P2=pair_P2)


TOGETHER = 8
"""How many micro-batches go through the stages together in an evaluation."""
NO_SHAPE = torch.Size([1, 2])
"""The shape of micro-batches in a pipeline without any tokens."""


class _Form(NamedTuple):
    """The key of a schedule: the shapes of its buffers."""

    name: ScheduleName
    micro_batches: int
    shape: torch.Size
    pairs: int
    is_training: bool


@dataclass(frozen=True)
class Flow:
    """Micro-batches of one shape that go through the stages.

    Attributes:
        parts: the micro-batches, at least one; the same on all ranks of a pipeline. None stands for
            a pass through the experts without tokens.
        shape: shape of the tokens of each micro-batch.
        controls: the routing controls of each micro-batch in a training step; None in evaluation.
        divisor: number that divides each loss.
        scale: factor of each loss after the division.
    """

    parts: Sequence[MicroBatch | None]
    shape: torch.Size
    controls: Sequence[RoutingControls] | None = None
    divisor: int = 1
    scale: float = 1.0

    def cut(self, sizes: Sequence[int]) -> Iterator[Flow]:
        """Splits it into flows of these sizes, in order."""
        first = 0
        for size in sizes:
            own = slice(first, first + size)
            controls = self.controls[own] if self.controls else None
            yield replace(self, parts=self.parts[own], controls=controls)
            first += size


class Pipeline:
    """Runs the schedules of this rank's stage. All ranks of a pipeline make the same calls."""

    def __init__(self, model: Transformer, group: Ranks, loss: LossConfig) -> None:
        """Runs no operation between the ranks yet.

        Args:
            model: model of this rank's stage.
            group: the ranks of the pipeline, in the order of the stages.
            loss: weights of its terms.
        """
        self._group = group
        self._chunks = [
            _StageModule(model, chunk, loss, group.device) for chunk in model.stage.chunks
        ]
        self._schedules: dict[_Form, Any] = {}
        self._said: tuple[int, ...] = ()
        # Otherwise torch would log a whole schedule when a stage fails.
        logging.getLogger(ScheduleLoopedBFS.__module__).setLevel(logging.CRITICAL)

    def train(self, flow: Flow, name: ScheduleName) -> list[Losses]:
        """Adds up the gradients of all micro-batches, in order.

        Returns:
            In the last stage, the detached losses of each micro-batch with tokens; otherwise
            nothing.

        Raises:
            Disconnected: another rank has ended.
        """
        size, number = self._group.size, len(flow.parts)
        if name == "interleaved":
            goes = flows_of(number, size)
            if len(goes) > 1 and self._said != goes:
                logger.info(
                    "%d micro-batches are no even rounds for %d stages: %d come in a go of their "
                    "own; a multiple of the stages would take less time",
                    number, size, goes[1],
                )  # fmt: skip
                self._said = goes
            return self._run(list(flow.cut(goes)), name, is_training=True)
        # 1F1B needs at least as many micro-batches as stages.
        return self._run([flow], "gpipe" if number < size else name, is_training=True)

    def evaluate(self, parts: Sequence[MicroBatch | None]) -> list[Losses]:
        """In the last stage, the losses of micro-batches of any shapes; otherwise nothing.

        Args:
            parts: micro-batches; None for one without tokens.

        Raises:
            Disconnected: another rank has ended.
        """
        found: list[Losses] = []
        for flow in _flows(parts):
            found += self._run([flow], "gpipe", is_training=False)
        return found

    def _run(self, flows: Sequence[Flow], name: ScheduleName, *, is_training: bool) -> list[Losses]:
        """Runs flows one after the other."""
        forms = []
        for flow in flows:
            compared = any(each.probe or each.draw_apart for each in flow.controls or ())
            pairs = MAX_PAIRS if compared else 0
            forms.append(_Form(name, len(flow.parts), flow.shape, pairs, is_training))
        # Free the buffers of other schedules before new ones are made.
        self._schedules = {form: self._schedules[form] for form in forms if form in self._schedules}
        found: list[Losses] = []
        for flow, form in zip(flows, forms, strict=True):
            for chunk in self._chunks:
                chunk.begin(flow, form, found)
            self._flow(form)
        return found

    def _flow(self, form: _Form) -> None:
        if form not in self._schedules:
            self._schedules[form] = self._made(form)
        self._count(form)
        watch, device = self._group.traffic.watch, self._chunks[0].device
        index = torch.arange(form.micro_batches)
        target = index if form.is_training and self._chunks[-1].stage.is_last else None
        try:
            with watch.timing(PIPELINE, device):
                self._schedules[form].step(index=index, target=target, return_outputs=False)
        except RuntimeError as error:
            self._schedules.clear()
            if error.__cause__ is not None:
                raise error.__cause__ from None  # the stage's own error, without torch's words
            if lacks_memory(error):
                raise
            raise Disconnected(str(error).partition("\n")[0]) from error
        finally:
            for chunk in self._chunks:
                chunk.end()

    def _made(self, form: _Form) -> Any:
        group, number = self._group, len(self._chunks)
        stages: list[Any] = [
            _TimedStage(
                group.traffic.watch,
                chunk,
                group.rank + index * group.size,
                group.size * number,
                group.device,
                input_args=chunk.inputs(form),
                output_args=chunk.outputs(form),
                group=group.handle,
            )
            for index, chunk in enumerate(self._chunks)
        ]
        loss = self._chunks[-1].scaled if form.is_training else None
        given: dict[str, Any] = {"loss_fn": loss, "scale_grads": False}
        if number > 1:
            # Torch's other schedules go backward from the last micro-batch to the first.
            several = ScheduleInterleaved1F1B if form.is_training else ScheduleLoopedBFS
            return several(stages, form.micro_batches, **given)
        kind = Schedule1F1B if form.name == "1f1b" else ScheduleGPipe
        return kind(stages[0], form.micro_batches, **given)

    def _count(self, form: _Form) -> None:
        """Counts the bytes that leave this rank."""
        for chunk in self._chunks:
            out = [] if chunk.stage.is_last else list(chunk.outputs(form))
            back = list(chunk.inputs(form)) if form.is_training else []
            for kind, tensors in (("stage outputs", out), ("stage gradients", back)):
                for _ in range(form.micro_batches if tensors else 0):
                    self._group.traffic.count(kind, 4 * sum(each.numel() for each in tensors))


def _flows(parts: Sequence[MicroBatch | None]) -> Iterator[Flow]:
    """Cuts micro-batches into runs of one shape, each of at most `TOGETHER`."""
    shape = next((part.tokens_BT1.shape for part in parts if part), NO_SHAPE)
    run: list[MicroBatch | None] = []
    for part in parts:
        other = part is not None and part.tokens_BT1.shape != shape
        if run and (other or len(run) == TOGETHER):
            yield Flow(run, shape)
            run = []
        if part is not None:
            shape = part.tokens_BT1.shape
        run.append(part)
    if run:
        yield Flow(run, shape)


class _TimedStage(PipelineStage):
    """A stage that records the seconds of its forwards and backwards."""

    def __init__(self, watch: Watch, module: _StageModule, *args: Any, **options: Any) -> None:
        super().__init__(module, *args, **options)
        self._watch, self._on = watch, module.device

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        """See `PipelineStage`."""
        with self._watch.timing(STAGE, self._on):
            return super().forward_one_chunk(*args, **options)

    def backward_one_chunk(self, *args: Any, **options: Any) -> Any:
        """See `PipelineStage`."""
        with self._watch.timing(STAGE, self._on):
            return super().backward_one_chunk(*args, **options)


class _StageModule(nn.Module):
    """Consecutive layers as a module for torch's schedules, which pass a micro-batch's number."""

    def __init__(
        self, model: Transformer, stage: Stage, loss: LossConfig, between: torch.device
    ) -> None:
        """`stage`: its layers of the model; `between`: the device of received and sent tensors."""
        super().__init__()
        self.model, self.stage, self._loss, self._between = model, stage, loss, between
        self._flow: Flow | None = None
        self._found: list[Losses] = []
        self._terms: TermsForm
        self._out: tuple[Tensor, ...]

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return next(self.model.parameters()).device

    def begin(self, flow: Flow, form: _Form, found: list[Losses]) -> None:
        """Sets the micro-batches; the last stage appends their losses to `found`."""
        self._flow, self._found = flow, found
        self._terms, self._out = self._terms_form(form), self.outputs(form)

    def end(self) -> None:
        """Drops the micro-batches."""
        self._flow, self._found = None, []

    def forward(self, *received: Tensor, index: Tensor) -> tuple[Tensor, ...] | Tensor:
        """Computes the layers for one micro-batch.

        Args:
            received: residual stream [B, T, D] and table [l, W]; nothing in the first stage.
            index: int64 [1], the micro-batch's number.

        Returns:
            Residual stream and table after these layers, or in the last stage the loss.
        """
        assert self._flow is not None
        model, k = self.model, int(index)
        part = self._flow.parts[k]
        controls = self._flow.controls[k] if self._flow.controls else None
        if part is None:
            return self._without_tokens(received, controls)
        tokens_BT1, masked = part
        tokens_BT1 = tokens_BT1.to(self.device, non_blocking=True)
        before: list[Tensor] = []
        if received:
            x_BTD, table_lW = (each.to(self.device) for each in received)
            before = [table_lW]
        else:
            x_BTD = model.model.embedded(tokens_BT1[:, :-1])
        length, layers = tokens_BT1.shape[1] - 1, self.stage.layers
        x_BTD, routings = model.model.through(x_BTD, length, controls, masked.documents, layers)
        terms = [LayerTerms.of(routing) for routing in routings]
        if not self.stage.is_last:
            rows = torch.stack([self._terms.row(each) for each in terms])
            table_lW = torch.cat([*before, rows])
            return x_BTD.to(self._between), table_lW.to(self._between)
        earlier = [self._terms.terms(row) for table in before for row in table.unbind()]
        losses = model.losses_of(
            model.model.norm(x_BTD),
            [*earlier, *terms],
            tokens_BT1,
            self._loss,
            controls=controls,
            masked=masked,
        )
        self._found.append(losses._replace(total=losses.total.detach()))
        return losses.total

    def _without_tokens(
        self, received: tuple[Tensor, ...], controls: RoutingControls | None
    ) -> tuple[Tensor, ...] | Tensor:
        """Like `forward`, with zeros as activations and as gradients."""
        layers = self.stage.layers
        zero = self.model.model.without_tokens(controls, layers).to(self._between)
        if self.stage.is_last:
            return zero + sum(each.sum() for each in received)
        shapes = [each.shape for each in self._out]
        found = [zero.expand(shape) for shape in shapes]
        if received:
            x_BTD, table_lW = received
            found = [found[0] + x_BTD, torch.cat([table_lW, found[1][len(table_lW) :]])]
        return tuple(each.contiguous() for each in found)

    def scaled(self, total: Tensor, _: Tensor) -> Tensor:
        """The loss for backward."""
        assert self._flow is not None
        return total / self._flow.divisor * self._flow.scale

    def inputs(self, form: _Form) -> tuple[Tensor, ...]:
        """Tensors of the shapes and types that the stage receives, without values."""
        return () if self.stage.is_first else self._between_stages(form, self.stage.layers[0])

    def outputs(self, form: _Form) -> tuple[Tensor, ...]:
        """Tensors like those that the stage sends, without values; in the last stage the loss."""
        if self.stage.is_last:
            return (torch.empty((), device="meta", requires_grad=form.is_training),)
        return self._between_stages(form, self.stage.layers[-1] + 1)

    def _between_stages(self, form: _Form, layers: int) -> tuple[Tensor, ...]:
        (sequences, length), width = form.shape, self._terms_form(form).width
        stream = self.model.model.tokens.shape(sequences, length - 1)
        shapes = [(*stream, self.model.config.hidden_size), (layers, width)]
        return tuple(
            torch.empty(shape, device="meta", requires_grad=form.is_training) for shape in shapes
        )

    def _terms_form(self, form: _Form) -> TermsForm:
        model: ModelConfig = self.model.config
        num_tokens = form.shape[0] * (form.shape[1] - 1)
        return TermsForm(model.num_experts, model.num_experts_per_tok, num_tokens, form.pairs)


class StageEngine(RankEngine):
    """The engine of a rank that holds one stage. All ranks get the same calls.

    It keeps, reads and writes only tensors of its stage.
    """

    def __init__(self, run: RunConfig, options: EngineOptions, ranks: Ranks) -> None:
        """Like `RankEngine`, with `pp` stages."""
        mesh = Mesh(ranks.size, options.ep, options.pp, options.tp)
        cut = pipeline_cut(run, options)
        super().__init__(run, options, ranks, stage=cut.stages[mesh.stage(ranks.rank)])
        self._stages = ranks.part(mesh.pipelines)
        self._ends: Ranks | None = None
        if run.model.tie_word_embeddings:
            self._ends = ranks.part(mesh.ends)
        self._pipeline = Pipeline(self._model, self._stages, run.loss)
        self._schedule = options.schedule

    # ------------------------------------------------ who holds what

    def holds(self, name: str) -> bool:
        """Whether a tensor belongs to this rank's stage, and to its share of the experts."""
        tied = self._run.model.tie_word_embeddings
        return self._model.stage.holds(name, tied=tied) and super().holds(name)

    def answers(self, name: str) -> bool:
        """Whether this rank alone sends a tensor's value to the controller."""
        return super().answers(name) and self._speaks_for(name)

    def _speaks_for(self, name: str) -> bool:
        """Whether this rank, and no other rank of its pipeline, counts a tensor's values."""
        return self.holds(name) and (name != EMBEDDING or self._model.stage.is_first)

    def _biases(self) -> Sequence[str]:
        return [name for name in super()._biases() if self.holds(name)]

    # ------------------------------------------------ a step

    def _gradients(self, parts: Sequence[MicroBatch], controls: RoutingControls) -> list[Losses]:
        mine = self._same.block(len(parts))
        idle = self._idle(len(parts))
        flow = Flow(
            parts=[*(parts[k] for k in mine), *[None] * idle],
            shape=parts[0].tokens_BT1.shape,
            controls=[*(controls.part(k) for k in mine), *[controls] * idle],
            divisor=len(parts),
            scale=self._guard.scale.value,
        )
        found = self._pipeline.train(flow, self._schedule) if flow.parts else []
        return self._of_all(mine, found, len(parts), controls)

    def _add_up(self) -> None:
        """Like `RankEngine`; then adds up a tied embedding over both ends of each pipeline."""
        super()._add_up()
        if self._ends is not None and self._ends.size > 1:
            self._ends.add_up([self._gradients_by_name()[EMBEDDING]])

    def _norms(self, scale: float) -> dict[str, Tensor]:
        mine = super()._norms(scale)
        names = self._trained_names()
        # fp64 holds fp32 values exactly.
        table = torch.zeros(len(names), dtype=torch.float64)
        own = [index for index, name in enumerate(names) if self._speaks_for(name)]
        table[own] = torch.stack([mine[names[index]] for index in own]).double().cpu()
        values = self._stages.united(table).float().to(self._device)
        return dict(zip(names, values.unbind(), strict=True))

    # ------------------------------------------------ evaluation

    def _means_of(self, parts: Sequence[Part]) -> list[float]:
        mine, idle = self._same.block(len(parts)), [None] * self._idle(len(parts))
        own = [
            MicroBatch(micro_BT1, Masked(scored_BT=scored_BT.to(self._device)))
            for micro_BT1, scored_BT in (parts[k] for k in mine)
        ]
        found = [[each.cross_entropy.item()] for each in self._pipeline.evaluate([*own, *idle])]
        means: list[float] = self._told(mine, found, (len(parts), 1))[:, 0].tolist()
        return means


class ShardedStageEngine(StageEngine, ShardedEngine):
    """A stage whose masters and moments are cut over the ranks that hold the same stage."""

    def _norms(self, scale: float) -> dict[str, Tensor]:
        """Norms of all stages, in one operation; a rank has the squares of its shares only."""
        return ShardedEngine._norms(self, scale)


class HeadsStageEngine(StageEngine, HeadsEngine):
    """A stage whose ranks share the attention heads."""
