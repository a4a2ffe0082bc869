"""What a monitor keeps of a run over its own restarts, as JSON."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, fields, replace

from pydantic import TypeAdapter, ValidationError

from swarm.monitor.scores import ScoreRow
from swarm.monitor.snapshot import Happening, Merge, RoundPoint, Snapshot
from swarm.protocol.figures import Real

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kept:
    """The history in a snapshot; see there."""

    run_id: str | None
    losses: tuple[tuple[int, Real], ...]
    merges: tuple[Merge, ...]
    rounds: tuple[RoundPoint, ...]
    events: tuple[Happening, ...]
    scores: tuple[ScoreRow, ...]


_SCHEMA = TypeAdapter(Kept)


def kept_of(snapshot: Snapshot) -> Kept:
    """What is worth keeping of a snapshot."""
    return Kept(*(getattr(snapshot, each.name) for each in fields(Kept)))


def encode_kept(kept: Kept) -> bytes:
    """As JSON."""
    return _SCHEMA.dump_json(kept)


def decode_kept(encoded: bytes) -> Kept:
    """Reads what `encode_kept` wrote; entries that cannot be read are passed over with a warning.

    An earlier version kept what strangers said: losses beyond all measure, and sums that were
    infinite, as null.

    Raises:
        ValueError: it is something else.
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
    """The look before the first one, as if the monitor had never ended; None of another run.

    What changed while it was away is told of losses, rounds and merges, not of peers.
    """
    if kept.run_id != snapshot.run_id:
        return None
    return replace(snapshot, **vars(kept))
