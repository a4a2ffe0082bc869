"""The blobs that are stored here, and the manifests whose blobs are being fetched."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from swarm.protocol.exchange.deltas import Move, moves_of, way_to
from swarm.protocol.messages import events
from swarm.protocol.messages.messages import Ballot, Commit, Evidence
from swarm.protocol.rounds.durable_state import Role
from swarm.protocol.rounds.policies import slow_links
from swarm.protocol.rounds.policies.update_bounds import update_bound
from swarm.protocol.values.manifest import Digest, Manifest, PeerId, Unit
from swarm.protocol.values.updates import UpdateBound


@dataclass
class Pursuit:
    """A manifest whose blobs are being fetched, to accept or apply the manifest."""

    purpose: ClassVar[events.Purpose]
    manifest: Manifest
    missing: dict[Digest, Unit]
    """Blobs that are not here yet, in the order of their units; a proposal's deltas come last."""
    sources: tuple[PeerId, ...]
    """Peers that claim to have all blobs, best first."""
    since: float
    progress_at: float
    is_fetching: bool = False
    is_syncing: bool = False
    failed: dict[Digest, set[PeerId]] = field(default_factory=dict)
    moves: dict[Digest, Move] = field(default_factory=dict)
    """How values can be made from deltas. Moves with unusable deltas are removed."""
    asked: dict[Digest, tuple[PeerId, ...]] = field(default_factory=dict)
    """Peers that were asked for each blob."""


@dataclass(kw_only=True)
class Proposal(Pursuit):
    """A proposal that is being fetched for a vote [A2]."""

    purpose: ClassVar[events.Purpose] = events.Purpose.PROPOSAL
    ballot: Ballot
    evidence: Evidence | None


@dataclass(kw_only=True)
class CatchUp(Pursuit):
    """A decided manifest that is being fetched to be applied [X1]."""

    purpose: ClassVar[events.Purpose] = events.Purpose.CATCH_UP
    commit: Commit
    began_at: float
    """When this peer began to catch up, perhaps by fetching an older manifest."""


