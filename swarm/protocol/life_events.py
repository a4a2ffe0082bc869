"""The lines of a peer's history, `events.jsonl`: what each kind of event has beside its time.

A line is an object with `event` (the kind), `time` (seconds since 1970, by the peer's wall clock)
and the fields of the kind. A kill may tear off the last line; the next one begins after it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import TypeAdapter

from swarm.protocol.figures import STRICT, Real

Totals = Mapping[str, int]


@dataclass(frozen=True)
class BytesMoved:
    """Bytes that a peer has moved, by kind."""

    blobs_sent: int
    blobs_received: int
    control_sent: int
    control_received: int
    moments_sent: int
    moments_received: int


@dataclass(frozen=True)
class Started(BytesMoved):
    """The peer takes part from now on; bytes since its process began."""

    __pydantic_config__ = STRICT
    run: str
    peer_id: str
    height: int
    digest: str


@dataclass(frozen=True)
class Progress:
    """A sentence about local steps under way, or about what is waited for."""

    __pydantic_config__ = STRICT
    text: str


@dataclass(frozen=True)
class AppliedPhase:
    """What one phase took."""

    __pydantic_config__ = STRICT
    seconds: float
    peak_rss_bytes: int


@dataclass(frozen=True)
class AppliedRouting:
    """`RoutingStats` of the local steps."""

    __pydantic_config__ = STRICT
    max_load: float
    idle_experts: int
    dropped: float
    similarity: Real | None
    shares: tuple[int, ...]
    pairs: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True)
class Applied:
    """A manifest became the peer's tip; figures since the one before."""

    __pydantic_config__ = STRICT
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


@dataclass(frozen=True)
class Validation:
    """This peer measured the state after a round."""

    __pydantic_config__ = STRICT
    round: int
    digest: str
    val_loss: float
    bits_per_byte: float


@dataclass(frozen=True)
class RefusedOwn:
    """A value of its own that nobody would take; it began anew from the agreed one."""

    __pydantic_config__ = STRICT
    unit: str
    reason: str


@dataclass(frozen=True)
class MomentsGiven:
    """Moments of an expert are out for its next owners."""

    __pydantic_config__ = STRICT
    expert: int
    round: int
    digest: str
    num_bytes: int
    to: tuple[str, ...]


@dataclass(frozen=True)
class MomentsTaken:
    """An expert that was taken up goes on with these moments; null: with zeros."""

    __pydantic_config__ = STRICT
    expert: int
    round: int | None
    digest: str | None
    reason: str


@dataclass(frozen=True)
class Finished:
    """All rounds are done."""

    __pydantic_config__ = STRICT
    round: int
    digest: str


@dataclass(frozen=True)
class Ended(BytesMoved):
    """The process ends; totals since it began."""

    __pydantic_config__ = STRICT
    refused: Totals
    phases: Mapping[str, AppliedPhase]


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


def parse_event(line: bytes | str) -> tuple[str, float, object]:
    """Kind, time and fields of a whole line.

    Raises:
        ValueError: it is no event of this version; says which field.
    """
    found = json.loads(line)
    if not isinstance(found, dict):
        raise ValueError("a line is no object")
    kind, time = found.pop("event", None), found.pop("time", None)
    if kind not in _SCHEMAS or not isinstance(time, int | float):
        raise ValueError(f"no event with a time is called {kind!r}")
    return kind, float(time), _SCHEMAS[kind].validate_json(json.dumps(found))
