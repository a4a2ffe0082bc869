"""What is here of the values, and what is being brought here to be accepted or applied."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from swarm.protocol.events import (
    BlobWanted,
    CancelFetch,
    Fetch,
    Purpose,
    Sync,
    SyncFailed,
    Topic,
    Unobtainable,
)
from swarm.protocol.manifest import Digest, Manifest, PeerId, Unit
from swarm.protocol.messages import Ballot, Commit, Evidence
from swarm.protocol.rounds.plausible import update_bound
from swarm.protocol.rounds.standing import Role
from swarm.protocol.updates import UpdateBound


@dataclass
class Pursuit:
    """A manifest whose blobs are being brought here, to be accepted or applied."""

    manifest: Manifest
    missing: dict[Digest, Unit]
    """Blobs that are not here yet, in the order of their units."""
    sources: tuple[PeerId, ...]
    """Peers that said they have everything, best first."""
    since: float
    progress_at: float
    is_fetching: bool = False
    is_syncing: bool = False
    failed: dict[Digest, set[PeerId]] = field(default_factory=dict)


@dataclass(kw_only=True)
class Proposal(Pursuit):
    """A proposal on its way to being accepted [A2]."""

    ballot: Ballot
    evidence: Evidence | None


@dataclass(kw_only=True)
class CatchUp(Pursuit):
    """A decided manifest on its way to being applied [X1]."""

    commit: Commit
    began_at: float
    """When this peer began to catch up, maybe with an older manifest."""


@dataclass(kw_only=True, eq=False)
class Blobs(Role):
    """Blobs and fetches. The acceptor pursues `proposal`, the adopter `catch_up`."""

    stored: set[Digest]
    """Blobs that are here."""
    synced: set[Digest] = field(init=False)
    """Manifests all of whose blobs are durable."""
    syncing: dict[Digest, Manifest] = field(init=False, default_factory=dict)
    proposal: Proposal | None = field(init=False, default=None)
    catch_up: CatchUp | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.synced = {self.tip.digest}
        accepted = self.standing.record.accepted
        if accepted:
            self.synced.add(accepted.manifest.digest)

    @property
    def pursuits(self) -> tuple[Pursuit, ...]:
        """What is being brought here."""
        return tuple(each for each in (self.proposal, self.catch_up) if each)

    def missing(self, manifest: Manifest) -> dict[Digest, Unit]:
        """Blobs of a manifest that are not here."""
        return {
            entry.digest: unit
            for unit, entry in manifest.entries.items()
            if entry.digest not in self.stored
        }

    def have(self, digests: Iterable[Digest]) -> None:
        """These blobs are here now."""
        pursuits = self.pursuits
        for digest in digests:
            self.stored.add(digest)
            for pursuit in pursuits:
                if pursuit.missing.pop(digest, None) is not None:
                    pursuit.progress_at = self.now
                    pursuit.is_fetching &= bool(pursuit.missing)

    def lose(self, digest: Digest) -> None:
        """The shell found that a blob is not here after all."""
        self.stored.discard(digest)
        for pursuit in self.pursuits:
            for unit, entry in pursuit.manifest.entries.items():
                if entry.digest == digest:
                    pursuit.missing[digest] = unit
                    pursuit.is_syncing = pursuit.is_fetching = False
                    self.synced.discard(pursuit.manifest.digest)

    def note_synced(self, digest: Digest) -> None:
        """All blobs of a manifest are durable, unless one was lost since."""
        self.syncing.pop(digest, None)
        for pursuit in self.pursuits:
            if pursuit.manifest.digest == digest and pursuit.missing:
                return
        self.synced.add(digest)

    def note_failed(self, event: Unobtainable) -> None:
        """A peer did not give a blob; others are asked first from now on."""
        for pursuit in self.pursuits:
            if event.digest in pursuit.missing:
                pursuit.failed.setdefault(event.digest, set()).add(event.peer)

    def drop_proposal(self) -> None:
        """The height is over."""
        self.cancel_fetch(Purpose.PROPOSAL, self.proposal)
        self.proposal = None

    def on_sync_failed(self, event: SyncFailed) -> None:
        """Whatever still needs this manifest durable tries again with the next tick [A3]."""
        self.syncing.pop(event.manifest, None)
        for pursuit in self.pursuits:
            if pursuit.manifest.digest == event.manifest:
                pursuit.is_syncing = False
                self.out.explain(
                    Topic.ROUND,
                    f"height {pursuit.manifest.height} is not durable here, {len(pursuit.missing)} "
                    f"blobs missing, so it is neither accepted nor applied yet: {event.reason}",
                )

    def is_complete(self, pursuit: Pursuit) -> bool:
        """Whether all blobs of a manifest are here: never accept or apply a part [A2, X1]."""
        return not pursuit.missing

    def start_sync(self, pursuit: Pursuit) -> None:
        """Has the blobs of a complete manifest made durable, once."""
        if not pursuit.is_syncing:
            pursuit.is_syncing = True
            self.syncing[pursuit.manifest.digest] = pursuit.manifest
            self.out.emit(Sync(pursuit.manifest))

    def start_fetch(self, purpose: Purpose, pursuit: Pursuit, everybody: list[PeerId]) -> None:
        """Fetches what is missing: from known holders, from where a value came, from anybody.

        Each unit starts at another of the holders, to spread the load.
        """
        wants = []
        first, holders = pursuit.sources[:1], pursuit.sources[1:]
        for position, (digest, unit) in enumerate(pursuit.missing.items()):
            entry = pursuit.manifest.entries[unit]
            shift = position % len(holders) if holders else 0
            ranked = [*holders[shift:], *holders[:shift]]
            ranked = (
                [entry.source, *first, *ranked]
                if purpose is Purpose.PROPOSAL and not pursuit.failed
                else [*first, entry.source, *ranked]
            )
            failed = pursuit.failed.get(digest, set())
            sources = [p for p in dict.fromkeys([*ranked, *everybody]) if p != self.me]
            sources.sort(key=lambda peer: peer in failed)
            bound = None
            if purpose is Purpose.PROPOSAL and unit in pursuit.manifest.sources:
                peers = [peer for peer, _ in pursuit.manifest.sources[unit]]
                bound = self.bound(unit, peers, pursuit.manifest.work)
            wants.append(BlobWanted(unit, digest, entry.num_bytes, tuple(sources), bound))
        pursuit.is_fetching = True
        self.out.emit(Fetch(purpose, tuple(wants)))

    def cancel_fetch(self, purpose: Purpose, pursuit: Pursuit | None) -> None:
        """Ends a fetch, if one is under way."""
        if pursuit and pursuit.is_fetching:
            pursuit.is_fetching = False
            self.out.emit(CancelFetch(purpose))

    def bound(
        self, unit: Unit, peers: Iterable[PeerId], work: Mapping[PeerId, int]
    ) -> UpdateBound | None:
        """How far a value that these peers made may be from the tip's [U1]."""
        return update_bound(unit, peers, work, self.tip, self.rules)
