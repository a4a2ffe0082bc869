"""What peers tell everybody in the DHT: small facts, signed by their owner, never commands.

Each record is canonical JSON under a key of its run, with one subkey per publishing peer, whose
signature the network checks. Nothing that agreement depends on is read from here: a record may be
lost, late or a lie. Keys, lifetimes and sizes are all in this file.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Annotated, TypeVar

from blake3 import blake3
from pydantic import Field, TypeAdapter, ValidationError

from swarm.canonical import canonical
from swarm.config import RunName
from swarm.config.explaining import refusal
from swarm.errors import BadRecord
from swarm.protocol.digests import Buffer
from swarm.protocol.figures import (
    MAX_REAL,
    MAX_REASON,
    MAX_REFUSED,
    Address,
    Amount,
    Brief,
    Count,
    Expert,
    Height,
    Hex,
    Id,
    LinkFigures,
    Positive,
    Real,
    Reason,
    RoundFigures,
    RoutingFigures,
    Word,
    WorkersFigures,
)
from swarm.protocol.invitation import Possession
from swarm.protocol.manifest import RUN_ID
from swarm.protocol.schemas import Generation, Room
from swarm.protocol.strict import Strict
from swarm.protocol.texts import Text, TokenizerFile

MAX_RECORD_BYTES = 20_000
"""Of a `PeerRecord` and a `MergeRecord`; the others need less."""
MAX_RUN_RECORD_BYTES = 3_000
MAX_VALIDATION_BYTES = 9_000
MAX_SCORE_BYTES = 9_000
MAX_ADDRESSES = 16
"""That a peer tells of itself."""
MAX_SCORES = 24
"""That one peer tells at a time."""
NUM_SHARDS = 16
FEW_SHARDS = 4
"""All records of one key come in one message of at most 4 MiB, so peers are spread over keys:
`NUM_SHARDS` for presence, `FEW_SHARDS` for each of the other kinds, which fewer read."""
HEARTBEAT_S = 8.0
"""How often a peer repeats its records."""
RECORD_TTL_S = 3 * HEARTBEAT_S
"""Presence and run records: a peer that died is gone from every view after this long."""
EVENT_TTL_S = 900.0
"""Merge, validation and score records, which are published per event, not as a sign of life."""
TaskName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.,-]{0,63}$")]

RunId = Annotated[str, Field(pattern=rf"{RUN_ID}|^gathering-[0-9a-f]{{32}}$")]


class RunState(Enum):
    """Whether a run trains yet."""

    GATHERING = "gathering"  # the founder waits for peers before the first round
    RUNNING = "running"  # rounds are going on


class PeerState(Enum):
    """What a peer is doing."""

    STARTING = "starting"  # loads its corpus and state, or listens for a chain
    JOINING = "joining"  # fetches the newest model, or waits to be listed
    TRAINING = "training"  # local steps
    AVERAGING = "averaging"  # in a round
    MERGING = "merging"  # computes or agrees on an expert merge
    CATCHING_UP = "catching_up"  # fetches a decided manifest that it missed
    PAUSED = "paused"  # too few experts have an owner: waits for machines with room
    LEAVING = "leaving"  # says good-bye
    FINISHED = "finished"  # all rounds done; serves blobs and records


@dataclass(frozen=True)
class RunRecord(Strict):
    """A run that can be joined; every member repeats it, so it outlives its founder."""

    run: RunId
    """Of a run that gathers: `gathering-` and the founder's nonce."""
    name: RunName
    fingerprint: Hex
    """Of the run configuration."""
    founder: Id
    founding: Hex
    """Digest of manifest 0."""
    founding_bytes: Count
    config: Hex
    """Blob with the configuration's canonical JSON."""
    config_bytes: Count
    state: RunState
    wait_for_peers: Count
    """How many peers the founder waits for."""
    text: Text | None = None
    """While peers are gathered, what manifest 0 will say: a peer that lacks it need not wait."""
    tokenizer: TokenizerFile | None = None
    """Likewise."""
    key: Annotated[str, Field(pattern=r"^[A-Za-z0-9]{0,128}$")] = ""
    """Of the invitation with which a gathering run counts peers; empty: it counts everybody."""


