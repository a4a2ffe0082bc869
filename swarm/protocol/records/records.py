"""Records that peers publish in the DHT: small facts signed by their owner, never commands."""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Annotated, Any, TypeVar

from blake3 import blake3
from pydantic import Field, TypeAdapter, ValidationError

from swarm.canonical import canonical
from swarm.config import RunName
from swarm.config.section import PRINTABLE, Strict, refusal
from swarm.errors import BadRecord
from swarm.protocol.messages.schemas import DigestText, Generation, PeerText, Room
from swarm.protocol.values.digests import Buffer
from swarm.protocol.values.invitation import Possession
from swarm.protocol.values.manifest import RUN_ID, Digest, Manifest, PeerId
from swarm.protocol.values.texts import Text, TokenizerFile

MAX_REASON = 300
TOO_LATE = "too late"
"""The reason that an uncounted peer gives if it was still training when its round was decided."""
NOTHING_DONE = "nothing to count"
"""The reason that an uncounted peer gives if it was still fetching a decided manifest."""
MAX_BRIEF = 120
"""Limit of sentences that a record may list."""
MAX_PAIRS = 16
MAX_LEFT_OUT = 4
MAX_UNREACHED = 8
MAX_REFUSED = 16
MAX_KINDS = 12
MAX_IDLE = 16
MAX_SHARES = 256
"""Experts whose share of the tokens a peer reports; a record has no room for more."""

Id = PeerText
Word = Annotated[str, Field(max_length=64, pattern=PRINTABLE)]
Reason = Annotated[str, Field(max_length=MAX_REASON, pattern=PRINTABLE)]
Brief = Annotated[str, Field(max_length=MAX_BRIEF, pattern=PRINTABLE)]
Hex = DigestText
Count = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(gt=0, lt=2**63)]
Height = Annotated[int, Field(ge=0, lt=2**31)]
"""Limit of heights and rounds: at one round a second, a run takes 68 years to get there."""
MAX_REAL = 1e100
"""More than any loss, norm or rate that a peer computes, and so small that sums, differences and
squares of published values are finite."""
Real = Annotated[float, Field(ge=-MAX_REAL, le=MAX_REAL, allow_inf_nan=False)]
Amount = Annotated[float, Field(ge=0, le=MAX_REAL, allow_inf_nan=False)]
Address = Annotated[str, Field(min_length=1, max_length=256, pattern=PRINTABLE)]
Expert = Annotated[int, Field(ge=0, lt=2**16)]
Worker = Annotated[int, Field(ge=0, lt=2**16)]
Work = Annotated[str, Field(max_length=24, pattern=PRINTABLE)]
Share = Annotated[int, Field(ge=0, le=1000)]
Alike = Annotated[int, Field(ge=-1000, le=1000)]
Pair = tuple[Expert, Expert, Alike]
"""Two experts, and a thousand times the CKA of their outputs for the same tokens."""


@dataclass(frozen=True)
class RoutingFigures(Strict):
    """How a peer's last local steps spread their tokens over the experts."""

    max_load: Amount
    """Tokens of the busiest expert divided by the mean over experts, in the layer where this is
    largest."""
    idle_experts: Count
    """(Layer, expert) pairs without a token."""
    dropped: Amount
    """Share of the choices of experts that exceeded a capacity."""
    similarity: Real | None
    """Mean CKA of experts that got the same tokens; None if too few did."""
    shares: Annotated[tuple[Share, ...], Field(max_length=MAX_SHARES)] = ()
    """Each expert's permille of all choices, over all layers; 0 only for an expert without tokens.
    Empty for a model with more than `MAX_SHARES` experts."""
    pairs: Annotated[tuple[Pair, ...], Field(max_length=MAX_PAIRS)] = ()
    """The pairs behind `similarity`, each a mean over layers, the most similar first."""


@dataclass(frozen=True)
class RoundFigures(Strict):
    """Figures of a peer's last round; durations, since clocks differ."""

    round: Height
    counted: bool
    """Whether its work is in the mean."""
    seconds: Amount
    """Time from the previous manifest until this one was applied."""
    phases: Annotated[Mapping[Word, Amount], Field(max_length=8)]
    """Seconds in each phase, by its name."""
    blob_bytes_sent: Count
    blob_bytes_received: Count
    why_not: Brief = ""
    """Why it was not counted, by the peer's own account; "" if it was."""
    left_out: Annotated[Mapping[Id, Brief], Field(max_length=MAX_LEFT_OUT)] = field(
        default_factory=dict
    )
    """Other members that were not counted, and why, if this peer was the round's convener."""


