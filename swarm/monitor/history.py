"""History that is no longer in records: losses, merges, rounds and events of earlier looks.

A peer's history adds rounds before the first look. A file keeps all across restarts of the monitor.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from pydantic import TypeAdapter, ValidationError

from swarm.monitor.health import Fault, causes_of
from swarm.monitor.metrics import swarm_tokens_per_s
from swarm.monitor.snapshot import (
    Agreement,
    Happening,
    Merge,
    PeerRow,
    RoundPoint,
    ScoreRow,
    Snapshot,
    Topic,
    in_order,
)
from swarm.protocol.records.life_events import Applied, EventReader, Started, Validation
from swarm.protocol.records.records import Real

logger = logging.getLogger(__name__)


MAX_POINTS = 2000
"""Limit of losses and of rounds. Older entries are left out."""
MAX_MERGES = 64
MAX_EVENTS = 300


def with_history(snapshot: Snapshot, before: Snapshot | None) -> Snapshot:
    """The snapshot with the history of an earlier one of the same run, and the changes since.

    Args:
        snapshot: snapshot of a look, with the losses and merges in its records.
        before: the result of the previous look. Ignored if it is of another run.
    """
    snapshot = replace(snapshot, peers=_heard(snapshot, before))
    if before is None or before.run_id != snapshot.run_id:
        return replace(snapshot, rounds=tuple(_point(snapshot, ())))
    losses = dict(before.losses) | dict(snapshot.losses)
    merges = {(m.generation, m.merged): m for m in (*before.merges, *snapshot.merges)}
    kept = before.rounds
    found = replace(
        snapshot,
        bits_per_byte_of_nat=snapshot.bits_per_byte_of_nat or before.bits_per_byte_of_nat,
        losses=tuple(sorted(losses.items()))[-MAX_POINTS:],
        merges=tuple(sorted(merges.values(), key=lambda merge: merge.when()))[-MAX_MERGES:],
        rounds=(*kept, *_point(snapshot, kept))[-MAX_POINTS:],
        scores=in_order({s.what: s for s in (*before.scores, *snapshot.scores)}.values()),
    )
    events = (*before.events, *_changes(before, found))
    return replace(found, events=events[-MAX_EVENTS:])


def _heard(snapshot: Snapshot, before: Snapshot | None) -> tuple[PeerRow, ...]:
    """The peers. An unchanged record keeps the time when it was first seen."""
    old = {row.record.peer_id: row for row in before.peers} if before else {}
    return tuple(
        replace(row, heard=known.heard)
        if (known := old.get(row.record.peer_id))
        and known.published is not None
        and known.published == row.published
        else row
        for row in snapshot.peers
    )


def _point(snapshot: Snapshot, before: tuple[RoundPoint, ...]) -> Iterable[RoundPoint]:
    """The point of a round that is seen for the first time."""
    last = before[-1] if before else None
    if snapshot.run_id is None or (last and snapshot.round <= last.round):
        return
    passed = snapshot.at - last.at if last else 0.0
    # The first look was in the middle of a round, so the second point has no whole round either.
    whole = last if last and len(before) > 1 and passed > 0 else None
    known = snapshot.tokens is not None and whole is not None and whole.tokens is not None
    speaking, members = snapshot.speaking, snapshot.members
    losses = [row.record.loss for row in speaking if row.record.loss is not None]
    yield RoundPoint(
        round=snapshot.round,
        at=snapshot.at,
        seconds=passed / (snapshot.round - whole.round) if whole else None,
        tokens=snapshot.tokens,
        train_loss=sum(losses) / len(losses) if losses else None,
        tokens_per_s=swarm_tokens_per_s(snapshot),
        present=len(speaking),
        contributors=None if members is None else members - len(snapshot.left_out),
        committed_per_s=(
            max((snapshot.tokens or 0) - (whole.tokens or 0), 0) / passed
            if known and whole
            else None
        ),
    )


def _changes(before: Snapshot, now: Snapshot) -> list[Happening]:
    """Changes between two looks that interest a person."""

    def tell(topic: Topic, text: str) -> None:
        told.append(Happening(now.at, topic, text))

    told: list[Happening] = []
    if now.generation != before.generation:
        tell(Topic.CHAIN, f"generation {before.generation[:12]} -> {now.generation[:12]}")
    if now.round != before.round:
        tell(Topic.ROUND, _decided(now))
    old_merges = {(merge.generation, merge.merged) for merge in before.merges}
    for merge in now.merges:
        if (merge.generation, merge.merged) not in old_merges:
            experts = f"{len(merge.donors)} experts announced"
            tell(
                Topic.MERGE,
                f"merge {merge.merged} at step {merge.step}, alpha {merge.alpha:.3g}, {experts}",
            )
    for reason in now.reasons if now.manifest_digest != before.manifest_digest else ():
        tell(Topic.MEMBERS, reason)
    known = {(cause.fault, cause.peer) for cause in causes_of(before)}
    for cause in causes_of(now):
        if cause.fault is not Fault.SILENT and (cause.fault, cause.peer) not in known:
            tell(Topic.PEER, cause.text)
    old, new = ({row.record.peer_id: row for row in look.speaking} for look in (before, now))
    for peer in sorted(new.keys() - old.keys()):
        tell(Topic.PEER, f"{new[peer].called} is present")
    present = {row.record.peer_id for row in now.peers}
    for peer in sorted(old.keys() - new.keys()):
        state = old[peer].record.state.value.replace("_", " ")
        gone = "is no longer a member" if peer in present else "is no longer present"
        tell(Topic.PEER, f"{old[peer].called} {gone}; its last state was: {state}")
    for peer in sorted(new.keys() & old.keys()):
        split = Agreement.DIFFERENT
        if new[peer].agreement is split and old[peer].agreement is not split:
            tell(Topic.CHAIN, f"{new[peer].called} has another tip at the same height")
    return told


def _decided(now: Snapshot) -> str:
    point = now.rounds[-1] if now.rounds else None
    parts = [f"round {now.round} decided"]
    if point and point.round == now.round and point.seconds is not None:
        parts.append(f"after {point.seconds:.1f} s")
    if now.members is not None:
        parts.append(f"with {now.members - len(now.left_out)} of {now.members} members")
    if now.left_out:
        parts.append("without " + ", ".join(map(now.called, now.left_out[:4])))
    return ", ".join(parts)


_TOPICS = {"quorum": Topic.ROUND, "merge": Topic.MERGE, "reform": Topic.CHAIN}
_TOLD = {
    "quorum": "round {round} decided, with {count} of {members} members",
    "merge": "similar experts were merged at step {step}",
    "reform": "generation {generation} begins, with {members} members",
}


@dataclass(frozen=True)
class Earlier:
    """The history of one run before the first look.

    Attributes:
        run: id of the run. None if no line names it.
        losses: (round, held-out loss in nats per token), ascending.
        events: rounds, merges and reforms, oldest first, each manifest once.
    """

    run: str | None
    losses: tuple[tuple[int, float], ...]
    events: tuple[Happening, ...]


def earlier_of(lines: Iterable[str]) -> Earlier:
    """Reads the joined histories of peers of one run. Lines that were cut short are skipped.

    Raises:
        ValueError: a whole line is no event of this version, or the runs differ.
    """
    runs: set[str] = set()
    losses: dict[int, float] = {}
    events: dict[str, Happening] = {}
    reader = EventReader()
    for line in lines:
        if not line.endswith("}"):
            continue
        _, time, event = reader.parse(line)
        if isinstance(event, Started):
            runs.add(event.run)
        elif isinstance(event, Validation) and math.isfinite(event.val_loss):
            losses[event.round] = event.val_loss
        elif isinstance(event, Applied) and event.kind in _TOLD:
            events.setdefault(event.digest, _happening(time, event))
    if len(runs) > 1:
        raise ValueError(f"they are of several runs: {', '.join(sorted(runs))}")
    told = sorted(events.values(), key=lambda happening: happening.at)
    return Earlier(next(iter(runs), None), tuple(sorted(losses.items())), tuple(told))


def with_earlier(first: Snapshot, before: Snapshot | None, earlier: Earlier) -> Snapshot:
    """A snapshot in place of a look before `first`, with history that is no longer in records."""
    known = before or replace(first, rounds=(), events=())
    seen = known.events[0].at if known.events else first.at
    older = tuple(event for event in earlier.events if event.at < seen)
    losses = dict(earlier.losses) | dict(known.losses)
    return replace(
        known,
        losses=tuple(sorted(losses.items()))[-MAX_POINTS:],
        events=(*older, *known.events)[-MAX_EVENTS:],
    )


def _happening(time: float, event: Applied) -> Happening:
    text = _TOLD[event.kind].format(
        round=event.round,
        count=len(event.contributors),
        members=len(event.members),
        step=event.step,
        generation=event.generation[:12],
    )
    return Happening(time, _TOPICS[event.kind], text)


@dataclass(frozen=True)
class Kept:
    """The part of a snapshot that a history file keeps. See `Snapshot` for the fields."""

    run_id: str | None
    losses: tuple[tuple[int, Real], ...]
    merges: tuple[Merge, ...]
    rounds: tuple[RoundPoint, ...]
    events: tuple[Happening, ...]
    scores: tuple[ScoreRow, ...]


_SCHEMA = TypeAdapter(Kept)


def kept_of(snapshot: Snapshot) -> Kept:
    """The part of a snapshot to keep."""
    return Kept(*(getattr(snapshot, each.name) for each in fields(Kept)))


def encode_kept(kept: Kept) -> bytes:
    """The JSON form."""
    return _SCHEMA.dump_json(kept)


def decode_kept(encoded: bytes) -> Kept:
    """Reads the bytes of `encode_kept`. Entries that cannot be read are skipped with a warning.

    An earlier version kept claims of strangers: absurd losses, and infinite sums as null.

    Raises:
        ValueError: the bytes are not those of `encode_kept`.
    """
    try:
        return _SCHEMA.validate_json(encoded)
    except ValidationError as error:
        wrong = {fault["loc"][:2] for fault in error.errors()}
        if not all(len(place) == 2 and isinstance(place[1], int) for place in wrong):
            raise
    found = json.loads(encoded)
    for name, position in sorted(wrong, reverse=True):
        del found[name][position]
    told = ", ".join(sorted({str(name) for name, _ in wrong}))
    logger.warning("%d entries of the history (%s) cannot be read: left out", len(wrong), told)
    return _SCHEMA.validate_json(json.dumps(found))


def recalled(snapshot: Snapshot, kept: Kept) -> Snapshot | None:
    """A snapshot of the look before the restart. None if the file is of another run.

    Changes while the monitor was stopped are shown for losses, rounds and merges, not for peers.
    """
    if kept.run_id != snapshot.run_id:
        return None
    return replace(snapshot, **vars(kept))