@dataclass(frozen=True)
class PeerRecord(Strict):
    """Presence, progress and ownership of one peer, in one record, so they belong together."""

    peer_id: Id
    name: Word
    addresses: Annotated[tuple[Address, ...], Field(max_length=MAX_ADDRESSES)]
    """Multiaddresses that others can dial; empty in client mode."""
    state: PeerState
    capacity: Annotated[float, Field(gt=0, le=MAX_REAL, allow_inf_nan=False)]
    room: Room
    """Experts that fit its machine, those that it owns included."""
    generation: Generation
    height: Height
    round: Height
    rounds_total: Count
    manifest_digest: Hex
    """Of the peer's tip."""
    owned_experts: Annotated[tuple[Expert, ...], Field(max_length=1024)]
    """By the peer's tip, ascending."""
    step: Count
    """Of the run, including the peer's steps since its tip."""
    tokens: Count
    """Trained by this peer since it joined."""
    loss: Real | None
    """Mean training loss of its last local steps, in nats per token."""
    val_loss: Real | None
    """Held-out loss of the newest agreed state that it knows of, in nats per token."""
    tokens_per_s: Amount
    blob_bytes_sent: Count
    blob_bytes_received: Count
    round_blob_bytes_sent: Count
    """In the last finished round."""
    round_blob_bytes_received: Count
    control_bytes_sent: Count
    control_bytes_received: Count
    steps_skipped: Count
    """Steps with a non-finite loss or gradient."""
    refused: Annotated[Mapping[Word, Count], Field(max_length=MAX_REFUSED)]
    """Refused inputs by reason, the most frequent ones."""
    reason: Reason
    """The last decision that this peer saw, with its numbers."""
    version: Word
    """Of its software."""
    moments_bytes_sent: Count
    """Hand-overs of moments, which are not in `blob_bytes_sent`."""
    moments_bytes_received: Count
    zero_moments: Count
    """Experts that it took up without moments, since it started."""
    moments_reason: Reason
    """Where the moments came from of the expert that it took up last."""
    routing: RoutingFigures | None
    """None before the first local steps."""
    grad_norm: Amount | None
    """Median over its last steps (at most 64), before clipping."""
    grad_spikes: Count
    """Steps since it started whose gradient norm stood out from those before."""
    last_round: RoundFigures | None
    """Of the last training round that it applied; None before the first."""
    tokens_lost: Count
    """Of local steps whose result entered no manifest, since it started."""
    engine: Brief
    """What computes its steps, and how much of the model stays on the device."""
    trouble: Brief
    """What this machine waits for a person to mend, such as a full disk; "" for nothing."""
    link: LinkFigures | None
    workers: WorkersFigures | None
    """Of the last local steps; None of a peer that computes in one process."""
    possession: Possession
    """While a run gathers: of its founder's invitation, so that this peer is counted; else ""."""


@dataclass(frozen=True)
class MergeRecord(Strict):
    """A peer announces the donors of the experts that it owns in a merge."""

    generation: Generation
    round: Height
    merged: Height
    step: Count
    alpha: Annotated[float, Field(ge=0, le=1)]
    donors: Mapping[Expert, tuple[tuple[Expert, ...], ...]]
    """Own expert -> for each layer its most similar experts, best first."""


@dataclass(frozen=True)
class ValidationRecord(Strict):
    """Held-out loss of an agreed state, measured by the round's first convener."""

    round: Height
    manifest_digest: Hex
    val_loss: Real
    tokens: Positive
    """Held-out tokens behind the figure."""
    text_bytes: Positive
    """Bytes of text that these tokens spell, in UTF-8."""
    recent: Annotated[tuple[tuple[Height, Real], ...], Field(max_length=200)] = ()
    """(round, val_loss) of rounds before, as far as the publisher knows them."""

    @property
    def bits_per_byte_of_nat(self) -> float:
        """How many bits per byte are one nat per token, in all rounds of the run."""
        return self.tokens / (self.text_bytes * math.log(2))


@dataclass(frozen=True)
class Score(Strict):
    """How good an agreed model is at one task, by one metric."""

    manifest_digest: Hex
    """Which model."""
    round: Height
    task: TaskName
    metric: TaskName
    value: Real
    samples: Positive
    """Documents or questions behind the value."""


@dataclass(frozen=True)
class ScoreRecord(Strict):
    """What somebody measured of a run's models, member or not; it binds nobody to believe it."""

    scores: Annotated[tuple[Score, ...], Field(min_length=1, max_length=MAX_SCORES)]


DhtRecord = RunRecord | PeerRecord | MergeRecord | ValidationRecord | ScoreRecord
AnyRecord = TypeVar("AnyRecord", RunRecord, PeerRecord, MergeRecord, ValidationRecord, ScoreRecord)
_KINDS = (RunRecord, PeerRecord, MergeRecord, ValidationRecord, ScoreRecord)
_SCHEMAS: dict[type, TypeAdapter[DhtRecord]] = {kind: TypeAdapter(kind) for kind in _KINDS}
_LIMITS: dict[type, int] = {
    RunRecord: MAX_RUN_RECORD_BYTES,
    PeerRecord: MAX_RECORD_BYTES,
    MergeRecord: MAX_RECORD_BYTES,
    ValidationRecord: MAX_VALIDATION_BYTES,
    ScoreRecord: MAX_SCORE_BYTES,
}


