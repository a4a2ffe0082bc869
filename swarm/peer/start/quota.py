"""The monthly quota of bytes: counts the traffic, warns, and has the peer leave in time.

A month is a calendar month (UTC), as for most providers, which also count both directions together.
All runs of a state directory count together, since they share one link. The kernel counts the bytes
of the node's sockets (`network/wire/upload_rate.py`), and a share for headers is added.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from swarm import durable
from swarm.background import SYSTEM, SupervisedThread, System
from swarm.config import NetworkSection, RunConfig
from swarm.errors import DataQuotaSpent
from swarm.model.cost import bytes_sent_per_peer_per_round, handover_bytes
from swarm.network.node.node import Node
from swarm.network.wire.steady_clock import dht_clock
from swarm.network.wire.traffic import Traffic
from swarm.peer.machine.state_directory import StateDirectory
from swarm.peer.training.leaving import Stop
from swarm.progress import duration

logger = logging.getLogger(__name__)

OVERHEAD = 1.05
"""Factor for headers. Those of TCP and IP are 40 of 1,500 bytes, and acknowledgements in the other
direction are half of that. The rest is for retransmissions and encryption."""
WARN_AT = (0.5, 0.8, 0.9)
LOOK_S = 10.0
MARK_S = 3600.0
MARKS = 24
"""Number of marks, each a time with the count then, `MARK_S` apart. The present rate is the mean
since the oldest mark."""
END_S = 10.0
"""Limit of the last count, so that a disk that does not answer cannot keep the peer from ending."""
HINT = "raise --data-quota, or start again when the next month has begun (UTC)"


def month_of(time_s: float) -> str:
    """The calendar month of a time, such as "2026-11"; later months are larger strings."""
    return datetime.fromtimestamp(time_s, UTC).strftime("%Y-%m")


def bytes_moved(traffic: Traffic) -> int:
    """Bytes on the link since the node's start, both directions together, with headers.

    Without the kernel's count, the node's own count is used.
    """
    total = traffic.line.total()
    return round((_known_of(traffic) if total is None else total) * OVERHEAD)


def _known_of(traffic: Traffic) -> int:
    return (
        traffic.blob_bytes_sent
        + traffic.blob_bytes_received
        + traffic.moments_bytes_sent  # received moments are counted as blobs
        + traffic.control_bytes_sent
        + traffic.control_bytes_received
        + 2 * traffic.relayed_bytes
        + traffic.dht_bytes
    )


def bytes_to_leave(run: RunConfig, num_peers: int) -> float:
    """Bytes that a leaving peer still moves: the bytes of a round, both ways, and its moments."""
    round_bytes = 2 * bytes_sent_per_peer_per_round(run, num_peers)
    return OVERHEAD * (round_bytes + handover_bytes(run, num_peers))


def month_after(month: str) -> str:
    """The month that follows one."""
    year, number = map(int, month.split("-"))
    return f"{year + number // 12:04}-{number % 12 + 1:02}"


class MonthlyCount:
    """Bytes of this month, in a file that outlives the process; a torn file counts as 0.

    A file with a month after the next counts as 0 too, since a wrong clock must have written it.

    Attributes:
        month: see `month_of`.
        num_bytes: bytes moved in this month.
        left_gb: the quota with which a peer left this month; 0 if none left.
    """

    def __init__(self, path: Path, now_s: float) -> None:
        self._path = path
        self.month, self.num_bytes, self.left_gb = month_of(now_s), 0, 0.0
        try:
            kept = json.loads(path.read_text())
            month, num_bytes = str(kept["month"]), int(kept["bytes"])
            left_gb = float(kept["left_gb"])
        except (OSError, ValueError, KeyError, TypeError):
            return
        # A clock that was set back does not begin a new month.
        if self.month <= month <= month_after(self.month):
            self.month, self.num_bytes, self.left_gb = month, num_bytes, left_gb

    def add(self, num_bytes: int, now_s: float) -> None:
        """Counts bytes that were moved until now."""
        if month_of(now_s) > self.month:
            self.month, self.num_bytes, self.left_gb = month_of(now_s), 0, 0.0
        self.num_bytes += num_bytes

    def write(self) -> None:
        """Makes the count durable."""
        kept = {"month": self.month, "bytes": self.num_bytes, "left_gb": self.left_gb}
        durable.write_file(self._path, json.dumps(kept).encode() + b"\n")


class DataQuota:
    """Decides at each count of moved bytes whether to warn or to leave.

    Attributes:
        count: moved bytes of the month so far.
        reserve_bytes: bytes that are kept for leaving in order.
    """

    def __init__(
        self,
        count: MonthlyCount,
        quota_bytes: float,
        reserve_bytes: float,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Begins to count.

        Args:
            count: moved bytes of the month so far.
            quota_bytes: quota of a month.
            reserve_bytes: bytes that are kept for leaving in order.
            clock: seconds since 1970; by default the clock of records, since a jump of the wall
                clock could begin a new month.
        """
        self.count, self.reserve_bytes = count, reserve_bytes
        self._quota, self._clock = quota_bytes, clock or dht_clock()
        self._before, self._warned = 0, 0.0
        self._marks = deque([(self._clock(), 0)], maxlen=MARKS)
        """Times within the last day, and the bytes moved until then."""

    def look(self, moved: int) -> str | None:
        """Counts traffic, and warns when the count passes another share of the quota.

        Args:
            moved: bytes since this object was made.

        Returns:
            Why the peer must leave, or None.
        """
        now_s = self._clock()
        self.count.add(moved - self._before, now_s)
        self._before, used = moved, self.count.num_bytes
        said = f"{used / 1e9:.3g} of {self._quota / 1e9:.3g} GB of {self.count.month} are used"
        if used + self.reserve_bytes >= self._quota:
            self.count.left_gb = self._quota / 1e9
            return f"{said}, and leaving takes up to {self.reserve_bytes / 1e9:.3g} GB"
        passed = max((mark for mark in WARN_AT if used >= mark * self._quota), default=0.0)
        (mark_s, before), (newest_s, _) = self._marks[0], self._marks[-1]
        if passed > self._warned and moved > before:
            left = self._quota - self.reserve_bytes - used
            left_s = left * (now_s - mark_s) / (moved - before)
            logger.warning(
                "data quota: %s; at this rate the peer leaves in %s", said, duration(left_s)
            )
        if now_s - newest_s >= MARK_S:
            self._marks.append((now_s, moved))
        self._warned = passed
        return None

    def require_room(self, num_bytes: int) -> None:
        """Raises DataQuotaSpent if too little is left for these bytes, headers and the reserve."""
        needed = num_bytes * OVERHEAD + self.reserve_bytes
        left = self._quota - self.count.num_bytes
        if needed > left:
            raise DataQuotaSpent(
                f"joining takes {num_bytes * OVERHEAD / 1e9:.3g} GB and leaving again up to "
                f"{self.reserve_bytes / 1e9:.3g} GB, but {max(left, 0) / 1e9:.3g} of "
                f"{self._quota / 1e9:.3g} GB of {self.count.month} are left",
                hint=HINT,
            )


