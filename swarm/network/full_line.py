"""How much a line carries away from this machine, where it was the line that held a stream up.

A rate says that only if neither the receiver nor this machine nor TCP's caution was the bound, and
nothing else was sent meanwhile. Of a direct connection the kernel knows for how long the first two
were, and that packets queued: a line before which they never do needs no cap. That two receivers
take the same is the rest of the evidence.
"""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise

from swarm.network.tcp_info import tcp_info

SAMPLE_S = 0.05
BOUND = 0.9
"""Of the time the line must have been the bound. Where a processor is, nothing is under way."""
STEADY = 1.25
"""A rate that still rises by more from one quarter of the time to the next is TCP's slow start."""
QUEUED_S = 0.02
"""A line that is full makes packets wait for longer, at every moment."""
ALIKE = 1.15
"""Two rates of one line differ by less; those of busy receivers hardly ever do."""


@dataclass(frozen=True)
class Sample:
    """Of one connection, from its beginning.

    Attributes:
        at_s: when.
        num_bytes: what the other side has; beyond a packet that is missing, too.
        bound_s: for how long something was under way that only the line held up.
        queued_s: for how long packets waited of late.
    """

    at_s: float
    num_bytes: int
    bound_s: float
    queued_s: float


def fill(connection: socket.socket) -> None:
    """Has a connection send until packets are lost; cubic may stop early, bbr leaves no queue."""
    if sys.platform != "linux":
        return
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")


@contextmanager
def sampled(connection: socket.socket) -> Iterator[list[Sample]]:
    """Samples of a connection while it sends; none where the kernel says nothing."""
    samples: list[Sample] = []
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def look() -> None:
        nonlocal timer
        if sample := sample_of(connection):
            samples.append(sample)
            timer = loop.call_later(SAMPLE_S, look)

    look()
    try:
        yield samples
    finally:
        if timer:
            timer.cancel()


def sample_of(connection: socket.socket) -> Sample | None:
    """What the kernel says now of a TCP connection; None where it says nothing."""
    info = tcp_info(connection)
    if info is None:
        return None
    return Sample(
        time.monotonic(),
        info.packet_bytes * info.delivered,
        (info.busy_us - info.by_receiver_us - info.by_buffer_us) * 1e-6,
        (info.rtt_us - info.least_rtt_us) * 1e-6,
    )


def full_rate_mbit(samples: Sequence[Sample]) -> float | None:
    """The rate of a full line in the second half of the time, in Mbit/s; None if it was not full.

    Args:
        samples: in their order, `SAMPLE_S` or so apart.
    """
    if len(samples) < 8:  # no quarter has two
        return None
    last = len(samples) - 1
    begin, middle, end = [samples[last * k // 4] for k in (2, 3, 4)]
    if end.bound_s - begin.bound_s < BOUND * (end.at_s - begin.at_s):
        return None
    if min(sample.queued_s for sample in samples[last // 2 :]) < QUEUED_S:
        return None
    is_steady = _mbit(middle, end) <= STEADY * _mbit(begin, middle)
    return _mbit(begin, end) if is_steady else None


def agreed_mbit(rates: Mapping[str, float]) -> float | None:
    """The lower of the two highest rates that were alike, by receiver; None if no two are."""
    ordered = sorted(rates.values(), reverse=True)
    return next((b for a, b in pairwise(ordered) if a <= ALIKE * b), None)


def _mbit(first: Sample, last: Sample) -> float:
    return (last.num_bytes - first.num_bytes) * 8e-6 / (last.at_s - first.at_s)
