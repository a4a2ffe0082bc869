"""Parts of `swarm.protocol.records`: what their fields may hold, and figures in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, Any

from pydantic import Field

from swarm.config.section import PRINTABLE
from swarm.protocol.schemas import DigestText, PeerText
from swarm.protocol.strict import Strict

MAX_REASON = 300
TOO_LATE = "too late"
"""In the words of a peer that still trained when its round was decided."""
NOTHING_DONE = "nothing to count"
"""In the words of a peer that still fetched what others had decided."""
MAX_BRIEF = 120
"""Of sentences that a record may have several of."""
MAX_PAIRS = 16
MAX_LEFT_OUT = 4
MAX_UNREACHED = 8
MAX_REFUSED = 16
MAX_KINDS = 12
MAX_IDLE = 16
MAX_SHARES = 256
"""Experts of which a peer tells what part of its tokens they got; a record has no room for more."""

Id = PeerText
Word = Annotated[str, Field(max_length=64, pattern=PRINTABLE)]
Reason = Annotated[str, Field(max_length=MAX_REASON, pattern=PRINTABLE)]
Brief = Annotated[str, Field(max_length=MAX_BRIEF, pattern=PRINTABLE)]
Hex = DigestText
Count = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(gt=0, lt=2**63)]
Height = Annotated[int, Field(ge=0, lt=2**31)]
"""Of manifests and rounds: one a second would take 68 years to get there."""
MAX_REAL = 1e100
"""More than any loss, norm or rate that a peer computes; sums, differences and squares of what
anybody says are finite too."""
Real = Annotated[float, Field(ge=-MAX_REAL, le=MAX_REAL, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, le=MAX_REAL, allow_inf_nan=False)]
Address = Annotated[str, Field(min_length=1, max_length=256, pattern=PRINTABLE)]
Expert = Annotated[int, Field(ge=0, lt=2**16)]
Worker = Annotated[int, Field(ge=0, lt=2**16)]
Work = Annotated[str, Field(max_length=24, pattern=PRINTABLE)]
Share = Annotated[int, Field(ge=0, le=1000)]
Alike = Annotated[int, Field(ge=-1000, le=1000)]
Pair = tuple[Expert, Expert, Alike]
"""Two experts, and a thousand times the CKA of what they make of the same tokens."""


@dataclass(frozen=True)
class RoutingFigures(Strict):
    """How a peer's last local steps spread their tokens over the experts."""

    max_load: Amount
    """Tokens of the busiest expert by the mean over experts, in the layer where that is largest."""
    idle_experts: Count
    """(Layer, expert) pairs without a token."""
    dropped: Amount
    """Share of the choices of experts that exceeded a capacity."""
    similarity: Real | None
    """Mean CKA of experts that got the same tokens; None if too few did."""
    shares: Annotated[tuple[Share, ...], Field(max_length=MAX_SHARES)] = ()
    """Of each expert its permille of all choices, over all layers; 0 only where it got none. () of
    a model with more than `MAX_SHARES` experts."""
    pairs: Annotated[tuple[Pair, ...], Field(max_length=MAX_PAIRS)] = ()
    """What `similarity` is the mean of, over layers, the most alike first."""


@dataclass(frozen=True)
class RoundFigures(Strict):
    """What a peer's last round took; durations, since clocks differ."""

    round: Height
    counted: bool
    """Whether its work is in the mean."""
    seconds: Amount
    """From the manifest before until this one was applied."""
    phases: Annotated[Mapping[Word, Amount], Field(max_length=8)]
    """Seconds in each phase, by its name."""
    blob_bytes_sent: Count
    blob_bytes_received: Count
    why_not: Brief = ""
    """Why it was not counted, by what the peer itself did; "" of one that was."""
    left_out: Annotated[Mapping[Id, Brief], Field(max_length=MAX_LEFT_OUT)] = field(
        default_factory=dict
    )
    """Other members that were not counted, and why, as this peer decided: it was the convener."""


@dataclass(frozen=True)
class WorkersFigures(Strict):
    """How a peer's worker processes computed its last local steps; means over these."""

    number: Annotated[int, Field(gt=0, le=2**16)]
    step_s: Amount
    """Seconds of a step."""
    shares: Annotated[Mapping[Work, Amount], Field(max_length=MAX_KINDS)]
    """Of each kind of operation between them its part of a step's time, the wait for slower ones
    included, mean over the workers."""
    bubble: Amount | None
    """Part of a pipeline's time in which a stage computes nothing, mean over the stages; None
    without one."""
    expected: Amount | None
    """The same, if all stages took as long."""
    idle: Annotated[tuple[Worker, ...], Field(max_length=MAX_IDLE)]
    """Workers that had fewer micro-batches than others."""
    slowest: Worker | None
    """The worker that computes longest; None if none stands out."""
    why: Brief
    """What is known of the reason; "" if none stands out."""


class Silence(Enum):
    """What becomes of messages to a peer."""

    GONE = "gone"  # its machine says that nothing listens there
    SILENT = "silent"  # no answer: its line may be cut


@dataclass(frozen=True)
class LinkFigures(Strict):
    """What a peer knows of its line; None: not measured."""

    rtt_ms: Amount | None
    """Shortest of the last control messages to each peer, handling included; median over peers."""
    down_mbit: Amount | None
    """Lower quartile of the day's fetches of over 1 MiB; before one, what was measured to join."""
    up_mbit: Amount | None
    """By tests of the last day, and by what others took since; None where neither is known."""
    unreached: Annotated[Mapping[Id, Silence], Field(max_length=MAX_UNREACHED)]
    """Peers to which the last messages in a row were lost."""


def routing_figures(stats: Mapping[str, Any]) -> RoutingFigures:
    """Of the fields of `RoutingStats`; what a record has no room for is left out."""
    shares = tuple(stats["shares"]) if len(stats["shares"]) <= MAX_SHARES else ()
    pairs = tuple((a, b, round(1000 * cka)) for a, b, cka in stats["pairs"][:MAX_PAIRS])
    return RoutingFigures(**{**stats, "shares": shares, "pairs": pairs})


def workers_figures(stats: Mapping[str, Any]) -> WorkersFigures:
    """Of the fields of `WorkersStats`; what a record has no room for is left out."""
    shares: Mapping[str, float] = stats["shares"]
    longest = sorted(shares, key=lambda kind: -shares[kind])[:MAX_KINDS]
    kept = {kind: shares[kind] for kind in sorted(longest)}
    return WorkersFigures(**{**stats, "shares": kept, "idle": stats["idle"][:MAX_IDLE]})
