"""A finished run, round by round, from the histories (`events.jsonl`) of its peers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from swarm.monitor.history import with_history
from swarm.monitor.snapshot import Agreement, ExpertRow, Happening, PeerRow, Snapshot, Topic
from swarm.protocol.records import records
from swarm.protocol.values.manifest import ALL_EXPERTS

Event = Mapping[str, Any]


def frames(run_id: str, histories: Mapping[str, Sequence[Event]]) -> Iterator[Snapshot]:
    """The snapshots that a monitor would have shown when each manifest was first applied.

    Args:
        run_id: id of the run.
        histories: events of each peer, oldest first, by the peer's name.

    Raises:
        KeyError: an event lacks a field that peers write.
    """
    applied = sorted(
        (
            (event["time"], name, event)
            for name, events in histories.items()
            for event in events
            if event["event"] == "applied"
        ),
        key=lambda found: found[:2],
    )
    ids = {name: _peer_id(name, events) for name, events in histories.items()}
    total = max((event["round"] for _, _, event in applied), default=0)
    losses = {
        event["round"]: event["val_loss"]
        for events in histories.values()
        for event in events
        if event["event"] == "validation" and math.isfinite(event["val_loss"])
    }
    by_digest: dict[str, dict[str, Event]] = {name: {} for name in histories}
    for _, name, event in applied:
        by_digest[name][event["digest"]] = event
    before: Snapshot | None = None
    seen: set[str] = set()
    for time, _, event in applied:
        if event["digest"] in seen:
            continue
        seen.add(event["digest"])
        own = {name: _newest(by_digest[name], event) for name in sorted(histories)}
        rows = tuple(_row(ids[k], k, mine, event, total) for k, mine in own.items() if mine)
        found = _frame(run_id, event, time, rows=rows, total=total, losses=losses)
        before = with_history(found, before)
        if event["kind"] == "merge":
            told = f"similar experts were merged at step {event['step']}"
            merged = Happening(time, Topic.MERGE, told)
            before = replace(before, events=(*before.events, merged))
        yield before


def _newest(by_digest: dict[str, Event], tip: Event) -> Event | None:
    """A peer's last manifest up to a tip's height, or the tip itself if the peer has applied it."""
    found = by_digest.get(tip["digest"])
    earlier = (e for e in reversed(by_digest.values()) if e["height"] <= tip["height"])
    return found or next(earlier, None)


def _frame(
    run_id: str,
    tip: Event,
    time: float,
    *,
    rows: tuple[PeerRow, ...],
    total: int,
    losses: Mapping[int, float],
) -> Snapshot:
    left_out = set(tip["members"]) - set(tip["contributors"]) if tip["round"] else set()
    return Snapshot(
        run_id=run_id,
        name=run_id.rpartition("-")[0],
        generation=tip["generation"],
        height=tip["height"],
        round=tip["round"],
        rounds_total=total,
        manifest_digest=tip["digest"],
        peers=rows,
        experts=tuple(
            ExpertRow(int(expert), tuple(owners), None)
            for expert, owners in sorted(tip["owners"].items(), key=lambda item: int(item[0]))
        ),
        merges=(),
        losses=tuple(sorted((k, loss) for k, loss in losses.items() if k <= tip["round"])),
        reasons=(),
        at=time,
        step=tip["step"],
        tokens=tip["tokens"],
        members=len(tip["members"]),
        left_out=tuple(sorted(left_out)),
        live=False,
    )


def _row(peer_id: str, name: str, own: Event, tip: Event, total: int) -> PeerRow:
    record = records.PeerRecord(
        peer_id=peer_id,
        name=name,
        addresses=(),
        state=records.PeerState.TRAINING,
        capacity=1.0,
        room=ALL_EXPERTS,
        generation=own["generation"],
        height=own["height"],
        round=own["round"],
        rounds_total=total,
        manifest_digest=own["digest"],
        owned_experts=tuple(own["owned"]),
        step=own["step"],
        tokens=own["trained_tokens"],
        loss=None,
        val_loss=None,
        tokens_per_s=own["trained_tokens"] / own["training_s"] if own["training_s"] else 0.0,
        blob_bytes_sent=own["blob_bytes_sent"],
        blob_bytes_received=own["blob_bytes_received"],
        round_blob_bytes_sent=own["blob_bytes_sent"],
        round_blob_bytes_received=own["blob_bytes_received"],
        control_bytes_sent=own["control_bytes_sent"],
        control_bytes_received=0,
        steps_skipped=0,
        refused={},
        reason=records.shortened(own["reason"]),
        version="",
        moments_bytes_sent=own["moments_bytes_sent"],
        moments_bytes_received=0,
        zero_moments=0,
        moments_reason="",
        routing=records.routing_figures(own["routing"]) if own["routing"] else None,
        grad_norm=own["grad_norm"],
        grad_spikes=own["grad_spikes"],
        last_round=records.RoundFigures(
            own["round"],
            own["counted"],
            own["seconds"],
            {phase: figures["seconds"] for phase, figures in own["phases"].items()},
            own["blob_bytes_sent"],
            own["blob_bytes_received"],
            own["why_not"],
        ),
        tokens_lost=own["tokens_lost"],
        engine="",
        trouble="",
        link=None,
        workers=_workers(own.get("workers")),
        possession="",
    )
    return PeerRow(
        record,
        _agreement(own, tip),
        votes=True if peer_id in tip["members"] else None,
        contributed=peer_id in tip["contributors"],
    )


def _workers(found: Event | None) -> records.WorkersFigures | None:
    if found is None:
        return None
    kept = {name: value for name, value in found.items() if name != "ranks"}
    why = records.shortened(found["why"], records.MAX_BRIEF)
    return records.workers_figures({**kept, "idle": tuple(found["idle"]), "why": why})


def _agreement(own: Event, tip: Event) -> Agreement:
    if own["digest"] == tip["digest"]:
        return Agreement.EQUAL
    if own["height"] == tip["height"]:
        return Agreement.DIFFERENT
    return Agreement.BEHIND if own["height"] < tip["height"] else Agreement.AHEAD


def _peer_id(name: str, events: Sequence[Event]) -> str:
    return next((str(e["peer_id"]) for e in events if e["event"] == "started"), name)