@dataclass(frozen=True)
class WorkersFigures(Strict):
    """How a peer's worker processes computed its last local steps; means over these."""

    number: Annotated[int, Field(gt=0, le=2**16)]
    step_s: Amount
    """Seconds of a step."""
    shares: Annotated[Mapping[Work, Amount], Field(max_length=MAX_KINDS)]
    """For each kind of operation between workers, its share of a step's time, waits for slower
    workers included; mean over the workers."""
    bubble: Amount | None
    """Part of a pipeline's time in which a stage computes nothing, mean over the stages; None
    without a pipeline."""
    expected: Amount | None
    """The value that `bubble` would have if all stages took equally long."""
    idle: Annotated[tuple[Worker, ...], Field(max_length=MAX_IDLE)]
    """Workers that had fewer micro-batches than others."""
    slowest: Worker | None
    """The worker that computes longest; None if none stands out."""
    why: Brief
    """The known reasons why it is slow; "" if no worker stands out."""


class Silence(Enum):
    """Why messages to a peer are lost."""

    GONE = "gone"  # the peer's machine says that nothing listens there
    SILENT = "silent"  # no answer: its line may be cut


@dataclass(frozen=True)
class LinkFigures(Strict):
    """A peer's measurements of its link; None: not measured."""

    rtt_ms: Amount | None
    """Shortest of the last round trips to each peer, handling included; median over peers."""
    down_mbit: Amount | None
    """Lower quartile of the day's fetches of over 1 MiB; before the first fetch, the rate measured
    when joining."""
    up_mbit: Amount | None
    """From tests of the last day, and from the rates at which others have received since then; None
    if unknown."""
    unreached: Annotated[Mapping[Id, Silence], Field(max_length=MAX_UNREACHED)]
    """Peers to which the last messages in a row were lost."""


def routing_figures(stats: Mapping[str, Any]) -> RoutingFigures:
    """Figures from the fields of `RoutingStats`, as far as a record has room for them."""
    shares = tuple(stats["shares"]) if len(stats["shares"]) <= MAX_SHARES else ()
    pairs = tuple((a, b, round(1000 * cka)) for a, b, cka in stats["pairs"][:MAX_PAIRS])
    return RoutingFigures(**{**stats, "shares": shares, "pairs": pairs})


def workers_figures(stats: Mapping[str, Any]) -> WorkersFigures:
    """Figures from the fields of `WorkersStats`, as far as a record has room for them."""
    shares: Mapping[str, float] = stats["shares"]
    longest = sorted(shares, key=lambda kind: -shares[kind])[:MAX_KINDS]
    kept = {kind: shares[kind] for kind in sorted(longest)}
    return WorkersFigures(**{**stats, "shares": kept, "idle": stats["idle"][:MAX_IDLE]})


MAX_RECORD_BYTES = 20_000
"""Limit of a `PeerRecord` and a `MergeRecord`; the others need less."""
MAX_RUN_RECORD_BYTES = 3_000
MAX_VALIDATION_BYTES = 9_000
MAX_SCORE_BYTES = 9_000
MAX_ADDRESSES = 16
"""Most addresses in a peer's record."""
MAX_SCORES = 24
"""Most scores that one peer publishes at a time."""
NUM_SHARDS = 16
FEW_SHARDS = 4
"""Number of keys of each kind but presence, which has `NUM_SHARDS`. Peers are spread over several
keys, because all records of one key come in one message of at most 4 MiB."""
HEARTBEAT_S = 8.0
"""How often a peer repeats its records."""
RECORD_TTL_S = 3 * HEARTBEAT_S
"""Lifetime of presence and run records: a dead peer disappears from every view after this long."""
EVENT_TTL_S = 900.0
"""Lifetime of merge, validation and score records, which are published after an event, not as a
sign of life."""
TaskName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.,-]{0,63}$")]

RunId = Annotated[str, Field(pattern=rf"{RUN_ID}|^gathering-[0-9a-f]{{32}}$")]


class RunState(Enum):
    """Whether a run trains yet."""

    GATHERING = "gathering"  # the founder waits for peers before the first round
    RUNNING = "running"  # rounds take place


class PeerState(Enum):
    """What a peer is doing."""

    STARTING = "starting"  # loads its corpus and state, or listens for a chain
    JOINING = "joining"  # fetches the newest model, or waits to be listed
    TRAINING = "training"  # local steps
    AVERAGING = "averaging"  # in a round
    MERGING = "merging"  # computes or agrees on an expert merge
    CATCHING_UP = "catching_up"  # fetches a decided manifest that it missed
    PAUSED = "paused"  # too few experts have an owner: waits for machines with room
    LEAVING = "leaving"  # asks to be left out, and hands over its experts
    FINISHED = "finished"  # all rounds done; serves blobs and records


