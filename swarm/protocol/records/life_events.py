"""The lines of a peer's history, `events.jsonl`: the fields of each kind of event.

A line is an object with `event` (the kind), `time` (seconds since 1970, by the peer's wall clock)
and the fields of the kind. After a kill the last line may be torn; the next one begins on a line of
its own.

Members, owners and the like are long, 46 kB at 256 members, and seldom change from one manifest to
the next. An `applied` line leaves out fields that equal those of the last such line (`abridged`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from swarm.config.section import Strict
from swarm.protocol.records.records import Real

Totals = Mapping[str, int]
UNCHANGED = ("members", "contributors", "owned", "owners")
"""Fields that an `applied` line has only where they differ from the `applied` line before."""


@dataclass(frozen=True)
class BytesMoved(Strict):
    """Bytes that a peer has moved, by kind."""

    blobs_sent: int
    blobs_received: int
    control_sent: int
    control_received: int
    moments_sent: int
    moments_received: int


@dataclass(frozen=True)
class Started(BytesMoved):
    """The peer takes part from now on; bytes are counted from the start of its process."""

    run: str
    peer_id: str
    height: int
    digest: str


@dataclass(frozen=True)
class Progress(Strict):
    """A sentence about the local steps under way, or about a wait."""

    text: str


@dataclass(frozen=True)
class AppliedPhase(Strict):
    """Time and memory of one phase."""

    seconds: float
    peak_rss_bytes: int


@dataclass(frozen=True)
class AppliedRouting(Strict):
    """`RoutingStats` of the local steps."""

    max_load: float
    idle_experts: int
    dropped: float
    similarity: Real | None
    shares: tuple[int, ...]
    pairs: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True)
class AppliedRank(Strict):
    """`RankFigures` of one worker process, over all local steps."""

    steps: int
    seconds: float
    micro_batches: int
    idle: int
    stage: int
    stages: int
    chunks: int
    pipeline_s: float
    stage_s: float
    operations: Mapping[str, int]
    num_bytes: Mapping[str, int]
    waited_s: Mapping[str, float]


@dataclass(frozen=True)
class AppliedWorkers(Strict):
    """`WorkersStats` of the local steps, and the figures of each worker behind them."""

    number: int
    step_s: float
    shares: Mapping[str, float]
    bubble: float | None
    expected: float | None
    idle: tuple[int, ...]
    slowest: int | None
    why: str
    ranks: tuple[AppliedRank, ...]


@dataclass(frozen=True)
class Applied(Strict):
    """A manifest became the peer's tip; figures since the previous tip."""

    generation: str
    height: int
    round: int
    kind: str
    digest: str
    step: int
    tokens: int
    members: tuple[str, ...]
    contributors: tuple[str, ...]
    owned: tuple[int, ...]
    owners: Mapping[str, tuple[str, ...]]
    trained_tokens: int
    counted: bool
    why_not: str
    tokens_lost: int
    wait_s: float
    steps: int
    training_s: float
    seconds: float
    blob_bytes_sent: int
    blob_bytes_received: int
    control_bytes_sent: int
    moments_bytes_sent: int
    reason: str
    routing: AppliedRouting | None
    grad_norm: float | None
    grad_spikes: int
    phases: Mapping[str, AppliedPhase]
    workers: AppliedWorkers | None = None


@dataclass(frozen=True)
class Validation(Strict):
    """This peer measured the state after a round."""

    round: int
    digest: str
    val_loss: float
    bits_per_byte: float


@dataclass(frozen=True)
class RefusedOwn(Strict):
    """A value that others would refuse, so that this peer restarted from the agreed value."""

    unit: str
    reason: str


@dataclass(frozen=True)
class MomentsGiven(Strict):
    """Moments of an expert are offered to its next owners."""

    expert: int
    round: int
    digest: str
    num_bytes: int
    to: tuple[str, ...]


@dataclass(frozen=True)
class MomentsTaken(Strict):
    """A newly owned expert continues with these moments; null: with zero moments."""

    expert: int
    round: int | None
    digest: str | None
    reason: str


@dataclass(frozen=True)
class Finished(Strict):
    """All rounds are done."""

    round: int
    digest: str


@dataclass(frozen=True)
class Ended(BytesMoved):
    """The process ends; totals since it began."""

    refused: Totals
    phases: Mapping[str, AppliedPhase]
    tokens_lost: int = 0


KINDS: Mapping[str, type] = {
    "started": Started,
    "progress": Progress,
    "applied": Applied,
    "validation": Validation,
    "refused": RefusedOwn,
    "moments_given": MomentsGiven,
    "moments_taken": MomentsTaken,
    "finished": Finished,
    "ended": Ended,
}
_SCHEMAS: Mapping[str, TypeAdapter[object]] = {
    kind: TypeAdapter(schema) for kind, schema in KINDS.items()
}


def abridged(fields: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """An `applied` line without the fields that equal those of the previous `applied` line.

    Args:
        fields: the whole line.
        before: the complete previous line of the same process; empty for the first one.
    """
    return {
        name: value
        for name, value in fields.items()
        if name not in UNCHANGED or name not in before or before[name] != value
    }


class EventReader:
    """Reads the lines of one history in order, and adds the fields that they leave out."""

    def __init__(self) -> None:
        self._before: dict[str, Any] = {}

    def read(self, line: bytes | str) -> dict[str, Any]:
        """A line as an object with all its fields.

        Raises:
            ValueError: the line is no JSON object.
        """
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError("a line is not an object")
        if found.get("event") == "applied":
            found = {**self._before, **found}
            self._before = {name: found[name] for name in UNCHANGED if name in found}
        return found

    def parse(self, line: bytes | str) -> tuple[str, float, object]:
        """Kind, time and fields of a whole line.

        Raises:
            ValueError: the line is not an event of this version; the error names the field.
        """
        found = self.read(line)
        kind, time = found.pop("event", None), found.pop("time", None)
        if kind not in _SCHEMAS or not isinstance(time, int | float):
            raise ValueError(f"no event with a time is called {kind!r}")
        return kind, float(time), _SCHEMAS[kind].validate_json(json.dumps(found))
