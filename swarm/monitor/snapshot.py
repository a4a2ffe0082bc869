"""The current state of the swarm, computed only from records and the newest manifest.

A peer's row is its own record only, so its generation, round and digest belong together. Owners and
versions of experts come from the manifest, if one could be fetched. Only members by that manifest
speak for the run, and members come first: any stranger may sign a record with any figure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TypeVar

from swarm.experts import expert_unit
from swarm.protocol.membership.membership import TRIAL_ROUNDS
from swarm.protocol.records.records import (
    MergeRecord,
    PeerRecord,
    ScoreRecord,
    ValidationRecord,
    told_losses,
)
from swarm.protocol.values.manifest import Digest, Manifest, PeerId
from swarm.protocol.values.work import num_samples

MAX_SCORES = 200
"""Limit of scores that are shown and remembered."""


@dataclass(frozen=True)
class ScoreRow:
    """A score, and its publisher."""

    publisher: PeerId
    member: bool | None
    """Whether the publisher is a member by the newest manifest. None without a manifest."""
    manifest_digest: Digest
    round: int
    task: str
    metric: str
    value: float
    samples: int

    @property
    def what(self) -> tuple[PeerId, Digest, str, str]:
        """The key of a score. Of two scores with equal keys, the later one counts."""
        return self.publisher, self.manifest_digest, self.task, self.metric


def score_rows(
    records: Mapping[PeerId, ScoreRecord], members: Container[PeerId] | None
) -> tuple[ScoreRow, ...]:
    """The scores of all records, in order; `members` are those of the newest manifest."""
    return in_order(
        ScoreRow(peer, None if members is None else peer in members, **vars(score))
        for peer, record in records.items()
        for score in record.scores
    )


def in_order(scores: Iterable[ScoreRow]) -> tuple[ScoreRow, ...]:
    """At most `MAX_SCORES`. Members' scores come first, so that strangers cannot displace them."""
    found = sorted(
        scores,
        key=lambda s: (s.member is not True, -s.round, s.task, s.metric, s.publisher, s.value),
    )
    return tuple(found[:MAX_SCORES])


MAX_NAMED = 3

Kind = TypeVar("Kind")


class Agreement(Enum):
    """How a peer's tip relates to the swarm's."""

    EQUAL = "equal"  # the same manifest
    BEHIND = "behind"  # an earlier manifest of the same generation
    AHEAD = "ahead"  # a later one of the same generation: records are read at different times
    DIFFERENT = "different"  # another manifest of the same height, or another generation


@dataclass(frozen=True)
class Sighting:
    """All records read of one run.

    Attributes:
        run: id of the run. None while its founder gathers peers, before the run has an id.
        name: the name in its configuration.
        peers: presence records that have not expired, by the peer that signed them.
        merges: merge announcements, by the peer that signed them.
        validations: held-out losses, by the peer that signed them.
        tip: the newest manifest, if a peer sent it.
        published: when a peer published its presence, in seconds since 1970 by its own clock.
        at: when the records were read, in seconds since 1970.
        wait_for_peers: number of peers that a gathering founder waits for.
        scores: published scores of the run's models, by the peer that signed them.
    """

    run: str | None
    name: str
    peers: Mapping[PeerId, PeerRecord]
    merges: Mapping[PeerId, MergeRecord]
    validations: Mapping[PeerId, ValidationRecord]
    tip: Manifest | None
    published: Mapping[PeerId, float] = field(default_factory=dict)
    at: float = 0.0
    wait_for_peers: int = 0
    scores: Mapping[PeerId, ScoreRecord] = field(default_factory=dict)


