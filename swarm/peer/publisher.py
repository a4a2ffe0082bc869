"""Publishes this peer's records: on every heartbeat, and soon after something changed."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

from swarm.background import SYSTEM, SupervisedThread, System
from swarm.config import RunConfig
from swarm.errors import SwarmError
from swarm.network.joining import publish_peer
from swarm.network.node import Node
from swarm.network.presence import Presence
from swarm.network.records import publish
from swarm.peer.own_clock import OwnClock
from swarm.peer.state_directory import StateDirectory
from swarm.peer.status import PeerStatus
from swarm.peer.telling import OwnCauses
from swarm.protocol.manifest import Manifest, PeerId
from swarm.protocol.merging import alpha_at
from swarm.protocol.records import (
    HEARTBEAT_S,
    MergeRecord,
    PeerRecord,
    RunRecord,
    RunState,
    fitted,
    merges_key,
    runs_key,
    validation_key,
)

logger = logging.getLogger(__name__)

SOONEST_S = 1.0
"""Changes in quick succession share one publication."""
PUBLISH_DEADLINE_S = 30.0
THERE_S = 300.0
"""One key of presence is read per beat, so each peer is seen every few minutes, see `Presence`."""
MAX_THERE = 4096
"""Peers whose rooms are remembered."""


class RoomsThere:
    """How many experts fit the machines of the peers that were heard of lately."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Nobody was heard of yet; `clock` is in seconds."""
        self._clock = clock
        self._heard: dict[PeerId, tuple[float, int]] = {}

    def note(self, present: Mapping[PeerId, PeerRecord]) -> None:
        """Some peers of the run are there; the newest `MAX_THERE` count."""
        now_s = self._clock()
        new = {peer: (now_s, record.room) for peer, record in present.items()}
        kept = {peer: said for peer, said in self._heard.items() if peer not in new}
        self._heard = dict([*kept.items(), *new.items()][-MAX_THERE:])

    def __call__(self) -> dict[PeerId, int]:
        """The room of each that was heard of within `THERE_S`."""
        since_s = self._clock() - THERE_S
        return {peer: room for peer, (at_s, room) in self._heard.items() if at_s >= since_s}


class Publisher:
    """One named thread; what it publishes is for people and newcomers, never for decisions."""

    def __init__(
        self,
        node: Node,
        status: PeerStatus,
        run: RunRecord,
        state: StateDirectory,
        *,
        on_present: Callable[[Mapping[PeerId, PeerRecord]], None],
        beside: Callable[[], Coroutine[Any, Any, None]],
        system: System = SYSTEM,
    ) -> None:
        """Publishes nothing yet.

        Args:
            node: of this peer.
            status: what there is to tell.
            run: what every member repeats of the run.
            state: remembers addresses.
            on_present: given what peers of the run say, of some of them at a time; see `Presence`.
            beside: run after each publication, `PUBLISH_DEADLINE_S` at most.
            system: whose clock and threads it uses.
        """
        self.node, self.status, self.run, self.state = node, status, run, state
        self._on_present, self._beside = on_present, beside
        self._merge: MergeRecord | None = None
        self._presence, self._clock = Presence(node, run.run), OwnClock(node, self._members)
        self._causes = OwnCauses(run.run)
        self._system = system
        self._thread = SupervisedThread("publisher", self._loop, system)

    def _members(self) -> Collection[PeerId]:
        tip = self.status.manifest
        return tip.members if tip else ()

    def start(self) -> None:
        """Begins to publish."""
        self._thread.start()

    def stop(self) -> None:
        """Publishes a last time and ends the thread."""
        self._thread.stopping.set()
        self.status.changed.set()
        self._thread.stop(PUBLISH_DEADLINE_S)

    def announce_merge(self, tip: Manifest, donors: Sequence[Sequence[Sequence[int]]]) -> None:
        """Announces the donors of this peer's experts in the merge of a due tip.

        Args:
            tip: the manifest that is merged.
            donors: by layer and expert, best first.
        """
        merging, me = self.status.run.merging, self.node.peer_id
        mine = [expert for expert, owners in sorted(tip.owners.items()) if me in owners]
        self._merge = fitted(
            MergeRecord(
                generation=tip.generation,
                round=tip.round,
                merged=tip.step // merging.interval_steps,
                step=tip.step,
                alpha=alpha_at(tip.step, merging),
                donors={e: tuple(tuple(layer[e]) for layer in donors) for e in mine},
            )
        )
        self.status.changed.set()

    def _loop(self) -> None:
        is_last = False
        while not is_last:
            wait_s = 0.0 if self._thread.stopping.is_set() else HEARTBEAT_S
            self._system.wait(self.status.changed, wait_s)
            self.status.changed.clear()
            is_last, began_s = self._thread.stopping.is_set(), self._system.monotonic()
            try:
                self.node.run(self._publish(), PUBLISH_DEADLINE_S)
                self.node.run(self._beside(), PUBLISH_DEADLINE_S)
                self.node.run(self._clock.compare(), PUBLISH_DEADLINE_S)
                self.state.known_peers = (*self.node.known_addresses, *self.state.known_peers)
            except (SwarmError, TimeoutError, OSError) as error:
                logger.warning("records were not published: %s", error)
            soonest_s = began_s + SOONEST_S - self._system.monotonic()
            self._system.wait(self._thread.stopping, max(soonest_s, 0.0))

    async def _publish(self) -> None:
        status, run, me = self.status, self.run.run, self.node.peer_id
        await publish_peer(self.node, run, own := status.record())
        await publish(self.node, runs_key(me), self.run)
        if status.validation:
            await publish(self.node, validation_key(run, me), status.validation)
        if self._merge:
            await publish(self.node, merges_key(run, me), self._merge)
        present = await self._presence.look()
        self._causes.note(present, own, status.manifest)
        if present:
            self.node.remember([a for record in present.values() for a in record.addresses])
            self._on_present(present)


def announcement(run_id: str, run: RunConfig, manifest: Manifest) -> RunRecord:
    """What every member repeats about the run, so that it outlives its founder.

    Args:
        run_id: of the run.
        run: its configuration.
        manifest: manifest 0.
    """
    return RunRecord(
        run=run_id,
        name=run.run.name,
        fingerprint=run.fingerprint(),
        founder=manifest.founding.founder,
        founding=manifest.blob,
        founding_bytes=len(manifest.encoded),
        config=manifest.founding.config,
        config_bytes=manifest.founding.config_bytes,
        state=RunState.RUNNING,
        wait_for_peers=len(manifest.members),
    )
