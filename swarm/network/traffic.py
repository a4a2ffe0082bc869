"""What a node sent, received and refused, and how fast it may. Read by anyone."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from swarm.config import NetworkSection
from swarm.network.line_bytes import LineBytes
from swarm.network.sent_rate import SentRate
from swarm.network.throttle import Throttle
from swarm.protocol.pace import Arrivals


class Arriving:
    """When bytes of blobs arrive, over all streams together; from any thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing has arrived; `clock` is in seconds."""
        self._clock, self._lock, self._arrivals = clock, threading.Lock(), Arrivals()

    def add(self, num_bytes: int) -> None:
        """Counts bytes that have just come."""
        with self._lock:
            self._arrivals.arrived(num_bytes, self._clock())

    def begin(self) -> tuple[int, float]:
        """Bytes and flowing seconds so far, when a fetch begins; see `Arrivals`."""
        with self._lock:
            self._arrivals.begin(self._clock())
            return self._arrivals.num_bytes, self._arrivals.flowing_s

    def since(self, before: tuple[int, float]) -> tuple[int, float]:
        """What was added to what `begin` returned."""
        with self._lock:
            return (
                self._arrivals.num_bytes - before[0],
                self._arrivals.flowing_s - before[1],
            )


@dataclass
class Traffic:
    """Counters since the node started; the DHT's own traffic is in `dht_bytes` alone.

    `line` is what a provider counts. The other counters say what bytes were for, each where it is
    used: what measures this peer's line is in none of them.

    Attributes:
        control_messages_sent: calls of `post` and `request`, answers not counted.
        control_messages_received: the same, from others.
        control_bytes_sent: payloads of messages, requests and answers, asks and heads of the bulk
            path, and blobs that belong to messages.
        control_bytes_received: the same, from others.
        blob_bytes_sent: contents of other blobs only, of moments neither.
        blob_bytes_received: contents of blobs, those refused later and those of messages included.
        measuring_bytes_sent: to others that measure their lines.
        relayed_bytes: passed on between two other peers; in no other counter.
        moments_bytes_sent: contents of moments blobs, which are in no other figure.
        moments_bytes_received: contents of moments blobs that were whole and in order; they are
            in `blob_bytes_received` too.
        dht_bytes: the DHT's questions and answers, both ways together.
        refused: how often bytes of others were refused, by reason.
        up: cap on what is sent.
        down: cap on what is received.
        sent: how fast the line sent of late.
        line: all that the line carries, whatever it is for.
        arriving: when the bytes came that `blob_bytes_received` counts once their piece has ended.
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
    sent: SentRate = field(default_factory=SentRate)
    arriving: Arriving = field(default_factory=Arriving)
    line: LineBytes = field(default_factory=LineBytes)

    @classmethod
    def of(cls, network: NetworkSection) -> Traffic:
        """Nothing moved yet; the caps are those that the person has set."""
        up, down = Throttle(network.max_upload_mbit), Throttle(network.max_download_mbit)
        return cls(up=up, down=down)

    @property
    def bytes_sent(self) -> int:
        """For others; messages are few beside it, and what measures this line is none of it."""
        of_blobs = self.blob_bytes_sent + self.moments_bytes_sent
        return of_blobs + self.measuring_bytes_sent + self.relayed_bytes

    def refuse(self, reason: str) -> None:
        """Counts one refusal."""
        self.refused[reason] += 1