@dataclass(frozen=True)
class PeerRow:
    """One peer, and how its tip relates to the swarm's."""

    record: PeerRecord
    agreement: Agreement
    votes: bool | None = None
    """Whether the peer votes, by the newest manifest. None for a stranger or without a manifest."""
    counted: int = 0
    """Number of rounds that have counted a trainee, out of `TRIAL_ROUNDS`."""
    contributed: bool | None = None
    """Whether its work is in the newest round's mean. None without a manifest."""
    published: float | None = None
    """When its record was published: seconds since 1970 by its own clock. None if unknown."""
    heard: float | None = None
    """When a look first found this record, by the monitor's clock. None in a replay."""

    @property
    def called(self) -> str:
        """The peer's display name, or the end of its id."""
        return self.record.name or f"…{self.record.peer_id[-6:]}"


@dataclass(frozen=True)
class ExpertRow:
    """Owners of an expert, and the round in which its value last changed (None: unknown)."""

    expert: int
    owners: tuple[PeerId, ...]
    version: int | None


@dataclass(frozen=True)
class Merge:
    """A merge as its owners announced it.

    Attributes:
        donors: of each expert whose owners announced the merge, the most similar experts in each
            layer, the best first.
    """

    generation: str
    round: int
    merged: int
    step: int
    alpha: float
    donors: Mapping[int, tuple[tuple[int, ...], ...]]

    def when(self) -> tuple[int, int, str]:
        """Key that sorts merges by time."""
        return self.step, self.merged, self.generation


@dataclass(frozen=True)
class Coverage:
    """How much of the common text the agreed training has read, in windows (samples)."""

    windows: int
    """Windows of the whole text, which is one lap."""
    counted: int
    """Windows whose training is in a manifest."""
    dealt: int
    """Windows that the members read now."""
    open: int
    """Windows that were dealt and not counted. They are dealt again next."""

    @property
    def laps(self) -> int:
        """How many times the whole text was counted."""
        return self.counted // self.windows

    @property
    def share(self) -> float:
        """Counted share of the lap after the whole laps, from 0 up to 1."""
        return self.counted % self.windows / self.windows

    @property
    def repeated(self) -> int:
        """Number of counted windows that an earlier lap had already counted."""
        return max(0, self.counted - self.windows)


@dataclass(frozen=True)
class RoundPoint:
    """A decided round, with the peers' figures of the first look after the decision.

    Attributes:
        at: seconds since 1970 at that look.
        seconds: time since the round before. None if no look saw the beginning of the round. If
            looks missed rounds, the mean over these rounds.
        tokens: tokens of all rounds up to this round. None without a manifest.
        train_loss: mean of the last local steps' loss over the speaking peers, in nats per token.
        tokens_per_s: sum over the speaking peers that train.
        present: number of speaking peers.
        contributors: number of peers whose work is in the mean. None without a manifest.
    """

    round: int
    at: float
    seconds: float | None
    tokens: int | None
    train_loss: float | None
    tokens_per_s: float
    present: int
    contributors: int | None
    committed_per_s: float | None = None
    """Tokens per second that entered the model since the round before. None if `seconds` is
    None."""


class Topic(Enum):
    """The subject of an event."""

    ROUND = "round"  # a round was decided
    MERGE = "merge"  # similar experts were merged
    PEER = "peer"  # a peer came, left, or changed its state
    MEMBERS = "members"  # a manifest added or removed members or owners
    CHAIN = "chain"  # a generation or a tip has changed


@dataclass(frozen=True)
class Happening:
    """One change between two looks, in a sentence, and when it was seen."""

    at: float
    topic: Topic
    text: str