@dataclass(eq=False)
class Blobs(Role):
    """Blobs and fetches. The acceptor pursues `proposal`, the adopter `catch_up`."""

    stored: set[Digest]
    """Blobs that are here."""
    synced: set[Digest] = field(init=False)
    """Manifests all of whose blobs are durable."""
    syncing: dict[Digest, Manifest] = field(init=False, default_factory=dict)
    proposal: Proposal | None = field(init=False, default=None)
    catch_up: CatchUp | None = field(init=False, default=None)
    rebuilding: set[Digest] = field(init=False, default_factory=set)
    """Values that are being made from deltas."""
    unmade: set[Digest] = field(init=False, default_factory=set)
    """Values that this peer has to fetch, because its own computation gives other bits."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.synced = {self.tip.digest}
        accepted = self.standing.record.accepted
        if accepted and not self.lacking(accepted.manifest):  # its blobs may be damaged or lost
            self.synced.add(accepted.manifest.digest)

    @property
    def pursuits(self) -> tuple[Pursuit, ...]:
        """The fetches under way."""
        return tuple(each for each in (self.proposal, self.catch_up) if each)

    def missing(self, manifest: Manifest) -> dict[Digest, Unit]:
        """Blobs of a manifest that are not here."""
        return {
            entry.digest: unit
            for unit, entry in manifest.entries.items()
            if entry.digest not in self.stored
        }

    def lacking(self, manifest: Manifest) -> dict[Digest, Unit]:
        """Missing blobs that a vote needs: values, and deltas to serve to others [W6]."""
        deltas = {d: unit for d, unit in manifest.deltas.items() if d not in self.stored}
        return {**self.missing(manifest), **deltas}

    def have(self, digests: Iterable[Digest]) -> None:
        """Notes that these blobs are here."""
        pursuits = self.pursuits
        for digest in digests:
            is_new = digest not in self.stored
            self.stored.add(digest)
            self.rebuilding.discard(digest)
            for pursuit in pursuits:
                if is_new and digest in pursuit.asked:
                    pursuit.progress_at = self.now
                self._take(digest, pursuit)
        for pursuit in pursuits:
            self._rebuild(pursuit)

    def _take(self, digest: Digest, pursuit: Pursuit) -> None:
        if pursuit.missing.pop(digest, None) is None:
            return
        pursuit.progress_at = self.now
        pursuit.is_fetching &= bool(pursuit.missing)
        if digest in pursuit.manifest.deltas:  # an earlier sync lacked it [W6]
            self.synced.discard(pursuit.manifest.digest)
            pursuit.is_syncing = False

    def moves_of(self, *manifests: Manifest | None) -> dict[Digest, Move]:
        """Moves by which this peer can make values of these manifests."""
        moves = moves_of(manifest for manifest in manifests if manifest)
        return {value: move for value, move in moves.items() if value not in self.unmade}

    def _way_to(self, value: Digest, unit: Unit, pursuit: Pursuit) -> tuple[Move, ...]:
        """Moves from a stored value to a missing one; empty if that must be fetched."""
        size = self.rules.delta_bytes.get(unit)
        if size is None:
            return ()
        whole = self.rules.unit_bytes[unit]
        return way_to(value, pursuit.moves, self.stored, size, whole) or ()

    def _rebuild(self, pursuit: Pursuit) -> None:
        """Has missing values made from deltas that arrived; several deltas of a value in order."""
        for value, unit in pursuit.missing.items() if pursuit.moves else ():
            for move in self._way_to(value, unit, pursuit)[:1]:
                if move.delta in self.stored and move.value not in self.rebuilding:
                    self.rebuilding.add(move.value)
                    self.out.emit(events.Rebuild(move.unit, move.base, move.delta, move.value))

    def note_not_made(self, event: events.NotMade) -> None:
        """Notes a value that could not be made here; if it is missing, the next tick fetches it."""
        self.rebuilding.discard(event.digest)
        self.unmade.add(event.digest)
        for pursuit in () if event.digest in self.stored else self.pursuits:
            self._do_without(pursuit, event.digest)

    def _do_without(self, pursuit: Pursuit, value: Digest) -> None:
        """Gives up the delta to a value: the value, and values made from it, are fetched whole."""
        if pursuit.moves.pop(value, None) is not None:
            pursuit.is_fetching = False
            self.out.emit(events.CancelFetch(pursuit.purpose))

    def lose(self, digest: Digest) -> None:
        """Notes that the shell found a blob missing or damaged, and has the blob fetched."""
        self.stored.discard(digest)
        for pursuit in [each for each in self.pursuits if digest not in each.missing]:
            for unit, entry in pursuit.manifest.entries.items():
                is_needed = pursuit is self.proposal and digest in pursuit.manifest.deltas
                if entry.digest == digest or (is_needed and entry.delta == digest):
                    pursuit.missing[digest] = unit
                    pursuit.is_syncing = pursuit.is_fetching = False
                    self.synced.discard(pursuit.manifest.digest)

    def note_synced(self, digest: Digest) -> None:
        """Notes that all blobs of a manifest are durable, unless a blob was lost since."""
        self.syncing.pop(digest, None)
        pursuits = [each for each in self.pursuits if each.manifest.digest == digest]
        if pursuits and all(each.missing for each in pursuits):
            return
        self.synced.add(digest)

    def note_failed(self, event: events.Unobtainable) -> None:
        """Notes that a peer did not send a blob, so that others are asked first from now on."""
        for pursuit in self.pursuits:
            is_awaited = event.digest in pursuit.asked and event.digest not in self.stored
            if event.digest in pursuit.missing or is_awaited:
                failed = pursuit.failed.setdefault(event.digest, set())
                failed.add(event.peer)
                self._judge_delta(event.digest, failed, pursuit)

    def _judge_delta(self, delta: Digest, failed: set[PeerId], pursuit: Pursuit) -> None:
        """Gives up a delta that no asked peer sent, unless a vote needs it [W6] (delta fetches)."""
        if delta in pursuit.missing or not failed.issuperset(pursuit.asked[delta]):
            return
        for move in [each for each in pursuit.moves.values() if each.delta == delta]:
            self._do_without(pursuit, move.value)

    def drop_proposal(self) -> None:
        """Drops the proposal, as its height is over."""
        self.cancel_fetch(events.Purpose.PROPOSAL, self.proposal)
        self.proposal = None

    def on_sync_failed(self, event: events.SyncFailed) -> None:
        """Has the blobs of this manifest synced again with the next tick [A3]."""
        self.syncing.pop(event.manifest, None)
        for pursuit in self.pursuits:
            if pursuit.manifest.digest == event.manifest:
                pursuit.is_syncing = False
                self.out.explain(
                    events.Topic.ROUND,
                    f"height {pursuit.manifest.height} is not durable here, {len(pursuit.missing)} "
                    f"blobs missing, so it is neither accepted nor applied yet: {event.reason}",
                )

    def is_complete(self, pursuit: Pursuit) -> bool:
        """Whether all blobs of a manifest are here, as a vote or an application needs [A2, X1]."""
        return not pursuit.missing

    def start_sync(self, pursuit: Pursuit) -> None:
        """Has the blobs of a complete manifest made durable, once."""
        if not pursuit.is_syncing:
            pursuit.is_syncing = True
            self.syncing[pursuit.manifest.digest] = pursuit.manifest
            self.out.emit(events.Sync(pursuit.manifest))

    def start_fetch(
        self, purpose: events.Purpose, pursuit: Pursuit, everybody: list[PeerId]
    ) -> None:
        """Fetches missing blobs: from a value's source, then known holders, then anybody.

        Holders are asked in a different order for each unit, to spread the load. For experts of a
        large proposal, relays are asked first (blob relays). For a unit that was renewed in an
        earlier round, a holder is asked first, since the source may have left long ago.
        """
        wants = []
        relays = self._relays(pursuit)
        first, holders = pursuit.sources[:1], pursuit.sources[1:]
        self._rebuild(pursuit)
        for position, (digest, unit, is_delta) in enumerate(self._needed(pursuit)):
            entry = pursuit.manifest.entries[unit]
            shift = position % len(holders) if holders else 0
            ranked = [*holders[shift:], *holders[:shift]]
            is_new = entry.version == pursuit.manifest.round
            if pursuit.failed or not (is_new or purpose is events.Purpose.PROPOSAL):
                ranked = [*first, entry.source, *ranked]
            elif purpose is events.Purpose.PROPOSAL and slow_links.has_one_writer(
                unit, pursuit.manifest
            ):
                before = relays.before(digest, entry.source, self.me)
                ranked = [*before, entry.source, *first, *ranked]
            else:
                ranked = [entry.source, *first, *ranked]
            failed = pursuit.failed.get(digest, set())
            sources = [p for p in dict.fromkeys([*ranked, *everybody]) if p != self.me]
            sources.sort(key=lambda peer: peer in failed)
            bound = None
            if purpose is events.Purpose.PROPOSAL and unit in pursuit.manifest.sources:
                peers = [peer for peer, _ in pursuit.manifest.sources[unit]]
                bound = self.bound(unit, peers, pursuit.manifest.work)
            size = self.rules.delta_bytes[unit] if is_delta else entry.num_bytes
            pursuit.asked[digest] = tuple(sources)
            wants.append(events.BlobWanted(unit, digest, size, tuple(sources), bound, is_delta))
        if wants:
            pursuit.is_fetching = True
            self.out.emit(events.Fetch(purpose, tuple(wants)))

    def _relays(self, pursuit: Pursuit) -> slow_links.Relays:
        if not isinstance(pursuit, Proposal):
            return slow_links.NONE
        return slow_links.relays_of_proposal(pursuit.manifest, pursuit.evidence)

    def _needed(self, pursuit: Pursuit) -> Iterator[tuple[Digest, Unit, bool]]:
        """Blobs that must be fetched from others, each with its unit and whether it is a delta."""
        named: set[Digest] = set()
        for digest, unit in pursuit.missing.items():
            way = self._way_to(digest, unit, pursuit)
            deltas = [move.delta for move in way if move.delta not in self.stored]
            is_delta = digest in pursuit.manifest.deltas
            for each in deltas if way else [digest]:
                if each not in named:
                    named.add(each)
                    yield each, unit, bool(way) or is_delta

    def cancel_fetch(self, purpose: events.Purpose, pursuit: Pursuit | None) -> None:
        """Ends a fetch, if one is under way."""
        if pursuit and pursuit.is_fetching:
            pursuit.is_fetching = False
            self.out.emit(events.CancelFetch(purpose))

    def bound(
        self, unit: Unit, peers: Iterable[PeerId], work: Mapping[PeerId, int]
    ) -> UpdateBound | None:
        """Largest distance from the tip's value that a value of these peers may have.

        Policy: update bounds.
        """
        return update_bound(unit, peers, work, self.tip, self.rules)