@dataclass(frozen=True)
class RunRecord(Strict):
    """A run that can be joined. Every member publishes this record, so it outlives the founder."""

    run: RunId
    """While the run gathers: `gathering-` and the founder's nonce."""
    name: RunName
    fingerprint: Hex
    """Fingerprint of the run configuration."""
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
    """While peers are gathered: the text of manifest 0. A peer without this text need not wait."""
    tokenizer: TokenizerFile | None = None
    """While peers are gathered: the tokenizer of manifest 0."""
    key: Annotated[str, Field(pattern=r"^[A-Za-z0-9]{0,128}$")] = ""
    """Key of the invitation whose holders a gathering run counts; empty: it counts every peer."""


@dataclass(frozen=True)
class PeerRecord(Strict):
    """Presence, progress and ownership of one peer, in one record so that all are consistent."""

    peer_id: Id
    name: Word
    addresses: Annotated[tuple[Address, ...], Field(max_length=MAX_ADDRESSES)]
    """Multiaddresses that others can dial; empty in client mode."""
    state: PeerState
    capacity: Annotated[float, Field(gt=0, le=MAX_REAL, allow_inf_nan=False)]
    room: Room
    """Experts that fit its machine, including those that it owns."""
    generation: Generation
    height: Height
    round: Height
    rounds_total: Count
    manifest_digest: Hex
    """Digest of the peer's tip."""
    owned_experts: Annotated[tuple[Expert, ...], Field(max_length=1024)]
    """The experts that the peer owns by its tip, ascending."""
    step: Count
    """Step of the run, with the peer's own steps since its tip added."""
    tokens: Count
    """Tokens that this peer has trained since it joined."""
    loss: Real | None
    """Mean training loss of the peer's last local steps, in nats per token."""
    val_loss: Real | None
    """Newest held-out loss of an agreed state that it knows, in nats per token."""
    tokens_per_s: Amount
    blob_bytes_sent: Count
    blob_bytes_received: Count
    round_blob_bytes_sent: Count
    """Bytes of blobs that it sent in the last finished round."""
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
    """Version of its software."""
    moments_bytes_sent: Count
    """Bytes of moments that it handed over, which are not in `blob_bytes_sent`."""
    moments_bytes_received: Count
    zero_moments: Count
    """Experts that the peer took over without moments, since it started."""
    moments_reason: Reason
    """Origin of the moments of the expert that it took over last."""
    routing: RoutingFigures | None
    """None before the first local steps."""
    grad_norm: Amount | None
    """Median over its last steps (at most 64), before clipping."""
    grad_spikes: Count
    """Steps since its start whose gradient norm was far above those before."""
    last_round: RoundFigures | None
    """Figures of the last training round that it applied; None before the first."""
    tokens_lost: Count
    """Tokens of local steps whose result entered no manifest, since it started."""
    engine: Brief
    """The engine of its steps, and how much of the model stays on the device."""
    trouble: Brief
    """A fault of this machine that a person has to mend, such as a full disk; "" for none."""
    link: LinkFigures | None
    workers: WorkersFigures | None
    """Figures of the last local steps; None for a peer that computes in one process."""
    possession: Possession
    """While a run gathers: proof that this peer has the founder's invitation, and so is counted; or
    ""."""


@dataclass(frozen=True)
class MergeRecord(Strict):
    """A peer's announcement of the donors of its own experts in a merge."""

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
    """(round, val_loss) of earlier rounds, as far as the publisher knows them."""

    @property
    def bits_per_byte_of_nat(self) -> float:
        """Bits per byte that equal one nat per token, in all rounds of the run."""
        return self.tokens / (self.text_bytes * math.log(2))


@dataclass(frozen=True)
class Score(Strict):
    """How good an agreed model is at one task, by one metric."""

    manifest_digest: Hex
    """Manifest of the model."""
    round: Height
    task: TaskName
    metric: TaskName
    value: Real
    samples: Positive
    """Documents or questions behind the value."""


@dataclass(frozen=True)
class ScoreRecord(Strict):
    """Scores of a run's models, published by any peer, member or not; they prove nothing."""

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

    A record over its limits is a bug of the caller (AssertionError), who uses `shortened` and
    `fitted`.
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
    """Reads a record whose kind is known only at run time.

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
    """The announcement; if it is too large, without the donors of its last experts."""
    while len(_json(record)) > MAX_RECORD_BYTES:
        experts = sorted(record.donors)[: len(record.donors) // 2]
        record = replace(record, donors={expert: record.donors[expert] for expert in experts})
    return record


def shard_of(peer_id: str, shards: int = NUM_SHARDS) -> int:
    """The number of the key that holds a peer's record, among the keys of its kind."""
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


MAX_ROUNDS = 4096
"""Most rounds whose loss is kept. Beyond that, every second one of the older half is dropped."""
MAX_MANIFESTS = 256
"""Most states whose own loss is kept."""
ALIKE = 0.01
"""Relative difference between the losses that two machines may compute for one state."""