@dataclass(frozen=True)
class Snapshot:
    """The swarm at one moment. `losses` are (round, held-out loss), ascending."""

    run_id: str | None
    name: str
    generation: str
    height: int
    round: int
    rounds_total: int
    manifest_digest: Digest
    peers: tuple[PeerRow, ...]
    experts: tuple[ExpertRow, ...]
    merges: tuple[Merge, ...]
    losses: tuple[tuple[int, float], ...]
    reasons: tuple[str, ...]
    """Why members or owners changed in the newest manifest."""
    coverage: Coverage | None = None
    """None without a manifest, and if every peer has its own text."""
    bits_per_byte_of_nat: float | None = None
    """Bits per byte that equal one nat per token of the losses. None before the first loss."""
    at: float = 0.0
    """When the records were read, in seconds since 1970."""
    live: bool = True
    """False in a replay, since a history has no states, refusals or links of peers."""
    wait_for_peers: int = 0
    """Number of peers that a gathering founder waits for."""
    step: int | None = None
    """Optimizer steps of the run. This and all fields below are None or () without a manifest."""
    tokens: int | None = None
    """Tokens of all contributors in all rounds."""
    members: int | None = None
    absent: tuple[PeerId, ...] = ()
    """Members without a record."""
    left_out: tuple[PeerId, ...] = ()
    """Members whose work is not in the newest round's mean."""
    quorum: bool | None = None
    """Whether the present voters can decide a round."""
    ends_with: PeerId | None = None
    """The only vouched member of several members. Without this peer no round is decided."""
    rounds: tuple[RoundPoint, ...] = ()
    """Rounds that the monitor saw, oldest first; see `swarm.monitor.history`."""
    events: tuple[Happening, ...] = ()
    """Events that the monitor saw, oldest first."""
    scores: tuple[ScoreRow, ...] = ()
    """Published scores, in the order of `in_order`."""

    @property
    def speaking(self) -> tuple[PeerRow, ...]:
        """Peers whose records count for the run: the members that are present.

        Without a manifest the members are not known, so all peers count. All peers of a replay
        count as well, because a replay has only peers of the run.
        """
        if self.members is None or not self.live:
            return self.peers
        return tuple(row for row in self.peers if row.votes is not None)

    def called(self, peer: PeerId) -> str:
        """Display name of a peer, also of an absent one."""
        rows = (row.called for row in self.peers if row.record.peer_id == peer)
        return next(rows, f"…{peer[-6:]}")

    def names(self, peers: Sequence[PeerId]) -> str:
        """Display names of some peers. Of many peers, only the first names."""
        named = ", ".join(map(self.called, peers[:MAX_NAMED]))
        return named if len(peers) <= MAX_NAMED else f"{named} and {len(peers) - MAX_NAMED} more"


def snapshot_of(seen: Sighting) -> Snapshot | None:
    """The projection, or None if no peer is present."""
    if not seen.peers:
        return None
    members = seen.tip.members.keys() & seen.peers.keys() if seen.tip else set[PeerId]()
    rows = [seen.peers[p] for p in sorted(seen.peers, key=lambda p: (p not in members, p))]
    totals = Counter(row.rounds_total for row in rows[: len(members) or len(rows)])
    generation, height, round_, digest = _tip_of(seen.tip, rows)
    told = told_losses(seen.validations, seen.tip)
    found = Snapshot(
        run_id=seen.run,
        name=seen.name,
        generation=generation,
        height=height,
        round=round_,
        rounds_total=max(totals, key=lambda total: (totals[total], total)),
        manifest_digest=digest,
        peers=tuple(_row(row, seen, _agreement(row, generation, height, digest)) for row in rows),
        experts=_experts(seen.tip, rows),
        merges=_merges(_of_members(seen.merges, seen.tip)),
        losses=tuple(sorted(told.by_round.items())),
        reasons=(),
        at=seen.at,
        wait_for_peers=seen.wait_for_peers,
        bits_per_byte_of_nat=told.bits_per_byte_of_nat,
        scores=score_rows(seen.scores, seen.tip.members if seen.tip else None),
    )
    return _by_manifest(found, seen.tip, seen.peers) if seen.tip else found


def without_peers(last: Snapshot) -> Snapshot:
    """The snapshot after the last look at a run, when none of its peers is present."""
    members = {row.record.peer_id for row in last.peers if row.votes is not None}
    absent = tuple(sorted({*last.absent, *members}))
    return replace(last, peers=(), absent=absent, quorum=None if last.members is None else False)


