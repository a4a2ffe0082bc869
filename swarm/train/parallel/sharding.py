"""Data parallel: every rank holds the whole model and computes its block of the micro-batches.

Sums are added up in the order of the ranks, so that their bits depend on the number of ranks alone,
and with two ranks, or one micro-batch each, are those of one process. What is added up is whole on
every rank, so that norms and clipping are computed as by one process and do not depend on the cut.

Shapes: B sequences, T tokens that a sequence predicts, N ranks, X elements of a bucket, L layers, E
experts, P compared pairs of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from swarm.config import RunConfig
from swarm.errors import lacks_memory
from swarm.model.losses import Losses
from swarm.model.routing import RoutingControls
from swarm.model.similarity import MAX_PAIRS
from swarm.train.engine import TERMS, mean_over
from swarm.train.micro_batches import MicroBatch
from swarm.train.options import EngineOptions
from swarm.train.resident import ResidentEngine

BUCKET = 2**22
"""Elements that are added up together: 16 MiB, and as much again for those of the other ranks."""


class Disconnected(Exception):
    """Another rank did not take part in a collective operation."""


@dataclass(frozen=True)
class Ranks:
    """The place of this process among those that compute together.

    Attributes:
        rank: of this process.
        size: number of ranks, at least one.
        device: where the operations between ranks take their tensors from.
    """

    rank: int
    size: int
    device: torch.device

    def block(self, count: int) -> range:
        """Which of so many micro-batches this rank computes: consecutive ones, or none."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def add_up(self, tensors: Sequence[Tensor]) -> None:
        """Replaces contiguous fp32 tensors by their sums over the ranks, in the ranks' order.

        Each element crosses to one rank that adds it up, and from there to all: as many bytes as a
        ring moves, and one addition after the other on every number of ranks.

        Raises:
            Disconnected: another rank is gone.
        """
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            flat_X = torch.cat([part.to(self.device) for part in bucket])
            padding = -len(flat_X) % self.size
            sums_X = self._summed(torch.nn.functional.pad(flat_X, (0, padding)))
            sizes = [len(part) for part in bucket]
            for part, total in zip(bucket, sums_X[: len(flat_X)].split(sizes), strict=True):
                part.copy_(total)

    def shared(self, mine: Sequence[Sequence[float]], count: int, width: int) -> Tensor:
        """Rows of numbers of all micro-batches, fp64 [count, width], from those of each rank.

        Fp32 values and whole numbers below 2^53 come through unchanged.

        Raises:
            Disconnected: another rank is gone.
        """
        rows = torch.zeros(count, width, dtype=torch.float64)
        for index, row in zip(self.block(count), mine, strict=True):
            rows[index] = torch.tensor(row, dtype=torch.float64)
        if self.size > 1:
            rows = rows.to(self.device)
            _collective(lambda: dist.all_reduce(rows))
        return rows.cpu()

    def _summed(self, mine_X: Tensor) -> Tensor:
        received_X = torch.empty_like(mine_X)
        _collective(lambda: dist.all_to_all_single(received_X, mine_X))
        parts = received_X.view(self.size, -1)
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        _collective(lambda: dist.all_gather_single(mine_X, total))
        return mine_X


