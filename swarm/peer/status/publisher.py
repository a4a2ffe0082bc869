"""Publishes this peer's records on every heartbeat and soon after a change.

`OwnClock` compares this machine's clock with those of other members.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any

from swarm.background import SYSTEM, SupervisedThread, System
from swarm.config import RunConfig
from swarm.errors import SwarmError
from swarm.network.node.node import Node
from swarm.network.node.peer_probe import DIALLING, look_at
from swarm.network.runs.joiner import PeerDiscovery, publish_peer
from swarm.network.runs.run_records import publish
from swarm.network.wire.steady_clock import LIMIT_S, SteadyClock, dht_clock
from swarm.peer.machine.state_directory import StateDirectory
from swarm.peer.status.round_log import OwnCauses
from swarm.peer.status.status import PeerStatus
from swarm.protocol.records import records
from swarm.protocol.values.manifest import Manifest, PeerId
from swarm.protocol.values.schedule import alpha_at

logger = logging.getLogger(__name__)

ASK_S = 6.0
"""Limit for the answers of one peer."""
AGAIN_S = 600.0
"""Interval between comparisons. In this time, clocks drift by 0.06 s at 100 ppm."""
SAY_S = 24 * 3600.0
"""How often the log repeats that a clock is wrong."""


class ClockCheck:
    """Compares the DHT's clock of this process with the clocks of a few members, repeatedly."""

    def __init__(
        self,
        node: Node,
        members: Callable[[], Collection[PeerId]] = tuple,
        *,
        time_s: Callable[[], float] = time.monotonic,
        clock: SteadyClock | None = None,
    ) -> None:
        """Compares nothing yet.

        Args:
            node: sends the questions.
            members: gives the members of the run, whose answers count; without members, neighbours
                are asked.
            time_s: monotonic seconds.
            clock: None for the DHT's clock of this process.
        """
        self._node, self._members, self._time_s = node, members, time_s
        self._clock = clock or dht_clock()
        self._next_s, self._said_s = float("-inf"), float("-inf")

    async def compare(self) -> None:
        """If due, asks some members for their time and adjusts the clock, or warns.

        A comparison is due at each call until a peer has answered.
        """
        now_s = self._time_s()
        if now_s < self._next_s:
            return
        members = sorted({*self._members()} - {self._node.peer_id})
        asked = random.sample(members, min(DIALLING, len(members)))
        asked = asked or sorted(self._node.neighbours)[:DIALLING]
        found = await asyncio.gather(*(_ahead_s(self._node, peer, self._clock) for peer in asked))
        told = [ahead_s for ahead_s in found if ahead_s is not None]
        if not told:
            return
        self._next_s = now_s + AGAIN_S
        if len(told) >= min(len(members), 2) > 0:  # a single peer may be wrong, or lie
            self._clock.compare([-ahead_s for ahead_s in told])
        warning = clock_warning(told)
        if warning and now_s - self._said_s >= SAY_S:
            self._said_s = now_s
            logger.warning("%s", warning)


def clock_warning(told: Sequence[float]) -> str | None:
    """A warning about this machine's clock; None if some peer's clock is near enough.

    Args:
        told: seconds by which this peer's clock is ahead, for each peer that answered.
    """
    least_s = min(told, key=abs, default=0.0)
    if abs(least_s) <= LIMIT_S:
        return None
    direction = "ahead of" if least_s > 0 else "behind"
    return (
        f"the clock of this peer's records is {abs(least_s):.1f} s {direction} those of all peers "
        f"that gave the time ({len(told)}), and {LIMIT_S:.0f} s are allowed: others refuse "
        "this peer's records, or it refuses theirs (set this machine's clock, best by "
        "timedatectl set-ntp true, and start again)"
    )