@dataclass(frozen=True)
class Losses:
    """Held-out losses in nats per token.

    Attributes:
        by_round: loss of each round. A round that was measured twice, as with a merge, has either
            loss.
        by_manifest: loss of the state of exactly this manifest, by its digest.
        bits_per_byte_of_nat: how many bits per byte are one nat per token; None: not known.
    """

    by_round: Mapping[int, float] = field(default_factory=dict)
    by_manifest: Mapping[Digest, float] = field(default_factory=dict)
    bits_per_byte_of_nat: float | None = None

    def until(self, manifest: Manifest) -> tuple[tuple[int, float], ...]:
        """(round, loss) up to this state, ascending. For its own round, only its own loss."""
        found = {number: loss for number, loss in self.by_round.items() if number < manifest.round}
        if manifest.digest in self.by_manifest:
            found[manifest.round] = self.by_manifest[manifest.digest]
        return tuple(sorted(found.items()))

    def with_newer(self, newer: Losses) -> Losses:
        """Both together; newer losses replace older ones. Long runs lack some rounds."""
        manifests = dict(self.by_manifest) | dict(newer.by_manifest)
        return Losses(
            _thinned(dict(self.by_round) | dict(newer.by_round)),
            dict(list(manifests.items())[-MAX_MANIFESTS:]),
            newer.bits_per_byte_of_nat or self.bits_per_byte_of_nat,
        )


def told_losses(validations: Mapping[PeerId, ValidationRecord], tip: Manifest | None) -> Losses:
    """Held-out losses by the records of the tip's members, since anybody may publish a record.

    The tip's loss is its first convener's figure, because no other peer measures it. The loss of an
    earlier round is the median of the voters' figures. If voters contradict each other, only the
    least contradicted voters count. One peer measures each round, and others repeat its figure. So
    a liar that rewrites the curve contradicts all others.

    Args:
        validations: the newest record of each peer.
        tip: the newest manifest. None while no peer has shown a manifest: then all peers and all
            rounds count.
    """
    heard = {p: r for p, r in sorted(validations.items()) if tip is None or p in tip.members}
    said: dict[int, dict[PeerId, float]] = {}
    for peer in heard.keys() & tip.voters if tip else heard:
        for number, loss in (*heard[peer].recent, (heard[peer].round, heard[peer].val_loss)):
            if tip is None or number < tip.round:
                said.setdefault(number, {})[peer] = loss
    doubts = _contradicted(said.values())
    by_round = {number: _believed(claims, doubts) for number, claims in said.items()}
    exactly: dict[Digest, float] = {}
    measured = heard.get(tip.order[0]) if tip else None
    if tip and measured and measured.manifest_digest == tip.digest:
        by_round[tip.round] = exactly[tip.digest] = measured.val_loss
    nats = sorted(record.bits_per_byte_of_nat for record in heard.values())
    return Losses(by_round, exactly, nats[(len(nats) - 1) // 2] if nats else None)


def _contradicted(rounds: Iterable[Mapping[PeerId, float]]) -> Counter[PeerId]:
    """For each peer, how often another one has published a different loss of the same round."""
    found: Counter[PeerId] = Counter()
    for claims in rounds:
        losses = sorted(claims.values())
        for peer, loss in claims.items():
            apart = ALIKE * abs(loss)
            alike = bisect_right(losses, loss + apart) - bisect_left(losses, loss - apart)
            found[peer] += len(losses) - alike
    return found


def _believed(claims: Mapping[PeerId, float], doubts: Mapping[PeerId, int]) -> float:
    """The median of the least contradicted claims; of two, the higher loss."""
    least = min(doubts[peer] for peer in claims)
    sound = sorted(loss for peer, loss in claims.items() if doubts[peer] == least)
    return sound[len(sound) // 2]


def _thinned(by_round: dict[int, float]) -> dict[int, float]:
    """The losses, with fewer of the older rounds where there are too many."""
    rounds = sorted(by_round)
    while len(rounds) > MAX_ROUNDS:
        half = len(rounds) // 2
        rounds = [*rounds[:half:2], *rounds[half:]]
    return {number: by_round[number] for number in rounds}


PEERS_A_HEARTBEAT = 64
"""In a run of this many peers, one look a heartbeat costs 9 kB/s. In larger runs peers look less
often."""


def shards_at_once(num_peers: int) -> int:
    """How many of the keys one look reads: all while no peer is seen, one from 16 peers on.

    Args:
        num_peers: peers that were seen in the DHT.
    """
    return max(1, NUM_SHARDS // max(1, num_peers))


def look_every_s(num_peers: int) -> float:
    """Seconds from one look to the next.

    Args:
        num_peers: peers that were seen in the DHT.
    """
    return HEARTBEAT_S * max(1, num_peers // PEERS_A_HEARTBEAT)