class RankEngine(ResidentEngine):
    """The resident engine of one rank: the same calls on every rank give the same bits on each."""

    def __init__(self, run: RunConfig, options: EngineOptions, ranks: Ranks) -> None:
        """As `ResidentEngine`."""
        super().__init__(run, options)
        self._ranks = ranks

    def _gradients(self, parts: Sequence[MicroBatch], controls: RoutingControls) -> list[Losses]:
        found = [self._backward(parts, k, controls) for k in self._ranks.block(len(parts))]
        for parameter in self._optimizer.parameters:
            if parameter.grad is None:
                # Without a micro-batch; a negative zero changes no bit of any sum.
                parameter.grad = torch.full_like(parameter, -0.0)
        self._ranks.add_up([p.grad for p in self._optimizer.parameters if p.grad is not None])
        form = LossesForm.of(self._run, controls)
        rows = self._ranks.shared([form.row(each) for each in found], len(parts), form.width)
        return [form.losses(row, self._device) for row in rows]

    def _mean(self, tokens_BT1: Tensor, scored_BT: Tensor | None) -> float:
        rows = self._run.train.micro_batch_sequences
        micro_batches = tokens_BT1.split(rows)
        mine = self._ranks.block(len(micro_batches))
        own = iter(range(len(micro_batches)))
        found: list[list[float]] = []

        def own_mean(micro_BT1: Tensor, scored_BT: Tensor) -> float:
            if next(own) in mine:
                found.append([self._mean_of(micro_BT1, scored_BT)])
            return 0.0

        mean_over(own_mean, tokens_BT1, scored_BT, rows)
        means = iter(self._ranks.shared(found, len(micro_batches), 1)[:, 0].tolist())
        return mean_over(lambda *_: next(means), tokens_BT1, scored_BT, rows)


@dataclass(frozen=True)
class LossesForm:
    """How the losses of a micro-batch are laid out as one row of numbers.

    Attributes:
        loads: shape [L, E] of the experts' loads.
        pairs: compared pairs of experts that there is room for.
    """

    loads: tuple[int, int]
    pairs: int

    @classmethod
    def of(cls, run: RunConfig, controls: RoutingControls) -> LossesForm:
        """The form in a step with this controls."""
        measured = controls.probe or controls.draw_apart
        layers = run.model.num_hidden_layers
        return cls((layers, run.model.num_experts), layers * MAX_PAIRS if measured else 0)

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return len(TERMS) + self.loads[0] * self.loads[1] + 4 + 3 * self.pairs

    def row(self, losses: Losses) -> list[float]:
        """The losses as numbers."""
        row = [float(term) for term in torch.stack(losses[:5]).tolist()]
        row += [float(load) for load in losses.expert_tokens.flatten().tolist()]
        alike, pair_P2, alike_P = losses.similarity, losses.pair_P2, losses.alike_P
        row += [float(losses.dropped), float(alike is not None), float(alike or 0.0)]
        if pair_P2 is None or alike_P is None:
            return [*row, -1.0] + [0.0] * (3 * self.pairs)
        flat = torch.cat([pair_P2.cpu().double(), alike_P.cpu().double()[:, None]], 1).flatten()
        return [*row, float(len(pair_P2)), *flat.tolist()] + [0.0] * (3 * self.pairs - len(flat))

    def losses(self, row: Tensor, device: torch.device) -> Losses:
        """The losses of such a row."""
        layers, experts = self.loads
        sizes = [len(TERMS), layers * experts, 1, 2, 1, 3 * self.pairs]
        terms, loads, dropped, alike, count, pairs = row.split(sizes)
        is_measured, similarity = alike.tolist()
        found = int(count)
        pairs_P3 = pairs[: 3 * max(found, 0)].view(-1, 3)
        total, cross_entropy, balance, router_z, output_z = terms.float().to(device).unbind()
        return Losses(
            total,
            cross_entropy,
            balance,
            router_z,
            output_z,
            expert_tokens=loads.long().view(layers, experts).to(device),
            dropped=dropped[0].long().to(device),
            similarity=torch.tensor(similarity, device=device) if is_measured else None,
            pair_P2=pairs_P3[:, :2].long() if found >= 0 else None,
            alike_P=pairs_P3[:, 2].float().to(device) if found >= 0 else None,
        )


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Flat views of all elements, in lists of `BUCKET` elements at most."""
    bucket: list[Tensor] = []
    room = BUCKET
    for tensor in tensors:
        rest = tensor.view(-1)
        while len(rest):
            bucket.append(rest[:room])
            rest, room = rest[room:], room - len(bucket[-1])
            if not room:
                yield bucket
                bucket, room = [], BUCKET
    if bucket:
        yield bucket


def _collective(operation: Callable[[], object]) -> None:
    try:
        operation()
    except (RuntimeError, ValueError) as error:
        if lacks_memory(error):
            raise
        raise Disconnected(str(error).partition("\n")[0]) from error
