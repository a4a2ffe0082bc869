"""Pipeline parallel: the stage of one rank, and micro-batches that flow through the stages.

The schedules are those of torch.distributed.pipelining. Between two stages go the residual stream
and a small table with what the losses take from the routers so far, and back their gradients; so
the last stage forms the same losses as one process, by the same operations.

Where the experts of a stage are dealt out, its ranks exchange tokens in every forward and backward
of a layer, each for a micro-batch of its own pipeline. These operations meet since all of them make
the same sequence of forwards and backwards: that follows from the schedule, the stage and the
number of micro-batches, so pipelines that share experts have equally many, some without tokens.
Ranks of a stage that wait for each other are then as one rank of a single pipeline, whose schedule
has no circle.

Shapes: B sequences, T tokens of a sequence, D hidden size, E experts, P compared pairs of a layer,
l layers that a micro-batch has gone through, W numbers of a layer in the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from swarm.config import LossConfig, ModelConfig
from swarm.errors import lacks_memory
from swarm.model.losses import LayerTerms, Losses
from swarm.model.routing import RoutingControls
from swarm.model.similarity import MAX_PAIRS
from swarm.model.transformer import Transformer
from swarm.train.micro_batches import MicroBatch
from swarm.train.options import ScheduleName
from swarm.train.parallel.ranks import Disconnected, Ranks
from swarm.train.parallel.watch import PIPELINE, STAGE, Watch

TOGETHER = 8
"""Micro-batches that flow through the stages in one go of an evaluation."""
NO_SHAPE = torch.Size([1, 2])
"""Of a pipeline whose micro-batches are all without tokens."""


@dataclass(frozen=True)
class TermsForm:
    """How the terms of a layer are laid out as one row of a table, fp32.

    Counts come through unchanged below 2^24 tokens of a micro-batch.

    Attributes:
        num_experts: of a layer.
        top_k: experts of a token.
        num_tokens: of a micro-batch.
        pairs: compared pairs of experts that there is room for; 0 where none are measured.
    """

    num_experts: int
    top_k: int
    num_tokens: int
    pairs: int

    @property
    def _sizes(self) -> list[int]:
        """Of means, z, counts, dropped, number of pairs, similarities, first and second experts."""
        return [self.num_experts, 1, self.num_experts, 1, 1, *(3 * [self.pairs])]

    @property
    def width(self) -> int:
        """Numbers of a row."""
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
            return terms  # and nothing waits for the device
        size = int(number)
        pair_P2 = torch.stack([each[:size].detach().long().cpu() for each in pair], 1)
        return terms._replace(similarity=alike[:size], pair_P2=pair_P2)


class _Form(NamedTuple):
    """What schedules are made for, since their buffers have these shapes."""

    name: ScheduleName
    micro_batches: int
    shape: torch.Size
    pairs: int
    is_training: bool


@dataclass(frozen=True)
class Flow:
    """Micro-batches of one shape that go through the stages.

    Attributes:
        parts: the micro-batches, one at least; every rank of a pipeline has the same. None in the
            place of one goes through the experts without tokens.
        shape: of the tokens of each.
        controls: of each, in a training step; None in evaluation.
        divisor: what the loss of each is divided by.
        scale: what it is multiplied with then.
    """

    parts: Sequence[MicroBatch | None]
    shape: torch.Size
    controls: Sequence[RoutingControls] | None = None
    divisor: int = 1
    scale: float = 1.0


class Pipeline:
    """The stage of this rank; all ranks of a pipeline call it alike."""

    def __init__(self, model: Transformer, group: Ranks, loss: LossConfig) -> None:
        """Makes nothing between the ranks yet.

        Args:
            model: of this rank's stage.
            group: the ranks of the pipeline, in the order of the stages.
            loss: weights of its terms.
        """
        self._module, self._group = _StageModule(model, loss, group.device), group
        self._form: _Form | None = None
        self._schedule: Any = None

    def train(self, flow: Flow, name: ScheduleName) -> list[Losses]:
        """Adds up the gradients of all micro-batches, in their order.

        Returns:
            The losses of each that has tokens, detached, in the last stage; nothing in the others.

        Raises:
            Disconnected: another rank is gone.
        """
        # The other schedule keeps every stage busy at once, which so few cannot.
        few = len(flow.parts) < self._group.size
        return self._flow(flow, "gpipe" if few else name, is_training=True)

    def evaluate(self, parts: Sequence[MicroBatch | None]) -> list[Losses]:
        """The losses of micro-batches of any shapes, in the last stage; nothing in the others.

        Args:
            parts: None for one without tokens.

        Raises:
            Disconnected: another rank is gone.
        """
        found: list[Losses] = []
        for flow in _flows(parts):
            found += self._flow(flow, "gpipe", is_training=False)
        return found

    def _flow(self, flow: Flow, name: ScheduleName, *, is_training: bool) -> list[Losses]:
        compared = any(each.probe or each.draw_apart for each in flow.controls or ())
        pairs = MAX_PAIRS if compared else 0
        form = _Form(name, len(flow.parts), flow.shape, pairs, is_training)
        found = self._module.begin(flow, form)
        if form != self._form:
            self._form = self._schedule = None  # its buffers, before others are made
            self._schedule, self._form = self._made(form), form
        self._count(form)
        watch, device = self._group.traffic.watch, self._module.device
        index = torch.arange(len(flow.parts))
        is_last = self._module.model.stage.is_last
        target = index if is_training and is_last else None
        try:
            with watch.timing(PIPELINE, device):
                self._schedule.step(index=index, target=target, return_outputs=False)
        except RuntimeError as error:
            self._form = self._schedule = None
            if error.__cause__ is not None:
                raise error.__cause__ from None  # what a stage raised, without torch's words
            if lacks_memory(error):
                raise
            raise Disconnected(str(error).partition("\n")[0]) from error
        finally:
            self._module.end()
        return found

    def _made(self, form: _Form) -> ScheduleGPipe | Schedule1F1B:
        module, group = self._module, self._group
        stage = _TimedStage(
            group.traffic.watch,
            module,
            group.rank,
            group.size,
            group.device,
            input_args=module.inputs(form),
            output_args=module.outputs(form),
            group=group.handle,
        )
        kind = Schedule1F1B if form.name == "1f1b" else ScheduleGPipe
        loss = module.scaled if form.is_training else None
        return kind(stage, form.micro_batches, loss_fn=loss, scale_grads=False)

    def _count(self, form: _Form) -> None:
        """Records what leaves this rank."""
        module = self._module
        out = [] if module.model.stage.is_last else list(module.outputs(form))
        back = list(module.inputs(form)) if form.is_training else []
        for kind, tensors in (("stage outputs", out), ("stage gradients", back)):
            for _ in range(form.micro_batches if tensors else 0):
                self._group.traffic.count(kind, 4 * sum(each.numel() for each in tensors))


def _flows(parts: Sequence[MicroBatch | None]) -> Iterator[Flow]:
    """Cuts micro-batches into runs of one shape, of `TOGETHER` at most."""
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
    """The layers of a stage for torch's schedules, which know micro-batches by their number."""

    def __init__(self, model: Transformer, loss: LossConfig, between: torch.device) -> None:
        """`between`: where what comes and goes lies."""
        super().__init__()
        self.model, self._loss, self._between = model, loss, between
        self._flow: Flow | None = None
        self._found: list[Losses] = []
        self._terms: TermsForm
        self._out: tuple[Tensor, ...]

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return next(self.model.parameters()).device

    def begin(self, flow: Flow, form: _Form) -> list[Losses]:
        """Takes micro-batches, in the place of those before.

        Returns:
            A list to which the last stage appends the losses.
        """
        self._flow, self._found = flow, []
        self._terms, self._out = self._terms_form(form), self.outputs(form)
        return self._found

    def end(self) -> None:
        """Lets go of them."""
        self._flow, self._found = None, []

    def forward(self, *received: Tensor, index: Tensor) -> tuple[Tensor, ...] | Tensor:
        """Takes a micro-batch through the layers.

        Args:
            received: residual stream [B, T, D] and table [l, W]; nothing in the first stage.
            index: int64 [1], which one.

        Returns:
            The same, or in the last stage the loss.
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
            x_BTD = model.model.embed_tokens(tokens_BT1[:, :-1])
        x_BTD, routings = model.model.through(x_BTD, controls, masked.documents)
        terms = [LayerTerms.of(routing) for routing in routings]
        if not model.stage.is_last:
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
        """As `forward`; zeros go from stage to stage, and zeros come back as gradients."""
        zero = self.model.model.without_tokens(controls).to(self._between)
        if self.model.stage.is_last:
            return zero + sum(each.sum() for each in received)
        shapes = [each.shape for each in self._out]
        found = [zero.expand(shape) for shape in shapes]
        if received:
            x_BTD, table_lW = received
            found = [found[0] + x_BTD, torch.cat([table_lW, found[1][len(table_lW) :]])]
        return tuple(each.contiguous() for each in found)

    def scaled(self, total: Tensor, _: Tensor) -> Tensor:
        """The loss of which the gradient is formed."""
        assert self._flow is not None
        return total / self._flow.divisor * self._flow.scale

    def inputs(self, form: _Form) -> tuple[Tensor, ...]:
        """What comes in, as tensors without values."""
        stage = self.model.stage
        return () if stage.is_first else self._between_stages(form, stage.layers.start)

    def outputs(self, form: _Form) -> tuple[Tensor, ...]:
        """What goes out, likewise."""
        stage = self.model.stage
        if stage.is_last:
            return (torch.empty((), device="meta", requires_grad=form.is_training),)
        return self._between_stages(form, stage.layers.stop)

    def _between_stages(self, form: _Form, layers: int) -> tuple[Tensor, ...]:
        (sequences, length), width = form.shape, self._terms_form(form).width
        shapes = [(sequences, length - 1, self.model.config.hidden_size), (layers, width)]
        return tuple(
            torch.empty(shape, device="meta", requires_grad=form.is_training) for shape in shapes
        )

    def _terms_form(self, form: _Form) -> TermsForm:
        model: ModelConfig = self.model.config
        num_tokens = form.shape[0] * (form.shape[1] - 1)
        return TermsForm(model.num_experts, model.num_experts_per_tok, num_tokens, form.pairs)