async def _ahead_s(node: Node, peer: PeerId, clock: SteadyClock) -> float | None:
    """Seconds by which this DHT clock is ahead of another peer's; None without an answer."""
    try:
        async with asyncio.timeout(ASK_S):
            look = await look_at(node, peer)
    except (SwarmError, TimeoutError) as error:
        logger.debug("peer=%s did not give its time: %s", peer[-6:], error)
        return None
    return clock() - time.time() - look.clock_offset_s


SOONEST_S = 1.0
"""Changes in quick succession share one publication."""
PUBLISH_DEADLINE_S = 30.0
THERE_S = 300.0
"""How long a peer counts as present after it was seen. The publisher reads one presence key per
heartbeat, so it sees each peer every few minutes; see `PeerDiscovery`."""
MAX_THERE = 4096
"""Limit of remembered peers and their rooms."""


class RoomsThere:
    """The number of experts that fit the machine of each recently seen peer."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Knows no peer yet; `clock` is in seconds."""
        self._clock = clock
        self._heard: dict[PeerId, tuple[float, int]] = {}

    def note(self, present: Mapping[PeerId, records.PeerRecord]) -> None:
        """Adds peers of the run that were just seen; keeps the newest `MAX_THERE`."""
        now_s = self._clock()
        new = {peer: (now_s, record.room) for peer, record in present.items()}
        kept = {peer: said for peer, said in self._heard.items() if peer not in new}
        self._heard = dict([*kept.items(), *new.items()][-MAX_THERE:])

    def __call__(self) -> dict[PeerId, int]:
        """The room of each peer that was seen within `THERE_S`."""
        since_s = self._clock() - THERE_S
        return {peer: room for peer, (at_s, room) in self._heard.items() if at_s >= since_s}


class Publisher:
    """Publishes in one named thread. Records inform people and newcomers, and decide nothing."""

    def __init__(
        self,
        node: Node,
        status: PeerStatus,
        run: records.RunRecord,
        state: StateDirectory,
        *,
        on_present: Callable[[Mapping[PeerId, records.PeerRecord]], None],
        beside: Callable[[], Coroutine[Any, Any, None]],
        system: System = SYSTEM,
    ) -> None:
        """Publishes nothing yet.

        Args:
            node: node of this peer.
            status: gives this peer's records.
            run: the run's record, which every member repeats.
            state: remembers addresses.
            on_present: called with records of some peers of the run at a time; see `PeerDiscovery`.
            beside: run after each publication, for at most `PUBLISH_DEADLINE_S`.
            system: whose clock and threads it uses.
        """
        self.node, self.status, self.run, self.state = node, status, run, state
        self._on_present, self._beside = on_present, beside
        self._merge: records.MergeRecord | None = None
        self._presence, self._clock = PeerDiscovery(node, run.run), ClockCheck(node, self._members)
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
        self._merge = records.fitted(
            records.MergeRecord(
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
            wait_s = 0.0 if self._thread.stopping.is_set() else records.HEARTBEAT_S
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
        await publish(self.node, records.runs_key(me), self.run)
        if status.validation:
            await publish(self.node, records.validation_key(run, me), status.validation)
        if self._merge:
            await publish(self.node, records.merges_key(run, me), self._merge)
        present = await self._presence.look()
        self._causes.note(present, own, status.manifest)
        if present:
            self.node.remember([a for record in present.values() for a in record.addresses])
            self._on_present(present)


def announcement(run_id: str, run: RunConfig, manifest: Manifest) -> records.RunRecord:
    """The run's record, which every member repeats, so that it outlives the founder.

    Args:
        run_id: id of the run.
        run: configuration of the run.
        manifest: manifest 0.
    """
    return records.RunRecord(
        run=run_id,
        name=run.run.name,
        fingerprint=run.fingerprint(),
        founder=manifest.founding.founder,
        founding=manifest.blob,
        founding_bytes=len(manifest.encoded),
        config=manifest.founding.config,
        config_bytes=manifest.founding.config_bytes,
        state=records.RunState.RUNNING,
        wait_for_peers=len(manifest.members),
    )
