"""The swarm as it looks now: a pure projection of records, and of the newest manifest.

A peer's row is its own record and nothing else, so its generation, round and digest belong
together. Owners and versions of experts come from the manifest, where one could be fetched. Members
by that manifest come first and speak for the run: anybody may sign a record with any figure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from swarm.experts import expert_unit
from swarm.protocol.dealing import num_samples
from swarm.protocol.manifest import Digest, Manifest, PeerId
from swarm.protocol.records import MergeRecord, PeerRecord, ValidationRecord
from swarm.protocol.voting import TRIAL_ROUNDS

MAX_POINTS = 2000
ROW_KEYS = (
    "peer_id",
    "name",
    "state",
    "generation",
    "round",
    "manifest_digest",
    "owned_experts",
    "tokens_per_s",
)
"""Keys that `as_json` shows of a peer."""


class Agreement(Enum):
    """How a peer's tip relates to the swarm's."""

    EQUAL = "equal"  # the same manifest
    BEHIND = "behind"  # an earlier one of the same generation
    AHEAD = "ahead"  # a later one of the same generation: records are not read at one moment
    DIFFERENT = "different"  # another manifest of the same height, or another generation


@dataclass(frozen=True)
class Sighting:
    """All that was read of one run.

    Attributes:
        run: its id; None while its founder gathers peers, when it has none yet.
        name: the one that people call it by.
        peers: presence records that have not expired, by the peer that signed them.
        merges: merge announcements, likewise.
        validations: held-out losses, likewise.
        tip: the newest manifest, when a peer gave it.
    """

    run: str | None
    name: str
    peers: Mapping[PeerId, PeerRecord]
    merges: Mapping[PeerId, MergeRecord]
    validations: Mapping[PeerId, ValidationRecord]
    tip: Manifest | None


@dataclass(frozen=True)
class PeerRow:
    """One peer, and how its tip relates to the swarm's."""

    record: PeerRecord
    agreement: Agreement
    votes: bool | None = None
    """By the newest manifest; None: it is no member, or nobody gave the manifest."""
    counted: int = 0
    """Of a trainee: rounds that have counted it, of `TRIAL_ROUNDS`."""


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
        donors: expert -> most similar experts of each layer, best first; of the experts whose
            owners announced.
    """

    generation: str
    round: int
    merged: int
    step: int
    alpha: float
    donors: Mapping[int, tuple[tuple[int, ...], ...]]


@dataclass(frozen=True)
class Coverage:
    """How much of the common text the agreed training has read, in windows of it (samples)."""

    windows: int
    """Of the whole text: a lap."""
    counted: int
    """Read, and in a manifest."""
    dealt: int
    """Windows that the members read now."""
    open: int
    """Dealt before and not counted; it is dealt next."""

    @property
    def laps(self) -> int:
        """How many times the whole text was counted."""
        return self.counted // self.windows

    @property
    def share(self) -> float:
        """Of the lap after these, 0 up to 1."""
        return self.counted % self.windows / self.windows


@dataclass(frozen=True)
class Snapshot:
    """The swarm at one moment; `losses` are (round, held-out loss), ascending."""

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
    """None without a manifest, and where every peer has its own text."""
    bits_per_byte_of_nat: float | None = None
    """How many bits per byte are one nat per token of the losses; None before the first."""


def snapshot_of(seen: Sighting) -> Snapshot | None:
    """The projection, or None when no peer is present."""
    if not seen.peers:
        return None
    members = seen.tip.members.keys() & seen.peers.keys() if seen.tip else set[PeerId]()
    rows = [seen.peers[p] for p in sorted(seen.peers, key=lambda p: (p not in members, p))]
    totals = Counter(row.rounds_total for row in rows[: len(members) or len(rows)])
    generation, height, round_, digest = _tip_of(seen.tip, rows)
    return Snapshot(
        run_id=seen.run,
        name=seen.name,
        generation=generation,
        height=height,
        round=round_,
        rounds_total=max(totals, key=lambda total: (totals[total], total)),
        manifest_digest=digest,
        peers=tuple(
            PeerRow(row, _agreement(row, generation, height, digest), *_standing(row, seen.tip))
            for row in rows
        ),
        experts=_experts(seen.tip, rows),
        merges=_merges(seen.merges),
        losses=_losses(seen.validations),
        reasons=seen.tip.reasons if seen.tip else (),
        coverage=_coverage(seen.tip) if seen.tip else None,
        bits_per_byte_of_nat=_bits_per_byte_of_nat(seen.validations),
    )


def as_json(snapshot: Snapshot) -> dict[str, Any]:
    """The contract with scripts; see `swarm-monitor --json`."""
    peers = []
    for row in snapshot.peers:
        values = {key: getattr(row.record, key) for key in ROW_KEYS}
        state, owned = row.record.state.value, list(row.record.owned_experts)
        votes = {"votes": row.votes, "counted": row.counted}
        peers.append(values | {"state": state, "owned_experts": owned} | votes)
    return {
        "run_id": snapshot.run_id,
        "generation": snapshot.generation,
        "round": snapshot.round,
        "manifest_digest": snapshot.manifest_digest,
        "peers": peers,
        "experts": [
            {"expert": row.expert, "owners": list(row.owners), "version": row.version}
            for row in snapshot.experts
        ],
        "coverage": _coverage_as_json(snapshot.coverage) if snapshot.coverage else None,
    }


def _coverage_as_json(coverage: Coverage) -> dict[str, Any]:
    found = {"laps": coverage.laps, "share": coverage.share}
    return found | {key: getattr(coverage, key) for key in ("windows", "dealt", "open")}


def with_history(snapshot: Snapshot, before: Snapshot | None) -> Snapshot:
    """The snapshot with the losses and merges that an earlier one of the same run knew."""
    if before is None or before.run_id != snapshot.run_id:
        return snapshot
    losses = dict(before.losses) | dict(snapshot.losses)
    merges = {(m.generation, m.merged): m for m in (*before.merges, *snapshot.merges)}
    return replace(
        snapshot,
        bits_per_byte_of_nat=snapshot.bits_per_byte_of_nat or before.bits_per_byte_of_nat,
        losses=tuple(sorted(losses.items()))[-MAX_POINTS:],
        merges=tuple(sorted(merges.values(), key=_when))[-MAX_POINTS:],
    )


def _tip_of(tip: Manifest | None, rows: list[PeerRecord]) -> tuple[str, int, int, Digest]:
    """Generation, height, round and digest: the manifest's, else those of most peers."""
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