def encode_record(record: DhtRecord) -> bytes:
    """The record as canonical JSON.

    An inadmissible record is our own bug (an AssertionError): use `shortened` and `fitted`.
    """
    encoded = _json(record)
    assert len(encoded) <= _LIMITS[type(record)], f"{type(record).__name__}: {len(encoded)} bytes"
    return encoded


def decode_record(kind: type[AnyRecord], encoded: Buffer) -> AnyRecord:
    """Reads a record from foreign bytes.

    Raises:
        BadRecord: reason `record_size` or `record_schema`.
    """
    record = read_record(kind, encoded)
    assert isinstance(record, kind)
    return record


def read_record(kind: type[DhtRecord], encoded: Buffer) -> DhtRecord:
    """The same where it is not known beforehand of which kind it is, as of an own record.

    Raises:
        BadRecord: reason `record_size` or `record_schema`.
    """
    if len(encoded) > _LIMITS[kind]:
        raise BadRecord("record_size", f"a {kind.__name__} of {len(encoded)} bytes is too large")
    try:
        return _SCHEMAS[kind].validate_json(bytes(encoded))
    except ValidationError as error:
        why = f"{kind.__name__} {refusal(error)}"[:MAX_REASON]
        raise BadRecord("record_schema", why) from error


def shortened(reason: str, most: int = MAX_REASON) -> str:
    """A reason that fits a `PeerRecord`: one printable line, cut where it is too long."""
    line = re.sub(r"[\x00-\x1f\x7f-\x9f\s]+", " ", reason).strip()
    return line if len(line) <= most else line[: most - 1] + "…"


def fitted(record: MergeRecord) -> MergeRecord:
    """The announcement without the donors of its last experts, where all would be too many."""
    while len(_json(record)) > MAX_RECORD_BYTES:
        experts = sorted(record.donors)[: len(record.donors) // 2]
        record = replace(record, donors={expert: record.donors[expert] for expert in experts})
    return record


def shard_of(peer_id: str, shards: int = NUM_SHARDS) -> int:
    """Which of the keys of a kind holds a peer's record."""
    return blake3(peer_id.encode()).digest()[0] % shards


def runs_keys() -> list[str]:
    """Keys of all `RunRecord`s."""
    return [f"swarm.runs.{shard}" for shard in range(FEW_SHARDS)]


def runs_key(peer_id: str) -> str:
    """Key of a peer's `RunRecord`."""
    return runs_keys()[shard_of(peer_id, FEW_SHARDS)]


def peers_key(run: str, shard: int) -> str:
    """Key of the `PeerRecord`s of one shard, 0 .. NUM_SHARDS - 1."""
    return f"{run}.peers.{shard}"


def peers_keys(run: str) -> list[str]:
    """Keys of all `PeerRecord`s of a run."""
    return [peers_key(run, shard) for shard in range(NUM_SHARDS)]


def merges_keys(run: str) -> list[str]:
    """Keys of each peer's newest `MergeRecord`."""
    return [f"{run}.merges.{shard}" for shard in range(FEW_SHARDS)]


def merges_key(run: str, peer_id: str) -> str:
    """Key of a peer's newest `MergeRecord`."""
    return merges_keys(run)[shard_of(peer_id, FEW_SHARDS)]


def validation_keys(run: str) -> list[str]:
    """Keys of each peer's newest `ValidationRecord`."""
    return [f"{run}.validation.{shard}" for shard in range(FEW_SHARDS)]


def validation_key(run: str, peer_id: str) -> str:
    """Key of a peer's newest `ValidationRecord`."""
    return validation_keys(run)[shard_of(peer_id, FEW_SHARDS)]


def scores_keys(run: str) -> list[str]:
    """Keys of everybody's newest `ScoreRecord`."""
    return [f"{run}.scores.{shard}" for shard in range(FEW_SHARDS)]


def scores_key(run: str, peer_id: str) -> str:
    """Key of a peer's newest `ScoreRecord`."""
    return scores_keys(run)[shard_of(peer_id, FEW_SHARDS)]


def _json(record: DhtRecord) -> bytes:
    return canonical(asdict(record), plain=lambda value: value.value, ascii_only=False)
