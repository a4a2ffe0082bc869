"""Figures of the monitor, each defined once: its unit, when it counts, and its limits."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.monitor.snapshot import Snapshot
from swarm.protocol.records.records import PeerState


@dataclass(frozen=True)
class Metric:
    """One figure.

    Attributes:
        title: text above a column or before a value.
        unit: unit of the value.
        counts: definition of the figure, and when it changes.
        is_not: what people may mistake the figure for.
    """

    title: str
    unit: str
    counts: str
    is_not: str


ROUND = Metric(
    "round",
    "training rounds",
    "rises by one when a peer applies the manifest of a round",
    "not the height, which also counts merges and reforms",
)
DIGEST = Metric(
    "tip",
    "first hex digits of a BLAKE3 digest",
    "names the manifest that a peer applied last; equal digests mean equal models, bit for bit",
    "not the weights of a peer in the middle of its local steps",
)
OWNED = Metric(
    "experts",
    "expert indices",
    "experts that a peer trains until the next round, by its own tip",
    "not all that it holds: every peer holds every expert",
)
LOSS = Metric(
    "loss",
    "nats per token",
    "mean training loss of a peer's last local steps, cross-entropy alone",
    "not comparable between peers, whose data differ",
)
VAL_LOSS = Metric(
    "held-out loss",
    "nats per token",
    "of an agreed state on the founder's held-out text, once a round; also in bits per byte of "
    "that text, which compares runs with different tokenizers",
    "not the loss of any one peer's live weights",
)
TOKENS_PER_S = Metric(
    "tokens/s",
    "tokens per second",
    "tokens of a peer's last local steps, divided by their seconds",
    "not including the time of rounds",
)
SENT = Metric(
    "sent",
    "bytes",
    "blob bytes that a peer has sent since it started, repeats included",
    "not control messages, records or libp2p's own framing",
)
RECEIVED = Metric(
    "received",
    "bytes",
    "blob bytes that have reached a peer since it started, refused ones included",
    "not equal to the bytes that others sent it when transfers were cut off",
)
MOMENTS = Metric(
    "moments",
    "bytes",
    "bytes of experts' Adam moments that a peer has sent to new owners",
    "not part of the bytes sent for the rounds",
)
ZERO_MOMENTS = Metric(
    "zero moments",
    "experts",
    "experts that a peer took up without their moments, since it started",
    "not lost weights: those are agreed values",
)
SKIPPED = Metric(
    "skipped",
    "steps",
    "local steps with a non-finite loss or gradient, which changed nothing",
    "not steps lost in rounds that failed",
)
REFUSED = Metric(
    "refused",
    "inputs",
    "blobs, records and messages of others that a peer refused as invalid",
    "not transfers that merely failed",
)
MAX_LOAD = Metric(
    "busiest expert",
    "times the mean",
    "tokens of a layer's busiest expert in a peer's last local steps, most over layers and peers",
    "not 1 when routing is good: only when it is even",
)
IDLE = Metric(
    "idle",
    "(layer, expert) pairs",
    "experts that got no token in a peer's last local steps, most over the peers",
    "not experts without an owner",
)
DROPPED = Metric(
    "dropped",
    "percent of choices",
    "choices of an expert beyond its capacity in the last local steps, mean over the peers",
    "not tokens lost to the run: such a token passes the layer unchanged",
)
SIMILARITY = Metric(
    "similarity",
    "CKA",
    "of the outputs of experts that got the same tokens, at the end of the local steps, mean "
    "over the peers: 1 when they do the same",
    "not of the experts' weights, by which merges choose their donors",
)
SPIKES = Metric(
    "spikes",
    "steps",
    "local steps whose gradient norm was over 4 times the running mean of those before",
    "not skipped: clipped like any other",
)
COVERAGE = Metric(
    "text",
    "percent of a lap",
    "windows of the common text whose training is in a manifest, each once before any is read "
    "again; rises with every round",
    "not the windows that members read now or left open, which are shown separately",
)
SCORE = Metric(
    "score",
    "of its metric",
    "a measurement of the run's models that somebody, member or not, has published; newest round",
    "not agreed on: its signer may be wrong or lie",
)
HEALTH = Metric(
    "health",
    "one word, as a label",
    "the worst that applies: gathering, finished, split (two tips at one height), halted (no "
    "quorum), paused (too few experts have an owner), stalled (a round takes 3 times the usual), "
    "degraded (a member is missing or was left out), unknown, healthy; unreachable: nobody answers",
    "not the health of a machine: a peer may be faulty while the run continues",
)
ROUND_S = Metric(
    "round time",
    "seconds",
    "from one round's manifest to the next, median of the last 20 that the monitor saw whole; "
    "before, of the last rounds that peers report",
    "not the time of a peer's local steps, which is a part of it",
)
ETA = Metric(
    "left",
    "seconds",
    "the remaining rounds times the usual round time",
    "not a promise: peers come and go",
)
COMMITTED = Metric(
    "committed",
    "tokens per second",
    "tokens that entered the agreed model a second, median of the last 20 rounds seen whole",
    "not the sum of the peers' tokens/s, which leaves out the time of rounds",
)
UTILISATION = Metric(
    "utilisation",
    "share of 1",
    "committed tokens/s of a round divided by the sum of the peers' tokens/s then; median of these",
    "not the load of processors: it falls with waiting, moving and lost work",
)
SHARE = Metric(
    "routed share",
    "permille of choices",
    "tokens that an expert got in a peer's last local steps, over all layers",
    "not a share of the run's tokens: every peer counts its own",
)
PHASE = Metric(
    "phase",
    "seconds",
    "how long a peer's last round spent in each phase, by the peer's own clock",
    "not when: clocks of peers differ",
)
SEEN = Metric(
    "last seen",
    "seconds ago",
    "since a peer published its record, which expires after 24",
    "not a round-trip time",
)
AGE = Metric(
    "age",
    "rounds",
    "since the agreed value of an expert last changed",
    "not a fault by itself: it is due once in `round.experts_every`, and grows old without owner",
)
CAUSE = Metric(
    "cause",
    "1 for each",
    "a fault of a peer, by its own record, by records of others, or by its silence",
    "not proven: peers may be wrong about each other",
)
COUNTED = Metric(
    "counted",
    "0 or 1",
    "whether a peer's last round has its work; the snapshot says why not",
    "not whether its experts advanced, which they do late as well",
)
TOKENS_LOST = Metric(
    "lost tokens",
    "tokens",
    "of a peer's local steps whose result entered no manifest, since it started",
    "not the steps that were skipped, which changed nothing",
)
RTT = Metric(
    "round trip",
    "seconds",
    "shortest of a peer's last control messages to each other peer, median over these",
    "not a ping: the other side has handled the message by then",
)
RATE = Metric(
    "line",
    "Mbit/s",
    "up: by a peer's tests of the last day, and what others took; down: the lower quartile of its "
    "last fetches of over 1 MiB, while bytes came, or the rate measured before it joined",
    "not known before a first test, or a first long fetch",
)
ENGINE = Metric(
    "engine",
    "words, as a label",
    "the engine that computes a peer's steps, and how much of the model stays on the device",
    "not what swarm-plan predicts: a peer that ran out of memory has stepped down",
)
ALIKE = Metric(
    "pair",
    "CKA in permille",
    "of two experts' outputs for the same tokens, of the pairs that share most, by each peer's "
    "last local steps",
    "not of all pairs: few share enough tokens to be compared",
)
BETWEEN = Metric(
    "between workers",
    "share of a step",
    "seconds of a peer's worker processes in operations between them, by kind, in its last local "
    "steps, mean over the workers",
    "not only the transfer of bytes: the wait for a slower worker is part of it",
)
BUBBLE = Metric(
    "bubble",
    "share of a pipeline's time",
    "in which the stages of a peer's pipeline compute nothing, mean over them, in its last local "
    "steps",
    "not the same as the schedule's own, which is shown with it: uneven stages and slow links "
    "add to that",
)
METRICS = (
    BETWEEN,
    BUBBLE,
    CAUSE,
    COUNTED,
    TOKENS_LOST,
    RTT,
    RATE,
    ENGINE,
    ALIKE,
    HEALTH,
    ROUND_S,
    ETA,
    COMMITTED,
    UTILISATION,
    SHARE,
    PHASE,
    SEEN,
    AGE,
    ROUND,
    DIGEST,
    OWNED,
    LOSS,
    VAL_LOSS,
    TOKENS_PER_S,
    SENT,
    RECEIVED,
    MOMENTS,
    ZERO_MOMENTS,
    SKIPPED,
    REFUSED,
    MAX_LOAD,
    IDLE,
    DROPPED,
    SIMILARITY,
    SPIKES,
    COVERAGE,
    SCORE,
)


def swarm_tokens_per_s(snapshot: Snapshot) -> float:
    """Sum of `TOKENS_PER_S` over the peers that speak for the run and are not finished."""
    idle = (PeerState.FINISHED, PeerState.STARTING, PeerState.JOINING)
    rows = (row.record for row in snapshot.speaking)
    return sum(record.tokens_per_s for record in rows if record.state not in idle)


def bytes_per_round(snapshot: Snapshot) -> tuple[float, float] | None:
    """Blob bytes (sent, received) in the last round, mean over the peers that speak for the run.

    None if no peer speaks for the run.
    """
    rows = [row.record for row in snapshot.speaking]
    if not rows:
        return None
    sent = sum(record.round_blob_bytes_sent for record in rows)
    received = sum(record.round_blob_bytes_received for record in rows)
    return sent / len(rows), received / len(rows)


def glossary() -> str:
    """All definitions, one on each line."""
    return "\n".join(f"{m.title} ({m.unit}): {m.counts}; {m.is_not}." for m in METRICS)