def _standing(row: PeerRecord, tip: Manifest | None) -> tuple[bool | None, int]:
    """Whether a member votes, and how far its trial is."""
    member = tip.members.get(row.peer_id) if tip else None
    return (member.votes, min(member.counted, TRIAL_ROUNDS)) if member else (None, 0)


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


def _coverage(tip: Manifest) -> Coverage | None:
    text = tip.founding.text
    if text is None:
        return None
    dealt = sum(num_samples(stretches) for stretches in tip.dealt.values())
    open_ = num_samples(tip.holes)
    return Coverage(text.windows, tip.cursor - dealt - open_, dealt, open_)


def _version(tip: Manifest, expert: int) -> int | None:
    entry = tip.entries.get(expert_unit(expert))
    return entry.version if entry else None


def _when(merge: Merge) -> tuple[int, int, str]:
    return merge.step, merge.merged, merge.generation


def _merges(records: Mapping[PeerId, MergeRecord]) -> tuple[Merge, ...]:
    """One merge per (generation, round, merged), with the donors of all peers that announced it."""
    found: dict[tuple[str, int, int], Merge] = {}
    for peer in sorted(records):
        record = records[peer]
        place = (record.generation, record.round, record.merged)
        known = found[place].donors if place in found else {}
        donors = dict(sorted((dict(known) | dict(record.donors)).items()))
        found[place] = Merge(*place, record.step, record.alpha, donors)
    return tuple(sorted(found.values(), key=_when))


def _bits_per_byte_of_nat(validations: Mapping[PeerId, ValidationRecord]) -> float | None:
    """Of the newest loss."""
    newest = max(validations.items(), key=lambda item: (item[1].round, item[0]), default=None)
    return newest[1].bits_per_byte_of_nat if newest else None


def _losses(validations: Mapping[PeerId, ValidationRecord]) -> tuple[tuple[int, float], ...]:
    """(round, loss); a later round's publisher overrides the losses of rounds before."""
    found: dict[int, float] = {}
    for _, record in sorted(validations.items(), key=lambda item: (item[1].round, item[0])):
        found |= dict(record.recent) | {record.round: record.val_loss}
    return tuple(sorted(found.items()))