def count_of(state: StateDirectory) -> MonthlyCount:
    """The bytes that the peers of a state directory have moved this month."""
    return MonthlyCount(state.path / "data_used", time.time())


def require_quota(network: NetworkSection, state: StateDirectory) -> None:
    """Checks the quota before anything is moved.

    Raises:
        DataQuotaSpent: the month's quota is used up, or has already made a peer leave.
    """
    count, quota = count_of(state), network.data_quota_gb
    if quota is not None and max(count.num_bytes / 1e9, count.left_gb) >= quota:
        used_gb = count.num_bytes / 1e9
        raise DataQuotaSpent(f"{used_gb:.3g} of {quota:g} GB of {count.month} are used", hint=HINT)


class QuotaWatch:
    """Counts a node's traffic and has the peer leave in time; does nothing without a quota."""

    def __init__(
        self,
        network: NetworkSection,
        state: StateDirectory,
        node: Node,
        stop: Stop,
        system: System = SYSTEM,
    ) -> None:
        """Begins to count, with the node's traffic since its start.

        Args:
            network: has the quota.
            state: the directory whose peers are counted together.
            node: moves the bytes.
            stop: asked when the peer must leave.
            system: whose threads it uses.
        """
        self._node, self._stop, self._system = node, stop, system
        self._thread = SupervisedThread("data-quota", self._watch, system)
        self._quota: DataQuota | None = None
        if network.data_quota_gb is None:
            return
        self._quota = DataQuota(count_of(state), network.data_quota_gb * 1e9, 0.0)
        self._thread.start()

    def keep_back(self, run: RunConfig) -> None:
        """Sets the reserve for leaving, once the run is known."""
        if self._quota:
            self._quota.reserve_bytes = bytes_to_leave(run, run.run.peers)

    def require_room(self, run: RunConfig, num_bytes: int) -> None:
        """Checks the quota before a run's state is fetched.

        Args:
            run: the run to join; sets the reserve for leaving it.
            num_bytes: bytes of blobs that are to be fetched.

        Raises:
            DataQuotaSpent: these bytes and the reserve exceed the rest of the quota.
        """
        self.keep_back(run)
        if self._quota:
            self._quota.require_room(num_bytes)

    def end(self) -> None:
        """Counts a last time; safe to call twice."""
        self._thread.stop(END_S)

    def _watch(self) -> None:
        is_last = False
        while not is_last and self._quota:
            is_last = self._system.wait(self._thread.stopping, LOOK_S)
            why = self._quota.look(bytes_moved(self._node.traffic))
            if why and not self._stop():
                logger.warning("data quota: %s; leaving", why)
                self._stop.ask(DataQuotaSpent(why, hint=HINT))
            try:
                self._quota.count.write()
            except OSError as error:  # a full disk; the next look writes the count
                logger.error("data quota: the count of this month is not on disk: %s", error)
