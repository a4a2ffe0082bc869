"""What a peer's history tells of rounds before the monitor's first look."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from swarm.monitor.history import MAX_EVENTS, MAX_POINTS
from swarm.monitor.snapshot import Happening, Snapshot, Topic
from swarm.protocol.life_events import Applied, EventReader, Started, Validation

_TOPICS = {"quorum": Topic.ROUND, "merge": Topic.MERGE, "reform": Topic.CHAIN}
_TOLD = {
    "quorum": "round {round} decided, with {count} of {members} members",
    "merge": "similar experts were merged at step {step}",
    "reform": "generation {generation} begins, with {members} members",
}


@dataclass(frozen=True)
class Earlier:
    """Of one run.

    Attributes:
        run: its id; None if no line says it.
        losses: (round, held-out loss in nats per token), ascending.
        events: rounds, merges and reforms, oldest first; each manifest once.
    """

    run: str | None
    losses: tuple[tuple[int, float], ...]
    events: tuple[Happening, ...]


def earlier_of(lines: Iterable[str]) -> Earlier:
    """Reads histories of peers of one run, one after the other; lines torn off are left out.

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
    """The look before the first one, with what histories tell and records forget."""
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
