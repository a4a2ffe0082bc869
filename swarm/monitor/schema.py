"""The only schema of the monitor: of `--json`, `/snapshot.json`, the page's events, `/metrics`.

Each field is described in swarm/monitor/README.md. Other figures in `peers` are those of
`PeerRecord` (swarm/protocol/records/records.py), with the same names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal, TypedDict, cast

from swarm.monitor.health import causes_of, health_of, pace_of
from swarm.monitor.metrics import swarm_tokens_per_s
from swarm.monitor.snapshot import Coverage, ExpertRow, Merge, PeerRow, Snapshot


class HealthJson(TypedDict):
    """`Health`. `unreachable` if the look failed: all else is from the last successful look."""

    word: Literal[
        "gathering",
        "finished",
        "split",
        "halted",
        "paused",
        "stalled",
        "degraded",
        "unknown",
        "healthy",
        "unreachable",
    ]
    reason: str


class PaceJson(TypedDict):
    """`Pace`, and the sum of the peers' tokens/s."""

    tokens_per_s: float
    committed_per_s: float | None
    utilisation: float | None
    round_s: float | None
    eta_s: float | None


class CauseJson(TypedDict):
    """`Cause`."""

    fault: Literal["dead", "cut", "silent", "trouble", "late", "left out", "slow"]
    peer: str
    text: str


class LinkJson(TypedDict):
    """`LinkFigures` of a record."""

    rtt_ms: float | None
    down_mbit: float | None
    up_mbit: float | None
    unreached: dict[str, Literal["gone", "silent"]]


class RoutingJson(TypedDict):
    """`RoutingFigures` of a record."""

    max_load: float
    idle_experts: int
    dropped: float
    similarity: float | None
    shares: list[int]
    pairs: list[tuple[int, int, int]]


class WorkersJson(TypedDict):
    """`WorkersFigures` of a record."""

    number: int
    step_s: float
    shares: dict[str, float]
    bubble: float | None
    expected: float | None
    idle: list[int]
    slowest: int | None
    why: str


class LastRoundJson(TypedDict):
    """`RoundFigures` of a record."""

    round: int
    counted: bool
    seconds: float
    phases: dict[str, float]
    blob_bytes_sent: int
    blob_bytes_received: int
    why_not: str
    left_out: dict[str, str]


class PeerJson(TypedDict):
    """A peer's own record, and its standing by the newest manifest."""

    peer_id: str
    name: str
    addresses: list[str]
    state: str
    capacity: float
    room: int
    generation: str
    height: int
    round: int
    rounds_total: int
    manifest_digest: str
    owned_experts: list[int]
    step: int
    tokens: int
    loss: float | None
    val_loss: float | None
    tokens_per_s: float
    blob_bytes_sent: int
    blob_bytes_received: int
    round_blob_bytes_sent: int
    round_blob_bytes_received: int
    control_bytes_sent: int
    control_bytes_received: int
    steps_skipped: int
    refused: dict[str, int]
    reason: str
    version: str
    moments_bytes_sent: int
    moments_bytes_received: int
    zero_moments: int
    moments_reason: str
    routing: RoutingJson | None
    grad_norm: float | None
    grad_spikes: int
    last_round: LastRoundJson | None
    tokens_lost: int
    engine: str
    trouble: str
    link: LinkJson | None
    workers: WorkersJson | None
    possession: str
    agreement: Literal["equal", "behind", "ahead", "different"]
    votes: bool | None
    counted: int
    contributed: bool | None
    published: float | None
    heard: float | None


class ExpertJson(TypedDict):
    """An expert by the newest manifest, and its place in the newest merge that named it."""

    expert: int
    owners: list[str]
    version: int | None
    age: int | None
    nearest: int | None
    donors: list[list[int]]


class MergeJson(TypedDict):
    """A merge. `ExpertJson` lists the donors of the newest merge that named the expert."""

    generation: str
    round: int
    merged: int
    step: int
    alpha: float
    experts: list[int]


class CoverageJson(TypedDict):
    """`Coverage`: whole laps, the share of the next one, and windows of the text."""

    laps: int
    share: float
    windows: int
    dealt: int
    open: int


class ScoreJson(TypedDict):
    """`ScoreRow`."""

    publisher: str
    member: bool | None
    manifest_digest: str
    round: int
    task: str
    metric: str
    value: float
    samples: int


class RoundJson(TypedDict):
    """`RoundPoint`."""

    round: int
    at: float
    seconds: float | None
    tokens: int | None
    train_loss: float | None
    tokens_per_s: float
    present: int
    contributors: int | None
    committed_per_s: float | None


class EventJson(TypedDict):
    """`Happening`."""

    at: float
    topic: Literal["round", "merge", "peer", "members", "chain"]
    text: str


