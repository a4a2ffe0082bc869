"""What is asked for when blobs of a manifest are missing, and how far they may have moved [U1]."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from swarm.protocol.events import BlobWanted, Fetch, Purpose
from swarm.protocol.manifest import PeerId, Unit
from swarm.protocol.rounds.plausible import update_bound
from swarm.protocol.rounds.state import MachineState, Pursuit
from swarm.protocol.updates import UpdateBound


class Fetching(MachineState):
    """Starts the fetches of this peer."""

    def _start_fetch(self, purpose: Purpose, pursuit: Pursuit, everybody: list[PeerId]) -> None:
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
                bound = self._bound(unit, peers, pursuit.manifest.work)
            wants.append(BlobWanted(unit, digest, entry.num_bytes, tuple(sources), bound))
        pursuit.is_fetching = True
        self._effects.append(Fetch(purpose, tuple(wants)))

    def _bound(
        self, unit: Unit, peers: Iterable[PeerId], work: Mapping[PeerId, int]
    ) -> UpdateBound | None:
        """How far a value that these peers made may be from the tip's [U1]."""
        return update_bound(unit, peers, work, self.tip, self.rules)
