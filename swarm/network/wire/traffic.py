"""Counts the bytes that a node sends, receives and refuses; token buckets cap both directions."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf

from swarm.config import NetworkSection
from swarm.network.wire.upload_rate import LineBytes, UploadRate
from swarm.protocol.timing.pace import Arrivals

BURST_S = 0.15
"""How many seconds of the cap may move at once after an idle time or a late wake-up. Over t seconds
the cap is exceeded by at most BURST_S / t, so by 0.3 % over a minute. A router with a queue of a
quarter of a second drops larger bursts, and TCP is then slower than the cap for seconds.
"""
ROOM_S = 0.1
PART_S = 0.05
"""How many seconds of the cap move at a time; little, since routers drop large bursts."""
LARGEST_PART_BYTES = 64 * 1024
"""Largest part of a capped transfer. The other side counts such a part as progress, so no stream
exceeds its deadline while it waits for the parts of all others."""
SMALLEST_PART_BYTES = 4096
PROGRESS_BYTES_PER_S = LARGEST_PART_BYTES / 7.5
"""Least rate of each stream: twice what a receiver requires as progress. It limits their number."""


class Bucket:
    """A token bucket without a clock, as a virtual schedule (GCRA, ITU-T I.371)."""

    def __init__(self, bytes_per_s: float, burst_s: float = BURST_S) -> None:
        """Starts full.

        Args:
            bytes_per_s: rate of the bucket.
            burst_s: size of the bucket, in seconds of this rate.
        """
        self._bytes_per_s, self._burst_s = bytes_per_s, burst_s
        self._paid_s = -inf

    def idle_s(self, now_s: float) -> float:
        """How long tokens have been unused; below 0 while some are owed."""
        return now_s - self._paid_s

    def take(self, now_s: float, num_bytes: int) -> float:
        """Takes tokens at once, even on credit; returns the seconds until the debt is paid.

        A later call waits longer, so calls have their turns in order.

        Args:
            now_s: the time of the call; never decreases.
            num_bytes: how many.
        """
        self._paid_s = max(self._paid_s, now_s - self._burst_s) + num_bytes / self._bytes_per_s
        return max(0.0, self._paid_s - now_s)


class Throttle:
    """Caps one direction of this machine's link; its methods may run in any thread.

    Attributes:
        mbit: the cap in Mbit/s; None for no cap.
        bytes_per_s: the same cap; inf for none.
    """

    def __init__(
        self, mbit: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self.hold(mbit)

    def hold(self, mbit: float | None) -> None:
        """Sets the cap. Transfers that are already waiting keep their old delay."""
        with self._lock:
            self.mbit = mbit
            self.bytes_per_s = mbit * 1e6 / 8 if mbit else inf
            self._bucket = Bucket(self.bytes_per_s) if mbit else None

    @property
    def has_room(self) -> bool:
        """Whether part of a cap was unused for longer than the pause between two parts.

        Also False without a cap, since then the link's rate is not known.
        """
        with self._lock:
            return self._bucket is not None and self._bucket.idle_s(self._clock()) >= ROOM_S

    def part_bytes(self, most: int) -> int:
        """How many bytes to move at a time, up to this limit."""
        if not self.mbit:
            return most
        part = int(self.bytes_per_s * PART_S)
        return min(most, LARGEST_PART_BYTES, max(part, SMALLEST_PART_BYTES))

    @property
    def most_streams(self) -> float:
        """Most simultaneous streams with which each is fast enough for its receiver."""
        return max(2, self.bytes_per_s // PROGRESS_BYTES_PER_S) if self.mbit else inf

    def count(self, num_bytes: int) -> float:
        """Counts bytes that move without a wait; returns the seconds that others would wait."""
        with self._lock:
            return self._bucket.take(self._clock(), num_bytes) if self._bucket else 0.0

    async def wait(self, num_bytes: int) -> None:
        """Returns when this many bytes may be moved."""
        if wait_s := self.count(num_bytes):
            await asyncio.sleep(wait_s)

    def wait_in_thread(self, num_bytes: int, stop: threading.Event) -> None:
        """Like `wait`, in a thread; returns at once when `stop` is set."""
        if wait_s := self.count(num_bytes):
            stop.wait(wait_s)


class Arriving:
    """Arrival of bytes of blobs, over all streams together; any thread may call."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Has counted nothing; `clock` is in seconds."""
        self._clock, self._lock, self._arrivals = clock, threading.Lock(), Arrivals()

    def add(self, num_bytes: int) -> None:
        """Counts bytes that have just arrived."""
        with self._lock:
            self._arrivals.arrived(num_bytes, self._clock())

    def begin(self) -> tuple[int, float]:
        """Bytes and flowing seconds so far, when a fetch begins; see `Arrivals`."""
        with self._lock:
            self._arrivals.begin(self._clock())
            return self._arrivals.num_bytes, self._arrivals.flowing_s

    def since(self, before: tuple[int, float]) -> tuple[int, float]:
        """Bytes and flowing seconds since `begin` returned its values."""
        with self._lock:
            return (
                self._arrivals.num_bytes - before[0],
                self._arrivals.flowing_s - before[1],
            )