class SnapshotJson(TypedDict):
    """The whole snapshot. None and [] mean unknown."""

    run_id: str | None
    name: str
    at: float
    live: bool
    health: HealthJson
    causes: list[CauseJson]
    generation: str
    height: int
    round: int
    rounds_total: int
    manifest_digest: str
    step: int | None
    tokens: int | None
    members: int | None
    wait_for_peers: int
    quorum: bool | None
    absent: list[str]
    left_out: list[str]
    pace: PaceJson
    reasons: list[str]
    coverage: CoverageJson | None
    peers: list[PeerJson]
    experts: list[ExpertJson]
    merges: list[MergeJson]
    losses: list[tuple[int, float]]
    bits_per_byte_of_nat: float | None
    rounds: list[RoundJson]
    events: list[EventJson]
    scores: list[ScoreJson]


def as_json(snapshot: Snapshot, unreachable: str | None = None) -> SnapshotJson:
    """The form that scripts and pages may rely on, ready for `json.dumps`.

    Args:
        snapshot: snapshot of the last successful look.
        unreachable: why a later look failed. None if it did not fail.
    """
    health, newest = health_of(snapshot), _newest_merges(snapshot)
    return {
        "run_id": snapshot.run_id,
        "name": snapshot.name,
        "at": round(snapshot.at, 3),
        "live": snapshot.live,
        "health": {"word": "unreachable", "reason": unreachable}
        if unreachable
        else {"word": health.word.value, "reason": health.reason},
        "causes": [
            {"fault": cause.fault.value, "peer": cause.peer, "text": cause.text}
            for cause in causes_of(snapshot)
        ],
        "generation": snapshot.generation,
        "height": snapshot.height,
        "round": snapshot.round,
        "rounds_total": snapshot.rounds_total,
        "manifest_digest": snapshot.manifest_digest,
        "step": snapshot.step,
        "tokens": snapshot.tokens,
        "members": snapshot.members,
        "wait_for_peers": snapshot.wait_for_peers,
        "quorum": snapshot.quorum,
        "absent": list(snapshot.absent),
        "left_out": list(snapshot.left_out),
        "pace": cast(
            PaceJson, {"tokens_per_s": swarm_tokens_per_s(snapshot), **asdict(pace_of(snapshot))}
        ),
        "reasons": list(snapshot.reasons),
        "coverage": _coverage(snapshot.coverage) if snapshot.coverage else None,
        "peers": [_peer(row) for row in snapshot.peers],
        "experts": [
            _expert(row, snapshot.round, newest.get(row.expert, ())) for row in snapshot.experts
        ],
        "merges": [_merge(merge) for merge in snapshot.merges],
        "losses": list(snapshot.losses),
        "bits_per_byte_of_nat": snapshot.bits_per_byte_of_nat,
        "rounds": [cast(RoundJson, vars(point)) for point in snapshot.rounds],
        "events": [
            {"at": round(event.at, 3), "topic": event.topic.value, "text": event.text}
            for event in snapshot.events
        ],
        "scores": [cast(ScoreJson, vars(score)) for score in snapshot.scores],
    }


def _peer(row: PeerRow) -> PeerJson:
    record: dict[str, Any] = asdict(row.record)
    record["state"] = row.record.state.value
    record["addresses"], record["owned_experts"] = (
        list(row.record.addresses),
        list(row.record.owned_experts),
    )
    if row.record.link:
        unreached = row.record.link.unreached.items()
        record["link"]["unreached"] = {peer: silence.value for peer, silence in unreached}
    standing = {
        "agreement": row.agreement.value,
        "votes": row.votes,
        "counted": row.counted,
        "contributed": row.contributed,
        "published": None if row.published is None else round(row.published, 3),
        "heard": None if row.heard is None else round(row.heard, 3),
    }
    return cast(PeerJson, record | standing)


def _expert(row: ExpertRow, round_: int, donors: tuple[tuple[int, ...], ...]) -> ExpertJson:
    best = Counter(layer[0] for layer in donors if layer)
    return {
        "expert": row.expert,
        "owners": list(row.owners),
        "version": row.version,
        "age": None if row.version is None else max(round_ - row.version, 0),
        "nearest": min(best, key=lambda expert: (-best[expert], expert)) if best else None,
        "donors": [list(layer) for layer in donors],
    }


def _newest_merges(snapshot: Snapshot) -> Mapping[int, tuple[tuple[int, ...], ...]]:
    """Donors of each expert, by layer, in the newest merge that named donors of the expert."""
    found: dict[int, tuple[tuple[int, ...], ...]] = {}
    for merge in snapshot.merges:
        found |= merge.donors
    return found


def _merge(merge: Merge) -> MergeJson:
    return {
        "generation": merge.generation,
        "round": merge.round,
        "merged": merge.merged,
        "step": merge.step,
        "alpha": merge.alpha,
        "experts": sorted(merge.donors),
    }


def _coverage(coverage: Coverage) -> CoverageJson:
    return {
        "laps": coverage.laps,
        "share": coverage.share,
        "windows": coverage.windows,
        "dealt": coverage.dealt,
        "open": coverage.open,
    }
