"""What a monitor keeps of a run over its own restarts, as JSON."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from pydantic import TypeAdapter

from swarm.monitor.scores import ScoreRow
from swarm.monitor.snapshot import Happening, Merge, RoundPoint, Snapshot


@dataclass(frozen=True)
class Kept:
    """The history in a snapshot; see there."""

    run_id: str | None
    losses: tuple[tuple[int, float], ...]
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
    """Reads what `encode_kept` wrote.

    Raises:
        ValueError: it is something else.
    """
    return _SCHEMA.validate_json(encoded)


def recalled(snapshot: Snapshot, kept: Kept) -> Snapshot | None:
    """The look before the first one, as if the monitor had never ended; None of another run.

    What changed while it was away is told of losses, rounds and merges, not of peers.
    """
    if kept.run_id != snapshot.run_id:
        return None
    return replace(snapshot, **vars(kept))