@dataclass
class Traffic:
    """Counters since the node started; the DHT's own traffic is in `dht_bytes` alone.

    `line` counts like a provider. The other counters show the purpose of bytes. Bytes that measure
    this peer's link are in none of these.

    Attributes:
        control_messages_sent: calls of `post` and `request`, answers not counted.
        control_messages_received: such calls from others.
        control_bytes_sent: payloads of messages, requests and answers, asks and heads of the bulk
            path, and blobs that belong to messages.
        control_bytes_received: such bytes from others.
        blob_bytes_sent: contents of all other blobs, except moments.
        blob_bytes_received: contents of blobs, including blobs of messages and blobs that are
            refused later.
        measuring_bytes_sent: bytes sent to others that measure their links.
        relayed_bytes: bytes relayed between two other peers; in no other counter.
        moments_bytes_sent: contents of moments blobs, which are in no other figure.
        moments_bytes_received: contents of moments blobs that were complete and valid; they are
            in `blob_bytes_received` too.
        dht_bytes: the DHT's questions and answers, both ways together.
        refused: how often bytes of others were refused, by reason.
        up: cap on sent bytes.
        down: cap on received bytes.
        sent: recent upload rate of the link.
        line: all bytes on the link, for any purpose.
        arriving: times of the bytes that `blob_bytes_received` counts at the end of their piece.
    """

    control_messages_sent: int = 0
    control_messages_received: int = 0
    control_bytes_sent: int = 0
    control_bytes_received: int = 0
    blob_bytes_sent: int = 0
    moments_bytes_sent: int = 0
    moments_bytes_received: int = 0
    blob_bytes_received: int = 0
    measuring_bytes_sent: int = 0
    relayed_bytes: int = 0
    dht_bytes: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    up: Throttle = field(default_factory=Throttle)
    down: Throttle = field(default_factory=Throttle)
    sent: UploadRate = field(default_factory=UploadRate)
    arriving: Arriving = field(default_factory=Arriving)
    line: LineBytes = field(default_factory=LineBytes)

    @classmethod
    def of(cls, network: NetworkSection) -> Traffic:
        """Counters at zero, with the caps that the person has set."""
        up, down = Throttle(network.max_upload_mbit), Throttle(network.max_download_mbit)
        return cls(up=up, down=down)

    @property
    def bytes_sent(self) -> int:
        """Bytes for others. Messages are few in comparison; tests of this link do not count."""
        of_blobs = self.blob_bytes_sent + self.moments_bytes_sent
        return of_blobs + self.measuring_bytes_sent + self.relayed_bytes

    def refuse(self, reason: str) -> None:
        """Counts one refusal."""
        self.refused[reason] += 1