def _row(record: PeerRecord, seen: Sighting, agreement: Agreement) -> PeerRow:
    member = seen.tip.members.get(record.peer_id) if seen.tip else None
    return PeerRow(
        record,
        agreement,
        votes=member.votes if member else None,
        counted=min(member.counted, TRIAL_ROUNDS) if member else 0,
        contributed=record.peer_id in seen.tip.contributors if seen.tip else None,
        published=seen.published.get(record.peer_id),
        heard=seen.at,
    )


def _by_manifest(found: Snapshot, tip: Manifest, present: Mapping[PeerId, object]) -> Snapshot:
    """The snapshot with the fields that only the newest manifest has."""
    return replace(
        found,
        reasons=tip.reasons,
        coverage=coverage_of(tip),
        step=tip.step,
        tokens=tip.tokens,
        members=len(tip.members),
        absent=tuple(sorted(tip.members.keys() - present.keys())),
        left_out=tuple(sorted(tip.members.keys() - set(tip.contributors))) if tip.round else (),
        quorum=tip.is_quorum(present),
        ends_with=min(tip.vouched) if len(tip.vouched) == 1 < len(tip.members) else None,
    )


def _tip_of(tip: Manifest | None, rows: list[PeerRecord]) -> tuple[str, int, int, Digest]:
    """Generation, height, round and digest: of the manifest, or else of most peers."""
    if tip:
        return tip.generation, tip.height, tip.round, tip.digest
    said = [(row.manifest_digest, row.height, row.generation, row.round) for row in rows]
    counts = Counter(said)
    digest, height, generation, round_ = max(counts, key=lambda one: (counts[one], one))
    return generation, height, round_, digest


def _agreement(row: PeerRecord, generation: str, height: int, digest: Digest) -> Agreement:
    if row.manifest_digest == digest:
        return Agreement.EQUAL
    if row.generation != generation or row.height == height:
        return Agreement.DIFFERENT
    return Agreement.BEHIND if row.height < height else Agreement.AHEAD


def _experts(tip: Manifest | None, rows: list[PeerRecord]) -> tuple[ExpertRow, ...]:
    if tip:
        return tuple(
            ExpertRow(expert, tip.owners[expert], _version(tip, expert))
            for expert in sorted(tip.owners)
        )
    owners: dict[int, list[PeerId]] = {}
    for row in rows:
        for expert in row.owned_experts:
            owners.setdefault(expert, []).append(row.peer_id)
    return tuple(ExpertRow(expert, tuple(owners[expert]), None) for expert in sorted(owners))


def coverage_of(tip: Manifest) -> Coverage | None:
    """How much of the common text the agreed training has read. None if each has its own text."""
    text = tip.founding.text
    if text is None:
        return None
    dealt = sum(num_samples(stretches) for stretches in tip.dealt.values())
    open_ = num_samples(tip.holes)
    return Coverage(text.windows, tip.cursor - dealt - open_, dealt, open_)


def _version(tip: Manifest, expert: int) -> int | None:
    entry = tip.entries.get(expert_unit(expert))
    return entry.version if entry else None


def _of_members(records: Mapping[PeerId, Kind], tip: Manifest | None) -> Mapping[PeerId, Kind]:
    """Records of members. All records without a manifest, since only a manifest names members."""
    return {peer: record for peer, record in records.items() if not tip or peer in tip.members}


def _merges(records: Mapping[PeerId, MergeRecord]) -> tuple[Merge, ...]:
    """One merge per (generation, round, merged), with the donors of all peers that announced it."""
    found: dict[tuple[str, int, int], Merge] = {}
    for peer in sorted(records):
        record = records[peer]
        place = (record.generation, record.round, record.merged)
        known = found[place].donors if place in found else {}
        donors = dict(sorted((dict(known) | dict(record.donors)).items()))
        found[place] = Merge(*place, record.step, record.alpha, donors)
    return tuple(sorted(found.values(), key=Merge.when))
