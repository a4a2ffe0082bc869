"""Figures of each rank in a step, and their summary for a person. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from swarm.train.engine.mesh import bubble_of, flows_of

STANDS_OUT = 1.1
"""A rank is named if it computes this many times as long as the others' median."""
SHOWN = 0.005
"""An operation is mentioned from this share of a step's time on."""


@dataclass(frozen=True)
class RankFigures:
    """One rank in one step, or in several steps together.

    Attributes:
        steps: number of steps.
        seconds: time from the command until the step is done.
        micro_batches: number of micro-batches that the rank computed.
        idle: slots without work: the difference to the rank with the most micro-batches.
        stage: number of the rank's stage in the pipeline.
        stages: stages of the pipeline; 1 for none.
        chunks: runs of layers that each rank of a pipeline has.
        pipeline_s: seconds of the pipeline's schedule.
        stage_s: seconds of the schedule spent in layers, exchanges of tokens included.
        operations: number of operations between ranks, by kind.
        num_bytes: bytes that this rank sent to others, by kind.
        waited_s: seconds in operations between ranks, by kind: from the time when this rank is
            ready until it has received the others' values, so waits for slower ranks are included.
            Transfers between stages overlap compute, so they are in `pipeline_s` instead.
    """

    steps: int = 1
    seconds: float = 0.0
    micro_batches: int = 0
    idle: int = 0
    stage: int = 0
    stages: int = 1
    chunks: int = 1
    pipeline_s: float = 0.0
    stage_s: float = 0.0
    operations: Mapping[str, int] = field(default_factory=dict)
    num_bytes: Mapping[str, int] = field(default_factory=dict)
    waited_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def moved(self) -> dict[str, tuple[int, int]]:
        """Number and bytes of the operations of each kind."""
        return {kind: (n, self.num_bytes[kind]) for kind, n in self.operations.items()}

    @property
    def own_s(self) -> float:
        """Seconds of the rank outside operations between ranks and waits for a stage."""
        return self.seconds - sum(self.waited_s.values()) - (self.pipeline_s - self.stage_s)


@dataclass(frozen=True)
class WorkersStats:
    """All ranks in some steps, with means over these steps.

    Attributes:
        number: number of ranks.
        step_s: seconds of a step.
        shares: the part of a step's time of each kind of operation, mean over the ranks.
        bubble: part of a pipeline's time in which a stage computes nothing, mean over the ranks.
            None without a pipeline.
        expected: the value of `bubble` for stages of equal duration, by `bubble_of`.
        idle: ranks that computed fewer micro-batches than others.
        slowest: the rank that computes longest, if it stands out. None if all are alike.
        why: the reason, if known. "" if none stands out.
    """

    number: int
    step_s: float
    shares: Mapping[str, float]
    bubble: float | None
    expected: float | None
    idle: tuple[int, ...]
    slowest: int | None
    why: str

    def words(self) -> str:
        """The figures in a line."""
        parts = [f"{self.number} workers, {self.step_s:.3g} s a step"]
        if self.bubble is not None and self.expected is not None:
            parts.append(f"bubble {self.bubble:.0%}, {self.expected:.0%} with even stages")
        kinds = sorted(self.shares, key=lambda kind: -self.shares[kind])
        said = [f"{kind} {self.shares[kind]:.0%}" for kind in kinds if self.shares[kind] >= SHOWN]
        parts.append(f"between them: {', '.join(said)}" if said else "")
        if self.idle:
            names = ", ".join(map(str, self.idle))
            parts.append(f"fewer micro-batches than others: worker {names}")
        parts.append(self.why)
        return "; ".join(part for part in parts if part)


def together(steps: Iterable[Sequence[RankFigures]]) -> tuple[RankFigures, ...]:
    """The figures of each rank, summed over the steps since the last change of the ranks."""
    found: list[RankFigures] = []
    for ranks in steps:
        alike = [_place(rank) for rank in ranks] == [_place(rank) for rank in found]
        found = list(map(_added, found, ranks)) if alike else list(ranks)
    return tuple(found)


def folded(ranks: Sequence[RankFigures]) -> WorkersStats | None:
    """The figures of a peer's ranks. None for fewer than two ranks.

    Args:
        ranks: figures of the ranks in order, all over the same steps.
    """
    if len(ranks) < 2:
        return None
    step_s = max(rank.seconds for rank in ranks)
    kinds = sorted({kind for rank in ranks for kind in rank.waited_s})
    shares = {
        kind: statistics.mean(rank.waited_s.get(kind, 0.0) for rank in ranks) / step_s
        for kind in kinds
    }
    slowest, why = _slowest(ranks)
    return WorkersStats(
        number=len(ranks),
        step_s=step_s / ranks[0].steps,
        shares=shares,
        bubble=_bubble(ranks),
        expected=_expected(ranks),
        idle=tuple(index for index, rank in enumerate(ranks) if rank.idle),
        slowest=slowest,
        why=why,
    )


def _bubble(ranks: Sequence[RankFigures]) -> float | None:
    """Includes the time in which stages that finish sooner wait for the last stage."""
    pipeline_s = max(rank.pipeline_s for rank in ranks)
    if ranks[0].stages == 1 or not pipeline_s:
        return None
    return max(0.0, 1 - statistics.mean(rank.stage_s for rank in ranks) / pipeline_s)


def _expected(ranks: Sequence[RankFigures]) -> float | None:
    """Computed for a rank with the most micro-batches.

    Other ranks take the same slots without tokens, or wait.
    """
    one = max(ranks, key=lambda rank: rank.micro_batches)
    if one.stages == 1 or not one.micro_batches:
        return None
    number = one.micro_batches / one.steps
    goes = len(flows_of(round(number), one.stages)) if one.chunks > 1 else 1
    return bubble_of(one.stages, number / goes, one.chunks)


def _slowest(ranks: Sequence[RankFigures]) -> tuple[int | None, str]:
    index = max(range(len(ranks)), key=lambda rank: ranks[rank].own_s)
    one, others = ranks[index], [*ranks[:index], *ranks[index + 1 :]]
    median_s = statistics.median(rank.own_s for rank in others)
    if one.own_s < STANDS_OUT * median_s:
        return None, ""
    words = f"worker {index} computes {one.own_s / one.steps:.3g} s a step"
    words += f", others {median_s / one.steps:.3g}"
    usual = statistics.median(rank.micro_batches for rank in others)
    if one.micro_batches > usual:
        words += f": {one.micro_batches / one.steps:.3g} micro-batches, not {usual / one.steps:.3g}"
    elif one.stages > 1:
        words += f": stage {one.stage + 1} of {one.stages}"
    else:
        words += ", with as many micro-batches"
    return index, words


def _place(rank: RankFigures) -> tuple[int, ...]:
    return rank.stage, rank.stages, rank.chunks


def _added(one: RankFigures, other: RankFigures) -> RankFigures:
    values: dict[str, Any] = {}
    for each in fields(RankFigures):
        left, right = getattr(one, each.name), getattr(other, each.name)
        if each.name in {"stage", "stages", "chunks"}:
            values[each.name] = left
        elif isinstance(left, Mapping):
            values[each.name] = {k: left.get(k, 0) + right.get(k, 0) for k in left | right}
        else:
            values[each.name] = left + right
    return RankFigures(**values)
