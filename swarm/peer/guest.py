"""A guest's view of a run, as the monitor shows it, for a program or a script."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm.errors import NobodyReachable
from swarm.monitor.health import is_finished
from swarm.monitor.history import with_history
from swarm.monitor.snapshot import Sighting, Snapshot, snapshot_of, without_peers
from swarm.network.blobs.blob_store import BlobStore
from swarm.network.dht.dht import MAX_RECORDS_PER_KEY
from swarm.network.runs.observer import Observer, Seen
from swarm.network.runs.run_search import Announced
from swarm.protocol.records.records import RunState
from swarm.protocol.values.manifest import Digest, Manifest

logger = logging.getLogger(__name__)

START_S = 8.0
LOOK_S = 4.0
"""Limit of each of a look's two reads. A first look takes 4 s on an idle machine, and must take
less than 15 s."""
TIP_S = 2.5
REFRESH_S = 2.0
PEERS_A_SECOND = 16
"""At this rate the records of all peers are read. Those of 256 peers have 3 MB, so in larger runs
looks take longer and are rarer."""


class History(Protocol):
    """History that outlives a restart; see `peers.actions.monitor_files`."""

    def before(self, first: Snapshot) -> Snapshot | None:
        """The state before the first look."""

    def keep(self, snapshot: Snapshot) -> None:
        """Saves the new parts of a snapshot.

        Raises:
            OSError: the history cannot be written; the next call tries again.
        """


@dataclass
class Watch:
    """Reads the state of one run repeatedly; remembers facts that newer records no longer show."""

    observer: Observer
    store: BlobStore
    """Has the observer's manifests. Emptied after each look, since there is a new one each
    round."""
    wanted: str | None
    history: History | None = None
    announced: Announced | None = None
    tip: Manifest | None = None
    before: Snapshot | None = None
    _keeps: bool = True

    def look(self) -> Snapshot:
        """The swarm now.

        Raises:
            NobodyReachable: no run is announced, or none of its peers is present. After the end of
                a run was seen, its last state is returned, without peers.
        """
        try:
            return self._look()
        except NobodyReachable:
            if self.before is None or not is_finished(self.before):
                raise
            self.before = with_history(without_peers(self.before), self.before)
            return self.before

    def _look(self) -> Snapshot:
        if self.announced is None or self.announced.record.state is RunState.GATHERING:
            self.announced = self.observer.find(self.wanted, LOOK_S)
            if self.tip and self.tip.run != self.announced.record.run:
                self.tip = None
        run, deadline_s = self.announced.record.run, LOOK_S + self._all_said_s / 2
        seen = self.observer.look(run, deadline_s)
        if not seen.peers:  # on a slow link the first read may miss some records
            seen = self.observer.look(run, deadline_s)
        had_tip = self.tip is not None
        if self._is_stale(seen):
            self._renew_tip(seen)
        shown = None if self.announced.record.state is RunState.GATHERING else run
        snapshot = snapshot_of(
            Sighting(
                shown,
                self.announced.record.name,
                seen.peers,
                seen.merges,
                seen.validations,
                self.tip,
                seen.published,
                seen.at,
                self.announced.record.wait_for_peers,
                seen.scores,
            )
        )
        if snapshot is None:
            self.announced = None
            if self.before and self.before.run_id is None:  # its peers soon announce manifest 0
                return self.before
            raise NobodyReachable(f"no peer of {run} is present")
        # Until the first manifest, records of strangers counted too, so no earlier look is kept.
        known = self.before if had_tip or not self.tip else None
        if known is None and self.history:
            known = self.history.before(snapshot)
        self.before = with_history(snapshot, known)
        if self.history and self.tip:
            self._keep(self.history, self.before)
        return self.before

    def _keep(self, history: History, snapshot: Snapshot) -> None:
        """Writes the history. A failing disk does not end the view; each failure is logged once."""
        try:
            history.keep(snapshot)
        except OSError as error:
            if self._keeps:  # logged as an error, since a terminal's view hides warnings
                where = f"{error.filename}: " if error.filename else ""
                logger.error("the history is not kept now: %s%s", where, error.strerror)
            self._keeps = False
        else:
            self._keeps = True

    @property
    def refresh_s(self) -> float:
        """Seconds from one look to the next."""
        return max(REFRESH_S, self._all_said_s)

    @property
    def _all_said_s(self) -> float:
        """Seconds between looks with which this reader keeps to its share of the DHT's traffic."""
        if self.tip:  # the first look uses the announced number
            return len(self.tip.members) / PEERS_A_SECOND
        announced = self.announced.record.wait_for_peers if self.announced else 0
        return min(announced, MAX_RECORDS_PER_KEY) / PEERS_A_SECOND

    def _is_stale(self, seen: Seen) -> bool:
        """Whether any peer has another tip than the one known here."""
        digest = self.tip.digest if self.tip else None
        return any(record.manifest_digest != digest for record in seen.peers.values())

    def _renew_tip(self, seen: Seen) -> None:
        """Fetches the newest tip; without an answer, keeps the last one."""
        assert self.announced is not None
        if self.announced.record.state is RunState.GATHERING:
            return
        try:
            tip = self.observer.tip(self.announced, seen.peers, TIP_S)
        except NobodyReachable:
            return
        finally:
            self.store.collect(())
        if self.tip is None or tip.code > self.tip.code:
            self.tip = tip


def look(
    addresses: Sequence[str], run_id: str | None = None, vouched: Digest | None = None
) -> Snapshot:
    """The state of a run, as in the monitor: peers, owners of experts, losses and last merges.

    Enters the network as a guest that publishes nothing, reads once and leaves. This takes some 5
    s.

    Args:
        addresses: addresses of peers of the run, such as `Peer.addresses`.
        run_id: which run, if several are announced there.
        vouched: digest of a manifest that the caller trusts; None trusts the run's first.

    Raises:
        NobodyReachable: none of the addresses answers, or no such run is announced.
        RunMismatch: several runs are announced, and none was named.
    """
    store = BlobStore(None)
    observer = Observer.start(addresses, store, START_S, vouched=vouched)
    try:
        return Watch(observer, store, run_id).look()
    finally:
        observer.stop()
